"""Records beside memory that outlives its engine (`engine.execution.kept_cache`): what a place of that memory
has. A place is a block, a window block or a copy of states. Pure.

    add ─▶ sum of the place, on a GPU after some steps ─▶ record (body, checksum of sum and body)
    ─▶ the pool gives the place out, to be written anew: it has no record once this is read
    the engine dies ─▶ the next one reads the records ─▶ verifies each checksum

Each place has room for one record, so the table is bounded. The length of a record is written last and erased
first. So a record that an engine left half written does not count, and nor does one of a place that was
written since. A place without a record is never used again as it is.
"""

import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import xxhash

from baton.engine.api.pools import Outcome, RecordMemory

_LENGTH = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<Q")
OVERHEAD = _LENGTH.size + _CHECKSUM.size
"""Bytes of a record beside its body."""
SUMMED_AT_ONCE = 256
"""Places whose records are verified together. A CPU sums some GB a second."""


class KeptTable:
    """The records of the places of one pool.

    Attributes:
        taken: places that the pool gave out since, in order. The table reads and empties it.
    """

    def __init__(self, memory: RecordMemory, size: int) -> None:
        """`size`: bytes of a record."""
        self._table, self._sums = memory
        self._size = size
        self.taken: list[int] = []
        self._recorded: set[int] = set()
        self._under_way: deque[tuple[Outcome, list[int], dict[int, bytes]]] = deque()
        """In order: sums, the places that are summed, and the bodies of those that get records."""
        self._batch_of: dict[int, dict[int, bytes]] = {}
        """By place, those under way."""

    def __contains__(self, place: int) -> bool:
        """Whether the place has a record, or will have one."""
        self._read()
        return place in self._recorded or place in self._batch_of

    def add(self, bodies: Iterable[tuple[int, bytes]]) -> None:
        """Gives records to these places, which do not change before they are taken. A body that is too long
        gets none."""
        self._read()
        batch = {place: body for place, body in bodies if OVERHEAD + len(body) <= self._size}
        for place in batch:
            self._remove(place)
        if batch:
            places = [*batch]
            self._under_way.append((self._sums(places), places, batch))
            self._batch_of.update(dict.fromkeys(places, batch))
            self.settle()

    def settle(self) -> None:
        """Writes the records of places whose sums have come, and ends those of places that were taken."""
        self._read()
        while self._under_way and self._under_way[0][0].passed():
            outcome, places, batch = self._under_way.popleft()
            for place, place_sum in zip(places, outcome.wait(), strict=True):
                if (body := batch.get(place)) is not None:
                    del self._batch_of[place]
                    self._write(place, body, place_sum)

    def _write(self, place: int, body: bytes, place_sum: int) -> None:
        at = place * self._size
        self._table[at + OVERHEAD : at + OVERHEAD + len(body)] = body
        checksum = xxhash.xxh3_64_intdigest(body, seed=place_sum)
        _CHECKSUM.pack_into(self._table, at + _LENGTH.size, checksum)
        _LENGTH.pack_into(self._table, at, len(body))
        self._recorded.add(place)

    def _read(self) -> None:
        for place in self.taken:
            self._remove(place)
        self.taken.clear()

    def _remove(self, place: int) -> None:
        """The place has no record any more, if it had one."""
        if (batch := self._batch_of.pop(place, None)) is not None:
            del batch[place]
        if place in self._recorded:
            self._recorded.remove(place)
            self._erase(place)

    def _erase(self, place: int) -> None:
        _LENGTH.pack_into(self._table, place * self._size, 0)

    def clear(self) -> None:
        for place in [*self._recorded, *self._batch_of]:
            self._remove(place)

    def left(self, tick: Callable[[], None]) -> Iterator[tuple[int, bytes]]:
        """Yields the places that an engine before this one has left and that are still as it recorded them,
        with the bodies. Erases all other records. `tick`: a sign of life, for each `SUMMED_AT_ONCE`."""
        places = range(len(self._table) // self._size)
        bodies = {place: body for place in places if (body := self._body(place)) is not None}
        recorded, sums = [*bodies], dict[int, int]()
        for first in range(0, len(recorded), SUMMED_AT_ONCE):
            tick()
            batch = recorded[first : first + SUMMED_AT_ONCE]
            sums.update(zip(batch, self._sums(batch).wait(), strict=True))
        for place in places:
            if place in bodies and self._checksum(place) == xxhash.xxh3_64_intdigest(
                bodies[place], seed=sums[place]
            ):
                self._recorded.add(place)
                yield place, bodies[place]
            else:
                self._erase(place)

    def _body(self, place: int) -> bytes | None:
        at = place * self._size
        (length,) = _LENGTH.unpack_from(self._table, at)
        if not 0 < length <= self._size - OVERHEAD:
            return None
        return bytes(self._table[at + OVERHEAD : at + OVERHEAD + length])

    def _checksum(self, place: int) -> int:
        return _CHECKSUM.unpack_from(self._table, place * self._size + _LENGTH.size)[0]
