"""Splits a prompt over several workers, which compute ranges of it at the same time.

A worker computes a range one layer behind the worker of the range before, whose KV it needs. The next range
goes to the worker that is free first, until all workers end at about the same time:

    A  ├── range 0 ──┤├── range 2 ──┤├ 5 ┤
    B  (other work)    ├── range 1 ──┤├─ 4 ──┤     the first token comes from the last range, 5
    C  (other work)             ├── range 3 ──┤

So workers hardly wait for each other, also if some of them are busy at first. A range has one step, or
several if no other worker is free. A later token costs more, since it attends to more positions. The times
follow from measured speeds, so a plan has no constants of one machine.

Prompts that come before a worker has none left wait for what it computes of this one, and for the time in
which it idles. Their delay counts like that of this prompt, as in `placement` (`behind`). One worker would
delay those that come there, so workers with fewer prompts are a gain, and so is less time of each.

What other routers have sent a worker since its last report is not known, so its wait is not the expected one.
A split ends with the last of its workers:

    several workers = end + latest + harm
    latest          = k · √V
    variance        = unseen · s² · min(m, b² / 4 + b / 3)

    end        of the last range, if each worker begins as expected: the first token
    harm       by which prompts that come later are delayed more than with one worker
    k          the expected largest of as many standard normal draws as there are workers
    V          the mean variance of their waits
    unseen     share of the prompts that other routers send
    s          seconds of a prompt
    m          prompts that came since the last report, and the variance of that number (Poisson)
    b          of a worker, `behind` of its pace. A queue forgets: no wait varies more than that of an M/D/1
               queue

Pure.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from baton.kv_names import CHUNK_TOKENS
from baton.router.policy.pace import delayed
from baton.router.policy.plan import Plan, Range
from baton.rpc import worker_pb2 as pb

LATEST = (0.0, 0.0, 0.564, 0.846, 1.029)
"""k, by number of workers."""
MOST_WORKERS = len(LATEST) - 1
"""Workers of a plan. Each receives the KV of all others."""
HOP_SECONDS = 0.004
"""From the first KV of a layer at one worker to its use at the next: two looks of the sender at its
device."""
_MOST_FILLS = 10
"""Tries of a search. Three are usual. In one of 400 searches none of ten succeeds (simulated)."""
_OF_REST = 0.7
"""Of the time in which all workers compute what is left. With 1, two tries are usual, but two workers finish
2,000 tokens 5 % later: the last range may end later than the search allows."""


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
    link_wait: float = 0.0
    """Seconds until that begins to come, behind KV that is under way."""
    behind: float = 0.0
    """As of its pace."""
    variance: float = 0.0
    """Of `wait`, in s²."""
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


def wait_variance(unseen: float, seconds: float, came: float, behind: float) -> float:
    """Of the wait at a worker, in s². The arguments are `unseen`, s, m and b of the formula."""
    return unseen * seconds**2 * min(came, behind**2 / 4 + behind / 3)


def may_gain(tokens: int, worker: SplitWorker) -> bool:
    """Whether a prompt with so many tokens to compute may be worth a split, if all workers are like this one.
    The whole decision takes a hundred times as long, and most prompts are short."""
    alone = tokens / worker.speed
    return alone / MOST_WORKERS + worker.floor + HOP_SECONDS < alone


def split(
    cost: PromptCost,
    workers: Iterable[tuple[int, SplitWorker]],
    last: tuple[int, SplitWorker] | None = None,
    spared: float = 0.0,
) -> Plan | None:
    """Returns the plan with the earliest first token and the least harm. It names no decode worker. None: one
    worker is about as good.

    Its costs, in seconds: `split`, until the first token, as expected. `unsplit`, the same with one worker.
    `harm`, by which prompts that come later are delayed more than with one worker, all together.

    Args:
        workers: and their rows, in the order in which they are taken. The first one has `cost.cached`. No
            more are read than may take part.
        last: the worker that decodes, if it may have the last range.
        spared: how much less the best other plan costs than a handover by the first worker.
    """
    taken = list[tuple[int, SplitWorker]]()
    for each in workers:
        if not _shares(taken, each[1]):
            taken.append(each)
            if len(taken) == MOST_WORKERS:
                break
    first = taken[0][1]
    unsplit = first.wait + cost.work(cost.cached, cost.tokens) / first.speed
    best, least = None, unsplit - spared
    for count in range(MOST_WORKERS, 1, -1):
        before = best
        ways = [taken[:count]] if count <= len(taken) else []
        if last is not None and count - 1 <= len(taken) and not _shares(taken[: count - 1], last[1]):
            ways.append([*taken[: count - 1], last])
        for way in ways:
            plan = best_of(cost, way, last if way[-1] is last else None, unsplit)
            if plan is not None and plan.costs["split"] + plan.costs["harm"] < least:
                best, least = plan, plan.costs["split"] + plan.costs["harm"]
        if best is before is not None:
            break  # still fewer workers take longer still
    return best


def _shares(taken: Iterable[tuple[int, SplitWorker]], worker: SplitWorker) -> bool:
    """Whether a worker computes on what one of those that are taken computes on."""
    return any(not worker.computes_on.isdisjoint(each.computes_on) for _, each in taken)


def best_of(
    cost: PromptCost,
    chosen: list[tuple[int, SplitWorker]],
    last: tuple[int, SplitWorker] | None,
    unsplit: float,
) -> Plan | None:
    """The plan of these workers that ends first. `last`: the one that must have the last range; None: any.
    None: the plan would not end before one worker, `unsplit`.

    The search begins when they could have computed the prompt without waits for each other. While a part is
    left then, they get most of the time in which all of them compute that part, and at least a chunk more."""
    workers = [worker for _, worker in chosen]
    until, speed = _without_waits(cost, workers), sum(worker.speed for worker in workers)
    if cost.cached:
        until = max(until, workers[0].wait + workers[0].floor + CHUNK_TOKENS / workers[0].speed)
    for _ in range(_MOST_FILLS):
        if until >= unsplit:
            return None
        filled = fill(cost, workers, None if last is None else len(chosen) - 1, until)
        if not isinstance(filled, int):
            break
        until += max(_OF_REST * cost.work(filled, cost.tokens), CHUNK_TOKENS) / speed
    else:
        return None
    ranges, seconds, idle = filled
    if len({index for index, _, _ in ranges}) == 1:
        return None
    alone = unsplit - workers[0].wait
    busy = idle.copy()
    for index, start, stop in ranges:
        busy[index] += cost.work(max(start, cost.cached), stop) / workers[index].speed
    harm = -delayed(workers[0].behind, workers[0].wait, alone)
    for worker, its in zip(workers, busy, strict=True):
        harm += delayed(worker.behind, worker.wait, its) * its / alone
    rows = [row for row, _ in chosen]
    latest = LATEST[len(rows)] * math.sqrt(fmean(worker.variance for worker in workers))
    return Plan(
        "split",
        tuple(Range(rows[index], start, stop) for index, start, stop in ranges),
        cached=cost.cached,
        costs={"split": seconds + latest, "harm": harm, "unsplit": unsplit},
        waits=dict(zip(rows, idle, strict=True)),
    )


def _without_waits(cost: PromptCost, workers: Sequence[SplitWorker]) -> float:
    """Seconds until these workers have computed the prompt, if none waits for another one."""
    work, speed, until = cost.work(cost.cached, cost.tokens), 0.0, math.inf
    for begins, each in sorted((worker.wait + worker.floor, worker.speed) for worker in workers):
        if begins >= until:
            break
        work, speed = work + begins * each, speed + each
        until = work / speed
    return until


def fill(
    cost: PromptCost, workers: Sequence[SplitWorker], last: int | None, until: float
) -> tuple[list[tuple[int, int, int]], float, list[float]] | int:
    """Gives the next range to the worker that is free first, while it can compute a part of it before
    `until`. Workers are numbers here. The one with the number `last` must have the last range.

    Returns the position up to which that goes, if it is not the whole prompt. Else the ranges, when the last
    one ends, and how long each worker computes nothing once it has work."""
    free = [worker.wait for worker in workers]  # when each can begin its next range; infinite: it gets none
    idle, deferred = [0.0] * len(workers), math.inf
    began, ended, lag, position, start = -math.inf, 0.0, 0.0, cost.cached, 0
    ranges, index = list[tuple[int, int, int]](), 0
    own = [cost.cached, *(0 for _ in workers[1:])]  # tokens whose KV each has
    while True:
        # No other worker has anything cached, so the first one gets the first range.
        if ranges or not cost.cached:
            at = min(free)
            if at == math.inf:
                if last is None or math.isinf(deferred):
                    return position
                free[last], deferred = deferred, -math.inf  # the others have their last ranges
                continue
            index = free.index(at)
        worker = workers[index]
        begins = max(free[index], began + lag)
        seconds = max(0.0, max(until, ended + lag) - begins - worker.floor)
        lacks = position - own[index]
        comes = worker.link_wait + lacks / worker.link if lacks else 0.0
        stop = cost.reach(position, seconds * worker.speed if comes <= begins + seconds else 0.0)
        most = position + worker.step
        if stop < most and index == last and deferred == math.inf:
            deferred, free[index] = free[index], math.inf
            continue
        is_last_of_worker, stop = stop < most, min(stop, most)
        stop = cost.tokens if stop >= cost.tokens else stop - stop % CHUNK_TOKENS
        if stop <= position or (stop == cost.tokens and last not in (None, index)):
            if cost.cached and not ranges:
                return position
            free[index] = math.inf
            continue
        work = cost.work(position, stop) / worker.speed
        ends = max(begins + worker.floor + work, ended + lag, comes)
        own[index] += stop - position
        idle[index] += ends - work - (free[index] or begins)
        began, ended, lag = begins, ends, (worker.floor + work) / cost.layers + HOP_SECONDS
        if ranges and ranges[-1][0] == index:
            start = ranges.pop()[1]
        ranges.append((index, start, stop))
        if stop == cost.tokens:
            return ranges, ends, idle
        free[index] = math.inf if is_last_of_worker else ends
        position = start = stop
