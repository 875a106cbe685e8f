"""What every prefill policy is: a pure function of a snapshot and a request."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from router.policy.chunk_index import Overlap
from router.policy.ring import Ring


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRequest:
    key: int
    """64-bit hash of its session."""
    tokens: int
    """Positions to have KV of, cached or not."""
    chunks: Sequence[int] = ()
    """Hashes of its full 64-token chunks (`rpc.chunk_hashes`); those of what follows the prompt may be
    missing."""
    arrival: int = 0
    """How many came before it."""


@dataclass(frozen=True, slots=True)
class PrefillSnapshot:
    """The prefill workers at the moment of one choice. Arrays are indexed by row; workers that must not be
    chosen wait infinitely long, and have nothing cached. `PrefillLoads` makes it."""

    ring: Ring
    """Of all workers that may be chosen, were they not avoided."""
    rows: np.ndarray
    """int64: those that may be chosen, never none, ordered by their workers' names."""
    wait: np.ndarray
    """float64, seconds: the uncached tokens that will be computed before the request's, at measured speed."""
    speed: np.ndarray
    """float64, tokens/s."""
    cached: Overlap
    """Of the request's prefix, what the prefix caches are believed to have."""

    def seconds(self, request: PrefillRequest, row: int) -> float:
        """The estimated time until this worker has sampled the request's first token."""
        return float(self.wait[row] + (request.tokens - self.cached.of(row)) / self.speed[row])


PrefillPolicy = Callable[[PrefillSnapshot, PrefillRequest], int]
"""Returns the row of the worker to ask."""
