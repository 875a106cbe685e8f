"""Whether a process lives."""

import asyncio
import contextlib
import itertools
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from baton.processes import liveness
from baton.processes.liveness import CpuWaits, Silence, Watchdog
from tests.within import WITHIN, within


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
        await within(Watchdog("the engine", lambda: 7, 0.2, TimeoutError, []).watch())


async def test_a_counter_that_moves_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """And reads nothing of the threads, which takes time on an event loop."""
    now, ticks = 0.0, itertools.count()

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if now > 100.0:
            raise asyncio.CancelledError

    monkeypatch.setattr(liveness, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(liveness, "asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(liveness, "_waited", pytest.fail)
    with pytest.raises(asyncio.CancelledError):
        await Watchdog("the engine", lambda: next(ticks), 5.0, TimeoutError, [os.getpid()]).watch()


async def test_a_process_that_waits_for_a_cpu_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step may take longer than the limit where others use the CPUs. A process that sleeps does hang."""
    now, waits = 0.0, itertools.chain([1.0] * 20, itertools.repeat(0.25))

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(liveness, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(liveness, "asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(liveness, "CpuWaits", lambda pids: SimpleNamespace(longest=lambda: next(waits)))
    with pytest.raises(TimeoutError):
        await Watchdog("the engine", lambda: 7, 4.0, TimeoutError, [1]).watch()
    assert now == 26.0, "20 intervals with no CPU, and 4 s of 6 with one"


def test_the_thread_that_waits_longest_for_a_cpu_counts() -> None:
    """A process whose first thread sleeps, and one that is busy, share one CPU."""
    [cpu, *_] = os.sched_getaffinity(0)
    busy = (
        f"import os, threading; os.sched_setaffinity(0, {{{cpu}}})\ndef loop():\n while True: pass\n"
        "threading.Thread(target=loop).start()"
    )
    with contextlib.ExitStack() as stack:
        both = [stack.enter_context(subprocess.Popen([sys.executable, "-S", "-c", busy])) for _ in range(2)]
        for process in both:
            stack.callback(process.kill)
        waits, until = CpuWaits([process.pid for process in both]), time.monotonic() + WITHIN
        while waits.longest() < 0.003:
            assert time.monotonic() < until
            time.sleep(0.01)
    assert waits.longest() == 0, "they have ended"


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
    dog = Watchdog("the engine", lambda: 7, 600.0, TimeoutError, [])
    with pytest.raises(TimeoutError, match=r"for 3\.0 s"):
        await dog.watch()
    assert ended == 13.0
