"""A decode pool behind several routers.

A router hears of the work of the others only in reports, once a second.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from router.policy import DecodeLoad

STATUS_INTERVAL = 1.0
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
    rng = random.Random(seed)
    pools = [DecodeWorker(str(i)) for i in range(workers)]
    views = [[DecodeLoad(w.name, BLOCK, POOL, SEATS, POOL) for w in pools] for _ in range(routers)]
    waiting: list[list[int]] = [[] for _ in range(routers)]
    outcome = DecodeOutcome()
    order = itertools.count()
    events: list[tuple[float, int, Callable[[float], None]]] = []

    def at(when: float, event: Callable[[float], None]) -> None:
        heapq.heappush(events, (when, next(order), event))

    def ask(router: int, tokens: int, now: float) -> bool:
        while (chosen := policy(views[router], tokens=tokens, rng=rng)) is not None:
            worker, load = pools[int(chosen)], views[router][int(chosen)]
            load.sent(tokens)
            blocks = -(-tokens // BLOCK)
            if blocks > worker.free or worker.running >= SEATS:
                outcome.refused += 1
                load.ended(tokens)
                load.full = True
                continue
            worker.free -= blocks
            worker.running += 1

            def end(when: float) -> None:
                worker.free += blocks  # noqa: B023 - the loop returns after this iteration
                worker.running -= 1  # noqa: B023
                load.ended(tokens)  # noqa: B023
                outcome.served += 1
                offer(router, when)

            at(now + rng.uniform(2, 20), end)
            return True
        return False

    def offer(router: int, now: float) -> None:
        while waiting[router] and ask(router, waiting[router][0], now):
            waiting[router].pop(0)

    def arrive(now: float) -> None:
        router, tokens = rng.randrange(routers), rng.randint(500, 4_000)
        if waiting[router] or not ask(router, tokens, now):
            outcome.waited += 1
            waiting[router].append(tokens)

    def report(worker: DecodeWorker, now: float) -> None:
        for router, loads in enumerate(views):
            loads[int(worker.name)].reported(blocks_free=worker.free, running=worker.running)
            offer(router, now)
        if outcome.served < requests:
            at(now + STATUS_INTERVAL, lambda now: report(worker, now))

    mean_blocks = 2_250 / BLOCK + 0.5
    rate = fill * workers * POOL / (mean_blocks * 11)
    when = 0.0
    for _ in range(requests):
        when += rng.expovariate(rate)
        at(when, arrive)
    for worker in pools:
        at(rng.random(), lambda now, worker=worker: report(worker, now))

    def look(now: float) -> None:
        used = [1 - w.free / POOL for w in pools]
        if now > 12:
            outcome.above_mean.append(max(used) - sum(used) / workers)
        if now + 0.5 < when:
            at(now + 0.5, look)

    at(0.0, look)
    while events:
        now, _, event = heapq.heappop(events)
        event(now)
    assert all(worker.free == POOL and not worker.running for worker in pools)
    return outcome
