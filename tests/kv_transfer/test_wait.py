"""Waiting for descriptors."""

import ctypes
import math
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from baton.kv_transfer import wait as waits
from baton.kv_transfer.wait import SPIN, end_waits_on_time, spins, wait

PR_SET_TIMERSLACK, PR_GET_TIMERSLACK = 29, 30


def test_the_descriptors_that_are_ready() -> None:
    (a, b), (c, d) = os.pipe(), os.pipe()
    assert wait([a, c], 0) == []
    assert wait([a], None, [b]) == [b]
    os.write(d, b"x")
    assert wait([a, c], None) == [c]
    os.close(b)
    assert wait([a, c], 1) == [a, c], "closed at the other end"
    for fd in (a, c, d):
        os.close(fd)


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0.0, (0, 0)), (0.0002, (0, 200_000)), (0.02, (0, 20_000_000)), (1.5, (1, 500_000_000))],
)
def test_how_long(monkeypatch: pytest.MonkeyPatch, seconds: float, told: tuple[int, int]) -> None:
    """What the kernel is told: also less than a millisecond, and more than a second."""
    asked: list[tuple[int, int]] = []

    def ppoll(fds: object, count: int, timeout: Any, mask: None) -> int:
        asked.append((timeout._obj.seconds, timeout._obj.nanoseconds))
        return 0

    monkeypatch.setattr(waits, "_ppoll", ppoll)
    assert wait([], seconds) == []
    assert asked == [told]


def test_waits_of_a_thread_and_of_those_that_it_starts_end_on_time() -> None:
    slack: list[int] = []  # nanoseconds

    def look() -> None:
        slack.append(ctypes.CDLL(None).prctl(PR_GET_TIMERSLACK))

    def first() -> None:
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 50_000)  # an earlier test may have changed this process
        look()
        end_waits_on_time()
        in_thread(look)

    in_thread(first)
    assert slack[0] > slack[1] == 1


def in_thread(run: Callable[[], None]) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


@pytest.mark.parametrize("cores", [2, 7, 8, 64])
def test_a_loop_polls_for_a_commit_that_is_due_on_many_cores_and_not_for_long(
    monkeypatch: pytest.MonkeyPatch, cores: int
) -> None:
    monkeypatch.setattr(waits, "_cores", cores)
    due = 1000.0
    for step in range(-10, 1000):  # the COMMIT never comes
        after = step * SPIN / 100
        assert spins(due, due + after) == (cores >= 8 and 0 <= step < 100)
    assert not spins(math.inf, due)
