"""When sessions start: pure functions of a specification and a seed.

Every client process computes the whole schedule and takes its share of it. A closed loop has no schedule: a
user starts its next session when the last one ended.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Literal

import msgspec
import numpy as np

ArrivalKind = Literal["poisson", "constant", "gamma", "ramp"]


class Arrivals(msgspec.Struct, frozen=True):
    """An open loop of `rate` sessions a second.

    `gamma` draws gaps with the shape `burstiness`, as vLLM's `--burstiness`: 1 is Poisson, less is burstier,
    more is smoother. `ramp` is a Poisson process. Its rate changes evenly from `rate` to `ramp_to` within
    `ramp_seconds` and stays there.
    """

    kind: ArrivalKind
    rate: float
    burstiness: float = 1.0
    ramp_to: float = 0.0
    ramp_seconds: float = 0.0

    def times(self, seed: int) -> Iterator[float]:
        """Seconds since the start of the run, ascending, without end."""
        if self.kind == "constant":
            yield from (k / self.rate for k in itertools.count())
        now = 0.0
        for gap in _unit_gaps(seed, self.burstiness if self.kind == "gamma" else 1.0):
            now += gap
            yield self._ramped(now) if self.kind == "ramp" else now / self.rate

    def _ramped(self, expected: float) -> float:
        """The time by which `expected` arrivals are due: the inverse of the integrated rate."""
        slope = (self.ramp_to - self.rate) / self.ramp_seconds
        within = (self.rate + self.ramp_to) / 2 * self.ramp_seconds
        if expected >= within:
            return self.ramp_seconds + (expected - within) / self.ramp_to
        if slope == 0:
            return expected / self.rate
        return (math.sqrt(self.rate**2 + 2 * slope * expected) - self.rate) / slope

    def __str__(self) -> str:
        match self.kind:
            case "gamma":
                return f"gamma {self.rate:g}/s, burstiness {self.burstiness:g}"
            case "ramp":
                return f"ramp {self.rate:g} → {self.ramp_to:g}/s in {self.ramp_seconds:g} s"
        return f"{self.kind} {self.rate:g}/s"


def _unit_gaps(seed: int, shape: float) -> Iterator[float]:
    """Gaps with mean 1."""
    rng = np.random.default_rng([seed, 1])
    while True:
        yield from rng.gamma(shape, 1.0 / shape, 1024).tolist()
