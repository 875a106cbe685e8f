"""A table in shared memory: the workers that have a chunk, for all router processes of a host.

One process writes, and all read without locks. Each change becomes visible by the store of one word. A reader
may see a part of a change, or a place that was just given back. Then it misses a worker, or sees one that had
the chunk before. That costs a little time and never a wrong token, since workers look into their own cache.

    heads, one for each table ─▶ slots of the table: chunk, value ─▶ some rows, or a record: a set of rows

Chunks are spread over tables, and a table that is full is copied into a larger one. Their limits differ, so
they are not full at the same time. A slot keeps its chunk until then, also without workers.
"""

import fcntl
import mmap
import os
from collections.abc import Iterable

import numpy as np

from baton.content import Tier
from baton.router.policy.host_rows import MAX_ROWS, HostRows

_WORD, _ROW_BITS = 8, 64
_TABLES, _SHIFT = 1 << 8, 64 - 8
_FIRST_SLOTS_LOG2 = 4
_LEAST_FULL = 0.4
"""A table is full at this share of its slots, up to twice as many."""
_PAGE = mmap.PAGESIZE

# Places of words. The memory is as large as it may ever get; untouched pages take none.
_VERSION, _CHUNKS, _WIDTH_LOG2, _OFFLOADED = range(4)
_HEADS = 512
_SLOTS = _HEADS + 512
_SLOTS_END = _SLOTS + (1 << 30)
_RECORDS_OF_WIDTH = 1 << 27
_WIDTHS = (MAX_ROWS // _ROW_BITS).bit_length()
_END = _SLOTS_END + _WIDTHS * _RECORDS_OF_WIDTH

# A value: the number of its rows, or that it has a record; whether the shared store has the chunk; then, in
# fields of 16 bits, each row and its tier, or the number of the record.
_COUNT, _MOST, _RECORD, _STORED = 0b111, 3, 4, 8
_FIELD, _ROW, _TIER = 16, MAX_ROWS - 1, 14
_ZERO = (1 << 64) - 1
"""Stands for the chunk 0, since a slot with 0 is empty."""
_HEAD = 8  # bits of a head with the logarithm of the number of slots; the others are the first place

_WRITER_LOCK = 1  # a byte of the file; `HostRows` locks another one


def _field(value: int, row: int) -> int:
    """The place of a row in a value without a record; 0 if it is not there."""
    for place in range(_FIELD, _FIELD * (value & _COUNT) + 1, _FIELD):
        if value >> place & _ROW == row:
            return place
    return 0


def _without(value: int, place: int) -> int:
    """The value without the row in this place."""
    later = value >> place + _FIELD << place
    return later | value & (1 << place) - 1 & ~_COUNT | (value & _COUNT) - 1


class ChunkTable:
    """The memory, and what its writer keeps for itself.

    Attributes:
        rows: of the workers, behind the chunks in the memory.
    """

    def __init__(self, fd: int | None = None, processes: int = 1, number: int = 0) -> None:
        """`fd`: of the memory that the supervisor made. None: there is only this process, which writes."""
        self._fd = fd
        own = os.memfd_create("baton chunks") if fd is None else fd
        os.ftruncate(own, _END * _WORD + HostRows.size(processes))
        self._memory = mmap.mmap(own, _END * _WORD)
        self.rows = HostRows(own, _END * _WORD, processes, number, alone=fd is None)
        if fd is None:
            os.close(own)
        self._words = memoryview(self._memory).cast("Q")
        self._array = np.frombuffer(self._memory, np.uint64)
        self._used = [0] * _TABLES  # slots with a chunk
        self._limits = [0] * _TABLES  # of these; then the table is copied
        self._free: dict[int, list[int]] = {}  # log2 of slots → places
        self._end = _SLOTS
        self._free_records: list[int] = []
        self._records = 0

    def may_write(self) -> bool:
        """Whether this process is the one that writes, from now to its end. A new writer finds no chunks."""
        if self._fd is not None:
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _WRITER_LOCK)
            except (BlockingIOError, PermissionError):  # another process has it
                return False
        self._array[_HEADS : _HEADS + _TABLES] = 0
        self._words[_CHUNKS] = self._words[_WIDTH_LOG2] = self._words[_OFFLOADED] = 0
        self._remove(_SLOTS, _END)
        self.changed()
        return True

    # ------------------------------------------------------------ reading

    def __len__(self) -> int:
        """The number of chunks that a worker has."""
        return self._words[_CHUNKS]

    @property
    def version(self) -> int:
        return self._words[_VERSION]

    @property
    def has_offloaded(self) -> bool:
        """Whether a worker ever had a chunk below its device."""
        return bool(self._words[_OFFLOADED])

    def value(self, chunk: int) -> int:
        """The value of a chunk, for `has` and `tier`. 0: nothing is known of it."""
        at = self._find(chunk)
        return self._words[at] if at else 0

    def holders(self, chunks: Iterable[int]) -> list[tuple[int, int, int]]:
        """Returns the workers that have each chunk, as a set of bits, and whether the store has it.

        Before both is the number of the first chunk for which they hold: most chunks of a prompt have the
        same workers as the one before. The last entry is the first chunk without a slot, or the end. Written
        for speed: each choice of a worker reads it."""
        words, found, before, stored, number = self._words, [], None, 0, -1
        for number, chunk in enumerate(chunks):
            chunk = chunk or _ZERO
            if not (head := words[_HEADS + (chunk >> _SHIFT)]):
                break
            at = (head >> _HEAD) + (chunk << 1 & (2 << (head & 0xFF)) - 2)
            if words[at] != chunk and (at := self._find(chunk) - 1) < 0:
                break
            value = words[at + 1]
            there = self._row_bytes(value) if value & _COUNT == _RECORD else value
            if there != before or value & _STORED != stored:
                before, stored = there, value & _STORED
                found.append((number, self._rows(value), stored))
        else:
            number += 1
        found.append((number, 0, 0))
        return found

    def _rows(self, value: int) -> int:
        if value & _COUNT == _RECORD:
            return int.from_bytes(self._row_bytes(value), "little")
        rows = 0
        for _ in range(value & _COUNT):
            value >>= _FIELD
            rows |= 1 << (value & _ROW)
        return rows

    def _row_bytes(self, value: int) -> bytes:
        width_log2 = self._words[_WIDTH_LOG2]
        size = _WORD << width_log2
        first = _WORD * (_SLOTS_END + width_log2 * _RECORDS_OF_WIDTH) + 3 * size * (value >> _FIELD)
        return self._memory[first : first + size]

    def is_stored(self, value: int) -> bool:
        """Whether the store that workers share has the chunk."""
        return bool(value & _STORED)

    def has(self, value: int, row: int) -> bool:
        """Whether a worker has the chunk."""
        if value & _COUNT != _RECORD:
            return bool(_field(value, row))
        first, width = self._record(value)
        word = row // _ROW_BITS
        return word < width and bool(self._words[first + word] >> row % _ROW_BITS & 1)

    def tier(self, value: int, row: int) -> Tier:
        """The fastest tier in which this worker has the chunk."""
        if value & _COUNT != _RECORD:
            return Tier(value >> _field(value, row) + _TIER & 0b11)
        (first, width), (word, bit) = self._record(value), divmod(row, _ROW_BITS)
        below = (t for t in (Tier.HOST, Tier.DISK) if self._words[first + t * width + word] >> bit & 1)
        return next(below, Tier.DEVICE)

    def _find(self, chunk: int) -> int:
        """The place of the value of a chunk; 0 if it has no slot."""
        chunk, words = chunk or _ZERO, self._words
        head = words[_HEADS + (chunk >> _SHIFT)]
        if head:
            first, mask = head >> _HEAD, (1 << (head & 0xFF)) - 1
            step = chunk & mask
            for _ in range(mask):  # a table is never full, but another process may change it meanwhile
                found = words[first + 2 * step]
                if found == chunk:
                    return first + 2 * step + 1
                if not found:
                    break
                step = step + 1 & mask
        return 0

    def _record(self, value: int) -> tuple[int, int]:
        """The first word of a record, and the words of each of its sets: rows, on hosts, on disks."""
        width_log2 = self._words[_WIDTH_LOG2]
        width = 1 << width_log2
        return _SLOTS_END + width_log2 * _RECORDS_OF_WIDTH + 3 * width * (value >> _FIELD), width

    # ------------------------------------------------------------ writing

    def changed(self) -> None:
        """Others look at their chunks again."""
        self._words[_VERSION] += 1

    def add(self, row: int, chunks: Iterable[int]) -> int:
        """Returns how many of the chunks the worker did not have. Written for speed."""
        words, used, limits, own = self._words, self._used, self._limits, 1 | row << _FIELD
        added = alone = 0
        for chunk in chunks:
            chunk = chunk or _ZERO
            table = chunk >> _SHIFT
            while True:
                if head := words[_HEADS + table]:
                    first, mask = head >> _HEAD, (2 << (head & 0xFF)) - 2
                    step = chunk << 1 & mask
                    while (found := words[first + step]) and found != chunk:
                        step = step + 2 & mask
                    if found or used[table] < limits[table]:
                        break
                self._copy(table, head)
            at = first + step + 1
            value = words[at] if found else 0
            if not found:
                words[at - 1] = chunk
                used[table] += 1
            if not value & _COUNT:
                words[at] = value | own
                alone += 1
            else:
                added += self._add_beside(at, value, row)
        words[_CHUNKS] += alone
        return added + alone

    def _add_beside(self, at: int, value: int, row: int) -> bool:
        """A worker has the chunk, or had it. Returns False if it is this one."""
        if self.has(value, row):
            return False
        count = value & _COUNT
        if count < _MOST:
            self._words[at] = value + 1 | row << _FIELD * (count + 1)
            return True
        if count == _MOST:
            rows = [value >> _FIELD * i & _ROW for i in range(1, _MOST + 1)]
            record = self._new_record(max(row, *rows))
            for other in rows:
                self._put(record, other, self.tier(value, other))
            self._words[at] = value & _STORED | record
            value = record
        else:
            self._words[_CHUNKS] += not self._rows(value)
            self._widen(row)
        self._put(value, row, Tier.DEVICE)
        return True

    def place(self, row: int, chunk: int, tier: Tier) -> None:
        """The worker has the chunk in this tier now, if it has it at all."""
        if tier is not Tier.DEVICE:
            self._words[_OFFLOADED] = 1
        at = self._find(chunk)
        value = self._words[at] if at else 0
        if not self.has(value, row):
            return
        if value & _COUNT == _RECORD:
            self._put(value, row, tier)
        else:
            place = _field(value, row) + _TIER
            self._words[at] = value & ~(0b11 << place) | tier << place

    def discard(self, row: int, chunks: Iterable[int]) -> int:
        """Returns how many of the chunks the worker had."""
        words, removed = self._words, 0
        for chunk in chunks:
            at = self._find(chunk)
            value = words[at] if at else 0
            if not self.has(value, row):
                continue
            removed += 1
            if value & _COUNT != _RECORD:
                words[at] = left = _without(value, _field(value, row))
                words[_CHUNKS] -= not left & _COUNT
                continue
            self._put(value, row, None)
            if not self._rows(value):
                self._free_records.append(value >> _FIELD)
                words[at] = value & _STORED
                words[_CHUNKS] -= 1
        return removed

    def clear(self, row: int) -> None:
        """Removes all chunks of a worker: 5 ms for a million chunks of all workers."""
        array, removed = self._array, 0
        for head in filter(None, self._words[_HEADS : _HEADS + _TABLES].tolist()):
            values = array[(head >> _HEAD) + 1 : (head >> _HEAD) + (2 << (head & 0xFF)) : 2]
            for place in range(_FIELD, 64, _FIELD):
                count = values & np.uint64(_COUNT)
                there = (count < _RECORD) & (count * np.uint64(_FIELD) >= place)
                mine = there & (values >> np.uint64(place) & np.uint64(_ROW) == row)
                if mine.any():
                    values[mine] = left = np.array(
                        [_without(v, place) for v in values[mine].tolist()], np.uint64
                    )
                    removed += int((left & np.uint64(_COUNT) == 0).sum())
        (first, width), (word, bit) = self._record(0), divmod(row, _ROW_BITS)
        if word < width:
            records = array[first : first + 3 * width * self._records].reshape(-1, 3, width)
            mine = records[:, 0, word] >> np.uint64(bit) & np.uint64(1) == 1
            records[:, :, word] &= np.uint64(~(1 << bit) & (1 << 64) - 1)
            removed += int((mine & ~records[:, 0].any(axis=1)).sum())
        self._words[_CHUNKS] -= removed

    def store(self, chunk: int, *, stored: bool) -> None:
        """The store that workers share has the chunk, or has it no more."""
        if stored and not self._find(chunk):
            self.add(0, [chunk])
            self.discard(0, [chunk])  # its slot stays
        if at := self._find(chunk):
            self._words[at] = self._words[at] & ~_STORED | stored * _STORED

    def _put(self, value: int, row: int, tier: Tier | None) -> None:
        """Changes the record of this value. None: the worker has the chunk no more."""
        (first, width), (word, bit) = self._record(value), divmod(row, _ROW_BITS)
        there = tier is not None, tier is Tier.HOST, tier is Tier.DISK
        for at, is_there in zip(range(first + word, first + 3 * width, width), there, strict=True):
            self._words[at] = self._words[at] & ~(1 << bit) | is_there << bit

    def _new_record(self, row: int) -> int:
        """Returns a value with an empty record that has place for this row."""
        self._widen(row)
        if self._free_records:
            return self._free_records.pop() << _FIELD | _RECORD
        self._records += 1
        if 3 * self._record(0)[1] * self._records > _RECORDS_OF_WIDTH:
            raise MemoryError("the index of cached chunks is full")
        return self._records - 1 << _FIELD | _RECORD

    def _widen(self, row: int) -> None:
        """Copies the records into wider ones, until the row has a place."""
        while row >= _ROW_BITS << self._words[_WIDTH_LOG2]:
            (first, width), area = self._record(0), self._records * 3
            old = self._array[first : first + width * area].reshape(area, width)
            then = first + _RECORDS_OF_WIDTH
            self._array[then : then + 2 * width * area].reshape(area, 2 * width)[:, :width] = old
            self._words[_WIDTH_LOG2] += 1
            self._remove(first, first + width * area)

    def _copy(self, table: int, head: int) -> None:
        """Copies the chunks that workers or the store have, with place for more."""
        live: list[tuple[int, int]] = []
        full = _LEAST_FULL * 2 ** (table / _TABLES)
        size_log2 = head & 0xFF if head else _FIRST_SLOTS_LOG2
        if head:
            old = self._words[head >> _HEAD : (head >> _HEAD) + (2 << size_log2)].tolist()
            for chunk, value in zip(old[::2], old[1::2], strict=True):
                if value & _COUNT == _RECORD and not self._rows(value):
                    self._free_records.append(value >> _FIELD)
                    value &= _STORED
                if value:
                    live.append((chunk, value))
            size_log2 += len(live) > full / 2 * (1 << size_log2)
        size = 1 << size_log2
        slots = [0] * (2 * size)
        for chunk, value in live:
            step = chunk
            while slots[at := 2 * (step & size - 1)]:
                step += 1
            slots[at], slots[at + 1] = chunk, value
        first = self._allocate(size_log2)
        self._array[first : first + 2 * size] = np.array(slots, np.uint64)
        self._words[_HEADS + table] = first << _HEAD | size_log2
        self._used[table], self._limits[table] = len(live), int(full * size)
        if head:
            self._free.setdefault(head & 0xFF, []).append(head >> _HEAD)
            self._remove(head >> _HEAD, (head >> _HEAD) + (2 << (head & 0xFF)))

    def _allocate(self, size_log2: int) -> int:
        if free := self._free.get(size_log2):
            return free.pop()
        words = 2 << size_log2
        first = -(-self._end // words) * words
        self._end = first + words
        if self._end > _SLOTS_END:
            raise MemoryError("the index of cached chunks is full")
        return first

    def _remove(self, first: int, end: int) -> None:
        """Gives memory back: whole pages of it. Nothing else is there."""
        begin, stop = -(-first * _WORD // _PAGE) * _PAGE, end * _WORD // _PAGE * _PAGE
        if begin < stop:
            self._memory.madvise(mmap.MADV_REMOVE, begin, stop - begin)
