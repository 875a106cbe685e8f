"""The one definition of a quantile, for benches, simulations and tests."""

from collections.abc import Sequence

import numpy as np


def percentile(
    values: Sequence[float] | np.ndarray, q: float, weights: Sequence[float] | None = None
) -> float:
    """The q-quantile (0…1) by nearest rank. The p99 of a short series is its maximum. `weights`: how often
    each value occurs; None: once."""
    assert len(values), "no values"
    return float(np.quantile(values, q, weights=weights, method="inverted_cdf"))
