"""Ties the life of a role to its supervisor: `baton … --ready-fd N` dies when its supervisor dies."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def tie_to_parent(ready_fd: int) -> None:
    """Makes the kernel kill this process when the thread that spawned it ends, for any reason.

    Call it first. If the parent has died already, its end of the pipe is closed, and this process exits.
    Also unblocks the signals that stop a role: Ray blocks them, and a child inherits blocked signals.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    poll = select.poll()
    poll.register(ready_fd, 0)
    if any(events & select.POLLERR for _, events in poll.poll(0)):
        sys.exit(1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant whose own parent dies, so that it can end all."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def report_error(ready_fd: int | None, message: str) -> None:
    """Sends the supervisor the reason why this role cannot start, in words for the user."""
    if ready_fd is not None:
        os.write(ready_fd, json.dumps({"error": message}).encode() + b"\n")
