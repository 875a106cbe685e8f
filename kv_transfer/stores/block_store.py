"""Copies of blocks of a KV cache below the device, in the memory of the host or on disk (`disk_store`).

A *place* has all layers of one block, as this rank holds them. A block gets a checksum when it is saved. When
it is loaded, the checksum must match. If it does not, the block's bytes are undefined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Protocol

import numpy as np
import torch
import xxhash

from baton.kv_transfer.device.pool import planes
from baton.kv_transfer.transport import PagedKV

BATCH_BYTES, BATCHES = 4 << 20, 4
"""A CPU copies a batch, or a few for requests that wait, while its engine computes nothing."""

Pair = tuple[int, int]
"""A block and a place."""


class BlockStore(Protocol):
    """The caller has one thread. It owns blocks and places from the start of their copy to its end."""

    batch: int
    """Blocks that are worth copying together."""

    @property
    def room(self) -> int:
        """How many blocks may be copied now."""
        ...

    def save(self, pairs: Sequence[Pair]) -> None:
        """Starts to copy blocks to places. No step writes the blocks, or the caller does not use the
        places."""
        ...

    def load(self, pairs: Sequence[Pair]) -> None:
        """Starts to copy places into blocks. No step uses the blocks."""
        ...

    def ended(self) -> list[bool]:
        """Of each block with a copy that is over, in the order of the copies: whether it is whole. A block
        that is saved is, unless a disk fails."""
        ...

    def close(self) -> None:
        """Waits for the copies, and frees the places."""
        ...


class HostStore(BlockStore, Protocol):
    """A store in the memory of the host."""

    sums: list[int | None]
    """The checksum of each place. None: a block that is loaded from there is not whole."""

    def memory(self, place: int) -> memoryview:
        """The bytes of a place. No copy uses them while the caller does."""
        ...


def block_bytes(kv: PagedKV) -> int:
    """The bytes of a block, as this rank holds it."""
    return sum(pool[:, 0].nbytes for pool in _pools(kv))


def _pools(kv: PagedKV) -> Iterator[torch.Tensor]:
    """Layers and scales, as in `planes`."""
    return chain.from_iterable(plane.values() for plane in planes(kv)[None])


def open_host_store(kv: PagedKV, num_places: int, tick: Callable[[], None]) -> HostStore:
    """`tick`, a sign of life, is called while memory is pinned, which takes 0.16 s for each GiB. Raises
    `MemoryError` if there is not enough."""
    if torch.device(kv.device).type == "cuda":
        from baton.kv_transfer.stores.cuda_store import CudaStore

        return CudaStore(kv, num_places, tick)
    return CpuStore(kv, num_places)


class CpuStore:
    """Copies at once."""

    def __init__(self, kv: PagedKV, num_places: int) -> None:
        self._pools = [pool.view(torch.uint8).numpy() for pool in _pools(kv)]
        self._ends = np.cumsum([pool[:, 0].size for pool in self._pools]).tolist()
        size = block_bytes(kv)
        # The system maps its pages only when they are first written.
        self._memory = np.empty((num_places, size), dtype=np.uint8)
        self.sums: list[int | None] = [None] * num_places
        self._ended: list[bool] = []
        self.batch = max(1, BATCH_BYTES // size)

    @property
    def room(self) -> int:
        return BATCHES * self.batch

    def save(self, pairs: Sequence[Pair]) -> None:
        for block, place in pairs:
            for pool, there in zip(self._pools, self._split(place), strict=True):
                there[:] = pool[:, block]
            self.sums[place] = xxhash.xxh3_64_intdigest(self._memory[place])
            self._ended.append(True)

    def load(self, pairs: Sequence[Pair]) -> None:
        for block, place in pairs:
            whole = xxhash.xxh3_64_intdigest(self._memory[place]) == self.sums[place]
            if whole:
                for pool, there in zip(self._pools, self._split(place), strict=True):
                    pool[:, block] = there
            self._ended.append(whole)

    def ended(self) -> list[bool]:
        ended, self._ended = self._ended, []
        return ended

    def memory(self, place: int) -> memoryview:
        return self._memory[place].data

    def close(self) -> None:
        self._pools.clear()
        self._memory = np.empty((0, 0), dtype=np.uint8)

    def _split(self, place: int) -> list[np.ndarray]:
        """A block of each pool."""
        parts = np.split(self._memory[place], self._ends[:-1])
        return [part.reshape(pool[:, 0].shape) for part, pool in zip(parts, self._pools, strict=True)]
