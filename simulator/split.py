"""Prefill workers that split long prompts, by the router's policy, on a simulated clock. Times are in
seconds.

A worker computes ranges in the order of their submission, at the cost of `simulator.steps`. A range begins a
layer after the range before it, and ends no earlier than a layer after that one's end.
"""

import random
from collections.abc import Sequence

from baton.router.policy.plan import Range
from baton.router.policy.split import HOP_SECONDS, MOST_WORKERS, PromptCost, SplitWorker, split
from baton.simulator.step_worker import BUDGET
from baton.simulator.steps import DOUBLES_AT, LAYERS, READ_SECONDS, step_seconds


def alone_seconds(tokens: int) -> float:
    """Time in which one idle worker computes a prompt."""
    starts = range(0, tokens, BUDGET)
    return sum(step_seconds(0, 0, [(min(BUDGET, tokens - start), start)]) for start in starts)


def simulate(
    tokens: int, load: float, *, workers: int, splits: bool, prompts: int, seed: int = 1
) -> tuple[list[float], int]:
    """Prompts arrive at random times, so many that they take the share `load` of the time of all workers; 0:
    one after another. Returns the times to their first tokens, and how many prompts were split.

    `splits`: whether prompts may be split. Each worker reports `load` as its utilisation.
    """
    arrivals, rng = random.Random(seed), random.Random(seed)
    alone, speed = alone_seconds(tokens), BUDGET / step_seconds(0, 0, [(BUDGET, 0)])
    now, seconds, shared = 0.0, list[float](), 0
    free = [0.0] * workers  # when each worker has computed all that it has
    for _ in range(prompts):
        now += arrivals.expovariate(load * workers / alone) if load else alone
        rows: Sequence[int] = range(workers)
        if workers > 2 * MOST_WORKERS:
            rows = rng.sample(rows, 2 * MOST_WORKERS)  # as many as a router looks at
        waits = {row: max(0.0, free[row] - now) for row in rows}
        chosen = sorted(waits, key=waits.__getitem__)
        offers = {
            row: SplitWorker(waits[row], speed, BUDGET, READ_SECONDS, utilisation=load) for row in chosen
        }
        plan = split(PromptCost(tokens, 0, DOUBLES_AT, LAYERS), offers) if splits else None
        shared += plan is not None
        ranges = plan.ranges if plan is not None else [Range(chosen[0], 0, tokens)]
        seconds.append(_compute(ranges, free, now) - now)
    return seconds, shared


def _compute(ranges: Sequence[Range], free: list[float], now: float) -> float:
    """Submits the ranges of a prompt to their workers. Returns the time of its first token."""
    began, ended, before = now, now, -1
    for part in ranges:
        row = part.worker
        for start in range(part.start, part.stop, BUDGET):
            seconds = step_seconds(0, 0, [(min(BUDGET, part.stop - start), start)])
            lag = seconds / LAYERS + HOP_SECONDS if before not in (-1, row) else 0.0
            began = max(free[row], began + lag)
            ended = free[row] = max(began + seconds, ended + lag)
            before = row
    return ended
