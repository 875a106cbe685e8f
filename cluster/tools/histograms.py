"""Histograms of a metrics page in Prometheus' text format: their sums, differences and quantiles."""

from __future__ import annotations

import math
from collections import defaultdict

import aiohttp
import msgspec
from prometheus_client.samples import Sample

_PAGE_BYTES = 16 << 20


class Histogram(msgspec.Struct):
    """Cumulative counts by upper bound, summed over all labels."""

    total: float = 0.0
    count: float = 0.0
    buckets: dict[float, float] = {}

    def add(self, sample: Sample) -> None:
        """Adds a sample of the histogram's family."""
        if sample.name.endswith("_sum"):
            self.total += sample.value
        elif sample.name.endswith("_count"):
            self.count += sample.value
        elif sample.name.endswith("_bucket"):
            bound = float(sample.labels["le"])
            self.buckets[bound] = self.buckets.get(bound, 0.0) + sample.value


async def page_text(response: aiohttp.ClientResponse) -> str:
    """The whole text of a metrics page. Raises ValueError for an endless one."""
    data = bytearray()
    async for piece in response.content.iter_any():
        data += piece
        if len(data) > _PAGE_BYTES:
            raise ValueError(f"more than {_PAGE_BYTES} bytes")
    return data.decode(errors="replace")


def difference(before: Histogram, after: Histogram) -> Histogram | None:
    """None if a counter went backwards."""
    added = defaultdict(float)
    for bound, count in after.buckets.items():
        added[bound] = count - before.buckets.get(bound, 0.0)
    result = Histogram(after.total - before.total, after.count - before.count, dict(added))
    backwards = result.count < 0 or result.total < -1e-9 or any(count < 0 for count in added.values())
    return None if backwards else result


def quantile(histogram: Histogram, q: float) -> float:
    """Interpolates within the bucket, as `histogram_quantile` of Prometheus.

    At most the last finite bound.
    """
    below, lower = 0.0, 0.0
    wanted = q * histogram.count
    for bound, count in sorted(histogram.buckets.items()):
        if count >= wanted and count > below:
            if math.isinf(bound):
                return lower
            return lower + (bound - lower) * (wanted - below) / (count - below)
        below, lower = count, bound
    return lower
