"""Generations that cannot go on, and wait outside the admission queue.

    no worker of a pool ───▶ without_worker ─ a worker becomes ready ─▶ advance
    a pause            ───▶ without_worker ─ a worker goes on       ─▶ advance
    no retry budget left ──▶ without_budget ─ budget is free again ───▶ advance, keys in turns
    decodes elsewhere  ───▶ away           ─ a worker becomes ready ─▶ advance, while it decodes

A parked generation does not hold up the queue. It may keep a reservation on a decode worker (`Retarget`). Its
`Waits` bounds how long it waits.
"""

import asyncio
import itertools
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.router.admission.entry import Entry
from baton.router.admission.fairness import FairQueue, Ticket
from baton.router.admission.keys import MAX_RETRY_AFTER
from baton.router.errors import ApiError, NoWorker, Paused, TimedOut

WOKEN_AT_ONCE = 200
"""Generations. To wake one takes up to 0.1 ms, and thousands may wait for the same worker."""
WINDOW_S = 10.0
"""Of the retry budget, as are the following."""
SHARE = 0.2
FLOOR = 100
"""Retries per window that are always allowed, so that a cluster with little load retries at once."""


class RetryBudget:
    """Limits how many prompts are prefilled again after failures.

    Retries add load to the remaining workers, which may then fail too. So retries are limited to a share of
    the new requests, as in Finagle's RetryBudget: 20 % over 10 s, and 10 per second in any case. The requests
    of one lost worker retry at once; a storm of retries is slowed down.

    Pure: the caller passes the time in seconds of `time.monotonic()`, which never goes back.
    """

    def __init__(self) -> None:
        self._requests: deque[float] = deque()
        self._retries: deque[float] = deque()

    def requested(self, now: float) -> None:
        self._forget(now)
        self._requests.append(now)

    def take(self, now: float) -> bool:
        """Takes one retry from the budget. Returns False if none is left."""
        self._forget(now)
        if len(self._retries) >= max(FLOOR, int(SHARE * len(self._requests))):
            return False
        self._retries.append(now)
        return True

    def spares(self, now: float) -> bool:
        """Whether less than half of the budget is taken."""
        self._forget(now)
        return 2 * len(self._retries) < max(FLOOR, int(SHARE * len(self._requests)))

    def wait(self, now: float) -> float:
        """Seconds until the window frees a retry. New requests may free one earlier."""
        self._forget(now)
        return self._retries[0] + WINDOW_S - now if self._retries else 0.0

    def _forget(self, now: float) -> None:
        for times in (self._requests, self._retries):
            while times and times[0] <= now - WINDOW_S:
                times.popleft()


class Parked:
    """Owns the retry budget. Runs on the event loop.

    Attributes:
        without_worker: generations that wait for a worker, or for the end of a pause, as keys in order.
        without_budget: generations that wait for the retry budget. Keys take turns by the retries that
            they got from it. Those of one key go in order of arrival.
        away: generations that decode, but not where they would if no worker had been lost.
    """

    def __init__(self, budget: RetryBudget) -> None:
        self.without_worker: dict[Waits, None] = {}
        self.without_budget: FairQueue[bytes, Waits] = FairQueue()
        self.away: dict[Waits, None] = {}
        self._budget = budget
        self._waking: dict[Waits, None] = {}  # those that are woken soon
        self._returning: dict[Waits, None] = {}  # those of `away` that wait for the retry budget
        self._arrivals = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    def arrival(self) -> int:
        """Counts a new request, which adds to the retry budget. Returns its number."""
        self._budget.requested(time.monotonic())
        if self.without_budget:
            self._retry()
        return next(self._arrivals)

    def worker_found(self, generation: "Waits") -> None:
        self.without_worker.pop(generation, None)
        self._waking.pop(generation, None)

    def worker_ready(self) -> None:
        """Wakes all generations that wait for a worker, then those that may return to one, a part in each
        round of the event loop."""
        self._wake_soon({**self.without_worker, **self.away})

    def _wake_soon(self, generations: "dict[Waits, None]") -> None:
        waking = bool(self._waking)
        self._waking.update(generations)
        if not waking:
            self._wake()

    def _wake(self) -> None:
        try:
            for generation in list(itertools.islice(self._waking, WOKEN_AT_ONCE)):
                if generation in self._waking:  # no other one has ended it meanwhile
                    self.worker_found(generation)
                    generation.worker_ready()
        finally:  # also after a defect: nothing else would wake the others
            if self._waking:
                asyncio.get_running_loop().call_soon(self._wake)

    def take_retry(self, generation: "Waits") -> bool:
        """Takes a retry from the budget. If none is left, parks the generation and returns False."""
        if not self.without_budget and self._budget.take(time.monotonic()):
            return True
        if generation.ticket is None:
            generation.ticket = self.without_budget.push(
                generation.tenant, 0, generation, order=generation.arrival
            )
            self._retry_later()
        return False

    def may_return(self, generation: "Waits") -> bool:
        """Whether the budget has a retry for a generation that decodes, which waits for it if not.

        It leaves half of the budget to failures: the worker that it returns to may be lost again."""
        if not self.without_budget and self._budget.spares(time.monotonic()):
            return True
        self._returning[generation] = None
        self._retry_later()
        return False

    def remove(self, generation: "Waits") -> None:
        self.worker_found(generation)
        self.away.pop(generation, None)
        self._returning.pop(generation, None)
        if generation.ticket is not None:
            self.without_budget.remove(generation.ticket)
            generation.ticket = None

    def _retry(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self.without_budget and self._budget.take(time.monotonic()):
            generation = self.without_budget.pop()
            assert generation is not None, "some wait, and all may go"
            generation.ticket = None
            self.without_budget.charge(generation.tenant, 1)
            generation.retry_granted()
        if self._returning and not self.without_budget and self._budget.spares(time.monotonic()):
            returning, self._returning = self._returning, {}
            self._wake_soon(returning)
        self._retry_later()

    def _retry_later(self) -> None:
        if (self.without_budget or self._returning) and self._timer is None:
            delay = self._budget.wait(time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._retry)


@dataclass(eq=False)
class Waits:
    """What one generation waits for outside the queue: a worker, retry budget, and the deadline of
    its request.

    Owns two timers: one until the deadline, and one while no worker is available or all pause.

    Attributes:
        arrival: number of the generation in order of arrival.
    """

    parked: Parked
    entry: Entry
    advance: Callable[[], None]
    """A worker became ready, or the generation got a retry from the budget. If it still lacks a worker, it
    parks again. One that decodes may return to the worker."""
    on_deadline: Callable[[ApiError], None]
    """It has waited too long."""
    prefilled: bool = field(default=False, init=False)
    """A worker got the prompt once."""
    ticket: Ticket | None = field(default=None, init=False)
    """While it waits for the retry budget."""

    def __post_init__(self) -> None:
        self.arrival = self.parked.arrival()
        self._has_retry = False  # taken from the budget and not used yet
        self._began = time.monotonic()
        loop = asyncio.get_running_loop()
        self._deadline_timer = loop.call_later(max(0.0, self.entry.deadline.seconds_left), self._timed_out)
        self._worker_timer: asyncio.TimerHandle | None = None

    @property
    def tenant(self) -> bytes:
        """Of the request's API key."""
        return self.entry.account.key.tenant

    @property
    def waited(self) -> float:
        """Seconds since the request came."""
        return time.monotonic() - self._began

    def may_prefill(self) -> bool:
        """Whether the prompt may be computed now: once for free, then only with a retry from the budget.

        Without budget it parks the generation.
        """
        if self.prefilled and not self._has_retry:
            self._has_retry = self.parked.take_retry(self)
        return self._has_retry or not self.prefilled

    def free_retry(self) -> None:
        """The next prefill needs no retry from the budget."""
        self._has_retry = True

    def retry_granted(self) -> None:
        self._has_retry = True
        self.advance()

    def prefill_sent(self) -> None:
        self.prefilled, self._has_retry = True, False

    def wait_for_worker(self, pool: str, seconds: float) -> None:
        """Parks the generation. It fails when it has waited `seconds` without any worker."""
        text = f"no {pool} worker became available within {seconds:g} s"
        self._park(seconds, NoWorker(text, retry_after=max(1, round(seconds))))

    def wait_for_resume(self, max_wait: float) -> None:
        """Parks the generation until the end of a pause. It fails when it has waited `max_wait` seconds in
        all."""
        text = f"the cluster is paused, and request {self.entry.name} may wait {max_wait:g} s"
        error = Paused(text, retry_after=max(1, round(min(max_wait, MAX_RETRY_AFTER))))
        self._park(max(0.0, max_wait - self.waited), error)

    def _park(self, seconds: float, error: ApiError) -> None:
        self.parked.without_worker[self] = None
        if self._worker_timer is None and seconds < math.inf:
            self._worker_timer = asyncio.get_running_loop().call_later(seconds, self.on_deadline, error)

    def worker_ready(self) -> None:
        self.advance()
        if self not in self.parked.without_worker:  # it may be in the queue, or lack retry budget
            self.worker_found()

    def worker_found(self) -> None:
        self.parked.worker_found(self)
        if self._worker_timer is not None:
            self._worker_timer.cancel()
            self._worker_timer = None

    def end(self) -> None:
        self._deadline_timer.cancel()
        self.worker_found()
        self.parked.remove(self)
        self.advance = self.on_deadline = lambda *_: None  # they refer to the generation

    def _timed_out(self) -> None:
        entry = self.entry
        text = f"request {entry.name} was not finished within {entry.deadline.seconds:g} s"
        self.on_deadline(TimedOut(text))
