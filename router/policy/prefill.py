"""The interface of a prefill policy: a pure function of a snapshot and a request."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from baton.router.policy.chunk_index import Overlap
from baton.router.policy.ring import Ring

COMPARED = 3
"""Workers to compare in detail. With 8, routers with the same old reports choose the same worker: p99 of TTFT
of 4 routers without decode workers rises by 17 % (simulated). One router gains 2 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRequest:
    key: int
    """64-bit hash of the session."""
    tokens: int
    """Positions that need KV, including cached ones."""
    chunks: Sequence[int] = ()
    """Hints of the prompt's full 64-token chunks (`content`). Output tokens may have none."""
    arrival: int = 0
    """Number of requests before it."""


@dataclass(frozen=True, slots=True)
class PrefillSnapshot:
    """The prefill workers at the time of one choice, made by `PrefillLoads`. Arrays are indexed by row.

    A worker that must not be chosen has an infinite `wait` and nothing cached.
    """

    ring: Ring
    """All workers that take work, including avoided ones."""
    rows: np.ndarray
    """int64[n], n ≥ 1: the rows that may be chosen, in order of their workers' names."""
    wait: np.ndarray
    """float64, seconds: time to compute the uncached tokens that are ahead, at measured speed."""
    speed: np.ndarray
    """float64, tokens/s."""
    cached: Overlap
    """The cached beginning of the request at each worker, as far as known."""
    load: Callable[[int], float]
    """Seconds in which the worker of a row copies to its device what it has cached below."""

    def tokens_ahead(self, row: int) -> float:
        """Estimated prompt tokens that this worker computes before the request."""
        return float(self.wait[row] * self.speed[row])

    def seconds(self, request: PrefillRequest, row: int) -> float:
        """Estimated time until this worker samples the request's first token."""
        computing = (request.tokens - self.cached.of(row)) / self.speed[row]
        return float(self.wait[row] + self.load(row) + computing)

    def compared(self, chosen: int, suits: Callable[[int], bool], rng: random.Random) -> list[int]:
        """The rows to compare in detail: `chosen`, and others that suit; of many, some at random."""
        others = [row for row in self.rows.tolist() if row != chosen and suits(row)]
        return [chosen, *(others if len(others) < COMPARED else rng.sample(others, COMPARED - 1))]


PrefillPolicy = Callable[[PrefillSnapshot, PrefillRequest], int]
"""Returns the row of the chosen worker."""
