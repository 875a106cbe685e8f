"""Finds processes by their titles, and kills, stops or disconnects them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket

import psutil

KINDS = ("service", "engine", "transfer")
_PIDFD_GETFD = 438  # the same number on every architecture


def tree(service: int) -> dict[str, int]:
    """The running processes of a worker by kind, such as "engine" or "rank 1". `service` is the pid of its
    service process."""
    found = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(service)
        for each in (process, *process.children()):
            with contextlib.suppress(psutil.NoSuchProcess):
                title = " ".join(each.cmdline())
                if title.startswith("baton: "):
                    # "baton: prefill 0 engine"
                    found["service" if each is process else " ".join(title.split()[3:])] = each.pid
    return found


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Sends a signal. Does nothing if the process is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def break_connections(pid: int, port: int) -> int:
    """Shuts down the TCP connections of a process to or from `port`. Returns their number.

    Copies each descriptor out of the process (pidfd_getfd), so both ends see what a broken network causes.
    Works for descendants, and for root with any process.
    """
    cut = 0
    pidfd = os.pidfd_open(pid)
    try:
        for entry in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError), _borrowed(pidfd, int(entry)) as connection:
                ends = (connection.getsockname(), connection.getpeername())
                if any(end[1] == port for end in ends):
                    connection.shutdown(socket.SHUT_RDWR)
                    cut += 1
    finally:
        os.close(pidfd)
    return cut


def _borrowed(pidfd: int, fd: int) -> socket.socket:
    """A socket of this process for a descriptor of another one. Raises OSError if it is no TCP socket."""
    libc = ctypes.CDLL(None, use_errno=True)
    copy = libc.syscall(_PIDFD_GETFD, pidfd, fd, 0)
    if copy < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    try:
        borrowed = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    if borrowed.family not in (socket.AF_INET, socket.AF_INET6) or borrowed.type != socket.SOCK_STREAM:
        borrowed.close()
        raise OSError("not a TCP socket")
    return borrowed
