"""Engines on the same CPUs see each other, and say how many threads each should have."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from baton.system import cpu_engines
from baton.system.cpu_engines import CpuEngine

ENGINE = """
import os, sys
from baton.system import cpu_engines
cpu_engines.announce(int(sys.argv[1]))
if sys.argv[2:]:
    os.sched_setaffinity(0, {int(sys.argv[2])})
print("", flush=True)
sys.stdin.read()
"""


@contextmanager
def engine(*args: int) -> Iterator[int]:
    """Of so many threads, and on this CPU."""
    command = [sys.executable, "-c", ENGINE, *map(str, args)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


def test_an_engine_sees_the_others_on_its_cpus() -> None:
    with engine(7) as pid:
        assert CpuEngine(pid, 7) in cpu_engines.other_engines()
        mine = os.getpid()
        assert pid not in [each.pid for each in cpu_engines.other_engines(mine)], "it belongs to this worker"
        cpus = os.sched_getaffinity(0)
        if len(cpus) > 1:
            one, other, *_ = sorted(cpus)
            os.sched_setaffinity(0, {one})
            try:
                with engine(7, other) as apart:
                    assert apart not in [each.pid for each in cpu_engines.other_engines()]
            finally:
                os.sched_setaffinity(0, cpus)
    assert pid not in [each.pid for each in cpu_engines.other_engines()]


@pytest.mark.parametrize(
    ("others", "share"), [([], 8), ([8], 4), ([2], 6), ([4, 4], 2), ([1, 1, 1], 5), ([8] * 20, 1)]
)
def test_another_engine_takes_what_is_left_and_at_least_an_equal_share(
    monkeypatch: pytest.MonkeyPatch, others: list[int], share: int
) -> None:
    monkeypatch.setattr(cpu_engines, "usable_cpus", lambda: 8)
    engines = [CpuEngine(pid, threads) for pid, threads in enumerate(others)]
    monkeypatch.setattr(cpu_engines, "other_engines", lambda worker: engines)
    assert cpu_engines.share_of_cpus(0) == share


@pytest.mark.parametrize(
    ("threads", "each"),
    [([8], 0), ([4, 4], 0), ([8, 4], 4), ([8, 8], 4), ([1] * 9, 0), ([2] * 9, 1), ([6, 2], 0)],
)
def test_engines_with_too_many_threads_are_told_how_many_to_have(
    monkeypatch: pytest.MonkeyPatch, threads: list[int], each: int
) -> None:
    """Threads of one each cannot be fewer."""
    monkeypatch.setattr(cpu_engines, "usable_cpus", lambda: 8)
    advice = cpu_engines.remedy([CpuEngine(pid, count) for pid, count in enumerate(threads)])
    assert advice.endswith(f"--advanced.num-threads {each}") if each else not advice


def test_the_text_names_each_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_engines, "usable_cpus", lambda: 8)
    text = cpu_engines.shown([CpuEngine(11, 8), CpuEngine(12, 1)])
    assert text == "2 engines (pid 11: 8 threads, pid 12: 1 thread) on 8 CPUs"
