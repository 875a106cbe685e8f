"""An index from chunk to the workers that have the chunk in their prefix cache.

A chunk is 64 tokens, known by the first 64 bits of its name (`content`). A worker counts as having a chunk
after it reports it. It also counts while a prompt with the chunk, which this router sent, waits for its first
token: the next request with the same prefix may come before the report. When the attempt ends, only the
report counts.

A worker may have a million chunks, and the event loop must not wait until all of them are removed. So `clear`
and `forget` only set them aside. From then on they do not count, and `drop_stale` removes them in parts.
A table that is full is copied at once into a larger one: 20 to 45 ms for half a million chunks. So chunks are
spread over 16 tables. Their shares differ by up to a factor of two, so they are not full at the same time.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TypeVar

from baton.content import CHUNK_TOKENS, Tier
from baton.rpc import worker_pb2 as pb

T = TypeVar("T")

MAX_LEVELS = 8
MOST_STORED = 1 << 20
"""Chunks that are known to be in the store that workers share. One more replaces the oldest."""
_TABLES = 16
_FIRSTS = [sum(range(_TABLES, _TABLES + table)) for table in range(_TABLES)]
"""Of each table, the first of its places. The next table has a place more."""
_PLACES = sum(range(_TABLES, 2 * _TABLES))


def _spread(make: Callable[[], T]) -> list[T]:
    """Makes the tables. Returns the table at each place. That of a chunk is at the place chunk % _PLACES."""
    return [table for places in range(_TABLES, 2 * _TABLES) for table in [make()] * places]


def _tables(at_place: list[T]) -> list[T]:
    return [at_place[first] for first in _FIRSTS]


class Overlap:
    """The cached tokens of one prompt at each worker: whole blocks, and never the last position."""

    __slots__ = ("_levels",)

    def __init__(self, levels: list[tuple[int, int]]) -> None:
        """`levels`: (tokens, set of rows with at least so many cached), in ascending order."""
        self._levels = levels

    @property
    def most(self) -> int:
        """The most cached tokens at any worker."""
        return self._levels[-1][0] if self._levels else 0

    def of(self, row: int) -> int:
        """Cached tokens at one worker."""
        for tokens, rows in reversed(self._levels):
            if rows >> row & 1:
                return tokens
        return 0

    def holders(self) -> list[int]:
        """The rows with the most cached tokens; empty if nothing is cached."""
        return _rows(self._levels[-1][1]) if self._levels else []

    def levels(self) -> Iterator[tuple[int, list[int]]]:
        """Numbers of cached tokens, the most first, each with the rows that have at least so many."""
        return ((tokens, _rows(rows)) for tokens, rows in reversed(self._levels))


def _rows(left: int) -> list[int]:
    rows = []
    while left:
        last = left & -left
        rows.append(last.bit_length() - 1)
        left ^= last
    return rows


_Aside = set[int] | dict[int, Tier] | dict[int, int]


class ChunkIndex:
    """Workers are rows. A set of rows is an int: the intersection of sets of 1,000 rows takes 50 ns."""

    def __init__(self) -> None:
        self._holders = _spread(dict[int, int])  # chunk → rows that have it; no empty sets
        self._bits: list[int] = []  # row → its bit: one shared object for all chunks that only this row has
        self._reported: list[list[set[int]]] = []
        self._offloaded: list[list[dict[int, Tier]]] = []  # row → reported chunk → its tier below the device
        self._expected: list[dict[int, int]] = []  # row → chunk → prompts that will cache it
        self._stored: dict[int, None] = {}  # in the store that workers share: it outlives them
        self._aside: dict[int, list[_Aside]] = {}  # row → cleared, but still in `_holders`
        self._unsure = 0  # the rows of `_aside`: a bit in `_holders` may be stale

    def __len__(self) -> int:
        """The number of chunks, stale ones included."""
        return sum(map(len, _tables(self._holders)))

    @property
    def has_stale(self) -> bool:
        """Whether `drop_stale` has something to remove."""
        return bool(self._aside)

    def grow(self, rows: int) -> None:
        for row in range(len(self._bits), rows):
            self._bits.append(1 << row)
            self._reported.append(_spread(set[int]))
            self._offloaded.append(_spread(dict[int, Tier]))
            self._expected.append({})

    def has_reported(self, row: int, chunk: int) -> bool:
        return chunk in self._reported[row][chunk % _PLACES]

    def reported(self, row: int) -> int:
        """Number of chunks that the worker reported."""
        return sum(map(len, _tables(self._reported[row])))

    def apply(self, row: int, events: pb.CacheEvents) -> None:
        """Applies a report of the worker."""
        if events.reset:
            self.clear(row)
        self.discard(row, events.evicted)
        self.add(row, events.added)
        of_tiers = (Tier.DEVICE, events.device), (Tier.HOST, events.host), (Tier.DISK, events.disk)
        for tier, chunks in of_tiers:
            self.place(row, chunks, tier)
        for chunk in events.not_stored:
            self._stored.pop(chunk, None)
        self._stored.update(dict.fromkeys(events.stored))
        while len(self._stored) > MOST_STORED:
            del self._stored[next(iter(self._stored))]

    def add(self, row: int, chunks: Collection[int]) -> None:
        """The worker reported these chunks. As many stale entries are removed, here and in `place`. So a
        worker that is cleared again and again leaves no more of them than it had at once.
        """
        self.drop_stale(len(chunks))
        reported = self._reported[row]
        for chunk in chunks:
            reported[chunk % _PLACES].add(chunk)
            self._hold(row, chunk)

    def place(self, row: int, chunks: Collection[int], tier: Tier) -> None:
        """The fastest tier with these chunks is this one. Without such a report it is the device."""
        self.drop_stale(len(chunks))
        reported, offloaded = self._reported[row], self._offloaded[row]
        for chunk in chunks:
            at = chunk % _PLACES
            offloaded[at].pop(chunk, None)
            if tier is not Tier.DEVICE and chunk in reported[at]:
                offloaded[at][chunk] = tier

    def offloaded(self, row: int, chunks: Iterable[int]) -> Counter[Tier]:
        """How many of these chunks the worker reported in each tier below the device."""
        offloaded = self._offloaded[row]
        if not any(_tables(offloaded)):
            return Counter()
        tiers = (offloaded[chunk % _PLACES].get(chunk) for chunk in chunks)
        return Counter(tier for tier in tiers if tier is not None)

    def only_stored(self, row: int, chunks: Iterable[int]) -> int:
        """How many of these chunks the worker lacks, and the shared store has."""
        expected = self._expected[row]
        missing = (c for c in chunks if c in self._stored and c not in expected)
        return sum(not self.has_reported(row, chunk) for chunk in missing)

    def slowest_tier(self, row: int, chunks: Iterable[int]) -> Tier:
        """The slowest tier with a part of these chunks, which the worker reported."""
        return max(self.offloaded(row, chunks), default=Tier.DEVICE)

    def discard(self, row: int, chunks: Iterable[int]) -> None:
        reported, expected = self._reported[row], self._expected[row]
        for chunk in chunks:
            at = chunk % _PLACES
            if chunk in reported[at]:
                reported[at].remove(chunk)
                self._offloaded[row][at].pop(chunk, None)
                if chunk not in expected:
                    self._release(row, chunk)

    def expect(self, row: int, chunks: Iterable[int]) -> None:
        """A prompt with these chunks was sent to the worker. `unexpect` undoes it."""
        expected = self._expected[row]
        for chunk in chunks:
            expected[chunk] = expected.get(chunk, 0) + 1
            self._hold(row, chunk)

    def unexpect(self, row: int, chunks: Iterable[int]) -> None:
        reported, expected = self._reported[row], self._expected[row]
        for chunk in chunks:
            expected[chunk] -= 1
            if not expected[chunk]:
                del expected[chunk]
                if chunk not in reported[chunk % _PLACES]:
                    self._release(row, chunk)

    def clear(self, row: int) -> None:
        """Forgets what the worker reported, but not what is expected."""
        self._set_aside(row, *_tables(self._reported[row]), *_tables(self._offloaded[row]))
        self._reported[row], self._offloaded[row] = _spread(set[int]), _spread(dict[int, Tier])

    def forget(self, row: int) -> None:
        """Forgets a worker that is gone, with what was expected of it. The row is free for another one."""
        self.clear(row)
        self._set_aside(row, self._expected[row])
        self._expected[row] = {}

    def _set_aside(self, row: int, *chunks: _Aside) -> None:
        if found := [some for some in chunks if some]:
            self._aside.setdefault(row, []).extend(found)
            self._unsure |= self._bits[row]

    def drop_stale(self, most: int) -> None:
        """Gives back the memory of at most so many entries of cleared workers. A chunk has one entry for the
        worker's report, one for its tier below the device, and one for prompts that are expected."""
        while most > 0 and self._aside:
            row, waiting = next(iter(self._aside.items()))
            chunks = waiting[-1]
            reported, expected = self._reported[row], self._expected[row]
            part = min(most, len(chunks))
            most -= part
            for _ in range(part):  # even to free a set takes time for each of its chunks
                chunk = chunks.pop() if isinstance(chunks, set) else chunks.popitem()[0]
                if chunk not in reported[chunk % _PLACES] and chunk not in expected:
                    self._release(row, chunk)
            if not chunks:
                waiting.pop()
            if not waiting:
                del self._aside[row]
                self._unsure &= ~self._bits[row]

    def _hold(self, row: int, chunk: int) -> None:
        bit, table = self._bits[row], self._holders[chunk % _PLACES]
        holders = table.get(chunk)
        table[chunk] = bit if holders is None or holders == bit else holders | bit

    def _release(self, row: int, chunk: int) -> None:
        table = self._holders[chunk % _PLACES]
        left = table.get(chunk, 0) & ~self._bits[row]
        if left:
            table[chunk] = left
        else:
            table.pop(chunk, None)  # a stale chunk may have been added and discarded since

    def overlap(
        self, chunks: Sequence[int], tokens: int, block_size: int, among: int, stores: int = 0
    ) -> Overlap:
        """Finds the cached beginning of a prompt at each worker of `among`, a set of rows. Those of `stores`
        have what the shared store has, too.

        A cached prefix ends at its first missing chunk. The search stops where no worker has more, so an
        unknown prompt costs one lookup. Of the different lengths only the longest `MAX_LEVELS` count.
        """
        levels: list[tuple[int, int]] = []  # (chunks, rows that have at least so many)
        rows, unsure = among, self._unsure & among
        tables = self._holders
        for depth, chunk in enumerate(chunks):
            holders = tables[chunk % _PLACES].get(chunk, 0)
            if unsure:
                for row in _rows(holders & rows & unsure):
                    if not self.has_reported(row, chunk) and chunk not in self._expected[row]:
                        holders ^= self._bits[row]
            if stores and chunk in self._stored:
                holders |= stores
            if holders is not rows and (left := rows & holders) != rows:
                levels.append((depth, rows))
                rows = left
                if not rows:
                    break
        else:
            levels.append((len(chunks), rows))
        found: list[tuple[int, int]] = []
        most = 0
        for depth, rows in levels[-MAX_LEVELS:]:
            hit = min(depth * CHUNK_TOKENS, tokens - 1) // block_size * block_size
            if hit > most:
                most = hit
                found.append((hit, rows))
        return Overlap(found)
