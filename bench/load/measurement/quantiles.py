"""Quantiles and confidence intervals: one definition for load tests and for comparisons of servers.

A quantile is by nearest rank (`steps.quantiles`). All intervals are of 95 %, by a bootstrap over blocks
of requests that follow each other (Carlstein, Annals of Statistics 1986). Requests in one queue depend on
each other, and so do the gaps of one request: single ones drawn anew would say too little. There are as many
blocks as a block has requests. Of k blocks each draw takes k - 3, since k would vary too little (Rao and Wu,
JASA 1988): with k - 1 the variance is right, and two fewer make up for few blocks, as Student's t does.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Self

import numpy as np

from baton.bench.report import Row
from baton.steps.quantiles import percentile

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}
DRAWS = 1000
MIN_BLOCKS = 4
_ENDS = 0.025, 0.975
_RANKS = 512


@cache
def drawn(blocks: int, seed: int = 0) -> np.ndarray:
    """The weight of each block in each draw, 1 on average. Shape [DRAWS, blocks]."""
    assert blocks >= MIN_BLOCKS
    draws, chances = blocks - MIN_BLOCKS + 1, np.full(blocks, 1 / blocks)
    return np.random.default_rng([seed, blocks]).multinomial(draws, chances, DRAWS) * (blocks / draws)


def interval(draws: np.ndarray) -> tuple[float, float]:
    """Of a figure, from its values in all draws."""
    low, high = (percentile(draws, end) for end in _ENDS)
    return low, high


@dataclass(frozen=True, slots=True)
class Series:
    """Samples of one metric.

    Attributes:
        values: ascending, shape [n].
        blocks: the block of each, 0 to `block_count` - 1.
    """

    values: np.ndarray
    blocks: np.ndarray
    block_count: int

    @classmethod
    def of(cls, requests: Sequence[Sequence[float] | np.ndarray]) -> Self:
        """The samples of each request, in order of time."""
        groups = [np.asarray(samples, float) for samples in requests if len(samples)]
        if not groups:
            return cls(np.empty(0), np.empty(0, int), 0)
        count = max(1, round(math.sqrt(len(groups))))
        values = np.concatenate(groups)
        block = np.repeat(np.arange(len(groups)) * count // len(groups), [len(group) for group in groups])
        order = np.argsort(values, kind="stable")
        return cls(values[order], block[order], count)

    def quantile(self, q: float) -> float:
        return percentile(self.values, q)

    def knows(self, q: float) -> bool:
        """Whether a sample is above the quantile. Otherwise the maximum would stand for it: the p99 of 50 is
        one sample."""
        return round(len(self.values) * (1 - q), 6) >= 1

    def draws(self, q: float, seed: int = 0) -> np.ndarray:
        """The quantile in each draw. Shape [DRAWS]. Draws of another seed do not depend on these. There must
        be `MIN_BLOCKS`."""
        [ranks] = self._ranks_of_draws([q], seed)
        return self.values[ranks]

    def rows(self, metric: str, goals: Mapping[str, float]) -> dict[str, Row]:
        """Rows in ms by quantile: p50, those of p90, p99 and p99.9 with a sample above it, and max, which has
        no interval. Empty without any sample. `goals`: upper bounds by name of the row."""
        if not len(self.values):
            return {}
        levels = {name: q for name, q in QUANTILES.items() if q <= 0.5 or self.knows(q)}
        intervals = self._intervals([*levels.values()])
        estimates = {
            name: (self.quantile(q), *ends) for (name, q), ends in zip(levels.items(), intervals, strict=True)
        }
        estimates["max"] = float(self.values[-1]), None, None
        return {
            quantile: Row(
                f"{metric}.{quantile}", value, "ms", low=low, high=high,
                goal=goals.get(f"{metric}.{quantile}"),
            )
            for quantile, (value, low, high) in estimates.items()
        }  # fmt: skip

    def _intervals(self, quantiles: Sequence[float]) -> list[tuple[float | None, float | None]]:
        """An upper end is None if there are too few samples for one."""
        if self.block_count < MIN_BLOCKS:
            return [(None, None)] * len(quantiles)
        ends = [interval(ranks) for ranks in self._ranks_of_draws(quantiles, 0)]
        last = len(self.values) - 1
        return [
            (float(self.values[int(low)]), None if high == last else float(self.values[int(high)]))
            for low, high in ends
        ]

    def _ranks_of_draws(self, quantiles: Sequence[float], seed: int) -> list[np.ndarray]:
        """For each quantile its place in `values` in each draw, shape [DRAWS].

        Of many samples only some places are looked at, the more the higher the values.
        """
        n = len(self.values)
        even = np.linspace(0, n - 1, min(n, _RANKS))
        from_the_top = n - np.geomspace(1, n, min(n, _RANKS))
        places = np.unique(np.concatenate((even, from_the_top)).astype(int))
        cell = np.searchsorted(places, np.arange(n)) + self.blocks * len(places)
        counts = np.bincount(cell, minlength=self.block_count * len(places))
        up_to = drawn(self.block_count, seed) @ counts.reshape(self.block_count, -1).cumsum(axis=1)
        return [places[(up_to < q * up_to[:, -1:]).sum(axis=1)] for q in quantiles]
