"""Whether a process lives."""

import asyncio
import itertools
from types import SimpleNamespace

import pytest

from baton.processes import liveness
from baton.processes.liveness import Silence, Watchdog
from tests.within import within


def test_only_time_in_which_both_could_run_is_silence() -> None:
    silence = Silence(limit=3.5)
    silence.passed(1.0, interval=1.0)
    silence.passed(100.0, interval=1.0)  # this process was stopped
    assert (silence.seconds, silence.is_too_long) == (3.0, False)
    silence.passed(1.0, interval=1.0, without_cpu=1.0)
    assert not silence.is_too_long
    silence.passed(0.5, interval=1.0)
    assert silence.is_too_long
    silence.broken()
    silence.passed(1.0, interval=1.0, without_cpu=5.0)
    assert silence.seconds == 0.0, "a wait for a CPU gives no credit"


async def test_a_counter_that_stands_still_raises() -> None:
    with pytest.raises(TimeoutError, match="the engine gave no sign of life for 0"):
        await within(Watchdog("the engine", lambda: 7, 0.2, TimeoutError).watch())


async def test_a_counter_that_moves_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    now, ticks = 0.0, itertools.count()

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if now > 100.0:
            raise asyncio.CancelledError

    monkeypatch.setattr(liveness, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(liveness, "asyncio", SimpleNamespace(sleep=sleep))
    with pytest.raises(asyncio.CancelledError):
        await Watchdog("the engine", lambda: next(ticks), 5.0, TimeoutError).watch()


async def test_silence_at_the_start_does_not_count_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that loads weights may be silent for longer than one that serves."""
    now, ended = 0.0, 0.0

    async def sleep(seconds: float) -> None:
        nonlocal now, ended
        now += seconds
        if now == 10.0:
            dog.restart(3.0)
        ended = now

    monkeypatch.setattr(liveness, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(liveness, "asyncio", SimpleNamespace(sleep=sleep))
    dog = Watchdog("the engine", lambda: 7, 600.0, TimeoutError)
    with pytest.raises(TimeoutError, match=r"for 3\.0 s"):
        await dog.watch()
    assert ended == 13.0
