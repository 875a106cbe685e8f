"""Computes the need and the size of one pool. Pure: takes loads and times, returns a number.

Two separate questions:

- *How many workers does the load need?* `PrefillDemand` and `DecodeDemand` answer with a fraction of workers.
  Prefill: arriving tokens divided by the speed of a worker, plus queued tokens divided by the time that the
  TTFT target leaves for them. Decode: KV blocks in use, and how much load lengthens steps, relative to the
  TTIT target. Separate signals for each pool are as in DistServe and Dynamo's planner.
- *Does the pool follow?* `Scaler` lets it grow soon and shrink late, by bounded steps. Between both
  thresholds the size stays. The scheme is that of Kubernetes' HorizontalPodAutoscaler: tolerance, windows of
  recommendations, step policies.

All times are seconds of `time.monotonic()`.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

ARRIVAL_WINDOW = 15.0  # seconds over which arrivals are averaged: longer than a burst, shorter than a trend
QUEUE_WINDOW = 5.0  # seconds over which the queue is averaged
PREFILL_BUSY = (
    0.75  # target share of time in which a prefill worker computes; near 1 queues grow without bound
)
QUEUE_SHARE = 0.5  # share of the TTFT target that a prompt may queue; computing it needs the rest
KV_FULL = 0.8  # target share of a decode worker's blocks in use; running requests grow into the rest
TTIT_SHARE = 0.9  # share of the TTIT target that a step may take

GROW_BEYOND = 1.1  # the pool grows if the need exceeds this × its size
SHRINK_BELOW = 0.8  # the pool shrinks if the need is at most this × (its size - 1)
GROW_AFTER = 3.0  # seconds for which the need must last before the pool grows, or gives a worker away
SHRINK_EVERY = 10.0  # seconds between two removals


@dataclass(frozen=True, slots=True)
class PrefillPoolLoad:
    """A prefill pool at one moment.

    Attributes:
        done: prompt tokens computed since the start, also by workers that have left.
        waiting: prompt tokens in workers and routers that are not computed yet.
        queued: the part of `waiting` whose requests have not started.
        speed: tokens per second of one worker while it computes; 0 if not measured yet.
    """

    done: float
    waiting: float
    queued: float
    speed: float


@dataclass(frozen=True, slots=True)
class DecodePoolLoad:
    """A decode pool at one moment.

    Attributes:
        kv_used: share of blocks in use, 0 to 1, for each worker.
        steps: seconds of a step, for each worker that runs requests.
        fastest: seconds of the fastest step that a worker measured, which more workers cannot shorten.
            0: not known.
    """

    kv_used: tuple[float, ...]
    steps: tuple[float, ...]
    fastest: float


@dataclass(frozen=True, slots=True)
class Needed:
    """How many workers the load needs, as a fraction: 1.3 is more than one worker. `why` is for people."""

    workers: float
    why: str


class PrefillDemand:
    """Computes the need of a prefill pool from its recent loads. `ttft_target` is in seconds."""

    def __init__(self, ttft_target: float) -> None:
        self._clear_within = QUEUE_SHARE * ttft_target
        self._seen: deque[tuple[float, PrefillPoolLoad]] = deque()

    def needed(self, now: float, load: PrefillPoolLoad) -> Needed | None:
        """The number of workers needed; None if there is load and no measured speed."""
        self._seen.append((now, load))
        while now - self._seen[0][0] > ARRIVAL_WINDOW:
            self._seen.popleft()
        then, first = self._seen[0]
        arrived = max(0.0, load.done + load.waiting - first.done - first.waiting)
        arriving = arrived / max(now - then, QUEUE_WINDOW)
        lately = [each.queued for at, each in self._seen if now - at <= QUEUE_WINDOW]
        queued = min(sum(lately) / len(lately), load.queued)  # a queue that is gone by now was only a burst
        if not load.speed:
            return None if arrived or load.waiting else Needed(0.0, "idle")
        workers = arriving / (PREFILL_BUSY * load.speed) + queued / (self._clear_within * load.speed)
        return Needed(
            workers,
            f"{arriving:.0f} tokens/s arrive, {queued:.0f} are queued, a worker computes {load.speed:.0f}/s",
        )


class DecodeDemand:
    """Computes the need of a decode pool. `ttit_target` is in seconds."""

    def __init__(self, ttit_target: float) -> None:
        self._target = TTIT_SHARE * ttit_target

    def needed(self, load: DecodePoolLoad) -> Needed:
        kv = sum(load.kv_used) / KV_FULL
        longest = max(load.steps, default=0.0)
        share = sum(load.kv_used) / max(1, len(load.kv_used))
        why = f"{share:.0%} of the KV blocks in use, steps up to {1000 * longest:.1f} ms"
        if not load.fastest:
            return Needed(kv, why)
        room = self._target - load.fastest  # seconds that load may add to a step
        if room > 0:
            return Needed(max(kv, sum(step - load.fastest for step in load.steps) / room), why)
        return Needed(
            kv,
            f"{why}; more workers cannot keep steps at {1000 * self._target:.1f} ms, {TTIT_SHARE:.0%} of "
            f"--ttit-target: the fastest step so far took {1000 * load.fastest:.1f} ms",
        )


@dataclass
class Scaler:
    """Decides the size of one pool between `least` and `most`, with hysteresis."""

    least: int
    most: int
    shrink_after: float = 60.0  # seconds for which the need must be low before the pool shrinks
    _needed: deque[tuple[float, float]] = field(default_factory=deque)
    _shrunk: float = -math.inf

    def decide(self, now: float, needed: float | None, size: int, *, starting: bool) -> int:
        """The new size of a pool of `size` workers, some of which may still be starting.

        `starting`: some of them are. They may meet the need soon, so the pool does not grow. It may shrink,
        because a worker for which no machine has room would keep `starting` true forever.
        """
        if size < self.least or size > self.most:
            return min(max(size, self.least), self.most)
        if needed is None:
            return size
        self._needed.append((now, needed))
        while now - self._needed[0][0] > self.shrink_after:
            self._needed.popleft()
        if not starting and (sustained := self._sustained(now)) > GROW_BEYOND * size:
            return min(math.ceil(sustained), 2 * size, self.most)  # at most double the size at a time
        quiet = now - self._needed[0][0] >= self.shrink_after - GROW_AFTER  # the whole window has samples
        peak = max(each for _, each in self._needed)
        if quiet and now - self._shrunk >= SHRINK_EVERY and peak <= SHRINK_BELOW * (size - 1):
            self._shrunk = now
            return max(size - 1, self.least)  # one at a time, because the others take over its load
        return size

    def spares_one(self, now: float, size: int) -> bool:
        """Whether the pool may give a worker away: its need was low for `GROW_AFTER`."""
        if size <= self.least or not self._needed or now - self._needed[0][0] < GROW_AFTER:
            return False
        peak = max(each for at, each in self._needed if now - at <= GROW_AFTER)
        return peak <= SHRINK_BELOW * (size - 1)

    def _sustained(self, now: float) -> float:
        """The lowest need of the last `GROW_AFTER` seconds; 0 with a shorter history."""
        if now - self._needed[0][0] < GROW_AFTER:
            return 0.0
        return min(each for at, each in self._needed if now - at <= GROW_AFTER)
