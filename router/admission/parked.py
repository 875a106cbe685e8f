"""Generations that cannot go on, and wait outside the admission queue.

    no worker of a pool ───▶ without_worker ─ a worker becomes ready ─▶ on_worker
    no retry budget left ──▶ without_budget ─ budget is free again ───▶ on_retry, in order of arrival

A parked generation does not hold up the queue. It may keep a reservation on a decode worker (`Retarget`).
"""

import asyncio
import itertools
import time
from bisect import insort
from typing import Protocol

from baton.router.admission.retry_budget import RetryBudget

WOKEN_AT_ONCE = 200
"""Generations. To wake one takes up to 0.1 ms, and thousands may wait for the same worker."""


class Parkable(Protocol):
    arrival: int
    """The request's number in order of arrival, from `Parked.arrival`."""

    def on_worker(self) -> None:
        """A worker became ready. A generation that still lacks one parks again."""
        ...

    def on_retry(self) -> None:
        """The generation got a retry from the budget."""
        ...


class Parked:
    """Owns the retry budget. Runs on the event loop.

    Attributes:
        without_worker: generations that wait for a worker, as keys in order.
        without_budget: generations that wait for the retry budget, in order of arrival.
    """

    def __init__(self, budget: RetryBudget) -> None:
        self.without_worker: dict[Parkable, None] = {}
        self.without_budget: list[Parkable] = []
        self._budget = budget
        self._waking: dict[Parkable, None] = {}  # those of `without_worker` that are woken soon
        self._arrivals = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    def arrival(self) -> int:
        """Counts a new request, which adds to the retry budget. Returns its number."""
        self._budget.requested(time.monotonic())
        if self.without_budget:
            self._retry()
        return next(self._arrivals)

    def for_worker(self, generation: Parkable) -> None:
        self.without_worker[generation] = None

    def worker_found(self, generation: Parkable) -> None:
        self.without_worker.pop(generation, None)
        self._waking.pop(generation, None)

    def worker_ready(self) -> None:
        """Wakes all generations that wait for a worker, a part in each round of the event loop."""
        waking = bool(self._waking)
        self._waking.update(self.without_worker)
        if not waking:
            self._wake()

    def _wake(self) -> None:
        for generation in list(itertools.islice(self._waking, WOKEN_AT_ONCE)):
            if generation in self._waking:  # no other one has ended it meanwhile
                self.worker_found(generation)
                generation.on_worker()
        if self._waking:
            asyncio.get_running_loop().call_soon(self._wake)

    def take_retry(self, generation: Parkable) -> bool:
        """Takes a retry from the budget. If none is left, parks the generation and returns False."""
        if not self.without_budget and self._budget.take(time.monotonic()):
            return True
        if generation not in self.without_budget:
            insort(self.without_budget, generation, key=lambda parked: parked.arrival)
            self._retry_later()
        return False

    def remove(self, generation: Parkable) -> None:
        self.worker_found(generation)
        if generation in self.without_budget:
            self.without_budget.remove(generation)

    def _retry(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self.without_budget and self._budget.take(time.monotonic()):
            self.without_budget.pop(0).on_retry()
        self._retry_later()

    def _retry_later(self) -> None:
        if self.without_budget and self._timer is None:
            delay = self._budget.wait(time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._retry)
