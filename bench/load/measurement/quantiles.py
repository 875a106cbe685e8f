"""Percentiles with confidence intervals, for samples that come in clusters.

All gaps of a request share its fate, so a million gaps of 500 requests are no million independent samples.
The interval is Woodruff's (JASA 1952): the share of samples below the estimate gets a standard error from
the clusters, and is turned back into values by the sample's own quantiles. With one sample a cluster that is
the usual interval by order statistics.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}
_Z = 1.96  # 95 %


@dataclass(frozen=True, slots=True)
class Estimate:
    """`low` and `high` bound the 95 % interval; `high` is None where there are too few samples to say."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Series:
    """Samples of one metric. Shape [n] each; `clusters` says which request a sample is of, ascending or
    not.
    """

    values: np.ndarray
    clusters: np.ndarray

    @classmethod
    def of(cls, groups: list[list[float]]) -> Series:
        """One cluster for each group."""
        sizes = [len(g) for g in groups]
        values = np.fromiter((x for g in groups for x in g), dtype=np.float64, count=sum(sizes))
        return cls(values, np.repeat(np.arange(len(groups)), sizes))

    def __len__(self) -> int:
        return len(self.values)

    def estimates(self) -> dict[str, Estimate]:
        """p50, p90, p99, p99.9 and max; empty without samples. A maximum has no interval."""
        if not len(self):
            return {}
        order = np.sort(self.values)
        found = {name: self._estimate(order, q) for name, q in QUANTILES.items()}
        return found | {"max": Estimate(float(order[-1]))}

    def curve(self, points: int = 120) -> list[tuple[float, float]]:
        """(share of samples, value): evenly up to the median, then ever denser towards the maximum."""
        if not len(self):
            return []
        order = np.sort(self.values)
        tail = 1 - np.logspace(np.log10(0.5), np.log10(1 / max(2, len(order))), points // 2)
        shares = np.unique(np.concatenate((np.linspace(0, 0.5, points // 2), tail, [1.0])))
        return [(float(q), _rank(order, q)) for q in shares]

    def _estimate(self, order: np.ndarray, q: float) -> Estimate:
        value = _rank(order, q)
        _, cluster = np.unique(self.clusters, return_inverse=True)
        sizes = np.bincount(cluster)
        below = np.bincount(cluster, weights=self.values <= value)
        n, k = len(order), len(sizes)
        if k < 2:
            return Estimate(value)
        error = float(np.sqrt(np.sum((below - q * sizes) ** 2) * k / (k - 1))) / n
        # Where all samples agree the residuals vanish; independent sampling is the least there can be.
        error = max(error, float(np.sqrt(q * (1 - q) / n)))
        low, high = q - _Z * error, q + _Z * error
        return Estimate(value, _rank(order, max(0.0, low)), _rank(order, high) if high < 1 else None)


def _rank(order: np.ndarray, q: float) -> float:
    """Nearest rank: of a short series the p99 is its maximum."""
    return float(order[min(len(order) - 1, max(0, int(np.ceil(q * len(order) - 1e-9)) - 1))])


def mean_estimate(values: np.ndarray) -> Estimate:
    """The mean of independent samples with its 95 % interval."""
    mean = float(values.mean())
    if len(values) < 2:
        return Estimate(mean)
    half = _Z * float(values.std(ddof=1)) / float(np.sqrt(len(values)))
    return Estimate(mean, mean - half, mean + half)
