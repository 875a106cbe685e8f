"""What API keys use, in memory that all router processes of a host share.

Each process writes only its own row of a key, and the use of a key is the sum of its rows. So no process
waits for another one, and a process that dies leaves nothing half done: the supervisor clears its row.

A process first adds a request and then looks at the sum. If two of them do that at the same time, each sees
the other, so the limit holds exactly. At worst both are refused.

The token bucket holds one minute. Its level follows from three numbers that each process may know: the time,
the tokens that were ever spent, and the highest value that `refilled - spent` ever had, at which the bucket
was full. That value only rises between two spends, so it is enough that a process notes it when it spends.
"""

import mmap
import os
from collections.abc import Iterable
from itertools import count

MAX_KEYS = 1 << 16
_REQUESTS, _SPENT, _FULL, _ROW = range(4)
_WORD = 8  # bytes


class KeyCounts:
    """The rows of all keys. Those of keys that are gone stay until the router ends."""

    def __init__(self, fd: int | None = None, processes: int = 1, number: int = 0) -> None:
        """`fd`: of the memory that the supervisor made. None: there is only this process."""
        size = MAX_KEYS * _WORD * (1 + processes * _ROW)
        if fd is not None:
            os.ftruncate(fd, size)
        memory = memoryview(mmap.mmap(-1 if fd is None else fd, size))  # untouched pages take no memory
        self._ids = memory[: MAX_KEYS * _WORD].cast("Q")  # 0: free
        self.cells = memory[MAX_KEYS * _WORD :].cast("d")
        self.processes, self.number = processes, number
        self._slots: dict[int, int] = {}  # by id

    def add(self, ids: Iterable[int]) -> None:
        """Gives each key with one of these ids, which are not 0, its rows.

        The supervisor does so before its processes do, so a process finds all of them and writes none. Raises
        ValueError for too many keys, and then adds none.
        """
        while (slot := len(self._slots)) < MAX_KEYS and self._ids[slot]:
            self._slots[self._ids[slot]] = slot
        new = set(ids) - self._slots.keys()
        if len(self._slots) + len(new) > MAX_KEYS:
            raise ValueError(f"more than {MAX_KEYS} API keys since the router started; restart it")
        for id in new:
            slot = self._slots[id] = len(self._slots)
            self._ids[slot] = id

    def of(self, id: int) -> "KeyUse":
        """Returns the rows of a key that was added."""
        return KeyUse(self, self._slots[id] * self.processes * _ROW)

    def ended(self, number: int) -> None:
        """A process has ended, and its requests with it. What they spent stays spent."""
        for slot in count():
            if slot == MAX_KEYS or not self._ids[slot]:
                return
            self.cells[(slot * self.processes + number) * _ROW + _REQUESTS] = 0


class KeyUse:
    """The use of one key by all processes."""

    def __init__(self, counts: KeyCounts, first: int) -> None:
        self._cells, self._rows = counts.cells, slice(first, first + counts.processes * _ROW)
        self._row = first + counts.number * _ROW

    @property
    def requests(self) -> int:
        return int(self._sum(_REQUESTS))

    def add_requests(self, number: int) -> None:
        self._cells[self._row + _REQUESTS] += number

    def left(self, refilled: float, size: float) -> float:
        """Tokens in the bucket. It may be below 0. `refilled`: tokens that ever flowed into a bucket without
        an end, so a clock in tokens."""
        level = refilled - self._sum(_SPENT)
        return size + level - max(level, *self._all(_FULL))

    def spend(self, tokens: float, refilled: float) -> None:
        """A negative number gives tokens back."""
        cells, row = self._cells, self._row
        cells[row + _FULL] = max(cells[row + _FULL], refilled - self._sum(_SPENT))
        cells[row + _SPENT] += tokens

    def _sum(self, field: int) -> float:
        return sum(self._all(field))

    def _all(self, field: int) -> "memoryview[float]":
        return self._cells[self._rows.start + field : self._rows.stop : _ROW]
