"""Which decode workers have the beginning of a prompt in their prefix caches, where these are on: what they
decoded, and with it the turn before."""

import random
from collections.abc import Collection, Sequence

from router.policy.chunk_index import ChunkIndex
from router.policy.decode_load import DecodeLoad
from router.policy.two_choices import two_choices


class DecodeCaches:
    """Owned by one router. A worker's *row* is its number from `join` to `leave`.

    Attributes:
        index: whose caches have what. Owned here; `add`, `discard` and `clear` are the worker's reports.
    """

    def __init__(self) -> None:
        self.index = ChunkIndex()
        self._loads: list[DecodeLoad | None] = []  # by row; None: free
        self._serving = 0  # a set of rows

    def join(self, load: DecodeLoad) -> int:
        """A worker came, with nothing cached. Returns its row."""
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

    def holders(
        self, chosen: int, *, chunks: Sequence[int], tokens: int, rng: random.Random, avoid: Collection[str]
    ) -> list[tuple[str, int]]:
        """Who may prefill a prompt of so many tokens, each with how many of them it has cached: the worker
        (its row) that was chosen for the request in any case; then, if they have more and room, one of those
        that have most."""
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
