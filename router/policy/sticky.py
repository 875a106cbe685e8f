"""Prefill: the same session to the same worker, unless that one has more than its share.

Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2018): walk the ring from the session's
point to the first worker that stays within `bound` times the mean load. Sessions keep their worker's prefix
cache, a hot session overflows to its neighbours on the ring, and a worker that joins or leaves moves only its
share.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping

import xxhash

POINTS_PER_WORKER = 64
BOUND = 1.25


class Ring:
    """Immutable: built when workers come and go, not for each decision."""

    def __init__(self, workers: Collection[str]) -> None:
        points = sorted(
            (xxhash.xxh3_64_intdigest(worker.encode(), seed=i), worker)
            for worker in workers
            for i in range(POINTS_PER_WORKER)
        )
        self._hashes = [point for point, _ in points]
        self._owners = [worker for _, worker in points]
        self.size = len(workers)

    def walk(self, key: int) -> Iterator[str]:
        """Every worker once, in the order in which a session of this 64-bit key prefers them."""
        start = bisect_right(self._hashes, key)
        seen: set[str] = set()
        for i in range(len(self._owners)):
            owner = self._owners[(start + i) % len(self._owners)]
            if owner not in seen:
                seen.add(owner)
                yield owner
                if len(seen) == self.size:
                    return


def sticky(
    ring: Ring,
    loads: Mapping[str, int],
    total: int,
    *,
    key: int,
    cost: int,
    avoid: Collection[str] = (),
) -> str | None:
    """The prefill worker for a session.

    Args:
        ring: the workers that may be chosen.
        loads: tokens that wait at each of them; may name others too.
        total: the sum over the ring.
        key: 64-bit hash of the session.
        cost: tokens that the request adds.
        avoid: workers that failed this request: taken only when there is no other.
    """
    if not ring.size:
        return None
    bound = BOUND * (total + cost) / ring.size
    best: str | None = None
    for worker in ring.walk(key):
        if worker in avoid:
            continue
        load = loads.get(worker, 0)
        if load == 0 or load + cost <= bound:
            return worker
        if best is None or load < loads.get(best, 0):
            best = worker
    return best or next(ring.walk(key))
