"""The life of the processes of a cluster: their signals, and their ends.

A role dies with its supervisor: `baton … --ready-fd N` is tied to it. `baton serve` ends only processes of
its own tree, which it reads from /proc.
"""

import asyncio
import contextlib
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from baton.processes.children import die_with_parent

# ------------------------------------------------------------ roles and their supervisor


def tie_to_parent(ready_fd: int) -> None:
    """Makes the kernel kill this process when the thread that spawned it ends, for any reason.

    Call it first. If the parent has died already, its end of the pipe is closed, and this process exits.
    Also unblocks the signals that stop a role: Ray blocks them, and a child inherits blocked signals.
    """
    die_with_parent()
    poll = select.poll()
    poll.register(ready_fd, 0)
    if any(events & select.POLLERR for _, events in poll.poll(0)):
        sys.exit(1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})


# ------------------------------------------------------------ signals


class StopSignals:
    """The first SIGINT or SIGTERM sets `stop`, the second sets `hurry`. SIGUSR1 sets `restart`.

    `install` sets the handlers explicitly: a shell starts background programs with SIGINT ignored, and Ray
    installs handlers of its own.
    """

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        self.hurry_threads = threading.Event()  # the same as `hurry`, for code that runs in a thread
        self.first = int(signal.SIGINT)  # the signal that set `stop`
        self.restart = asyncio.Event()

    def install(self) -> None:
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, self._received, signum)
        loop.add_signal_handler(signal.SIGUSR1, self.restart.set)
        # A closed terminal sends SIGHUP. Under nohup it is ignored, and must stay so.
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, self._received, signal.SIGTERM)

    async def unless_stopped(self, *tasks: asyncio.Task[Any]) -> None:
        """Waits until one of the tasks has ended, or `stop` is set. Raises what a task raised."""
        stopped = asyncio.create_task(self.stop.wait())
        done, _ = await asyncio.wait({stopped, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        for ended in done:
            ended.result()

    def _received(self, signum: int) -> None:
        if self.stop.is_set():
            self.hurry.set()
            self.hurry_threads.set()
        else:
            self.first = signum
            self.stop.set()


# ------------------------------------------------------------ the process tree


def alive(process: psutil.Process) -> bool:
    """Whether it has not ended. A zombie has."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def own_age() -> float:
    """Seconds since this process started, including the interpreter and imports."""
    ticks_since_boot = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks_since_boot / os.sysconf("SC_CLK_TCK")


def reap_orphans() -> None:
    """Makes the running event loop reap the orphans that this process adopts (`children.adopt_orphans`).

    A child that this process started leads its own process group, and the code that started it waits for it.
    An orphan is a member of another group.
    """
    asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, _reap_orphans)


def _reap_orphans() -> None:
    for child in psutil.Process().children():
        with contextlib.suppress(ChildProcessError, ProcessLookupError):  # threads wait for children, too
            if not alive(child) and os.getpgid(child.pid) != child.pid:
                os.waitpid(child.pid, os.WNOHANG)


def end_descendants(patience: float, hurry: threading.Event) -> list[str]:
    """Waits until no descendant is alive. Kills the rest after `patience` seconds, or when `hurry` is set.

    Returns the names of the killed processes. It reaps every child, so call it only at the very end of a
    process that adopts orphans.
    """
    deadline = time.monotonic() + patience
    killed: dict[int, str] = {}
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        descendants = list(filter(alive, psutil.Process().children(recursive=True)))
        if not descendants:
            return sorted(killed.values())
        if hurry.is_set() or time.monotonic() >= deadline:
            for process in descendants:
                with contextlib.suppress(psutil.NoSuchProcess):
                    killed[process.pid] = process.name()
                    process.kill()
        time.sleep(0.02)  # the kernel reports no event for the end of a process that is not our child
