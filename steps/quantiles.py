"""The one definition of a quantile, for benches, simulations and tests."""

from collections.abc import Sequence

import numpy as np


def percentile(
    values: Sequence[float] | np.ndarray, q: float, weights: Sequence[float] | None = None
) -> float:
    """The q-quantile (0…1) by nearest rank. The p99 of a short series is its maximum. `weights`: how often
    each value occurs; None: once."""
    return float(percentiles(values, [q], weights)[0])


def percentiles(
    values: Sequence[float] | np.ndarray,
    qs: Sequence[float] | np.ndarray,
    weights: Sequence[float] | None = None,
) -> np.ndarray:
    """The `percentile` of each q. Sorts the values once. float64, shape [qs]."""
    assert len(values), "no values"
    return np.quantile(values, qs, weights=weights, method="inverted_cdf")  # noqa: TID251
