"""The loop of a helper: a process without threads, which forks for each message of its callers."""

import os
import selectors
import signal
import socket
from collections.abc import Callable

from setproctitle import setproctitle

_MOST_FDS = 16


def serve_forks(
    messages: socket.socket,
    title: str,
    fork: Callable[[bytes, list[int]], None],
    selector: selectors.BaseSelector | None = None,
) -> int:
    """Calls `fork` with each message and its descriptors, which are closed then. Returns 0 when no caller is
    there any more. `selector`: what this process waits for beside messages. It calls the data of each key."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # for the callers
        signal.signal(number, signal.SIG_IGN)
    setproctitle(title)
    selector = selectors.PollSelector() if selector is None else selector  # which is no descriptor
    selector.register(messages, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is not messages:
                key.data()
                continue
            message, fds, *_ = socket.recv_fds(messages, 64, _MOST_FDS)
            if not message:
                return 0
            try:
                fork(message, fds)
            finally:
                for fd in fds:
                    os.close(fd)
