"""Re-prefills are a share of what is new; those beyond it wait, in order of arrival."""

import asyncio

from router.admission.parked import Parked
from router.admission.retry_budget import FLOOR, WINDOW_S, RetryBudget


def take_all(budget: RetryBudget, now: float) -> int:
    return next(n for n in range(10_000) if not budget.take(now))


def test_a_quiet_cluster_retries_at_once() -> None:
    assert take_all(RetryBudget(), 5.0) == FLOOR


def test_a_busy_one_a_fifth_of_what_is_new() -> None:
    budget = RetryBudget()
    for i in range(5000):
        budget.requested(i / 1000)
    assert take_all(budget, 5.0) == 1000
    assert not budget.take(5.0 + WINDOW_S - 0.001)


def test_what_was_spent_comes_back_after_the_window() -> None:
    budget = RetryBudget()
    assert take_all(budget, 100.0) == FLOOR
    assert budget.wait(103.0) == WINDOW_S - 3
    assert not budget.take(100.0 + WINDOW_S - 0.001)
    assert take_all(budget, 100.0 + WINDOW_S) == FLOOR


def test_old_requests_count_no_more() -> None:
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


class Scripted(RetryBudget):
    """So many re-prefills, and more when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 0

    def take(self, now: float) -> bool:
        self.left -= 1
        return self.left >= 0

    def wait(self, now: float) -> float:
        return 0.001


async def test_who_came_first_is_served_first_when_the_time_has_come() -> None:
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


async def test_nobody_overtakes_who_waits_and_new_requests_help() -> None:
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
