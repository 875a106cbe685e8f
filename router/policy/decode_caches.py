"""Which decode workers have the beginning of a prompt in their prefix caches, where these are on: what they
decoded, and with it the turn before."""

import random
from collections.abc import Collection, Sequence

import numpy as np

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
        self._serving: set[int] = set()

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
        self._serving.discard(row)

    def serve(self, row: int, serving: bool) -> None:
        """Whether it takes new work."""
        (self._serving.add if serving else self._serving.discard)(row)

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
        cached = np.zeros(len(self._loads), np.int64)
        block_size = max(load.block_size for load in self._loads if load is not None)
        most = self.index.overlap(chunks, tokens, block_size, cached)
        found = [(load.worker, int(cached[chosen]))]
        if cached[chosen] < most:
            rows = self._serving.intersection(np.flatnonzero(cached == most).tolist())
            loads = [load for row in rows if (load := self._loads[row]) and load.worker not in avoid]
            if (best := two_choices(loads, tokens=tokens + 1, rng=rng)) is not None:
                found.append((best, most))
        return found
