"""Reads this process's own process tree from /proc, and ends it. Never touches other processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    parent: int
    group: int  # process group
    name: str
    alive: bool  # False for a zombie


def _all_processes() -> list[Process]:
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            stat = (entry / "stat").read_text()
        except OSError:
            continue  # the process ended after the directory was read
        # The name is in parentheses and may itself contain parentheses.
        name, _, rest = stat.partition("(")[2].rpartition(")")
        state, parent, group = rest.split()[:3]
        found.append(Process(int(entry.name), int(parent), int(group), name, state != "Z"))
    return found


def descendants(pid: int) -> list[Process]:
    """All processes below `pid`, zombies included."""
    children: dict[int, list[Process]] = {}
    for process in _all_processes():
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    todo = [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += [process.pid for process in below]
    return found


def own_age() -> float:
    """Seconds since this process started, including the interpreter and imports."""
    ticks_since_boot = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks_since_boot / os.sysconf("SC_CLK_TCK")


def reap_orphans() -> None:
    """Makes the running event loop reap the orphans that this process adopts (`lifeline.adopt_orphans`).

    A child that this process started leads its own process group, and the code that started it waits for it.
    An orphan is a member of another group.
    """
    asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, _reap_orphans)


def _reap_orphans() -> None:
    for process in descendants(os.getpid()):
        if process.parent == os.getpid() and not process.alive and process.group != process.pid:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)


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
        alive = [process for process in descendants(os.getpid()) if process.alive]
        if not alive:
            return sorted(killed.values())
        if hurry.is_set() or time.monotonic() >= deadline:
            for process in alive:
                killed[process.pid] = process.name
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.02)  # the kernel reports no event for the end of a process that is not our child
