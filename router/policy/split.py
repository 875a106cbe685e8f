"""Splits a prompt over several workers, which compute ranges of it at the same time.

A worker computes a range one layer behind the worker of the range before, whose KV it needs. The next range
goes to the worker that is free first, until all workers end at about the same time:

    A  ├── range 0 ──┤├── range 2 ──┤├ 5 ┤
    B  (other work)    ├── range 1 ──┤├─ 4 ──┤     the first token comes from the last range, 5
    C  (other work)             ├── range 3 ──┤

So workers hardly wait for each other, also if some of them are busy at first. A range has one step, or
several if no other worker is free. A later token costs more, since it attends to more positions. The times
follow from measured speeds, so a plan has no constants of one machine.

Prompts that come before the plan ends wait for the time in which its workers idle. Their delay counts like
that of this prompt. Pure.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.kv_names import CHUNK_TOKENS
from baton.router.policy.plan import Plan, Range
from baton.rpc import worker_pb2 as pb

LEAST_GAIN = 0.1
"""A prompt is split if the first token should come earlier by this share: the estimates are not exact, and a
lost worker costs all of the prompt."""
MOST_WORKERS = 4
"""Workers of a plan. Each receives the KV of all others."""
HOP_SECONDS = 0.004
"""From the first KV of a layer at one worker to its use at the next: two looks of the sender at its
device."""
_HALVINGS = 9


@dataclass(frozen=True, slots=True)
class SplitWorker:
    """A worker that may compute ranges of a prompt. It decodes nothing, so no gap waits for its steps."""

    wait: float
    """Seconds until it could begin."""
    speed: float
    """Tokens/s at the beginning of a prompt."""
    step: int
    """Most tokens of a step."""
    floor: float = 0.0
    """Seconds of a step with hardly any token."""
    link: float = math.inf
    """Tokens/s at which KV of other workers comes. Infinite: not known, and so not limited."""
    utilisation: float = 0.0
    """Share of its recent time in which it computed prompts."""
    computes_on: frozenset[str] = frozenset()
    """Names of its CPUs or GPUs. Workers that share one take time from each other, so only one takes part."""


@dataclass(frozen=True, slots=True)
class PromptCost:
    """What a prompt of one model costs.

    Attributes:
        tokens: of the prompt.
        cached: of these, what the first worker has. The others get this KV from there.
        doubles_at: the position whose token costs twice as much as the first one, by its attention.
        layers: of the model.
    """

    tokens: int
    cached: int
    doubles_at: float
    layers: int

    def work(self, start: int, stop: int) -> float:
        """The cost of [start, stop), in first tokens of a prompt."""
        return (stop - start) * (1 + (start + stop) / 2 / self.doubles_at)

    def reach(self, start: int, work: float) -> int:
        """The position up to which so much work goes from `start` on."""
        linear = 1 + start / self.doubles_at
        return start + int(self.doubles_at * (math.sqrt(linear**2 + 2 * work / self.doubles_at) - linear))


def first_speed(speed: float, status: pb.WorkerStatus, doubles_at: float) -> float:
    """Tokens/s at the beginning of a prompt. `speed`: at the positions that the worker computed lately."""
    return speed * (1 + status.prefill_position / doubles_at)


def may_gain(tokens: int, worker: SplitWorker) -> bool:
    """Whether a prompt with so many tokens to compute may be worth a split, if all workers are like this one.
    The whole decision takes a hundred times as long, and most prompts are short."""
    alone = tokens / worker.speed
    return alone / MOST_WORKERS + worker.floor + HOP_SECONDS < (1 - LEAST_GAIN) * alone


def split(
    cost: PromptCost,
    workers: Mapping[int, SplitWorker],
    last: int | None = None,
    alone: float = math.inf,
) -> Plan | None:
    """Returns the plan with the earliest first token and the least harm. It names no decode worker. None: one
    worker is about as good.

    Its costs, in seconds: `split`, until the first token, as expected. `unsplit`, the same with one worker.
    `harm`, by which prompts that come later are delayed, all together.

    Args:
        workers: by row, in the order in which they are taken. The first one has `cost.cached`.
        last: the worker that decodes, if it may have the last range. It is the last of `workers`.
        alone: seconds until a token, if one worker computes the whole prompt and decodes.
    """
    rows = list[int]()
    for row in workers:
        if row != last and not _shares(workers, rows, row):
            rows.append(row)
    first = workers[rows[0]]
    work = cost.work(cost.cached, cost.tokens)
    unsplit = first.wait + work / first.speed
    best, least = None, min((1 - LEAST_GAIN) * unsplit, alone)
    for count in range(MOST_WORKERS, 1, -1):
        before = best
        ways: list[tuple[list[int], int | None]] = []
        if count <= len(rows):
            ways.append((rows[:count], None))
        if last is not None and count - 1 <= len(rows) and not _shares(workers, rows[: count - 1], last):
            ways.append(([*rows[: count - 1], last], last))
        for chosen, ends in ways:
            taking = [workers[row] for row in chosen]
            if work > sum(each.speed * max(0.0, least - each.wait - each.floor) for each in taking):
                continue  # they cannot compute all of it until then
            plan = _best_of(cost, workers, chosen, ends, unsplit)
            if plan is not None and plan.costs["split"] + plan.costs["harm"] < least:
                best, least = plan, plan.costs["split"] + plan.costs["harm"]
        if best is before is not None:
            break  # still fewer workers take longer still
    return best


def _shares(workers: Mapping[int, SplitWorker], chosen: Sequence[int], row: int) -> bool:
    """Whether a worker computes on what one of the chosen ones computes on."""
    return any(not workers[row].computes_on.isdisjoint(workers[each].computes_on) for each in chosen)


def _best_of(
    cost: PromptCost, workers: Mapping[int, SplitWorker], chosen: list[int], last: int | None, unsplit: float
) -> Plan | None:
    """The plan that ends first. `last`: the worker that must have the last range; None: any."""
    least = cost.work(cost.cached, cost.tokens) / sum(workers[i].speed for i in chosen)
    best, low, high = None, least, unsplit
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        filled = _fill(cost, workers, chosen, last, middle)
        low, high, best = (middle, high, best) if filled is None else (low, middle, filled)
    if best is None or len({part.worker for part in best[0]}) == 1:
        return None
    ranges, seconds, idle = best
    alone = unsplit - workers[chosen[0]].wait
    harm = sum(lost * _delayed(workers[i], seconds, alone) for i, lost in idle.items())
    costs = {"split": seconds, "harm": harm, "unsplit": unsplit}
    return Plan("split", tuple(ranges), cached=cost.cached, costs=costs)


def _delayed(worker: SplitWorker, seconds: float, alone: float) -> float:
    """How many prompts wait for a second that this worker loses: those that come until it is idle, if it has
    work for `seconds` (an M/G/1 queue). `alone`: seconds of a prompt.

    It has a mean queue at least: if less is known, other routers may have sent more since its report."""
    share = min(worker.utilisation, 1 - LEAST_GAIN)  # a measured one is not exact
    unknown = max(0.0, share / 2 / (1 - share) - worker.wait / alone)
    return (seconds / alone + unknown) * share / (1 - share)


def _fill(
    cost: PromptCost, workers: Mapping[int, SplitWorker], chosen: list[int], last: int | None, until: float
) -> tuple[list[Range], float, dict[int, float]] | None:
    """Gives the next range to the worker that is free first, while it can compute a part of it before
    `until`. None: that is not the whole prompt.

    Also returns when the last range ends, and how long each worker computes nothing once it has work."""
    free = {i: workers[i].wait for i in chosen}  # when a worker can begin its next range
    idle = dict.fromkeys(chosen, 0.0)
    began, ended, lag, position, start = -math.inf, 0.0, 0.0, cost.cached, 0
    ranges, deferred = list[Range](), None
    while free:
        index = min(free, key=lambda i: (i == deferred, free[i]))
        if cost.cached and not ranges:
            index = chosen[0]  # no other one has anything cached
        worker = workers[index]
        begins = max(free[index], began + lag)
        seconds = max(0.0, max(until, ended + lag) - begins - worker.floor)
        stop = cost.reach(position, seconds * worker.speed)
        most = position + int(min(worker.step, seconds * worker.link / (len(chosen) - 1)))
        if stop < most and index == last != deferred:
            deferred = last  # the others compute their last ranges first
            continue
        is_last_of_worker, stop = stop < most, min(stop, most)
        stop = cost.tokens if stop >= cost.tokens else stop - stop % CHUNK_TOKENS
        if stop <= position or (stop == cost.tokens and last not in (None, index)):
            if cost.cached and not ranges:
                return None
            del free[index]
            continue
        work = cost.work(position, stop) / worker.speed
        ends = max(begins + worker.floor + work, ended + lag)
        idle[index] += ends - work - (free[index] or begins)
        began, ended, lag = begins, ends, (worker.floor + work) / cost.layers + HOP_SECONDS
        if ranges and ranges[-1].worker == index:
            start = ranges.pop().start
        ranges.append(Range(index, start, stop))
        if stop == cost.tokens:
            return ranges, ends, idle
        free[index] = ends
        if is_last_of_worker:
            del free[index]
        position = start = stop
    return None
