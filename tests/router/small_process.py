"""What a process of a router does in place of serving. It ends at once while its first argument exists."""

import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from baton.processes import forks
from baton.processes.children import report
from baton.router.config import RouterConfig
from baton.router.processes.process import configured
from tests.fake_worker import SECRET

REPLIES = {
    "ping\n": b'{"ready": true, "state": "serving", "pause": "none"}',
    "metrics\n": b"# TYPE a counter\na_total 1\n",
}


def run(given: bytes, fds: Sequence[int]) -> int:
    config = configured(RouterConfig(model=None, secret=SECRET), given, fds)
    assert config.control_fd is not None
    if Path(sys.argv[1]).exists():
        return 3
    report(config.ready_fd, {"ready": {"url": "http://nowhere"}}, last=True)
    control = socket.socket(fileno=config.control_fd)
    for question in control.makefile():
        if question == "status\n":
            signal.pause()  # as with a worker that is silent
        reply = REPLIES.get(question, b"")
        control.sendall(len(reply).to_bytes(4) + reply)
        if question == "stop\n":
            break
    return 0


if __name__ == "__main__":
    forks.serve(socket.socket(fileno=int(sys.argv[2])), os.getppid(), "small processes", run)
