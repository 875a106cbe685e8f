"""Waiting for descriptors of any number, which `select` does not take, and for less than a millisecond, which
Python's `poll` and `epoll` round up."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from ctypes import byref
from select import POLLIN, POLLOUT


class _PollFd(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_PR_SET_TIMERSLACK = 29
_libc = ctypes.CDLL(None, use_errno=True)
_ppoll = _libc.ppoll  # lets other threads run meanwhile
_ppoll.argtypes = (ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_void_p)


def end_waits_on_time() -> None:
    """From now on waits of this thread, and of threads that it starts, end on time. By default the kernel
    ends them 50 µs late, to wake less often. Looks at the events of a GPU are only 50 µs apart."""
    _libc.prctl(_PR_SET_TIMERSLACK, 1)  # nanoseconds; a kernel without it only ends waits late


def wait(reading: Sequence[int], seconds: float | None, writing: Sequence[int] = ()) -> list[int]:
    """Those that can be read or written, or are broken; none after so many seconds, or for a signal."""
    count = len(reading) + len(writing)
    fds = (_PollFd * count)(*[(fd, POLLIN) for fd in reading], *[(fd, POLLOUT) for fd in writing])
    timeout = None if seconds is None else _Timespec(int(seconds), int(seconds % 1 * 1e9))
    if _ppoll(fds, count, timeout and byref(timeout), None) < 0:
        if (error := ctypes.get_errno()) != errno.EINTR:
            raise OSError(error, os.strerror(error))
        return []
    return [entry.fd for entry in fds if entry.revents]
