"""What a process of a router does in place of serving. It ends at once while the file `model` exists."""

import signal
import socket
import sys
from pathlib import Path

from baton.processes.children import die_with_parent, report
from baton.router.processes.child import Given

REPLIES = {
    "ping\n": b'{"ready": true, "state": "serving", "pause": "none"}',
    "metrics\n": b"# TYPE a counter\na_total 1\n",
}


def main() -> None:
    given = Given.taken()
    die_with_parent(given.parent_pid)
    assert given.config.model is not None
    assert given.config.control_fd is not None
    if Path(given.config.model).exists():
        sys.exit(3)
    report(given.config.ready_fd, {"ready": {"url": "http://nowhere"}}, last=True)
    control = socket.socket(fileno=given.config.control_fd)
    for question in control.makefile():
        if question == "status\n":
            signal.pause()  # as with a worker that is silent
        reply = REPLIES.get(question, b"")
        control.sendall(len(reply).to_bytes(4) + reply)
        if question == "stop\n":
            break


if __name__ == "__main__":
    main()
