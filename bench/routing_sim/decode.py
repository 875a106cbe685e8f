"""Decode workers behind several routers that see each other's work only in reports, once a second."""

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
"""Blocks: 256 thousand tokens."""
SEATS = 256

DecodePolicy = Callable[..., str | None]
"""As `two_choices`."""


@dataclass(slots=True)
class DecodeWorker:
    name: str
    free: int = POOL
    running: int = 0
    peak: int = 0
    """Most blocks ever taken."""


@dataclass(slots=True)
class DecodeOutcome:
    refused: int = 0
    """Reservations that met a full worker."""
    waited: int = 0
    """Requests that no worker seemed to have room for when they came."""
    served: int = 0
    peak: float = 0.0
    """The largest share of its blocks that any worker ever had taken."""
    mean: float = 0.0
    """Share of all blocks that were taken, at the end of the arrivals."""
    spread: list[float] = field(default_factory=list)
    """Twice a second: the fullest worker less the mean, as shares of a pool."""


def simulate(
    policy: DecodePolicy, *, workers: int, routers: int, requests: int, fill: float, seed: int = 1
) -> DecodeOutcome:
    """`fill`: the share of all blocks that requests would take on average. Each holds 500 to 4,000 tokens for
    2 to 20 seconds. Reserve, then confirm: who meets a full worker asks the next; who finds none waits for
    news.
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
                load.refused(tokens)
                continue
            worker.free -= blocks
            worker.running += 1
            worker.peak = max(worker.peak, POOL - worker.free)

            def end(when: float) -> None:
                worker.free += blocks  # noqa: B023 - returned from at once
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
        taken = [1 - w.free / POOL for w in pools]
        outcome.mean = sum(taken) / workers
        if now > 12:
            outcome.spread.append(max(taken) - outcome.mean)
        if now + 0.5 < when:
            at(now + 0.5, look)

    at(0.0, look)
    while events:
        now, _, event = heapq.heappop(events)
        event(now)
    outcome.peak = max(worker.peak for worker in pools) / POOL
    assert all(worker.free == POOL and not worker.running for worker in pools)
    return outcome


def emptiest(loads: list[DecodeLoad], *, tokens: int, rng: random.Random) -> str | None:
    """To compare with: the best of all by what was last heard."""
    found = [load for load in loads if load.has_room(tokens)]
    return min(found, key=lambda load: load.pressure).worker if found else None
