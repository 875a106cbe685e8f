"""Memory that the router processes of a host share: the row of each worker, and its last report.

A worker has the same row in all processes. Each process marks the rows of the workers that it is attached to.
A row without marks is free.

One process gets the reports of all workers and writes them here. The others read without locks. A report that
is just being written does not fit its checksum yet, and is read later.
"""

import asyncio
import fcntl
import mmap
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import numpy as np
import xxhash

from baton.rpc import worker_pb2 as pb

MAX_ROWS = 1 << 14
_REPORT_BYTES = 1 << 16
_HEAD = struct.Struct("QQQ")
"""Of a report: its bytes, the incarnation of the worker, and a number that makes each report another one."""
_PLACES = mmap.PAGESIZE + 2 * 8 * MAX_ROWS
"""After the number of rows that were ever taken, their ids, and the checksums of their reports."""
_MARKS = _PLACES + MAX_ROWS * _REPORT_BYTES
LOOK = 0.01
"""Seconds between two looks at a lock that another process has."""


class HostRows:
    """As one process sees them."""

    def __init__(self, fd: int, offset: int, processes: int, number: int, *, alone: bool = False) -> None:
        """`fd`, `offset`: the memory, which is as long as `size` says. `alone`: no other process maps it."""
        self._fd, self._alone, self._number = fd, alone, number
        self._memory = mmap.mmap(fd, self.size(processes), offset=offset)
        self._top = np.frombuffer(self._memory, np.uint64, 1)
        ids_and_checks = np.frombuffer(self._memory, np.uint64, 2 * MAX_ROWS, offset=mmap.PAGESIZE)
        self._ids, self._checks = ids_and_checks.reshape(2, MAX_ROWS)
        self._marks = np.frombuffer(self._memory, np.bool_, offset=_MARKS).reshape(MAX_ROWS, processes)
        self._seen = np.zeros(MAX_ROWS, np.uint64)  # the checksums of the reports that this process has read
        self._written = 0

    @staticmethod
    def size(processes: int) -> int:
        return _MARKS + MAX_ROWS * processes

    @asynccontextmanager
    async def locked(self) -> AsyncIterator[None]:
        """No other process takes a row meanwhile. Nothing may be awaited in the context.

        Another process has the lock for microseconds. One that was stopped has it longer, and the event loop
        goes on."""
        while not self._lock():  # noqa: ASYNC110  another process gives it back
            await asyncio.sleep(LOOK)
        try:
            yield
        finally:
            if not self._alone:
                fcntl.lockf(self._fd, fcntl.LOCK_UN, 1)

    def _lock(self) -> bool:
        """False: another process has it."""
        if not self._alone:
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)  # the kernel frees it at a death
            except (BlockingIOError, PermissionError):
                return False
        return True

    def take(self, worker: str) -> int:
        """Returns the row that the worker has in all processes, or gives it a free one. For `locked`."""
        id = xxhash.xxh3_64_intdigest(worker.encode())
        top = int(self._top[0])
        marks = self._marks[:top]
        used, own = marks.any(axis=1), marks[:, self._number]
        same = np.flatnonzero((self._ids[:top] == id) & used & ~own)
        row = int(next(iter(same), next(iter(np.flatnonzero(~used)), top)))
        if row == MAX_ROWS:
            raise ValueError(f"a router knows at most {MAX_ROWS} workers at a time")
        self._ids[row], self._top[0], self._marks[row, self._number] = id, max(top, row + 1), True
        self._seen[row] = self._checks[row]  # the description has a newer one
        return row

    def leave(self, row: int) -> None:
        self._marks[row, self._number] = False

    def ended(self, number: int) -> None:
        """A process has ended. Called by the supervisor."""
        self._marks[:, number] = False

    def pass_on(self, row: int, incarnation: int, status: pb.WorkerStatus) -> None:
        """Writes a report for the other processes. One that is too long is left out: they ask for it."""
        if self._alone:
            return
        self._written += 1
        report = status.SerializeToString()
        data = _HEAD.pack(len(report), incarnation, self._written) + report
        if len(data) <= _REPORT_BYTES:
            first = _PLACES + row * _REPORT_BYTES
            self._memory[first : first + len(data)] = data
            self._checks[row] = xxhash.xxh3_64_intdigest(data)

    def reports(self) -> Iterator[tuple[int, int, pb.WorkerStatus]]:
        """What was written since the last call: the row and incarnation of the worker, and its report."""
        top = int(self._top[0])
        new = (self._checks[:top] != self._seen[:top]) & self._marks[:top, self._number]
        for row in np.flatnonzero(new).tolist():
            first, check = _PLACES + row * _REPORT_BYTES, int(self._checks[row])
            size, incarnation, _ = _HEAD.unpack_from(self._memory, first)
            data = self._memory[first : first + min(_HEAD.size + size, _REPORT_BYTES)]
            if xxhash.xxh3_64_intdigest(data) == check:
                self._seen[row] = check
                yield row, incarnation, pb.WorkerStatus.FromString(data[_HEAD.size :])
