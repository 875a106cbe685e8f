"""The retry budget, and the generations that wait for it."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from baton.router.admission import parked as parked_module
from baton.router.admission.entry import Deadline, Entry
from baton.router.admission.keys import Account, ApiKey
from baton.router.admission.parked import FLOOR, WINDOW_S, Parked, RetryBudget, Waits
from baton.router.errors import ApiError
from tests.stand_in import stand_in
from tests.within import eventually, within


def take_all(budget: RetryBudget, now: float) -> int:
    return next(n for n in range(10_000) if not budget.take(now))


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


def test_half_of_the_budget_is_left_to_failures() -> None:
    budget = RetryBudget()
    assert sum(budget.spares(1.0) and budget.take(1.0) for _ in range(FLOOR)) == FLOOR // 2
    assert take_all(budget, 2.0) == FLOOR // 2
    assert (budget.spares(1.0 + WINDOW_S), budget.spares(2.0 + WINDOW_S)) == (False, True)


@dataclass
class Waiting:
    """A generation that waits. It parks again `times` times for a worker, and then calls `then`."""

    parked: Parked
    times: int = 0
    deadline: Deadline | None = None
    key: str = ""
    then: Callable[[], object] = bool
    errors: list[ApiError] = field(default_factory=list)
    served: list["Waiting"] = field(default_factory=list)
    woken: int = 0

    def __post_init__(self) -> None:
        self.done = asyncio.Event()
        self.waits = Waits(
            self.parked,
            stand_in(
                Entry,
                name="0",
                deadline=self.deadline or Deadline(time.monotonic(), 60.0),
                account=Account(ApiKey(self.key, b"")),
            ),
            advance=self._advance,
            on_deadline=self.errors.append,
        )

    def _advance(self) -> None:
        if self.waits._has_retry:
            self.served.append(self)
            self.done.set()
            return
        self.woken += 1
        if self.woken <= self.times:
            self.waits.wait_for_worker("prefill", 60.0)
        else:
            self.then()


async def test_thousands_that_wait_for_a_worker_are_woken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parked_module, "WOKEN_AT_ONCE", 2)
    parked = Parked(RetryBudget())
    waits, gone, *others = (Waiting(parked, times) for times in (5, 0, 0, 0, 0))
    for generation in (waits, *others, gone):
        generation.waits.wait_for_worker("prefill", 60.0)
    parked.worker_ready()
    assert [generation.woken for generation in (waits, *others)] == [1, 1, 0, 0]
    parked.worker_ready()  # another worker, before all were woken
    gone.waits.worker_found()
    for _ in range(4):
        await asyncio.sleep(0)
    assert [generation.woken for generation in (*others, gone)] == [1, 1, 1, 0]
    assert waits.woken == 2, "once for each worker"
    assert list(parked.without_worker) == [waits.waits]


async def test_a_defect_in_one_generation_does_not_keep_the_others_asleep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parked_module, "WOKEN_AT_ONCE", 1)
    parked = Parked(RetryBudget())
    generations = [Waiting(parked, then=lambda: 1 // 0), Waiting(parked), Waiting(parked)]
    for generation in generations:
        generation.waits.wait_for_worker("prefill", 60.0)
    with pytest.raises(ZeroDivisionError):
        parked.worker_ready()
    for _ in range(3):
        await asyncio.sleep(0)
    assert [generation.woken for generation in generations] == [1, 1, 1]


@pytest.mark.parametrize(("seconds", "said"), [(0.04, "0.04 s"), (0.31, "0.31 s"), (60.0, "60 s")])
async def test_the_error_of_a_late_request_names_its_whole_time(seconds: float, said: str) -> None:
    """Not what its preparation has left of it."""
    late = Waiting(Parked(RetryBudget()), deadline=Deadline(time.monotonic() - seconds, seconds))
    while not late.errors:  # noqa: ASYNC110
        await asyncio.sleep(0)
    late.waits.end()
    [error] = late.errors
    assert f"was not finished within {said}" in str(error)


class Scripted(RetryBudget):
    """Has as many retries as the test sets."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 0

    def take(self, now: float) -> bool:
        self.left -= 1
        return self.left >= 0

    def spares(self, now: float) -> bool:
        return self.left > 0

    def wait(self, now: float) -> float:
        return 0.001


async def test_parked_generations_retry_in_order_of_arrival() -> None:
    budget, served = Scripted(), list[Waiting]()
    parked = Parked(budget)
    early, gone, late, newest = (Waiting(parked, served=served) for _ in range(4))
    for generation in (late, early, gone, late):
        assert not parked.take_retry(generation.waits)
    gone.waits.end()
    assert len(parked.without_budget) == 2
    budget.left = 2
    assert not parked.take_retry(newest.waits), "others wait"
    await within(late.done.wait())
    assert served == [early, late]
    newest.waits.end()
    assert len(parked.without_budget) == 0


async def test_a_stream_that_returns_waits_behind_failures_for_the_budget() -> None:
    budget = Scripted()
    parked = Parked(budget)
    returns, gone, failed = (Waiting(parked) for _ in range(3))
    for generation in (returns, gone):
        assert not parked.may_return(generation.waits)
    gone.waits.end()
    assert not parked.take_retry(failed.waits)
    budget.left = 1
    await within(failed.done.wait())
    assert returns.woken == 0
    budget.left = 1
    await eventually(lambda: returns.woken)
    assert (returns.woken, gone.woken) == (1, 0)
    assert parked.may_return(returns.waits)
    for generation in (returns, failed):
        generation.waits.end()


async def test_keys_take_turns_for_the_retry_budget() -> None:
    budget, served = Scripted(), list[Waiting]()
    parked = Parked(budget)
    flood = [Waiting(parked, served=served, key="flood") for _ in range(4)]
    other = Waiting(parked, served=served, key="other")
    for generation in (*flood, other):
        assert not parked.take_retry(generation.waits)
    budget.left = 3
    await within(flood[1].done.wait())
    assert served == [flood[0], other, flood[1]]
    for generation in flood:
        generation.waits.end()
    assert len(parked.without_budget) == 0


async def test_new_requests_free_retries_for_the_first_that_waits() -> None:
    budget, served = RetryBudget(), list[Waiting]()
    parked = Parked(budget)
    first, second = Waiting(parked, served=served), Waiting(parked, served=served)
    for _ in range(FLOOR):
        assert parked.take_retry(first.waits)
    assert not parked.take_retry(first.waits)
    for _ in range(6 * FLOOR - 1):
        parked.arrival()
    assert served == [first]
    assert parked.take_retry(second.waits)


async def test_a_worker_that_came_ends_the_wait_for_one_although_the_budget_is_used() -> None:
    parked = Parked(Scripted())
    without_budget = Waiting(parked)
    without_budget.then = lambda: parked.take_retry(without_budget.waits)
    without_worker = Waiting(parked, times=1)
    for generation in (without_budget, without_worker):
        generation.waits.wait_for_worker("decode", 0.05)
    parked.worker_ready()
    assert len(parked.without_budget) == 1
    await eventually(lambda: without_worker.errors)  # its timer began last, and ends last
    assert not without_budget.errors
    assert ["no decode worker" in str(error) for error in without_worker.errors] == [True]
    for generation in (without_budget, without_worker):
        generation.waits.end()
