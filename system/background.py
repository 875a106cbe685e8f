"""A process that gives way to another one, which serves."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
LOWER = 5
"""Niceness: a thread on a busy CPU gets a third of the time of one with the usual priority. Less would starve
it on a machine that is always busy."""
KILLED_FIRST = 500
"""In thousandths of the machine's memory: what a process seems to take more when the kernel chooses one to
kill."""


def at_low_priority(call: Callable[[], T]) -> T:
    """Returns what `call` returns. It runs in a thread of its own, with a lower priority, and so do threads
    that it starts. Few processes may raise a priority again, so that of the caller stays as it is."""
    with ThreadPoolExecutor(1, "background", initializer=_lower) as thread:
        return thread.submit(call).result()


def _lower() -> None:
    thread = threading.get_native_id()  # on Linux, other threads keep their priority
    os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + LOWER)


def raise_priority(pid: int) -> None:
    """Gives the threads of a child the priority of this process, if the system lets it."""
    with suppress(OSError):  # it may have ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(ProcessLookupError):  # the thread has ended since then, and others have not
                os.setpriority(os.PRIO_PROCESS, int(thread), os.getpriority(os.PRIO_PROCESS, 0))


def killed_first(than: int, *, first: bool, proc: Path = Path("/proc")) -> None:
    """When memory runs out, the kernel kills this process before the process `than`, or as likely. Nothing
    changes where a container forbids it."""
    with suppress(OSError):
        other = int((proc / str(than) / "oom_score_adj").read_text())
        score = min(1000, other + KILLED_FIRST) if first else other
        (proc / "self" / "oom_score_adj").write_text(str(score))
