"""Computes the need and the size of one pool. Pure: takes samples and times, returns a number.

Two separate questions:

- *How many workers does the load need?* `PrefillDemand` and `DecodeDemand` answer with a fraction of workers.
  Prefill: arriving tokens divided by the speed of a worker, plus queued tokens divided by the time that the
  TTFT target leaves for them. Decode: KV blocks in use, and requests, relative to those with which a step
  keeps the ITL target. Workers report a model of their steps, which says both speeds. Separate signals for
  each pool are as in DistServe and Dynamo's planner.
- *Does the pool follow?* `Scaler` lets it grow soon and shrink late, by bounded steps. Between both
  thresholds the size stays. The scheme is that of Kubernetes' HorizontalPodAutoscaler: tolerance, windows of
  recommendations, step policies.

All times are seconds of `time.monotonic()`.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.cluster.gpu_pools import PREFILL_BUSY
from baton.rpc import worker_pb2 as pb
from baton.steps.step_model import StepModel

ARRIVAL_WINDOW = 15.0  # seconds over which arrivals are averaged: longer than a burst, shorter than a trend
QUEUE_WINDOW = 5.0  # seconds over which the queue is averaged
QUEUE_SHARE = 0.5  # share of the TTFT target that a prompt may queue; computing it needs the rest
KV_FULL = 0.8  # target share of a decode worker's blocks in use; running requests grow into the rest
ITL_SHARE = 0.9  # share of the ITL target that a step may take

GROW_BEYOND = 1.1  # the pool grows if the need exceeds this × its size
SHRINK_BELOW = 0.8  # the pool shrinks if the need is at most this × (its size - 1)
GROW_AFTER = 3.0  # seconds for which the need must last before the pool grows, or gives a worker away
SHRINK_EVERY = 10.0  # seconds between two removals


@dataclass(frozen=True)
class Sample:
    """The answer of one worker to a poll.

    Attributes:
        model: what its steps cost. None: not known.
        done: prompt tokens that it prefilled since the last poll.
        refused: reservations that it refused for want of room since the last poll.
        silent: it did not answer; `status` is its last one.
    """

    status: pb.WorkerStatus
    model: StepModel | None
    done: int
    refused: int
    silent: bool = False


@dataclass(frozen=True, slots=True)
class Needed:
    """How many workers the load needs, as a fraction: 1.3 is more than one worker. `why` is for people."""

    workers: float
    why: str


class PrefillDemand:
    """Computes the need of a prefill pool from its recent loads. `ttft_target` is in seconds."""

    def __init__(self, ttft_target: float) -> None:
        self._clear_within = QUEUE_SHARE * ttft_target
        self._done = 0  # prompt tokens computed since the start, also by workers that have left
        self._arrivals: deque[tuple[float, float, float]] = deque()  # (time, tokens that came, tokens queued)

    def needed(self, now: float, samples: Sequence[Sample], held_tokens: int = 0) -> Needed | None:
        """The number of workers needed; None if there is load and no speed is known.

        `held_tokens`: of prompts in routers. They and those of requests that have not started are queued.
        """
        statuses = [sample.status for sample in samples]
        waiting = held_tokens + sum(status.tokens_waiting for status in statuses)
        queued = held_tokens + sum(
            s.tokens_waiting * s.requests_waiting / (s.requests_waiting + s.requests_running)
            for s in statuses
            if s.requests_waiting
        )
        speeds = [
            sample.model.prompt_speed(sample.status.prefill_position)
            for sample in samples
            if sample.model is not None
        ]
        self._done += sum(sample.done for sample in samples)
        self._arrivals.append((now, self._done + waiting, queued))
        while now - self._arrivals[0][0] > ARRIVAL_WINDOW:
            self._arrivals.popleft()
        then, came, _ = self._arrivals[0]
        arrived = max(0.0, self._done + waiting - came)
        arriving = arrived / max(now - then, QUEUE_WINDOW)
        lately = [tokens for at, _, tokens in self._arrivals if now - at <= QUEUE_WINDOW]
        queued = min(sum(lately) / len(lately), queued)  # a queue that is gone by now was only a burst
        if not speeds:
            return None if arrived or waiting else Needed(0.0, "idle")
        speed = sum(speeds) / len(speeds)  # of one worker while it computes
        workers = arriving / (PREFILL_BUSY * speed) + queued / (self._clear_within * speed)
        return Needed(
            workers,
            f"{arriving:.0f} tokens/s arrive, {queued:.0f} are queued, a worker computes {speed:.0f}/s",
        )


class DecodeDemand:
    """Computes the need of a decode pool. `itl_target` is in seconds."""

    def __init__(self, itl_target: float) -> None:
        self._target = ITL_SHARE * itl_target

    def needed(self, samples: Sequence[Sample]) -> Needed:
        """A worker that refused a reservation counts as full, even with free blocks: they do not suffice."""
        used = sum(
            1.0 if sample.refused else 1 - sample.status.blocks_free / max(1, sample.status.blocks_total)
            for sample in samples
        )
        loads = [
            (status.requests_decoding, status.decode_context, sample.model)
            for sample in samples
            if sample.model is not None and (status := sample.status).requests_decoding
        ]
        longest = max((model.decode(rows, context) for rows, context, model in loads), default=0.0)
        fitting = [model.fitting_rows(context / rows, self._target) for rows, context, model in loads]
        workers = sum(rows / most for (rows, *_), most in zip(loads, fitting, strict=True) if most)
        share = used / max(1, len(samples))
        why = f"{share:.0%} of the KV blocks in use, steps up to {1000 * longest:.1f} ms"
        if 0 in fitting:
            why += (
                f"; more workers cannot keep steps at {1000 * self._target:.1f} ms, {ITL_SHARE:.0%} of "
                "--itl-target: a step with one request takes longer"
            )
        return Needed(max(used / KV_FULL, workers), why)


@dataclass
class Scaler:
    """Decides the size of one pool between `least` and `most`, with hysteresis."""

    least: int
    most: int
    shrink_after: float = 60.0  # seconds for which the need must be low before the pool shrinks
    _needs: deque[tuple[float, float]] = field(default_factory=deque)
    _shrunk: float = -math.inf

    def decide(self, now: float, need: float | None, size: int, *, starting: bool) -> int:
        """The new size of a pool of `size` workers, some of which may still be starting. `need` None: it is
        not known.

        `starting`: some of them are. They may meet the need soon, so the pool does not grow. It may shrink,
        because a worker for which no machine has room would keep `starting` true forever.
        """
        if size < self.least or size > self.most:
            return min(max(size, self.least), self.most)
        if need is None:
            self._needs.clear()  # a need before it says nothing of the need after it
            return size
        self._needs.append((now, need))
        while now - self._needs[0][0] > self.shrink_after:
            self._needs.popleft()
        if not starting and (sustained := self._sustained(now)) > GROW_BEYOND * size:
            return min(math.ceil(sustained), 2 * size, self.most)  # at most double the size at a time
        quiet = now - self._needs[0][0] >= self.shrink_after - GROW_AFTER  # the whole window has samples
        peak = max(each for _, each in self._needs)
        if quiet and now - self._shrunk >= SHRINK_EVERY and peak <= SHRINK_BELOW * (size - 1):
            self._shrunk = now
            return max(size - 1, self.least)  # one at a time, because the others take over its load
        return size

    def spares_one(self, now: float, size: int) -> bool:
        """Whether the pool may give a worker away: its need was low for `GROW_AFTER`."""
        if size <= self.least or not self._needs or now - self._needs[0][0] < GROW_AFTER:
            return False
        peak = max(each for at, each in self._needs if now - at <= GROW_AFTER)
        return peak <= SHRINK_BELOW * (size - 1)

    def _sustained(self, now: float) -> float:
        """The lowest need of the last `GROW_AFTER` seconds; 0 with a shorter history."""
        if now - self._needs[0][0] < GROW_AFTER:
            return 0.0
        return min(each for at, each in self._needs if now - at <= GROW_AFTER)
