"""Child processes: how they report, how they end with their parent, and how long they wait for a CPU."""

import asyncio
import contextlib
import ctypes
import json
import os
import resource
import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


_DESCRIPTORS = 65_536
"""As many as the systemd units allow. Some programs do something for each descriptor that they may have."""


def raise_descriptor_limit() -> None:
    """Lets this process and its children open as many files as its hard limit allows, at most `_DESCRIPTORS`.

    Most systems let a process have 1,024 at first, which clients and peers would fill."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def report(ready_fd: int | None, message: Mapping[str, Any], *, last: bool = False) -> None:
    """Writes a line of JSON into the ready pipe, which the supervisor of this process reads: {"stage": …,
    "fraction": …}, {"ready": …} or {"error": …}. A reader that has gone is ignored."""
    if ready_fd is not None:
        with contextlib.suppress(BrokenPipeError):
            os.write(ready_fd, json.dumps(message).encode() + b"\n")
        if last:
            os.close(ready_fd)


def die_with_parent(parent_pid: int | None = None) -> None:
    """Makes the kernel kill this process when the thread that started it ends, for any reason.

    `parent_pid`: of the process with that thread. If it has ended already, this process ends, too."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if parent_pid not in (None, os.getppid()):
        os._exit(1)


def waited_for_cpu(pid: int) -> float:
    """Seconds in which the first thread of a process had no CPU to run on. 0: the kernel does not say."""
    with waits_for_cpu(pid) as waited:
        return waited()


@contextlib.contextmanager
def waits_for_cpu(pid: int) -> Iterator[Callable[[], float]]:
    """Gives `waited_for_cpu` of that process, for many calls: to open its file takes longer than to read."""
    try:
        fd = os.open(f"/proc/{pid}/schedstat", os.O_RDONLY)
    except OSError:
        yield lambda: 0.0
        return

    def waited() -> float:
        try:
            return int(os.pread(fd, 256, 0).split()[1]) / 1e9
        except (OSError, IndexError):
            return 0.0

    try:
        yield waited
    finally:
        os.close(fd)


async def process_end(pid: int) -> None:
    """Returns as soon as the child `pid` is dead. Does not reap it."""
    loop = asyncio.get_running_loop()
    dead = asyncio.Event()
    pidfd = os.pidfd_open(pid)
    loop.add_reader(pidfd, dead.set)
    try:
        await dead.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


def describe_exit(code: int) -> str:
    """Returns the text for logs, such as "exited with 3" or "was killed by SIGKILL"."""
    if code >= 0:
        return f"exited with {code}"
    return f"was killed by {signal.Signals(-code).name}"
