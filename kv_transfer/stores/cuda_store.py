"""Cells of a cache on a GPU in pinned memory of the host. Imported on GPUs only: it needs Triton."""

import logging
import mmap
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from baton.kv_transfer.device import copy_kernels
from baton.kv_transfer.device.copy_kernels import Pages
from baton.kv_transfer.device.pool import Window
from baton.kv_transfer.device.tables import Table, pin, unpin
from baton.kv_transfer.stores import CacheCells, HostStore, Pair

log = logging.getLogger(__name__)

STAGING_BYTES = 64 << 20
"""Memory on the device through which cells go, so many at once. The bus takes 1.2 ms for it."""
MOST_LINES = 1 << 15
"""Cells × layers of one launch: a grid has 65,535 places there."""
BATCHES = 16
"""Batches under way at most."""
PINNED_BYTES = 64 << 20
"""Pinned with one call, which takes 10 ms. Launches may wait for it."""
AHEAD_BYTES = 1 << 30
"""Pinned before it is needed. KV comes more slowly than memory is pinned, 6 GiB/s."""


class _PlaneLines(NamedTuple):
    """Lines of one plane, whose layers are alike."""

    pages: Pages
    most: tuple[int, int]
    """Positions and heads of a cell."""
    windowed: bool
    lines: np.ndarray
    """[layers, fields]."""


class CellLines:
    """Lines of the table of `copy_kernels.launch`, for whole cells and all layers that have them."""

    def __init__(self, cells: CacheCells) -> None:
        self._planes = cells.planes  # keeps the pools alive
        self._of_planes: list[_PlaneLines] = []
        at = 0
        for plane, windowed in zip(self._planes, cells.windowed, strict=True):
            first = next(iter(plane.values()))
            positions, heads = first.shape[2:4]
            cell, pages = Window(0, positions, 0, heads, 0, 0, positions, heads), Pages.of(first)
            lines: list[list[int]] = []
            for pool in plane.values():
                lines.append(pages.line(pool.data_ptr(), 0, at, cell, 0, at // 4))
                at += pool[:, 0].nbytes
            of_plane = _PlaneLines(pages, (positions, heads), windowed, np.array(lines, dtype=np.int64))
            self._of_planes.append(of_plane)
        self.cell_bytes = at
        self.most_layers = max(len(plane.lines) for plane in self._of_planes)
        """Of a plane. They differ: few layers of a model may have no window, or an index."""

    def words(self, cells: int) -> int:
        """Size of `fill`'s table for so many cells: their numbers, their checksums, their numbers in arrays
        with windows, and the lines by plane."""
        return 3 * cells + cells * sum(plane.lines.size for plane in self._of_planes)

    def fill(
        self,
        words: np.ndarray,
        address: int,
        cells: Sequence[int],
        window_cells: Sequence[int],
        dense: int,
        stride: int,
    ) -> None:
        """Writes the table for these cells, which the device will have at `address`. In dense memory at
        `dense` a cell begins every `stride` bytes."""
        count = len(cells)
        words[:count] = cells
        words[count : 2 * count] = 0
        words[2 * count : 3 * count] = window_cells
        number = np.arange(count)[:, None]
        for plane, where in self._tables(count):
            table = words[where].reshape(count, -1, copy_kernels.FIELDS)
            table[:] = plane.lines
            table[..., 1] = address + 16 * count * plane.windowed
            table[..., 2] += dense + stride * number
            table[..., 3] = plane.pages.block_size * number
            table[..., 8] = address + 8 * (count + number)

    def launch(self, words: torch.Tensor, count: int, *, into_pool: bool) -> None:
        """Copies the cells of a table that is on the device, and adds up their checksums there."""
        for plane, where in self._tables(count):
            table = words[where].view(-1, copy_kernels.FIELDS)
            copy_kernels.launch(table, plane.pages, plane.most, into_pool=into_pool)

    def _tables(self, count: int) -> Iterator[tuple[_PlaneLines, slice]]:
        """Each plane, and where the table of so many cells has its lines."""
        end = 3 * count
        for plane in self._of_planes:
            start, end = end, end + count * plane.lines.size
            yield plane, slice(start, end)

    def close(self) -> None:
        self._planes.clear()


@dataclass(slots=True, eq=False)
class _Batch:
    """Cells that are copied together."""

    table: Table  # as `CellLines.fill` makes it
    over: torch.cuda.Event
    places: list[int] = field(default_factory=list)
    is_load: bool = False


def _huge_pages(size: int) -> mmap.mmap:
    """Memory of the host, in huge pages where the system has them: the driver pins small pages one by one,
    and a process that is killed ends only when each of them is free, after 0.2 s for 1 GiB. Raises
    MemoryError."""
    try:
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_DONTFORK)  # a child would get pages that the device does not use
    except OSError as error:
        raise MemoryError(str(error)) from error
    with suppress(OSError):  # a kernel that was built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class CudaStore(HostStore):
    """Copies on a side stream: a kernel between the pool and dense memory on the device, and one copy a cell
    between that and its place. The kernel adds up the checksums.

    Memory is taken from the host and pinned when it is needed, in parts, by a thread. A caller that does not
    ask for places with `expect` waits for them in `have_all`."""

    def __init__(self, cells: CacheCells, num_places: int) -> None:
        self._device = torch.device(cells.kv.device)
        self._lines = CellLines(cells)
        size = self._lines.cell_bytes
        self._stride = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self.batch = max(1, min(STAGING_BYTES // self._stride, MOST_LINES // self._lines.most_layers))
        self._map = _huge_pages(num_places * self._stride)
        self._memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self.num_places, self.ready = num_places, 0
        # No copy goes beyond what one call pins.
        self._parts = self._memory.split(max(1, PINNED_BYTES // self._stride) * self._stride)
        self._pinned = 0  # of these
        self._wanted = 0  # places
        self._wake, self._closed = threading.Event(), False
        self._pinning = threading.Thread(target=self._pin_when_told, name="pin memory", daemon=True)
        self.sums: list[int | None] = [None] * num_places
        self._stream = torch.cuda.Stream(self._device, priority=-1)
        self._staging = torch.empty(self.batch * self._stride, dtype=torch.uint8, device=self._device)
        words = self._lines.words(self.batch)
        self._spare = [_Batch(Table.of_size(words, self._device), torch.cuda.Event()) for _ in range(BATCHES)]
        self._under_way: deque[_Batch] = deque()
        self._pin_next()
        # Compiles the kernels: cell 0, there and back.
        for is_load in (False, True):
            self.copy([(0, 0)], is_load=is_load, window_cells=[0])
        self._stream.synchronize()
        self.ended()

    def expect(self, places: int) -> None:
        wanted = min(self.num_places, places + max(1, AHEAD_BYTES // self._stride))
        if wanted > max(self._wanted, self.ready):
            self._wanted = wanted
            if self._pinning.ident is None:
                self._pinning.start()
            self._wake.set()

    def have_all(self) -> None:
        while self._pin_next():
            pass

    def _pin_when_told(self) -> None:
        torch.cuda.set_device(self._device)  # of this thread
        while True:
            self._wake.wait()
            self._wake.clear()
            while not self._closed and self.ready < self._wanted and self._pin_next():
                pass
            if self._closed:
                return

    def _pin_next(self) -> bool:
        """Pins the next part. False: it cannot be had, nor any after it."""
        if self.ready >= self.num_places:
            return False
        part = self._parts[self._pinned]
        part.zero_()  # takes its pages from the system, for which the driver would block launches
        try:
            pin(part)
        except RuntimeError as error:
            log.warning("--host-cache-size: %d of %d bytes are used: %s", self.ready * self._stride,
                        len(self._map), error)  # fmt: skip
            self.num_places = self.ready
            return False
        self._pinned += 1
        self.ready = min(self.num_places, self._pinned * len(self._parts[0]) // self._stride)
        return True

    @property
    def room(self) -> int:
        return len(self._spare) * self.batch

    def copy(self, pairs: Sequence[Pair], *, is_load: bool, window_cells: Sequence[int]) -> None:
        with torch.cuda.stream(self._stream):
            for first in range(0, len(pairs), self.batch):
                some = slice(first, first + self.batch)
                self._start_batch(pairs[some], window_cells[some], is_load=is_load)

    def _start_batch(self, pairs: Sequence[Pair], window_cells: Sequence[int], *, is_load: bool) -> None:
        count, size = len(pairs), self._lines.cell_bytes
        batch = self._spare.pop()
        batch.places, batch.is_load = [place for _, place in pairs], is_load
        used, table, cells = self._lines.words(count), batch.table, [cell for cell, _ in pairs]
        address, dense = table.on_device.data_ptr(), self._staging.data_ptr()
        self._lines.fill(table.words[:used], address, cells, window_cells, dense, self._stride)
        # By torch, which gives this thread the context of the device if it has none yet.
        table.on_device[:used].copy_(table.pinned[:used], non_blocking=True)
        staged = [self._staging[i * self._stride : i * self._stride + size] for i in range(count)]
        places = [self._memory[p * self._stride : p * self._stride + size] for p in batch.places]
        if is_load:
            for dense, place in zip(staged, places, strict=True):
                dense.copy_(place, non_blocking=True)
        self._lines.launch(table.on_device[:used], count, into_pool=is_load)
        if not is_load:
            for dense, place in zip(staged, places, strict=True):
                place.copy_(dense, non_blocking=True)
        table.pinned[: 2 * count].copy_(table.on_device[: 2 * count], non_blocking=True)
        batch.over.record(self._stream)
        self._under_way.append(batch)

    def ended(self) -> list[bool]:
        intact: list[bool] = []
        while self._under_way and self._under_way[0].over.query():
            batch = self._under_way.popleft()
            count = len(batch.places)
            sums = batch.table.words[count : 2 * count].tolist()
            for place, checksum in zip(batch.places, sums, strict=True):
                if batch.is_load:
                    intact.append(checksum == self.sums[place])
                else:
                    self.sums[place] = checksum
                    intact.append(True)
            self._spare.append(batch)
        return intact

    def memory(self, place: int) -> memoryview:
        return self._memory[place * self._stride :][: self._lines.cell_bytes].numpy().data

    def close(self) -> None:
        self._closed = True
        if self._pinning.ident is not None:
            self._wake.set()
            self._pinning.join()
        self._stream.synchronize()
        for part in self._parts[: self._pinned]:
            unpin(part)
        self._lines.close()
