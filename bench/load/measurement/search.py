"""Searches the highest rate that meets an objective. Pure.

Doubles the first rate until a run misses, or halves it until a run meets the objective. Then it bisects
geometrically until the bracket is narrow. The rate that it returns was measured and met the objective.
"""

from __future__ import annotations

import math
from collections.abc import Generator

PRECISION = 0.05
LEAST_RATE = 1e-2
MOST_RATE = 1e5


def highest_rate(first: float) -> Generator[float, bool, float | None]:
    """Yields rates to measure and gets whether each was good. Returns the highest good rate, or None.

    Ends when the lowest bad rate is at most `1 + PRECISION` times the highest good rate.
    """
    assert first > 0
    good: float | None = None
    bad: float | None = None
    rate = first
    while LEAST_RATE <= rate <= MOST_RATE:
        if (yield rate):
            good = rate
        else:
            bad = rate
        if good is not None and bad is not None:
            if bad <= good * (1 + PRECISION):
                return good
            rate = math.sqrt(good * bad)
        else:
            rate = rate * 2 if bad is None else rate / 2
    return good
