"""Consistent hashing: where sessions live, agreed upon by all routers without a word between them."""

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping

import numpy as np
import xxhash

POINTS_PER_WORKER = 128
"""A worker's share of the sessions varies by 1/√128 = 9 %."""


class Ring:
    """Points of all workers on a circle of 64-bit hashes (Karger 1997). Immutable: made anew, in 20 ms for
    1,000 workers, when workers come and go.

    A worker's points depend on its name alone, so that one that joins or leaves moves only its own share.
    """

    def __init__(self, workers: Mapping[str, int]) -> None:
        """`workers`: name → row."""
        names = np.array([xxhash.xxh3_64_intdigest(name.encode()) for name in workers], dtype=np.uint64)
        points = _points(names).ravel()
        order = np.argsort(points)
        # Not lists: their entries would lie all over the memory.
        self._points = array("Q", points[order].tobytes())
        rows = np.repeat(np.array(list(workers.values()), np.int64), POINTS_PER_WORKER)
        self._rows = array("q", rows[order].tobytes())
        self.size = len(workers)

    def walk(self, key: int) -> Iterator[int]:
        """The row of every worker once, in the order in which a session of this 64-bit key prefers them."""
        start = bisect_right(self._points, key)
        seen: set[int] = set()
        for i in range(len(self._rows)):
            row = self._rows[(start + i) % len(self._rows)]
            if row not in seen:
                seen.add(row)
                yield row
                if len(seen) == self.size:
                    return


def _points(names: np.ndarray) -> np.ndarray:
    """uint64[workers, points]: the first outputs of a splitmix64 generator (Steele 2014) seeded by each
    name."""
    steps = np.arange(1, POINTS_PER_WORKER + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = names[:, None] + steps
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
