"""Requests to be prefilled again wait here until the retry budget lets them, in order of arrival."""

import asyncio
import time
from bisect import insort
from typing import Protocol

from router.generation.retry_budget import RetryBudget


class Retrier(Protocol):
    arrival: int
    """Its place in the order in which requests came."""

    def on_retry(self) -> None:
        """It has a re-prefill now."""
        ...


class RetryQueue:
    """Owns the budget. Runs on the event loop; wakes those who wait by a timer or with a new request."""

    def __init__(self, budget: RetryBudget) -> None:
        self._budget = budget
        self._waiting: list[Retrier] = []
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def requested(self) -> None:
        """A new request came: it adds to the budget."""
        self._budget.requested(time.monotonic())
        if self._waiting:
            self._serve()

    def take(self, retrier: Retrier) -> bool:
        """Whether it may be prefilled again now; else it waits for its `on_retry`."""
        if not self._waiting and self._budget.take(time.monotonic()):
            return True
        if retrier not in self._waiting:
            insort(self._waiting, retrier, key=lambda waiting: waiting.arrival)
            self._wake_later()
        return False

    def leave(self, retrier: Retrier) -> None:
        if retrier in self._waiting:
            self._waiting.remove(retrier)

    def _serve(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting and self._budget.take(time.monotonic()):
            self._waiting.pop(0).on_retry()
        self._wake_later()

    def _wake_later(self) -> None:
        if self._waiting and self._timer is None:
            delay = self._budget.wait(time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._serve)
