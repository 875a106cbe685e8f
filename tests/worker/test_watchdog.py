"""The watchdog."""

import asyncio
import itertools
from types import SimpleNamespace

import pytest

from baton.worker import processes
from baton.worker.processes import TreeError, Watchdog


async def test_a_counter_that_stands_still_raises() -> None:
    with pytest.raises(TreeError, match="the engine gave no sign of life for 0"):
        await asyncio.wait_for(Watchdog("the engine", lambda: 7, 0.2).watch(), 5)


async def test_a_counter_that_moves_raises_nothing() -> None:
    ticks = itertools.count()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(Watchdog("the engine", lambda: next(ticks), 0.05).watch(), 0.5)


async def test_silence_at_the_start_does_not_count_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that loads weights may be silent for longer than one that serves."""
    now, ended = 0.0, 0.0

    async def sleep(seconds: float) -> None:
        nonlocal now, ended
        now += seconds
        if now == 10.0:
            dog.restart(3.0)
        ended = now

    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(processes, "asyncio", SimpleNamespace(sleep=sleep))
    dog = Watchdog("the engine", lambda: 7, 600.0)
    with pytest.raises(TreeError, match=r"for 3\.8 s"):
        await dog.watch()
    assert ended == 13.75
