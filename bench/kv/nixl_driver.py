"""Drives NIXL between two processes, between registered memory, for `bench.kv`.

    PYTHON bench/kv/nixl_driver.py host|cuda BYTES

Needs a Python that has NIXL installed, and imports nothing of Baton. Each line on stdin has a number
of bytes, at most BYTES, and a number of pieces: moves them and prints the seconds. Environment variables tune
UCX.
"""

import base64
import json
import os
import subprocess
import sys
import time
from importlib import import_module
from importlib.util import find_spec

import numpy as np

MIB = 1 << 20


class Nixl:
    def __init__(self, name: str, size: int, memory: str) -> None:
        wheel = next(name for name in ("nixl_cu13", "nixl_cu12") if find_spec(name))
        nixl = import_module(f"{wheel}._api")
        self._kind, self._number = "DRAM", 0
        if memory == "cuda":
            import torch

            self._kind, self._number = "VRAM", int(name == "initiator") % torch.cuda.device_count()
            self._memory = torch.ones(size, dtype=torch.uint8, device=f"cuda:{self._number}")
            torch.cuda.synchronize()
            self.address_of_memory = self._memory.data_ptr()
        else:
            self._memory = np.frombuffer(os.urandom(MIB) * (size // MIB), np.uint8).copy()
            self.address_of_memory = self._memory.ctypes.data
        self._agent = nixl.nixl_agent(name, nixl.nixl_agent_config(backends=["UCX"]))
        area = (self.address_of_memory, size, self._number, "")
        self._agent.register_memory(self._agent.get_reg_descs([area], self._kind))
        self._peer = b""

    def address(self) -> str:
        return base64.b64encode(self._agent.get_agent_metadata()).decode()

    def connect(self, address: str) -> None:
        self._peer = self._agent.add_remote_agent(base64.b64decode(address))

    def move(self, theirs: int, size: int, pieces: int) -> None:
        part = size // pieces
        ends = [
            self._agent.get_xfer_descs([(base + i * part, part, number) for i in range(pieces)], self._kind)
            for base, number in ((self.address_of_memory, self._number), (theirs, 0))
        ]
        transfer = self._agent.initialize_xfer("READ", *ends, self._peer)
        state = self._agent.transfer(transfer)
        while state == "PROC":
            state = self._agent.check_xfer_state(transfer)
        assert state == "DONE", state
        self._agent.release_xfer_handle(transfer)


def main() -> None:
    memory, size = sys.argv[1], int(sys.argv[2])
    if len(sys.argv) > 3:
        target = Nixl("target", size, memory)
        print(json.dumps({"address": target.address(), "memory": target.address_of_memory}), flush=True)
        sys.stdin.readline()
        return
    child = subprocess.Popen(
        [sys.executable, *sys.argv, "target"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    found = json.loads(
        next(line for line in child.stdout if line.startswith("{"))
    )  # the engines log to stdout, too
    initiator = Nixl("initiator", size, memory)
    initiator.connect(found["address"])
    for line in sys.stdin:
        size, pieces = map(int, line.split())
        started = time.perf_counter()
        initiator.move(found["memory"], size, pieces)
        print(json.dumps({"seconds": time.perf_counter() - started}), flush=True)
    child.communicate("")


if __name__ == "__main__":
    main()
