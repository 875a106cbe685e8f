"""What plots show of a run: distributions, and what happened over time. Pure; the size is bounded.

A curve is a list of points. Reports keep the curves, so that `--html` can draw two runs of different days
over each other.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from baton.bench.load.target.answer import Record
from baton.steps.quantiles import percentile, percentiles

QUANTILES, BINS = 100, 60
"""Points of a distribution, and of a timeline."""


def curves(records: Sequence[Record], begin: float, end: float) -> dict[str, Any]:
    """Returns the curves of a run, of which [begin, end) counts. Times are seconds, latencies ms.

    - `distributions`: by metric, the latencies of `QUANTILES` + 1 equally spaced quantiles.
    - `timeline`: by name, the values of equal bins from the start of the run on; None where a bin has none.
    """
    ok = [r for r in records if r.ok]
    counted = [r for r in ok if begin <= r.intended < end]
    samples = {
        "ttft": [r.ttft for r in counted],
        "itl": [gap for r in counted for gap in r.gaps],
        "e2e.per_token": [r.e2e / r.generated for r in counted if r.generated],
    }
    distributions = {name: _distribution(values) for name, values in samples.items() if values}
    return {"distributions": distributions, "timeline": _timeline(records, ok)}


def _distribution(seconds: Sequence[float]) -> list[float]:
    quantiles = percentiles(np.asarray(seconds) * 1e3, np.linspace(0, 1, QUANTILES + 1))
    return [_digits(value) for value in quantiles]


def _timeline(records: Sequence[Record], ok: Sequence[Record]) -> dict[str, Any]:
    last = max((r.ended for r in records), default=0.0)
    if last <= 0:
        return {}
    width = last / BINS

    def bins(times: Sequence[float]) -> np.ndarray:
        return np.minimum((np.asarray(times, float) / width).astype(int).clip(0), BINS - 1)

    def counts(times: Sequence[float], weights: Sequence[float] | None = None) -> np.ndarray:
        return np.bincount(bins(times), weights, BINS) if len(times) else np.zeros(BINS)

    def quantile(values: Sequence[tuple[float, float]], q: float) -> list[float | None]:
        if not values:
            return [None] * BINS
        at, sizes = bins([when for when, _ in values]), np.asarray([size for _, size in values]) * 1e3
        return [
            _digits(percentile(sizes[at == each], q)) if (at == each).any() else None for each in range(BINS)
        ]

    edges = np.arange(1, BINS + 1) * width
    started, done = (np.sort([getattr(r, name) for r in records]) for name in ("sent", "ended"))
    in_flight = np.searchsorted(started, edges) - np.searchsorted(done, edges)
    arrivals = [at for r in ok for at in r.arrivals]
    tokens = [float(count) for r in ok for count in (r.tokens or [1] * len(r.arrivals))]
    first = [(r.intended, r.ttft) for r in ok]
    gaps = [(at, gap) for r in ok for at, gap in zip(r.arrivals[1:], r.gaps, strict=False)]
    lists: dict[str, Sequence[float | None]] = {
        "in_flight": in_flight.astype(float).tolist(),
        "tokens_per_s": [_digits(each / width) for each in counts(arrivals, tokens)],
        "failed_per_s": [_digits(each / width) for each in counts([r.ended for r in records if not r.ok])],
        **{f"ttft.{name}": quantile(first, q) for name, q in (("p50", 0.5), ("p99", 0.99))},
        **{f"itl.{name}": quantile(gaps, q) for name, q in (("p50", 0.5), ("p99", 0.99))},
    }
    return {"at": [_digits(each) for each in edges - width / 2], **lists}


def _digits(value: float) -> float:
    """Four digits, which is more than a plot shows."""
    return float(f"{value:.4g}")
