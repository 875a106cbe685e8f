"""The prefix caches of decode workers, which keep what they decoded: the turn before in a conversation.

Empty unless the workers run with a prefix cache.
"""

import random
from collections.abc import Collection, Sequence

from router.policy.chunk_index import ChunkIndex
from router.policy.decode_load import DecodeLoad
from router.policy.two_choices import two_choices


class DecodeCaches:
    """Owned by one router. A worker's row is its number from `join` to `leave`.

    Attributes:
        index: the cached chunks. The caller applies the workers' reports to it.
    """

    def __init__(self) -> None:
        self.index = ChunkIndex()
        self._loads: list[DecodeLoad | None] = []  # by row; None: free
        self._serving = 0  # a set of rows

    def join(self, load: DecodeLoad) -> int:
        """Adds a worker with an empty cache. Returns its row."""
        if None not in self._loads:
            self._loads.append(None)
            self.index.grow(len(self._loads))
        row = self._loads.index(None)
        self._loads[row] = load
        return row

    def leave(self, row: int) -> None:
        self.index.forget(row)
        self._loads[row] = None
        self.serve(row, False)

    def serve(self, row: int, serving: bool) -> None:
        """Whether it takes new work."""
        bit = 1 << row
        self._serving = self._serving | bit if serving else self._serving & ~bit

    def candidates(
        self, chosen: int, *, chunks: Sequence[int], tokens: int, rng: random.Random, avoid: Collection[str]
    ) -> list[tuple[str, int]]:
        """Returns the workers that may prefill a prompt, each with its number of cached tokens.

        The first is the worker with the row `chosen`. The second, if there is one, has more cached than any
        other, and capacity.
        """
        load = self._loads[chosen]
        assert load is not None
        if not len(self.index):
            return [(load.worker, 0)]
        block_size = max(load.block_size for load in self._loads if load is not None)
        cached = self.index.overlap(chunks, tokens, block_size, self._serving | 1 << chosen)
        found = [(load.worker, cached.of(chosen))]
        if cached.of(chosen) < cached.most:
            loads = [load for row in cached.holders() if (load := self._loads[row]) is not None]
            loads = [load for load in loads if load.worker not in avoid]
            if (best := two_choices(loads, tokens=tokens + 1, rng=rng)) is not None:
                found.append((best, cached.most))
        return found
