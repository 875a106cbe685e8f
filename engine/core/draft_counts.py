"""How many drafts each request of a step gets. Pure.

A draft is worth its probability of being accepted: with acceptance p, the j-th draft of a request adds p^j
tokens. It costs a row. So of all drafts the most probable are taken, and as many as give the most tokens in a
second:

    speed(rows) = (requests + Σ p of the best rows − requests drafts) / seconds(rows)

Where reading the weights bounds a step, a row costs almost nothing. With many requests it costs more than it
brings, and no request gets a draft.

Both are measured. `seconds` is kept for a few numbers of rows, and is a line between two of them. Larger
numbers that were never tried take no longer, so they are tried. What was measured long ago counts half, so
that a number which once took long is tried again. A step without drafts is measured now and then, too. More
rows never take less, so a pause of the process in a step without drafts makes no draft look cheap.
"""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from baton.steps.averages import Average

DECAY = 0.8
"""Factor on the weight of a past step with each later step of its rows."""
OUTLIER = 2.0
"""A step counts as at most this many average ones of its rows."""
KNOWN_STEPS = 64
"""After so many steps with drafts, one without is measured again."""
GAIN = 1.02
"""Drafts must promise so many times the speed without them, since what they promise is not exact."""
OLD_STEPS = 500
"""After so many steps, what steps of other rows took counts half."""


class StepCosts:
    """Learns how long steps that only decode take, by their rows."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """`sizes`: numbers of rows that are worth telling apart, in ascending order. A graph pads a step to
        one of them."""
        self.sizes = np.array(sizes)
        self._seconds: dict[int, Average] = {}  # by index of the size
        self._at: dict[int, int] = {}  # the last step of this size
        self._steps = 0

    def index(self, rows: int) -> int:
        """Of the size that a step with so many rows has."""
        return min(bisect_left(self.sizes, rows), len(self.sizes) - 1)

    def record(self, rows: int, seconds: float) -> None:
        self._steps += 1
        index = self.index(rows)
        if index not in self._at:  # the first step of a size may compile or allocate
            self._at[index] = -OLD_STEPS
            return
        average = self._seconds.setdefault(index, Average(DECAY))
        average.add(min(seconds, OUTLIER * average.value) if average.value else seconds)
        self._at[index] = self._steps

    def is_known(self, rows: int) -> bool:
        """Whether a step with so many rows was measured lately."""
        index = self.index(rows)
        return index in self._seconds and self._at[index] + KNOWN_STEPS >= self._steps

    def seconds(self, rows: int) -> np.ndarray:
        """Of a step of each size from that of `rows` on, which is known."""
        first = self.index(rows)
        known = sorted(self._seconds)
        values = np.array([self._seconds[index].value for index in known])
        base = np.interp(self.sizes[first], self.sizes[known], values)
        old = np.array([self._at[index] + OLD_STEPS < self._steps and index != first for index in known])
        values = np.where(old, np.minimum(values, (values + base) / 2), values)
        return np.maximum.accumulate(np.interp(self.sizes[first:], self.sizes[known], values))


def draft_counts(
    acceptance: Sequence[float], limits: Sequence[int], rows: int, costs: StepCosts
) -> list[int]:
    """The number of drafts of each request.

    `acceptance`: of each request, the probability of a draft if the one before was accepted. `limits`: its
    most drafts. `rows`: of the step without drafts."""
    most = max(limits, default=0)
    room = int(costs.sizes[-1]) - rows
    if most <= 0 or room <= 0 or not costs.is_known(rows):
        return [0] * len(limits)
    each = np.arange(1, most + 1)
    gains = np.where(each <= np.array(limits)[:, None], np.array(acceptance)[:, None] ** each, 0.0).ravel()
    order = np.argsort(-gains, kind="stable")[: min(room, int(np.count_nonzero(gains)))]
    total = np.concatenate(([0.0], np.cumsum(gains[order])))
    sizes, seconds = costs.sizes[costs.index(rows) :], costs.seconds(rows)
    added = np.minimum(sizes - rows, len(order))
    best = int(np.argmax((rows + total[added]) / seconds))
    without = rows / seconds[0]
    if (rows + total[added[best]]) / seconds[best] <= GAIN * without:
        return [0] * len(limits)
    counts = np.bincount(order[: added[best]] // most, minlength=len(limits))
    return counts.tolist()
