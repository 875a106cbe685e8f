"""An index from chunk to the workers that have the chunk in their prefix cache.

A chunk is 64 tokens, known by the first 64 bits of its name (`content`). A worker counts as having a chunk
after it reports it. It also counts while a prompt with the chunk, which this router sent, waits for its first
token: the next request with the same prefix may come before the report. When the attempt ends, only the
report counts.

The reports are in a `ChunkTable`, which the router processes of a host share. One of them gets and applies
them. What a process expects is its own.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from baton.content import CHUNK_TOKENS, MOST_STORED, Tier
from baton.router.policy.chunk_table import ChunkTable
from baton.rpc import worker_pb2 as pb

MAX_LEVELS = 8


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

    @property
    def count(self) -> int:
        return self._levels[-1][1].bit_count() if self._levels else 0

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


class ChunkIndex:
    """Workers are rows. A set of rows is an int: the intersection of sets of 1,000 rows takes 50 ns.

    Attributes:
        table: the reports.
    """

    def __init__(self, table: ChunkTable | None = None) -> None:
        """`table`: that of all processes. None: there is only this process."""
        self.table = ChunkTable() if table is None else table
        self._reported: list[int] = []  # row → chunks, as applied by this process
        self._expected: list[dict[int, int]] = []  # row → chunk → prompts that will cache it
        self._expecting: dict[int, int] = {}  # chunk → rows that expect it; no empty sets
        self._stored: dict[int, None] = {}  # in the store that workers share, the oldest first
        self._asked: Sequence[int] = ()  # the chunks of the last `overlap`
        self._values: list[tuple[int, int, int]] = []  # what is known of them
        self._version = 0  # of the table then

    def __len__(self) -> int:
        """The number of chunks that workers reported."""
        return len(self.table)

    def __bool__(self) -> bool:
        return bool(len(self.table) or self._expecting)

    def grow(self, rows: int) -> None:
        for _ in range(len(self._expected), rows):
            self._reported.append(0)
            self._expected.append({})

    def has_reported(self, row: int, chunk: int) -> bool:
        return self.table.has(self.table.value(chunk), row)

    def reported(self, row: int) -> int:
        """Number of chunks that the worker reported to this process."""
        return self._reported[row]

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
            self.table.store(chunk, stored=False)
        for chunk in events.stored:
            self._stored[chunk] = None
            self.table.store(chunk, stored=True)
        while len(self._stored) > MOST_STORED:
            oldest = next(iter(self._stored))
            del self._stored[oldest]
            self.table.store(oldest, stored=False)
        self.table.changed()

    def add(self, row: int, chunks: Iterable[int]) -> None:
        """The worker reported these chunks."""
        self._reported[row] += self.table.add(row, chunks)
        self.table.changed()

    def place(self, row: int, chunks: Iterable[int], tier: Tier) -> None:
        """The fastest tier with these chunks is this one. Without such a report it is the device."""
        for chunk in chunks:
            self.table.place(row, chunk, tier)

    def offloaded(self, row: int, chunks: Iterable[int]) -> Counter[Tier]:
        """How many of these chunks the worker reported in each tier below the device."""
        found: Counter[Tier] = Counter()
        if self.table.has_offloaded:
            values = map(self.table.value, chunks)
            found.update(self.table.tier(value, row) for value in values if self.table.has(value, row))
            del found[Tier.DEVICE]
        return found

    def only_stored(self, row: int, chunks: Iterable[int]) -> int:
        """How many of these chunks the worker lacks, and the shared store has."""
        table, expected = self.table, self._expected[row]
        values = (table.value(chunk) for chunk in chunks if chunk not in expected)
        return sum(table.is_stored(value) and not table.has(value, row) for value in values)

    def slowest_tier(self, row: int, chunks: Iterable[int]) -> Tier:
        """The slowest tier with a part of these chunks, which the worker reported."""
        return max(self.offloaded(row, chunks), default=Tier.DEVICE)

    def discard(self, row: int, chunks: Iterable[int]) -> None:
        self._reported[row] -= self.table.discard(row, chunks)
        self.table.changed()

    def expect(self, row: int, chunks: Iterable[int]) -> None:
        """A prompt with these chunks was sent to the worker. `unexpect` undoes it."""
        expected, expecting, bit, self._version = self._expected[row], self._expecting, 1 << row, -1
        for chunk in chunks:
            expected[chunk] = expected.get(chunk, 0) + 1
            expecting[chunk] = expecting.get(chunk, 0) | bit

    def unexpect(self, row: int, chunks: Iterable[int]) -> None:
        expected = self._expected[row]
        for chunk in chunks:
            expected[chunk] -= 1
            if not expected[chunk]:
                del expected[chunk]
                self._expects_no_more(row, chunk)

    def _expects_no_more(self, row: int, chunk: int) -> None:
        self._version = -1
        self._expecting[chunk] ^= 1 << row
        if not self._expecting[chunk]:
            del self._expecting[chunk]

    def clear(self, row: int) -> None:
        """Forgets what the worker reported, but not what is expected."""
        if self._reported[row]:
            self._reported[row] = 0
            self.table.clear(row)
            self.table.changed()

    def forget(self, row: int) -> None:
        """Forgets a worker that is gone, with what was expected of it. The row is free for another one."""
        self.clear(row)
        expected, self._expected[row] = self._expected[row], {}
        for chunk in expected:
            self._expects_no_more(row, chunk)

    def _known(self, chunks: Sequence[int]) -> list[tuple[int, int, int]]:
        """As `ChunkTable.holders`, with the workers that expect a chunk. One choice of workers asks several
        times for a prompt."""
        if chunks is not self._asked or self._version != self.table.version:
            self._asked, self._version = chunks, self.table.version
            known = self._with_expected if self._expecting else self.table.holders
            self._values = known(chunks)
        return self._values

    def _with_expected(self, chunks: Sequence[int]) -> list[tuple[int, int, int]]:
        found, expecting, table, begin = list[tuple[int, int, int]](), self._expecting, self.table, 0
        reported: dict[int, tuple[int, int]] = {}  # from these chunks on
        unknown = rows = stored = 0  # from chunk `unknown` on, nothing was looked up
        for number, chunk in enumerate(chunks):
            if number >= unknown:
                rows = stored = 0
                if table.value(chunk):
                    after = table.holders(chunks[number:])
                    reported = {number + at: (holders, in_store) for at, holders, in_store in after}
                    unknown = number + after[-1][0]
            rows, stored = reported.get(number, (rows, stored))
            both = rows | expecting.get(chunk, 0)
            if not (both or stored):
                break
            if not found or (both, stored) != found[-1][1:]:
                found.append((number, both, stored))
            begin = number + 1
        found.append((begin, 0, 0))
        return found

    def overlap(
        self, chunks: Sequence[int], tokens: int, block_size: int, among: int, stores: int = 0
    ) -> Overlap:
        """Finds the cached beginning of a prompt at each worker of `among`, a set of rows. Those of `stores`
        have what the shared store has, too.

        A cached prefix ends at its first missing chunk. The search stops where no worker has more, so an
        unknown prompt costs one lookup. Of the different lengths only the longest `MAX_LEVELS` count.
        """
        levels: list[tuple[int, int]] = []  # (chunks, rows that have at least so many)
        rows = among
        for depth, holders, stored in self._known(chunks):
            if stored:
                holders |= stores
            if (left := rows & holders) != rows:
                levels.append((depth, rows))
                rows = left
                if not rows:
                    break
        found: list[tuple[int, int]] = []
        most = 0
        for depth, rows in levels[-MAX_LEVELS:]:
            hit = min(depth * CHUNK_TOKENS, tokens - 1) // block_size * block_size
            if hit > most:
                most = hit
                found.append((hit, rows))
        return Overlap(found)
