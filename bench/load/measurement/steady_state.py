"""Where the warm-up ends, and whether what follows is steady.

The warm-up is found by MSER-5 (White 1997; White, Cobb, Spratt 2000): of the first half, cut as many
batches of 5 from the start as make the standard error of the rest's mean smallest. Noise alone makes it cut
now and then, so a cut must also differ from what it is cut from. What follows is tested for a trend
(Mann–Kendall on batch means): a queue that grows through the run has no percentiles that mean anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

_BATCH = 5
_LEAST_REQUESTS = 40
_CUT_Z = 3.0
_CUT_CHANGE = 0.05  # of the mean: a warm-up that changes less is no matter
_TREND_BATCHES = 20
_TREND_Z = 3.0
_TREND_CHANGE = 0.25  # of the mean, from the first to the last quarter: less is no matter


class Steadiness(msgspec.Struct, frozen=True):
    """`begin`: seconds since the start of the run from where on samples count. `statement`: for the
    reader.
    """

    begin: float
    steady: bool | None  # None: too few requests to tell
    statement: str


def fixed_warm_up(seconds: float, times: Sequence[float], values: Sequence[float]) -> Steadiness:
    """The user said how long the warm-up is."""
    kept = [(t, v) for t, v in zip(times, values, strict=True) if t >= seconds]
    return _judged(seconds, f"warm-up of {seconds:g} s excluded as asked", kept)


def detect(times: Sequence[float], values: Sequence[float]) -> Steadiness:
    """`times`: intended send times, ascending; `values`: what should become steady (TTFT), of the same
    requests.
    """
    pairs = list(zip(times, values, strict=True))
    if len(pairs) < _LEAST_REQUESTS:
        return Steadiness(
            0.0, None, f"{len(pairs)} requests are too few to detect a warm-up: nothing excluded"
        )
    cut = _mser([v for _, v in pairs])
    begin = pairs[cut][0] if cut else 0.0
    said = f"warm-up of {begin:.1f} s ({cut} requests) excluded" if cut else "no warm-up seen"
    return _judged(begin, said, pairs[cut:])


def _judged(begin: float, said: str, kept: Sequence[tuple[float, float]]) -> Steadiness:
    if len(kept) < _LEAST_REQUESTS:
        return Steadiness(begin, None, f"{said}; {len(kept)} requests are too few to tell if steady")
    change = _trend([v for _, v in kept])
    if change is not None:
        return Steadiness(
            begin,
            False,
            f"{said}; NOT steady: TTFT {'rises' if change > 0 else 'falls'} by {abs(change):.0%}",
        )
    return Steadiness(begin, True, f"{said}; steady after it")


def _mser(values: Sequence[float]) -> int:
    """Samples to cut from the start, at most half of them."""
    count = len(values) // _BATCH
    means = np.asarray(values[: count * _BATCH]).reshape(count, _BATCH).mean(axis=1)
    # Of every suffix, by sums from the end.
    sizes = np.arange(count, 0, -1)
    sums, squares = np.cumsum(means[::-1])[::-1], np.cumsum((means**2)[::-1])[::-1]
    errors = (np.maximum(squares - sums**2 / sizes, 0) / sizes**2)[: count // 2 + 1]
    # Of equal ones the earliest: rounding must not cut from a constant series.
    best = int(np.argmax(errors <= errors.min() + 1e-12 * max(1.0, float(np.max(means**2)))))
    if not best:
        return 0
    cut, kept = means[:best], means[best:]
    noise = math.sqrt(float(kept.var(ddof=1)) * (1 / len(cut) + 1 / len(kept)))
    least = max(_CUT_Z * noise, _CUT_CHANGE * float(kept.mean()))
    return best * _BATCH if abs(float(cut.mean() - kept.mean())) > least else 0


def _trend(values: Sequence[float]) -> float | None:
    """The relative change over the series if it is a clear trend, else None."""
    means = np.asarray([part.mean() for part in np.array_split(np.asarray(values), _TREND_BATCHES)])
    n = len(means)
    score = float(np.sum(np.sign(means[None, :] - means[:, None])[np.triu_indices(n, 1)]))
    z = score / math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    quarter = n // 4
    change = float((means[-quarter:].mean() - means[:quarter].mean()) / max(float(means.mean()), 1e-9))
    return change if abs(z) > _TREND_Z and abs(change) > _TREND_CHANGE else None
