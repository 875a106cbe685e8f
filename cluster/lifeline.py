"""Ties a supervised role to whoever started it: `baton … --ready-fd N` ends when the reader of N does."""

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
    """From now on this process is killed when the thread that spawned it ends, however that comes about.

    To be called first thing: a parent that died before is noticed by its end of the pipe, which is closed.
    Unblocks the signals that stop a role: Ray blocks them, and a blocked signal is inherited through exec.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    poll = select.poll()
    poll.register(ready_fd, 0)
    if any(events & select.POLLERR for _, events in poll.poll(0)):
        sys.exit(1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant whose own parent dies, so that none can get lost."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def report_error(ready_fd: int | None, message: str) -> None:
    """Tells the supervisor why this role cannot even start, in words for its user."""
    if ready_fd is not None:
        os.write(ready_fd, json.dumps({"error": message}).encode() + b"\n")
