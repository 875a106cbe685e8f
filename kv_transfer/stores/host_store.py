"""Blocks of a KV cache in the memory of the host, of an engine on any device: `open_host_store`."""

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
import torch
import xxhash

from baton.kv_transfer.device.pool import tensor_planes
from baton.kv_transfer.stores import HostStore, Pair
from baton.kv_transfer.transport import PagedKV

BATCH_BYTES, BATCHES = 4 << 20, 4
"""A CPU copies a batch, or a few for requests that wait, while its engine computes nothing."""


def block_bytes(kv: PagedKV) -> int:
    """The bytes of a block, as this rank holds it."""
    return sum(pool[:, 0].nbytes for pool in _pools(kv))


def _pools(kv: PagedKV) -> Iterator[torch.Tensor]:
    """Layers and scales, as in `planes`."""
    return chain.from_iterable(plane.values() for plane in tensor_planes(kv)[0])


def open_host_store(kv: PagedKV, num_places: int) -> HostStore:
    """Raises `MemoryError` if the host cannot have so much."""
    if torch.device(kv.device).type == "cuda":
        from baton.kv_transfer.stores.cuda_store import CudaStore

        return CudaStore(kv, num_places)
    return CpuStore(kv, num_places)


class CpuStore(HostStore):
    """Copies at once."""

    def __init__(self, kv: PagedKV, num_places: int) -> None:
        self._pools = [pool.view(torch.uint8).numpy() for pool in _pools(kv)]
        self._ends = np.cumsum([pool[:, 0].size for pool in self._pools]).tolist()
        size = block_bytes(kv)
        # The system maps its pages only when they are first written.
        self._memory = np.empty((num_places, size), dtype=np.uint8)
        self.num_places = self.ready = num_places
        self.sums: list[int | None] = [None] * num_places
        self._ended: list[bool] = []
        self.batch = max(1, BATCH_BYTES // size)

    @property
    def room(self) -> int:
        return BATCHES * self.batch

    def copy(self, pairs: Sequence[Pair], *, is_load: bool) -> None:
        for block, place in pairs:
            whole = not is_load or self._sum(place) == self.sums[place]
            for pool, there in self._parts(place) if whole else ():
                if is_load:
                    pool[:, block] = there
                else:
                    there[:] = pool[:, block]
            if not is_load:
                self.sums[place] = self._sum(place)
            self._ended.append(whole)

    def ended(self) -> list[bool]:
        ended, self._ended = self._ended, []
        return ended

    def memory(self, place: int) -> memoryview:
        return self._memory[place].data

    def close(self) -> None:
        self._pools.clear()
        self._memory = np.empty((0, 0), dtype=np.uint8)

    def _sum(self, place: int) -> int:
        return xxhash.xxh3_64_intdigest(self._memory[place])

    def _parts(self, place: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Each pool, and the block of it that the place has."""
        parts = np.split(self._memory[place], self._ends[:-1])
        for pool, part in zip(self._pools, parts, strict=True):
            yield pool, part.reshape(pool[:, 0].shape)
