"""What a process of a router does in place of serving. It ends at once while the file `model` exists."""

import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from baton.processes import forks
from baton.processes.children import report
from baton.router.process_helper import configured

REPLIES = {
    "ping\n": b'{"ready": true, "state": "serving", "pause": "none"}',
    "metrics\n": b"# TYPE a counter\na_total 1\n",
}


def run(given: bytes, fds: Sequence[int]) -> int:
    config = configured(given, fds)
    assert config.model is not None
    assert config.control_fd is not None
    if Path(config.model).exists():
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
    forks.serve(int(sys.argv[1]), bytes.decode, run)
