"""The prefix caches of the decode pool, which keep what was decoded: the turn before in a conversation."""

import random
from collections.abc import Collection, Sequence

from baton.router.policy.chunk_index import ChunkIndex
from baton.router.policy.decode_load import DecodeLoad
from baton.router.policy.two_choices import two_choices

CACHED_PRESSURE = 0.1
"""How much more loaded a worker with a cached prefix may be than one without."""


class DecodeCaches:
    """Owned by one router. Each worker has its row of `PrefillLoads`, in either pool.

    Attributes:
        loads: of all workers, by row.
    """

    def __init__(self, index: ChunkIndex) -> None:
        """`index`: the cached chunks of all workers, which `PrefillLoads` owns."""
        self.loads: dict[int, DecodeLoad] = {}
        self._index = index
        self._block_size = 1  # the largest, so that the cached tokens are not overestimated
        self._serving = 0  # a set of rows

    def join(self, row: int, load: DecodeLoad) -> None:
        """Adds a worker, which does not take work yet."""
        self.loads[row] = load
        self._block_size = max(self._block_size, load.block_size)

    def leave(self, row: int) -> None:
        self.serve(row, False)
        del self.loads[row]
        self._block_size = max((load.block_size for load in self.loads.values()), default=1)

    def serve(self, row: int, serving: bool) -> None:
        """Whether it takes new work of the decode pool."""
        bit = 1 << row
        self._serving = self._serving | bit if serving else self._serving & ~bit

    def candidates(
        self, chosen: int, *, chunks: Sequence[int], tokens: int, rng: random.Random, avoid: Collection[str]
    ) -> list[tuple[int, int]]:
        """Returns the rows of workers that may prefill a prompt, each with its number of cached tokens.

        The first is `chosen`. The second, if there is one, has more cached than any other, and capacity.
        """
        if not len(self._index):
            return [(chosen, 0)]
        cached = self._index.overlap(chunks, tokens, self._block_size, self._serving | 1 << chosen)
        found = [(chosen, cached.of(chosen))]
        if cached.of(chosen) < cached.most:
            rows = {self.loads[row].worker: row for row in cached.holders()}
            loads = [self.loads[row] for name, row in rows.items() if name not in avoid]
            if (best := two_choices(loads, tokens=tokens + 1, rng=rng)) is not None:
                found.append((rows[best], cached.most))
        return found

    def nearest(
        self, chosen: int, *, chunks: Sequence[int], tokens: int, rng: random.Random, avoid: Collection[str]
    ) -> int:
        """Returns the row of the worker to decode a prompt: `chosen`, or the one with the most of it cached.

        The latter gets less KV, and shares its blocks. But it must not be much more loaded than `chosen`."""
        row, _ = self.candidates(chosen, chunks=chunks, tokens=tokens, rng=rng, avoid=avoid)[-1]
        return row if self.loads[row].pressure <= self.loads[chosen].pressure + CACHED_PRESSURE else chosen
