"""A decode pool behind several routers.

A router hears of the work of the others only in reports, once a second.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from baton.router.policy import DecodeLoad
from baton.rpc import LONGEST_REPORT
from baton.simulator.clock import Clock

BLOCK = 128
POOL = 2_000
"""Blocks of a worker: 256 thousand tokens."""
SEATS = 256

DecodePolicy = Callable[..., str | None]
"""As `router.policy.two_choices`."""


@dataclass(slots=True)
class DecodeWorker:
    name: str
    free: int = POOL
    running: int = 0


@dataclass(slots=True)
class DecodeOutcome:
    """What was measured.

    Attributes:
        refused: reservations that met a full worker.
        waited: requests for which no worker seemed to have room when they came.
        above_mean: twice a second, the used share of the fullest pool less the mean.
    """

    refused: int = 0
    waited: int = 0
    served: int = 0
    above_mean: list[float] = field(default_factory=list)


def simulate(
    policy: DecodePolicy, *, workers: int, routers: int, requests: int, fill: float, seed: int = 1
) -> DecodeOutcome:
    """Each request holds 500 to 4,000 tokens for 2 to 20 seconds. `fill` is the mean share of used blocks.

    A router reserves before it confirms. If the worker is full, the router asks the next worker. If no worker
    has room, the request waits for a report or for the end of another request.
    """
    pool = _Pool(policy, workers, routers, requests, random.Random(seed))
    mean_blocks = 2_250 / BLOCK + 0.5
    pool.run(rate=fill * workers * POOL / (mean_blocks * 11))
    return pool.outcome


class _Pool:
    """The workers, each router's view of them and its waiting requests, and the events to come."""

    def __init__(
        self, policy: DecodePolicy, workers: int, routers: int, requests: int, rng: random.Random
    ) -> None:
        self.outcome = DecodeOutcome()
        self._policy, self._requests, self._rng = policy, requests, rng
        self._workers = [DecodeWorker(str(i)) for i in range(workers)]
        self._views = [
            [DecodeLoad(w.name, BLOCK, POOL, SEATS, POOL) for w in self._workers] for _ in range(routers)
        ]
        self._waiting: list[list[int]] = [[] for _ in range(routers)]
        self._clock = Clock()

    def run(self, rate: float) -> None:
        """`rate`: requests a second."""
        last = 0.0
        for _ in range(self._requests):
            last += self._rng.expovariate(rate)
            self._clock.at(last, self._arrive)
        for worker in self._workers:
            self._clock.at(self._rng.random(), partial(self._report, worker))
        self._clock.at(0.0, partial(self._look, last))
        self._clock.run()
        assert all(worker.free == POOL and not worker.running for worker in self._workers)

    def _ask(self, router: int, tokens: int) -> bool:
        """Whether a worker took the request."""
        view, blocks = self._views[router], -(-tokens // BLOCK)
        while (chosen := self._policy(view, tokens=tokens, rng=self._rng)) is not None:
            worker, load = self._workers[int(chosen)], view[int(chosen)]
            load.sent(tokens)
            if blocks <= worker.free and worker.running < SEATS:
                worker.free -= blocks
                worker.running += 1
                self._clock.after(self._rng.uniform(2, 20), partial(self._end, router, int(chosen), tokens))
                return True
            self.outcome.refused += 1
            load.ended(tokens)
            load.full = True
        return False

    def _end(self, router: int, chosen: int, tokens: int) -> None:
        worker = self._workers[chosen]
        worker.free += -(-tokens // BLOCK)
        worker.running -= 1
        self._views[router][chosen].ended(tokens)
        self.outcome.served += 1
        self._offer(router)

    def _offer(self, router: int) -> None:
        waiting = self._waiting[router]
        while waiting and self._ask(router, waiting[0]):
            waiting.pop(0)

    def _arrive(self) -> None:
        router, tokens = self._rng.randrange(len(self._views)), self._rng.randint(500, 4_000)
        if self._waiting[router] or not self._ask(router, tokens):
            self.outcome.waited += 1
            self._waiting[router].append(tokens)

    def _report(self, worker: DecodeWorker) -> None:
        for router, view in enumerate(self._views):
            view[int(worker.name)].reported(blocks_free=worker.free, running=worker.running)
            self._offer(router)
        if self.outcome.served < self._requests:
            self._clock.after(LONGEST_REPORT, partial(self._report, worker))

    def _look(self, last: float) -> None:
        """Measures until the last request arrives."""
        used = [1 - worker.free / POOL for worker in self._workers]
        if self._clock.now > 12:
            self.outcome.above_mean.append(max(used) - sum(used) / len(used))
        if self._clock.now + 0.5 < last:
            self._clock.after(0.5, partial(self._look, last))
