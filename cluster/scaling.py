"""How many workers a pool should have. Pure: loads and times come in, a number goes out.

Two questions, kept apart:

- *How many does the load need?* A fraction of workers, by the pool's own signal. Prefill: tokens that arrive,
  against what one worker computes, and the tokens that queue, against the time in which TTFT allows them to
  be gone. Decode: KV blocks in use, and how far steps are stretched by load, against the TTIT target.
- *Shall the pool follow?* `Scaler` lets it grow soon and shrink late, by bounded steps, with a band between
  the two in which nothing happens. The scheme is that of Kubernetes' HorizontalPodAutoscaler (tolerance,
  windows of recommendations, step policies), the division by signals that of DistServe and Dynamo's planner.

All times are seconds of `time.monotonic()`.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

ARRIVAL_WINDOW = 15.0  # seconds over which arrivals are averaged: shorter than a trend, longer than a burst
QUEUE_WINDOW = 5.0  # the same for the queue
PREFILL_BUSY = (
    0.75  # share of its time that a prefill worker should compute; queues grow without bound near 1
)
QUEUE_SHARE = 0.5  # of the TTFT target that may pass in the queue; the prompt itself needs the rest
KV_FULL = 0.8  # share of a decode worker's blocks in use; the rest is for running requests to grow into
TTIT_SHARE = 0.9  # of the TTIT target that steps may take

GROW_BEYOND = 1.1  # × the pool: more than that is needed before it grows
SHRINK_BELOW = 0.8  # × the pool less one worker: no more than that is needed before it shrinks
GROW_AFTER = 3.0  # seconds for which it must have been needed
SHRINK_EVERY = 10.0  # seconds between two steps down


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """A prefill pool at one moment.

    Attributes:
        done: prompt tokens computed since the start, by all workers there ever were.
        waiting: prompt tokens accepted and not yet computed, by workers or routers.
        queued: those of them whose request has not begun.
        speed: tokens per second of one worker while it computes; 0 until known.
    """

    done: float
    waiting: float
    queued: float
    speed: float


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """A decode pool at one moment.

    Attributes:
        kv_used: share of its blocks that each worker has in use.
        steps: seconds of a step, of each worker that runs requests.
    """

    kv_used: tuple[float, ...]
    steps: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Needed:
    """`workers` is a fraction: 1.3 is more than one worker can do. `why` is for people."""

    workers: float
    why: str


class PrefillDemand:
    """Remembers what arrived lately."""

    def __init__(self, ttft_target: float) -> None:
        self._clear_within = QUEUE_SHARE * ttft_target
        self._seen: deque[tuple[float, PrefillLoad]] = deque()

    def needed(self, now: float, load: PrefillLoad) -> Needed | None:
        """None: not known, for want of a measured speed."""
        self._seen.append((now, load))
        while now - self._seen[0][0] > ARRIVAL_WINDOW:
            self._seen.popleft()
        then, first = self._seen[0]
        arrived = max(0.0, load.done + load.waiting - first.done - first.waiting)
        arriving = arrived / max(now - then, QUEUE_WINDOW)
        lately = [each.queued for at, each in self._seen if now - at <= QUEUE_WINDOW]
        queued = min(sum(lately) / len(lately), load.queued)  # what is gone again was a burst, no need
        if not load.speed:
            return None if arrived or load.waiting else Needed(0.0, "idle")
        workers = arriving / (PREFILL_BUSY * load.speed) + queued / (self._clear_within * load.speed)
        return Needed(
            workers,
            f"{arriving:.0f} tokens/s arrive, {queued:.0f} queue, a worker computes {load.speed:.0f}/s",
        )


class DecodeDemand:
    """Remembers the shortest step: what a step takes without load, which no number of workers shortens."""

    def __init__(self, ttit_target: float) -> None:
        self._target = TTIT_SHARE * ttit_target
        self._shortest = math.inf

    def needed(self, load: DecodeLoad) -> Needed:
        kv = sum(load.kv_used) / KV_FULL
        self._shortest = min((self._shortest, *load.steps))
        room = self._target - self._shortest  # for what load adds to a step
        stretched = sum(step - self._shortest for step in load.steps) / room if room > 0 else 0.0
        longest = 1000 * max(load.steps, default=0.0)
        share = sum(load.kv_used) / max(1, len(load.kv_used))
        return Needed(
            max(kv, stretched), f"{share:.0%} of the KV blocks in use, steps up to {longest:.1f} ms"
        )


@dataclass
class Scaler:
    """Follows what is needed, within [least, most], with hysteresis. One for each pool."""

    least: int
    most: int
    shrink_after: float = 60.0  # seconds for which a worker must have been too many
    _needed: deque[tuple[float, float]] = field(default_factory=deque)
    _shrunk: float = -math.inf

    def decide(self, now: float, needed: float | None, size: int, *, starting: bool) -> int:
        """The new size of a pool that has (or is about to have) `size` workers.

        `starting`: some of them are on their way, so that what is needed may be met already: it does not
        grow. It may shrink: a worker that finds no place would otherwise be waited for without end.
        """
        if size < self.least or size > self.most:
            return min(max(size, self.least), self.most)
        if needed is None:
            return size
        self._needed.append((now, needed))
        while now - self._needed[0][0] > self.shrink_after:
            self._needed.popleft()
        if not starting and (sustained := self._least_of_late(now)) > GROW_BEYOND * size:
            return min(math.ceil(sustained), 2 * size, self.most)  # at most twice as many at a time
        quiet = now - self._needed[0][0] >= self.shrink_after - GROW_AFTER  # all of the window is known
        peak = max(each for _, each in self._needed)
        if quiet and now - self._shrunk >= SHRINK_EVERY and peak <= SHRINK_BELOW * (size - 1):
            self._shrunk = now
            return max(size - 1, self.least)  # one at a time: the others take over its load
        return size

    def _least_of_late(self, now: float) -> float:
        if now - self._needed[0][0] < GROW_AFTER:
            return 0.0
        return min(each for at, each in self._needed if now - at <= GROW_AFTER)
