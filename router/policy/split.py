"""Splits a prompt over several workers, which compute ranges of it at the same time.

A worker computes a range one layer behind the worker of the range before, whose KV it needs. So ranges that
take equal times end one layer after each other:

    A  ├── range 0 ──┤├── range 2 ──┤
    B    ├── range 1 ──┤├── range 3 ──┤      the first token comes here

A later token costs more, since it attends to more positions. At the same speed B gets fewer tokens than A. A
range is at most one step of its worker, so long prompts go in turns. The times follow from measured speeds,
so a plan has no constants of one machine. Pure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from baton.content import CHUNK_TOKENS

LEAST_GAIN = 0.1
"""A prompt is split if the first token should come earlier by this share: the estimates are not exact, and a
lost worker costs all of the prompt."""
MOST_WORKERS = 4
"""Workers of a plan. Each receives the KV of all others."""
HOP_SECONDS = 0.004
"""From the first KV of a layer at one worker to its use at the next: two looks of the sender at its
device."""
_HALVINGS = 12


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


@dataclass(frozen=True, slots=True)
class SplitRange:
    """Positions [start, stop), computed by the worker of this index."""

    worker: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Split:
    """A plan for a prompt.

    Attributes:
        seconds: until the first token, as expected.
        unsplit: the same without a split.
        idle: how long its workers compute nothing before their last ranges end, all together.
    """

    ranges: tuple[SplitRange, ...]
    seconds: float
    unsplit: float
    idle: float = 0.0

    def attributes(self) -> dict[str, str | float]:
        """The plan and its reasons, for a trace."""
        ranges = " ".join(f"{found.worker}:{found.start}-{found.stop}" for found in self.ranges)
        costs = {"baton.cost_s.split": self.seconds, "baton.cost_s.unsplit": self.unsplit}
        return {"baton.place": "split", "baton.ranges": ranges, **costs}


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


def may_gain(tokens: int, worker: SplitWorker) -> bool:
    """Whether a prompt with so many tokens to compute may be worth a split, if all workers are like this one.
    The whole decision takes a hundred times as long, and most prompts are short."""
    alone = tokens / worker.speed
    return alone / MOST_WORKERS + worker.floor + HOP_SECONDS < (1 - LEAST_GAIN) * alone


def split(
    cost: PromptCost, workers: Sequence[SplitWorker], decode: SplitWorker | None = None, busy: float = 0.0
) -> Split | None:
    """Returns the plan with the earliest first token. None: one worker is about as good.

    Args:
        workers: in the order in which they compute. The first one has `cost.cached`.
        decode: the worker that decodes, if it may have the last range. Its index is that after `workers`.
        busy: the share of workers that are busy. Where other prompts wait, time in which workers idle between
            their ranges counts as much as time until the first token.
    """
    all_workers = [*workers, *([decode] if decode is not None else ())]
    unsplit = workers[0].wait + cost.work(cost.cached, cost.tokens) / workers[0].speed
    best, least = None, (1 - LEAST_GAIN) * unsplit
    for count in range(2, MOST_WORKERS + 1):
        ways = [[*range(count)]] if count <= len(workers) else []
        if decode is not None and count - 1 <= len(workers):
            ways.append([*range(count - 1), len(workers)])
        for chosen in ways:
            found = _plan(cost, all_workers, chosen, unsplit)
            if found is not None and (harm := found.seconds + busy * found.idle) < least:
                best, least = found, harm
    return best


def _plan(
    cost: PromptCost, workers: Sequence[SplitWorker], chosen: list[int], unsplit: float
) -> Split | None:
    """The plan with the least time for a range, in as few turns as the steps of the workers allow."""
    steps = sum(workers[i].step for i in chosen)
    fewest = max(1, math.ceil((cost.tokens - cost.cached) / steps))
    for turns in (fewest, fewest + 1):
        found, low, high = _fill(cost, workers, chosen, turns, unsplit), 0.0, unsplit
        for _ in range(_HALVINGS if found else 0):
            middle = (low + high) / 2
            tried = _fill(cost, workers, chosen, turns, middle)
            low, high, found = (middle, high, found) if tried is None else (low, middle, tried)
        if found is not None:
            ranges, took, idle = found
            shared = len({part.worker for part in ranges}) > 1
            return Split(tuple(ranges), took, unsplit, idle) if shared else None
    return None


def _fill(
    cost: PromptCost, workers: Sequence[SplitWorker], chosen: list[int], turns: int, seconds: float
) -> tuple[list[SplitRange], float, float] | None:
    """Gives each worker in turn what it computes in `seconds`. None: that is not the whole prompt.

    Also returns when the last range ends, and how long the workers do not compute between and in their
    ranges."""
    free = {i: workers[i].wait for i in chosen}  # when a worker can begin its next range
    lag = seconds / cost.layers + HOP_SECONDS
    position, start, began, ended, idle = cost.cached, 0, -lag, 0.0, 0.0
    ranges = list[SplitRange]()
    for index in chosen * turns:
        worker = workers[index]
        begins = max(free[index], began + lag)
        # The first range of a worker that is busy for a while is shorter, so that all end together.
        late = begins - began - lag if ranges and free[index] == worker.wait else 0.0
        time = max(0.0, seconds - late - worker.floor)
        most = position + int(min(worker.step, time * worker.link / (len(chosen) - 1)))
        stop = min(cost.reach(position, time * worker.speed), most)
        stop = cost.tokens if stop >= cost.tokens else stop - stop % CHUNK_TOKENS
        if stop <= position:
            if not ranges:
                return None  # the next worker has nothing cached
            continue
        work = cost.work(position, stop) / worker.speed
        began, ended = begins, max(begins + worker.floor + work, ended + lag if ranges else 0.0)
        idle += ended - (begins if free[index] == worker.wait else free[index]) - work
        free[index] = ended
        ranges.append(SplitRange(index, start, stop))
        if stop == cost.tokens:
            return ranges, ended, idle
        position = start = stop
    return None
