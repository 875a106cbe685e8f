"""Cells of a cache in the memory of the host, of an engine on any device: `open_host_store`."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import xxhash

from baton.kv_transfer.stores import CacheCells, HostStore, Pair

BATCH_BYTES, BATCHES = 4 << 20, 4
"""A CPU copies a batch, or a few for requests that wait, while its engine computes nothing."""


def open_host_store(cells: CacheCells, num_places: int) -> HostStore:
    """Raises `MemoryError` if the host cannot have so much."""
    if torch.device(cells.kv.device).type == "cuda":
        from baton.kv_transfer.stores.cuda_store import CudaStore

        return CudaStore(cells, num_places)
    return CpuStore(cells, num_places)


class CpuStore(HostStore):
    """Copies at once."""

    def __init__(self, cells: CacheCells, num_places: int) -> None:
        pools = [pool for plane in cells.planes for pool in plane.values()]
        of_planes = zip(cells.planes, cells.windowed, strict=True)
        self._windowed = [windowed for plane, windowed in of_planes for _ in plane]
        self._pools = [pool.view(torch.uint8).numpy() for pool in pools]
        self._ends = np.cumsum([pool[:, 0].size for pool in self._pools]).tolist()
        size = cells.cell_bytes
        # The system maps its pages only when they are first written.
        self._memory = np.empty((num_places, size), dtype=np.uint8)
        self.num_places = self.ready = num_places
        self.sums: list[int | None] = [None] * num_places
        self._ended: list[bool] = []
        self.batch = max(1, BATCH_BYTES // size)

    @property
    def room(self) -> int:
        return BATCHES * self.batch

    def copy(self, pairs: Sequence[Pair], *, is_load: bool, window_cells: Sequence[int]) -> None:
        for (cell, place), window_cell in zip(pairs, window_cells, strict=True):
            intact = not is_load or self._sum(place) == self.sums[place]
            for pool, stored, windowed in self._parts(place) if intact else ():
                at = window_cell if windowed else cell
                if is_load:
                    pool[:, at] = stored
                else:
                    stored[:] = pool[:, at]
            if not is_load:
                self.sums[place] = self._sum(place)
            self._ended.append(intact)

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

    def _parts(self, place: int) -> Iterator[tuple[np.ndarray, np.ndarray, bool]]:
        """Each pool, the cell of it that the place has, and whether its array has a window."""
        parts = np.split(self._memory[place], self._ends[:-1])
        for pool, part, windowed in zip(self._pools, parts, self._windowed, strict=True):
            yield pool, part.reshape(pool[:, 0].shape), windowed
