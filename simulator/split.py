"""Prefill workers that share long prompts, by the router's policy, on a simulated clock. Times are in
seconds.

A worker computes ranges in the order of their submission, at the cost of `simulator.steps`. A range begins a
layer after the range before it, and ends no earlier than a layer after that one's end.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.router.policy.split import (
    HOP_SECONDS,
    MOST_WORKERS,
    PromptCost,
    SplitRange,
    SplitWorker,
    split,
)
from baton.simulator.step_worker import BUDGET
from baton.simulator.steps import DOUBLES_AT, LAYERS, READ_SECONDS, step_seconds


def alone_seconds(tokens: int) -> float:
    """Time in which one idle worker computes a prompt."""
    starts = range(0, tokens, BUDGET)
    return sum(step_seconds(0, 0, [(min(BUDGET, tokens - start), start)]) for start in starts)


@dataclass(slots=True)
class SharedPrompts:
    """A pool of prefill workers that compute prompts of one length.

    Attributes:
        splits: whether prompts may be split.
        load: the share of its time in which a worker computes, as each one reports it.
        rng: which workers the router looks at.
        free: when each worker has computed all that it has.
        shared: prompts that several workers computed.
    """

    workers: int
    splits: bool
    load: float
    rng: random.Random
    free: list[float] = field(init=False)
    shared: int = 0

    def __post_init__(self) -> None:
        self.free = [0.0] * self.workers

    def compute(self, tokens: int, now: float) -> float:
        """Submits a prompt. Returns the time of its first token."""
        waits = {row: max(0.0, self.free[row] - now) for row in self._drawn()}
        chosen = sorted(waits, key=lambda row: waits[row])
        speed = BUDGET / step_seconds(0, 0, [(BUDGET, 0)])
        workers = [
            SplitWorker(waits[row], speed, BUDGET, READ_SECONDS, utilisation=self.load) for row in chosen
        ]
        plan = split(PromptCost(tokens, 0, DOUBLES_AT, LAYERS), workers) if self.splits else None
        self.shared += plan is not None
        ranges = plan.ranges if plan is not None else [SplitRange(0, 0, tokens)]
        steps = [
            (chosen[part.worker], start, min(part.stop, start + BUDGET))
            for part in ranges
            for start in range(part.start, part.stop, BUDGET)
        ]
        began, ended, before = now, now, -1
        for row, start, stop in steps:
            seconds = step_seconds(0, 0, [(stop - start, start)])
            lag = seconds / LAYERS + HOP_SECONDS if before not in (-1, row) else 0.0
            began = max(self.free[row], began + lag)
            ended = self.free[row] = max(began + seconds, ended + lag)
            before = row
        return ended

    def _drawn(self) -> Sequence[int]:
        """As many workers as a router looks at."""
        rows = range(self.workers)
        return rows if self.workers <= 2 * MOST_WORKERS else self.rng.sample(rows, 2 * MOST_WORKERS)


def simulate(
    tokens: int, load: float, *, workers: int, splits: bool, prompts: int, seed: int = 1
) -> tuple[list[float], int]:
    """Prompts arrive at random times, so many that they take the share `load` of the time of all workers; 0:
    one after another. Returns the times to their first tokens, and how many prompts were split."""
    arrivals, rng = random.Random(seed), random.Random(seed)
    pool = SharedPrompts(workers, splits, load, rng)
    alone, now, found = alone_seconds(tokens), 0.0, list[float]()
    for _ in range(prompts):
        now += arrivals.expovariate(load * workers / alone) if load else alone
        found.append(pool.compute(tokens, now) - now)
    return found, pool.shared
