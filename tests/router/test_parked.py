"""The retry budget, and the generations that wait for it."""

import asyncio

import pytest

from baton.router.admission import parked as parked_module
from baton.router.admission.parked import Parked
from baton.router.admission.retry_budget import FLOOR, WINDOW_S, RetryBudget


def take_all(budget: RetryBudget, now: float) -> int:
    return next(n for n in range(10_000) if not budget.take(now))


def test_a_hundred_retries_are_always_allowed() -> None:
    assert take_all(RetryBudget(), 5.0) == FLOOR


def test_retries_are_a_fifth_of_the_new_requests() -> None:
    budget = RetryBudget()
    for i in range(5000):
        budget.requested(i / 1000)
    assert take_all(budget, 5.0) == 1000
    assert not budget.take(5.0 + WINDOW_S - 0.001)


def test_used_retries_come_back_after_the_window() -> None:
    budget = RetryBudget()
    assert take_all(budget, 100.0) == FLOOR
    assert budget.wait(103.0) == WINDOW_S - 3
    assert not budget.take(100.0 + WINDOW_S - 0.001)
    assert take_all(budget, 100.0 + WINDOW_S) == FLOOR


def test_requests_before_the_window_do_not_count() -> None:
    budget = RetryBudget()
    for _ in range(5000):
        budget.requested(0.0)
    assert take_all(budget, WINDOW_S + 1) == FLOOR


class Retrier:
    def __init__(self, arrival: int, served: list[int]) -> None:
        self.arrival = arrival
        self.served = served
        self.done = asyncio.Event()

    def on_worker(self) -> None:
        raise AssertionError("it waits for the budget")

    def on_retry(self) -> None:
        self.served.append(self.arrival)
        self.done.set()


class Workerless:
    """Waits for a worker, and parks again `times` times."""

    def __init__(self, parked: Parked, times: int) -> None:
        self.arrival = parked.arrival()
        self.woken = 0
        self._parked = parked
        self._times = times

    def on_worker(self) -> None:
        self.woken += 1
        if self.woken <= self._times:
            self._parked.for_worker(self)

    def on_retry(self) -> None:
        raise AssertionError("it waits for a worker")


def test_each_ready_worker_wakes_all_that_wait_for_one_once() -> None:
    parked = Parked(RetryBudget())
    satisfied, waits, gone = (Workerless(parked, times) for times in (0, 5, 0))
    for generation in (satisfied, waits, gone, satisfied):
        parked.for_worker(generation)
    parked.worker_found(gone)
    parked.worker_ready()
    assert list(parked.without_worker) == [waits]
    parked.worker_ready()
    assert (satisfied.woken, waits.woken, gone.woken) == (1, 2, 0)
    parked.remove(waits)
    assert not parked.without_worker


async def test_thousands_that_wait_for_a_worker_are_woken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parked_module, "WOKEN_AT_ONCE", 2)
    parked = Parked(RetryBudget())
    waits, gone, *others = (Workerless(parked, times) for times in (5, 0, 0, 0, 0))
    for generation in (waits, *others, gone):
        parked.for_worker(generation)
    parked.worker_ready()
    assert [generation.woken for generation in (waits, *others)] == [1, 1, 0, 0]
    parked.worker_ready()  # another worker, before all were woken
    parked.worker_found(gone)
    for _ in range(4):
        await asyncio.sleep(0)
    assert [generation.woken for generation in (*others, gone)] == [1, 1, 1, 0]
    assert waits.woken == 2, "once for each worker"
    assert list(parked.without_worker) == [waits]


class Scripted(RetryBudget):
    """Has as many retries as the test sets."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 0

    def take(self, now: float) -> bool:
        self.left -= 1
        return self.left >= 0

    def wait(self, now: float) -> float:
        return 0.001


async def test_parked_generations_retry_in_order_of_arrival() -> None:
    budget, served = Scripted(), list[int]()
    parked = Parked(budget)
    late, early, gone = (Retrier(n, served) for n in (9, 1, 5))
    for retrier in (late, early, gone, late):
        assert not parked.take_retry(retrier)
    parked.remove(gone)
    assert len(parked.without_budget) == 2
    budget.left = 2
    await asyncio.wait_for(late.done.wait(), 10)
    assert served == [1, 9]
    assert len(parked.without_budget) == 0


async def test_new_requests_free_retries_for_the_first_that_waits() -> None:
    budget, served = RetryBudget(), list[int]()
    parked = Parked(budget)
    first, second = Retrier(1, served), Retrier(2, served)
    for _ in range(FLOOR):
        assert parked.take_retry(first)
    assert not parked.take_retry(first)
    for _ in range(6 * FLOOR - 1):
        parked.arrival()
    assert served == [1]
    assert parked.take_retry(second)
