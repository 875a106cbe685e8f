"""Waiting for descriptors of any number, which `select` does not take, and for less than a millisecond, which
Python's `poll` and `epoll` round up. And when a loop polls instead."""

import ctypes
import errno
import os
from collections.abc import Sequence
from ctypes import byref
from select import POLLIN, POLLOUT

from baton.system import usable_cpus

SPIN = 0.016
"""Seconds that a loop polls for a COMMIT at most. After the last KV a prefill computes the rest of that
layer: an 8B model on an H200 takes 1.2 ms for 2,000 tokens, 5.5 ms for 8,000, and 12 ms for the last 8,192 of
32,000."""
EVENT_POLL = 0.00005
"""Seconds between two looks at events of a GPU that a receiver awaits."""
_CORES_TO_SPIN = 8
_cores = usable_cpus()


def spins(due: float, now: float) -> bool:
    """Whether a loop polls where it would sleep, for a COMMIT that is due since `due` (time.monotonic()).
    Infinite: none is due.

    The decode device idles while COMMIT passes through two transfer processes to its engine. A process that
    sleeps takes long to wake, and its code then runs from cold caches. On two H200s with cuda_ipc COMMIT took
    600 µs from `Sender.commit` to the decode engine, and 240 µs if these three processes polled. A handover
    took some 0.9 ms less. They poll for about the time of one layer of each prefill, of 32 in that model.

    On few cores this would take a core from a process that it waits for."""
    return _cores >= _CORES_TO_SPIN and due <= now < due + SPIN


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
