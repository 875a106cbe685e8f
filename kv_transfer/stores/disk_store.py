"""Cells of a cache in a file on a local disk: a `CellStore` behind a small `HostStore`.

    save:  cell ────▶ slot of the staging store, which makes the checksum ──▶ place in the file
    load:  place in the file ──▶ slot, with the checksum of its save ──▶ cell, if the bytes have it

Threads read and write the file, so the caller never waits for the disk. A write that fails, for example
because the disk is full, ends its save. A read that fails ends its load as a wrong checksum does. No content
of an earlier process is ever read, since the file has no name.
"""

import os
import shutil
import tempfile
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from baton.kv_transfer.stores import CacheCells, CellStore, Pair
from baton.kv_transfer.stores.host_store import open_host_store

STAGING_BYTES = 256 << 20
"""Memory of the host for cells on their way."""
THREADS = 4


@dataclass(slots=True, eq=False)
class _Copy:
    cell: int
    place: int
    slot: int
    is_load: bool
    window_cell: int
    io: Future[bool] | None = None
    """Whether the file was read or written."""
    intact: bool | None = None
    """Whether the copy came to its end with the right bytes. None: it is not over."""


class DiskStore(CellStore):
    """Owns the file and the staging store."""

    def __init__(self, cells: CacheCells, num_places: int, directory: str) -> None:
        """Raises `OSError` if the directory takes no file, or has too little space, and `MemoryError` if the
        host has too little memory."""
        self._size = cells.cell_bytes
        self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
        if (free := shutil.disk_usage(directory).free) < num_places * self._size:
            self._file.close()
            raise OSError(f"{num_places * self._size} bytes are wanted, {free} are free")
        slots = min(num_places, max(1, STAGING_BYTES // self._size))
        self._staging = open_host_store(cells, slots)
        self._staging.have_all()
        self.batch = max(1, min(self._staging.batch, slots // 2))
        self.num_places = self.ready = num_places
        self._sums: list[int | None] = [None] * num_places
        self._free = list(range(slots))
        self._under_way: deque[_Copy] = deque()  # in the order of the caller
        self._reading: list[_Copy] = []
        self._staged: deque[_Copy] = deque()  # at the staging store, in its order
        self._threads = ThreadPoolExecutor(THREADS, "disk tier")

    @property
    def room(self) -> int:
        return min(len(self._free), self._staging.room) // self.batch * self.batch

    def copy(self, pairs: Sequence[Pair], *, is_load: bool, window_cells: Sequence[int]) -> None:
        copies = [
            _Copy(cell, place, self._free.pop(), is_load, window_cell)
            for (cell, place), window_cell in zip(pairs, window_cells, strict=True)
        ]
        self._under_way += copies
        if not is_load:
            self._stage(copies)
            return
        for copy in copies:
            copy.io = self._threads.submit(self._move, copy)
            self._reading.append(copy)

    def ended(self) -> list[bool]:
        for intact in self._staging.ended():
            copy = self._staged.popleft()
            if copy.is_load:
                copy.intact = intact
            else:
                self._sums[copy.place] = self._staging.sums[copy.slot]
                copy.io = self._threads.submit(self._move, copy)
        read = [copy for copy in self._reading if copy.io is not None and copy.io.done()]
        self._stage(read[: self._staging.room])
        ended: list[bool] = []
        while self._under_way:
            copy = self._under_way[0]
            if not copy.is_load and copy.io is not None and copy.io.done():
                copy.intact = copy.io.result()
            if copy.intact is None:
                break
            ended.append(copy.intact)
            self._free.append(copy.slot)
            self._under_way.popleft()
        return ended

    def close(self) -> None:
        self._threads.shutdown()
        self._staging.close()
        self._file.close()

    def _stage(self, copies: Sequence[_Copy]) -> None:
        """Starts copies between cells and their slots, all in one direction."""
        if not copies:
            return
        self._staged += copies
        is_load = copies[0].is_load
        for copy in copies if is_load else ():
            self._reading.remove(copy)
            is_read = copy.io is not None and copy.io.result()
            self._staging.sums[copy.slot] = self._sums[copy.place] if is_read else None
        pairs, cells = [(copy.cell, copy.slot) for copy in copies], [copy.window_cell for copy in copies]
        self._staging.copy(pairs, is_load=is_load, window_cells=cells)

    def _move(self, copy: _Copy) -> bool:
        """Reads or writes the file, in a thread."""
        file, at = self._file.fileno(), copy.place * self._size
        try:
            memory = self._staging.memory(copy.slot)
            moved = os.preadv(file, [memory], at) if copy.is_load else os.pwrite(file, memory, at)
        except OSError:
            return False
        return moved == self._size
