"""A real Mooncake master and store process, for tests."""

import ctypes
import importlib.util
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from baton.bench.lab.harness.cluster import free_port

SEGMENT = 64 << 20


class Mooncake(NamedTuple):
    master: subprocess.Popen[bytes]
    store: subprocess.Popen[bytes]
    port: int
    metrics_port: int

    def kill(self) -> None:
        for process in (self.master, self.store):
            process.kill()
            process.wait()

    @property
    def url(self) -> str:
        return f"mooncake://127.0.0.1:{self.port}"


def libraries(directory: Path) -> str:
    """A value of LD_LIBRARY_PATH with libibverbs, which Mooncake needs and few systems have. The wheel of
    NIXL brings one under another name, and what that needs."""
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        wheel = importlib.util.find_spec("nixl_cu13")
        assert wheel is not None
        assert wheel.origin is not None
        brought = Path(wheel.origin).parent.with_name("nixl_cu13.libs")
        [verbs] = brought.glob("libibverbs-*")
        directory.mkdir(exist_ok=True)
        (directory / "libibverbs.so.1").symlink_to(verbs)
        return f"{directory}:{brought}"
    return os.environ.get("LD_LIBRARY_PATH", "")


@contextmanager
def mooncake(directory: Path, *, segment: int = SEGMENT, port: int = 0) -> Iterator[Mooncake]:
    """Runs both while the context is open. `LD_LIBRARY_PATH` must be set for them. `segment`: bytes of the
    store."""
    wheel = importlib.util.find_spec("mooncake")
    assert wheel is not None
    assert wheel.submodule_search_locations is not None
    [binaries] = wheel.submodule_search_locations
    port, metrics = port or free_port(), free_port()
    with (directory / "mooncake.log").open("ab") as log:

        def start(name: str, *flags: str) -> subprocess.Popen[bytes]:
            return subprocess.Popen([f"{binaries}/{name}", *flags], stdout=log, stderr=log)

        master = start(
            "mooncake_master", f"--rpc_port={port}", "--rpc_address=127.0.0.1",
            "--metrics_host=127.0.0.1", f"--metrics_port={metrics}",
        )  # fmt: skip
        _until_listening(port)
        own = free_port()
        store = start(
            "mooncake_client", "--host=127.0.0.1", f"--port={own}", f"--global_segment_size={segment}",
            f"--master_server_address=127.0.0.1:{port}", "--metadata_server=P2PHANDSHAKE", "--protocol=tcp",
        )  # fmt: skip
        running = Mooncake(master, store, port, metrics)
        try:
            _until_listening(own)
            yield running
        finally:
            running.kill()


def _until_listening(port: int) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            assert time.monotonic() < deadline, f"nothing listens on port {port}"
            time.sleep(0.02)
        else:
            return
