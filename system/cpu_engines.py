"""Engines that compute on the same CPUs. Each says how many threads it has, in the name of its main thread.

Together they should have no more threads than there are CPUs: the threads of a step wait for each other, and
one without a CPU holds up all. `baton serve` divides the CPUs itself. A worker that is started alone looks at
those that run.
"""

import os
import re
from pathlib import Path
from typing import NamedTuple

import setproctitle

from baton.system import limited_by_quota, usable_cpus
from baton.system.words import counted

_NAME = re.compile(r"baton cpu (\d{1,4})\n")  # 15 characters are the most


class CpuEngine(NamedTuple):
    """An engine process that computes on CPUs."""

    pid: int
    threads: int


def announce(threads: int) -> None:
    """Says that this process computes with so many threads. The main thread calls it."""
    setproctitle.setthreadtitle(f"baton cpu {min(threads, 9999)}")


def other_engines(worker: int = 0) -> list[CpuEngine]:
    """Engines on CPUs that this process may use, too. `worker`: a process whose children do not count."""
    cpus, group = os.sched_getaffinity(0), _cgroup("self") if limited_by_quota() else None
    found = dict[int, CpuEngine]()  # by worker: it may have another engine process that stands by
    for comm in Path("/proc").glob("[0-9]*/comm"):
        try:
            named = _NAME.fullmatch(comm.read_text(errors="replace"))
            if named is None:
                continue
            pid = int(comm.parent.name)
            parent = int(comm.with_name("stat").read_text().rpartition(")")[2].split()[1])
            shares = not cpus.isdisjoint(os.sched_getaffinity(pid)) and group in (None, _cgroup(str(pid)))
        except OSError:
            continue  # it has ended
        if parent != worker and shares:
            found[parent] = CpuEngine(pid, int(named[1]))
    return [*found.values()]


def share_of_cpus(worker: int) -> int:
    """Threads for another engine: what the engines that run leave, but at least an equal share."""
    others, cpus = other_engines(worker), usable_cpus()
    return max(1, cpus - sum(each.threads for each in others), cpus // (1 + len(others)))


def shown(engines: list[CpuEngine]) -> str:
    each_has = ", ".join(f"pid {each.pid}: {counted(each.threads, 'thread')}" for each in engines)
    return f"{counted(len(engines), 'engine')} ({each_has}) on {counted(usable_cpus(), 'CPU')}"


def remedy(engines: list[CpuEngine]) -> str:
    """What to do if these engines on the CPUs of this process have too many threads. Empty: they have not."""
    cpus = usable_cpus()
    share = max(1, cpus // max(1, len(engines)))
    if sum(each.threads for each in engines) <= cpus or all(each.threads <= share for each in engines):
        return ""
    return f"they slow each other down several times: start each with --advanced.num-threads {share}"


def _cgroup(pid: str) -> str:
    return (Path("/proc") / pid / "cgroup").read_text()
