"""A router of two small processes: `python -m tests.router.small_router SOCKET`.

It and each process connect to SOCKET, and tell their name, pid and state. A process waits there for a byte
before it goes on to its next state. The router says on stdout when all of them are ready.
"""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Sequence

from baton.processes.children import report
from baton.processes.forks import fork_helper
from baton.processes.sandbox.client import ForkServer
from baton.router.config import RouterConfig
from baton.router.processes import supervise
from baton.router.processes.process import configured
from tests.fake_worker import SECRET

CONFIG = RouterConfig(model=None, secret=SECRET, port=0, processes=2, admin_port=0, ready_fd=1)
STATES = {"drain\n": "draining", "stop\n": "stopping"}


def told() -> socket.socket:
    there = socket.socket(socket.AF_UNIX)
    there.connect(sys.argv[1])
    return there


def run(given: bytes, fds: Sequence[int]) -> int:
    config = configured(CONFIG, given, fds)
    assert config.control_fd is not None
    gate = told()

    def wait(state: str) -> None:
        gate.sendall(f"process{config.process_number} {os.getpid()} {state}\n".encode())
        gate.recv(1)

    wait("starting")
    report(config.ready_fd, {"ready": {"url": "http://nowhere"}}, last=True)
    for question in socket.socket(fileno=config.control_fd).makefile():
        os.write(config.control_fd, b"\0\0\0\0")
        if question in STATES:
            wait(STATES[question])
            break
    return 0


if __name__ == "__main__":
    logging.basicConfig()
    supervise.FIRST_BACKOFF = 0.01
    forks = fork_helper("small processes", run, (1,))
    for name, pid in (("helper", forks._helper.pid), ("router", os.getpid())):
        with told() as gate:
            gate.sendall(f"{name} {pid} started\n".encode())
    idle = ForkServer(["-c", "import os, sys; os.read(int(sys.argv[1]), 1)"])  # until the router ends
    sys.exit(asyncio.run(supervise.Supervisor(CONFIG, forks, idle).run()))
