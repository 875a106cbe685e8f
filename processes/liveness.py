"""Whether a process lives: how long it gave no sign of life while it could have."""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

HANG_SECONDS = 60.0
"""Without a reply for so long, a helper or its child hangs, and is killed. A limit of CPU time does not end a
process that sleeps."""


@dataclass
class Silence:
    """Pure. Seconds without a sign of life, as checks find them."""

    limit: float
    seconds: float = 0.0

    @property
    def is_too_long(self) -> bool:
        return self.seconds >= self.limit

    def passed(self, seconds: float, interval: float, without_cpu: float = 0.0) -> None:
        """`seconds`: since the last check. If much more than the `interval`, this process itself was stopped,
        and two intervals count. `without_cpu`: in which the watched process had to wait for a CPU."""
        self.seconds = max(0.0, self.seconds + min(seconds, 2 * interval) - without_cpu)

    def broken(self) -> None:
        self.seconds = 0.0


async def reply(
    asked: Coroutine[Any, Any, T],
    silence: Silence,
    interval: float,
    waited: Callable[[], float] = lambda: 0.0,
) -> T:
    """Waits for what was asked. Raises TimeoutError if the `silence` becomes too long, and what it raises.

    Counts intervals, since this process itself may have been stopped in one. `waited`: the seconds in which
    the asked process had no CPU until now."""
    task, before = asyncio.ensure_future(asked), waited()
    try:
        while not silence.is_too_long:
            await asyncio.wait({task}, timeout=interval)
            if task.done():
                return task.result()
            now = waited()
            silence.passed(interval, interval, now - before)
            before = now
        raise TimeoutError
    finally:
        task.cancel()


class Watchdog:
    """Raises `error` from `watch` when `ticks` gives the same value for longer than `limit` seconds. Time in
    which the processes `pids` had to wait for a CPU does not count after the first silent interval."""

    def __init__(
        self,
        name: str,
        ticks: Callable[[], int],
        limit: float,
        error: type[Exception],
        pids: Sequence[int],
    ) -> None:
        self._name = name
        self._ticks = ticks
        self._silence = Silence(limit)
        self._error = error
        self._pids = pids
        self._checked = 0.0  # time.monotonic()

    def restart(self, limit: float) -> None:
        """A new limit. What was allowed before does not count against it."""
        self._silence, self._checked = Silence(limit), time.monotonic()

    async def watch(self) -> None:
        last, self._checked, waits = self._ticks(), time.monotonic(), CpuWaits(self._pids)
        while True:
            interval = min(1.0, self._silence.limit / 4)
            await asyncio.sleep(interval)
            now, before, last = time.monotonic(), last, self._ticks()
            if last == before:
                self._silence.passed(now - self._checked, interval, waits.longest())
            else:
                self._silence.broken()
                waits = CpuWaits(self._pids)  # a thousand threads take 16 ms: not while the process lives
            self._checked = now
            if self._silence.is_too_long:
                raise self._error(f"{self._name} gave no sign of life for {self._silence.seconds:.1f} s")


class CpuWaits:
    """How long the threads of processes that work together had no CPU to run on.

    A thread that waits for another one sleeps. So the one without a CPU for longest held up the others. A
    busy thread that no other one waits for counts, too: while other processes use the CPUs, a hang beside it
    is found later."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._folders = [Path(f"/proc/{pid}/task") for pid in pids]
        self._before: dict[Path, float] = {}

    def longest(self) -> float:
        """Seconds of the thread that waited longest since the last call. 0: it is the first call, the
        processes have ended, or the kernel does not say."""
        before, self._before = self._before, {}
        for folder in self._folders:
            with contextlib.suppress(OSError):
                for thread in folder.iterdir():
                    self._before[thread] = _waited(thread)
        return max((now - before.get(thread, now) for thread, now in self._before.items()), default=0.0)


def waited_for_cpu(pid: int) -> float:
    """Seconds in which the first thread of a process had no CPU to run on. 0: the kernel does not say."""
    return _waited(Path(f"/proc/{pid}"))


def _waited(of: Path) -> float:
    """`of`: the folder of a process or a thread in /proc."""
    with waits_for_cpu(of) as waited:
        return waited()


@contextlib.contextmanager
def waits_for_cpu(of: Path) -> Iterator[Callable[[], float]]:
    """Gives the seconds in which a process or a thread had no CPU, for many calls: to open its file takes
    longer than to read. `of`: its folder in /proc."""
    try:
        fd = os.open(of / "schedstat", os.O_RDONLY)
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
