"""Percentiles with confidence intervals, for samples that come in clusters.

The gaps of one request depend on each other, so a million gaps of 500 requests are not a million independent
samples. The interval is Woodruff's (JASA 1952). The clusters give a standard error for the share of samples
below the estimate, and the quantiles of the sample turn that share back into values. With one sample per
cluster it is the usual interval by order statistics.

Requests of one moment depend on each other, too: the machine may be slower for some seconds. So the error is
computed twice, with requests and with tenths of the run as clusters, and the larger one counts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from baton.bench.contract import Row, percentile

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}
_Z = 1.96  # 95 %
PARTS = 10  # of a run, in time


@dataclass(frozen=True, slots=True)
class Series:
    """Samples of one metric. Both arrays have shape [n]; `clusters` is the request of each sample."""

    values: np.ndarray
    clusters: np.ndarray

    @classmethod
    def of(cls, groups: list[list[float]]) -> Self:
        """One cluster for each group."""
        sizes = [len(g) for g in groups]
        values = np.fromiter((x for g in groups for x in g), dtype=np.float64, count=sum(sizes))
        return cls(values, np.repeat(np.arange(len(groups)), sizes))

    def rows(self, metric: str, goals: Mapping[str, float]) -> dict[str, Row]:
        """Rows in ms by quantile: p50, those of p90, p99 and p99.9 with a sample above it, and max, which has
        no interval. Empty without any sample. `goals`: upper bounds by name of the row."""
        if not (count := len(self.values)):
            return {}
        order = np.sort(self.values)
        # Without a sample above it, the maximum would stand for a quantile: the p99 of 50 is one sample.
        known = {name: q for name, q in QUANTILES.items() if q <= 0.5 or round(count * (1 - q), 6) >= 1}
        found = {name: self._estimate(order, q) for name, q in known.items()}
        found["max"] = float(order[-1]), None, None
        return {
            quantile: Row(
                f"{metric}.{quantile}", value, "ms", low=low, high=high,
                goal=goals.get(f"{metric}.{quantile}"),
            )
            for quantile, (value, low, high) in found.items()
        }  # fmt: skip

    def _estimate(self, order: np.ndarray, q: float) -> tuple[float, float | None, float | None]:
        """The quantile and its 95 % interval. The upper end is None if there are too few samples."""
        value = percentile(order, q)
        _, cluster = np.unique(self.clusters, return_inverse=True)
        n, k = len(order), int(cluster.max()) + 1
        if k < 2:
            return value, None, None
        below = self.values <= value
        half = _half(cluster, below, q)
        if k > PARTS:  # requests are in the order of time
            half = max(half, _half(cluster * PARTS // k, below, q))
        # If all samples are equal the residuals vanish. Independent sampling gives the least error.
        half = max(half, _Z * float(np.sqrt(q * (1 - q) / n)))
        low, high = q - half, q + half
        return value, percentile(order, max(0.0, low)), percentile(order, high) if high < 1 else None


def _half(cluster: np.ndarray, below: np.ndarray, q: float) -> float:
    """Half of the interval of the share `below`, whose samples have these clusters, 0 to k - 1."""
    sizes = np.bincount(cluster)
    k, residuals = len(sizes), np.bincount(cluster, weights=below) - q * sizes
    return student(k - 1) * float(np.sqrt(np.sum(residuals**2) * k / (k - 1))) / len(cluster)


def student(degrees: int) -> float:
    """The 97.5 % quantile of Student's t distribution, by its expansion (Abramowitz and Stegun 26.7.5)."""
    z, n = _Z, max(2, degrees)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / n**power for power, term in enumerate(terms, 1))
