"""An index from chunk to the workers that have the chunk in their prefix cache.

A chunk is 64 tokens, known by 60 bits of its name (`kv_names`). A worker counts as having a chunk
after it reports it. It also counts while a prompt with the chunk, which this router sent, waits for its first
token: the next request with the same prefix may come before the report. When the attempt ends, only the
report counts.

Each router process has its own index, from the reports that workers send to it. Many chunks have the same
holders: those of one prompt, and all that only one worker has. So the index has the number of its `Holders`
for each chunk, and equal holders have one number.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from baton.kv_names import CHUNK_TOKENS, HINT_BITS, MOST_STORED, Tier
from baton.rpc import worker_pb2 as pb

MAX_LEVELS = 8
_FIRST_STEP = 4
"""Chunks from one look to the next, at first. Each later step is twice as long."""
_PARTS, _SHIFT = 1 << 8, HINT_BITS - 8
_PART = _PARTS - 1
"""Chunks are spread over so many dictionaries by their first bits. To enlarge one for all, or to look at all
entries at once, would stop the event loop: 0.3 s for six million chunks."""


class Overlap:
    """The cached tokens of one prompt at each worker: whole blocks, and never the last position.

    Attributes:
        most: cached tokens at any worker.
    """

    __slots__ = ("_levels", "most")

    def __init__(self, levels: list[tuple[int, int]]) -> None:
        """`levels`: (tokens, set of rows with at least so many cached), in ascending order."""
        self._levels, self.most = levels, levels[-1][0] if levels else 0

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
        return rows_of(self._levels[-1][1]) if self._levels else []

    def levels(self, least: int) -> Iterator[tuple[int, int]]:
        """Numbers of cached tokens, the most first, each with the set of rows that have them; at least so
        many."""
        return (level for level in reversed(self._levels) if level[0] >= least)


NOTHING_CACHED = Overlap([])


def rows_of(rows_left: int) -> list[int]:
    """The rows of a set."""
    rows = []
    while rows_left:
        last = rows_left & -rows_left
        rows.append(last.bit_length() - 1)
        rows_left ^= last
    return rows


class Holders(NamedTuple):
    """What is known of a chunk. Workers are rows, and a set of rows is an int: the intersection of sets of
    1,000 rows takes 50 ns."""

    reported: int = 0
    """The workers that reported the chunk."""
    host: int = 0
    """Those of them that have it in the memory of their host, and not on the device."""
    disk: int = 0
    """Those that have it only on the disk of their host."""
    stored: bool = False
    """The store that workers share has the chunk."""

    def tier(self, row: int) -> Tier:
        """The fastest tier in which a worker that reported the chunk has it."""
        return Tier.HOST if self.host >> row & 1 else Tier.DISK if self.disk >> row & 1 else Tier.DEVICE

    def at(self, bit: int, tier: Tier | None) -> "Holders":
        """The worker of this bit has the chunk in this tier now. None: it has the chunk no more."""
        return self._replace(
            reported=self.reported & ~bit if tier is None else self.reported | bit,
            host=self.host | bit if tier is Tier.HOST else self.host & ~bit,
            disk=self.disk | bit if tier is Tier.DISK else self.disk & ~bit,
        )


NOTHING = Holders()


class ChunkIndex:
    """Owned by one router, or a simulated one.

    Attributes:
        has_offloaded: a worker had a chunk below its device.
    """

    def __init__(self) -> None:
        self.has_offloaded = False
        self._parts: list[dict[int, int]] = [{} for _ in range(_PARTS)]  # chunk → number of its holders
        self._holders = [NOTHING]  # by number; 0: nothing is known
        self._numbers = {NOTHING: 0}
        self._chunks = [0]  # by number: how many chunks have these holders
        self._free: list[int] = []  # numbers without chunks
        self._cleared: set[int] = set()  # numbers of NOTHING, of chunks that are removed later
        self._to_sweep = 0  # parts that may have such chunks
        self._reported: list[int] = []  # row → chunks that the worker reported
        self._expecting: dict[int, int] = {}  # chunk → rows that expect it; no empty sets
        self._again: list[Counter[int]] = []  # row → expected chunk → further prompts that will cache it
        self._stored: dict[int, None] = {}  # in the store that workers share, the oldest first
        self._asked: Sequence[int] = ()  # the chunks of the last `overlap`
        self._known: list[tuple[int, int, bool]] = []  # what is known of them

    def __len__(self) -> int:
        """The number of chunks that workers reported."""
        return sum(self._chunks[number] for number, holders in enumerate(self._holders) if holders.reported)

    def grow(self, rows: int) -> None:
        for _ in range(len(self._again), rows):
            self._reported.append(0)
            self._again.append(Counter())

    def reported_by(self, chunk: int) -> int:
        """The set of rows that reported the chunk."""
        return self._of(chunk).reported

    def reported(self, row: int) -> int:
        """Number of chunks that the worker reported."""
        return self._reported[row]

    # ------------------------------------------------------------ changes

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
        oldest = iter(self._stored)
        gone = [next(oldest) for _ in range(len(self._stored) - MOST_STORED)]
        for chunk in gone:
            del self._stored[chunk]
        self._change(events.stored, lambda holders: holders._replace(stored=True))
        self._change([*events.not_stored, *gone], lambda holders: holders._replace(stored=False))

    def add(self, row: int, chunks: Iterable[int]) -> None:
        """The worker reported these chunks."""
        bit = 1 << row
        self._reported[row] += self._change(
            chunks, lambda holders: holders if holders.reported & bit else holders.at(bit, Tier.DEVICE)
        )

    def place(self, row: int, chunks: Iterable[int], tier: Tier) -> None:
        """The fastest tier with these chunks is this one. Without such a report it is the device."""
        bit = 1 << row
        if self._change(chunks, lambda holders: holders.at(bit, tier) if holders.reported & bit else holders):
            self.has_offloaded = True

    def discard(self, row: int, chunks: Iterable[int]) -> None:
        bit = 1 << row
        self._reported[row] -= self._change(chunks, lambda holders: holders.at(bit, None))

    def expect(self, row: int, chunks: Iterable[int]) -> None:
        """A prompt that begins with these chunks was sent to the worker. `unexpect` undoes it."""
        self._asked = ()
        expecting, again, bit = self._expecting, self._again[row], 1 << row
        for chunk in chunks:
            rows = expecting.get(chunk, 0)
            if rows & bit:
                again[chunk] += 1
            else:
                expecting[chunk] = rows | bit

    def unexpect(self, row: int, chunks: Iterable[int]) -> None:
        self._asked = ()
        expecting, again, bit = self._expecting, self._again[row], 1 << row
        for chunk in chunks:
            if chunk in again:
                again[chunk] -= 1
                if not again[chunk]:
                    del again[chunk]
            elif rows := expecting[chunk] ^ bit:
                expecting[chunk] = rows
            else:
                del expecting[chunk]

    def clear(self, row: int) -> None:
        """Forgets what the worker reported, but not what is expected. Looks at the holders, and not at the
        chunks, which are many."""
        if not self._reported[row]:
            return
        self._asked = ()
        self._reported[row], bit = 0, 1 << row
        for number, holders in enumerate(self._holders):
            if holders.reported & bit:
                now = self._holders[number] = holders.at(bit, None)
                if self._numbers.get(holders) == number:
                    del self._numbers[holders]
                self._numbers.setdefault(now, number)  # another number may have equal holders
                if now == NOTHING:
                    self._cleared.add(number)
                    self._to_sweep = _PARTS

    def _change(self, chunks: Iterable[int], change: Callable[[Holders], Holders]) -> int:
        """Changes what is known of each chunk. Returns how many have other holders now. Written for speed."""
        self._asked = ()
        if self._to_sweep:
            self._sweep()
        parts, counts, changed = self._parts, self._chunks, 0
        numbers: dict[int, int] = {}
        for chunk in chunks:
            part = parts[chunk >> _SHIFT & _PART]
            before = part.get(chunk, 0)
            after = numbers.get(before)
            if after is None:
                holders = self._holders[before]
                now = change(holders)
                after = numbers[before] = before if now == holders and before else self._number(now)
            if after != before:
                changed += 1
                counts[before] -= 1
                counts[after] += 1
                if after:
                    part[chunk] = after
                else:
                    del part[chunk]
        for number in {*numbers, *numbers.values()}:
            if number and not counts[number]:
                self._free_number(number)
        return changed

    def _number(self, holders: Holders) -> int:
        number = self._numbers.get(holders)
        if number is None:
            if self._free:
                number = self._free.pop()
                self._holders[number] = holders
            else:
                number = len(self._holders)
                self._holders.append(holders)
                self._chunks.append(0)
            self._numbers[holders] = number
        return number

    def _free_number(self, number: int) -> None:
        holders = self._holders[number]
        if self._numbers.get(holders) == number:
            del self._numbers[holders]
        self._holders[number] = NOTHING
        self._cleared.discard(number)
        self._free.append(number)

    def _sweep(self) -> None:
        """Removes the chunks of one part of which nothing is known any more: 1 ms for 30,000 chunks."""
        self._to_sweep -= 1
        part, cleared = self._parts[self._to_sweep], self._cleared
        known = self._parts[self._to_sweep] = {
            chunk: number for chunk, number in part.items() if number not in cleared
        }
        if len(known) < len(part):
            gone = Counter(number for number in part.values() if number in cleared)
            for number, count in gone.items():
                self._chunks[number] -= count
                if not self._chunks[number]:
                    self._free_number(number)

    # ------------------------------------------------------------ questions

    def _of(self, chunk: int) -> Holders:
        return self._holders[self._parts[chunk >> _SHIFT & _PART].get(chunk, 0)]

    def offloaded(self, row: int, chunks: Iterable[int]) -> Counter[Tier]:
        """How many of these chunks the worker reported in each tier below the device."""
        if not self.has_offloaded:
            return Counter()
        in_tier = Counter(holders.tier(row) for holders in map(self._of, chunks))
        del in_tier[Tier.DEVICE]
        return in_tier

    def only_stored(self, row: int, chunks: Iterable[int]) -> int:
        """How many of these chunks the worker lacks, and the shared store has."""
        expecting, bit = self._expecting, 1 << row
        lacking = (self._of(chunk) for chunk in chunks if not expecting.get(chunk, 0) & bit)
        return sum(holders.stored and not holders.reported >> row & 1 for holders in lacking)

    def sole_holders(self, chunks: Iterable[int]) -> dict[int, list[int]]:
        """Of these chunks, those that exactly one worker reported, by its row."""
        by_row: dict[int, list[int]] = {}
        for chunk in chunks:
            rows = self._of(chunk).reported
            if rows and not rows & (rows - 1):
                by_row.setdefault(rows.bit_length() - 1, []).append(chunk)
        return by_row

    def sole_partners(self, row: int) -> set[int]:
        """The workers that have chunks which else only the worker of this row has."""
        bit = 1 << row
        others = {holders.reported ^ bit for holders in self._holders if holders.reported & bit}
        return {rows.bit_length() - 1 for rows in others if rows and not rows & (rows - 1)}

    def slowest_tier(self, row: int, chunks: Iterable[int]) -> Tier:
        """The slowest tier with a part of these chunks, which the worker reported."""
        return max(self.offloaded(row, chunks), default=Tier.DEVICE) if self.has_offloaded else Tier.DEVICE

    def _rows_with(self, chunks: Sequence[int]) -> list[tuple[int, int, bool]]:
        """Returns the workers that have or expect each chunk, and whether the store has it.

        Before both is the number of the first chunk for which they hold: most chunks of a prompt have the
        same holders as the one before. The last entry is the first chunk of which nothing is known, or the
        end. One choice of workers asks several times for a prompt.

        It looks at few chunks, since each is somewhere else in memory: of two with equal holders, those
        between are taken to have them, too. Caches evict the end of a prefix first."""
        if chunks is not self._asked or not chunks:
            known: list[tuple[int, int, bool]] = []
            parts, expecting = self._parts, self._expecting
            place, end, number, expected = 0, len(chunks), 0, 0
            if chunks:
                chunk = chunks[0]
                number, expected = parts[chunk >> _SHIFT & _PART].get(chunk, 0), expecting.get(chunk, 0)
            while place < end:
                if not (number or expected):
                    end = place
                    break
                holders = self._holders[number]
                known.append((place, holders.reported | expected, holders.stored))
                # `place` has these holders, and `after` has others.
                step, after, next_number, next_expected = _FIRST_STEP, end, 0, 0
                while place + 1 < after:
                    half = (place + after) // 2 if after < end else end - 1
                    look = place + step if place + step < half else half
                    chunk = chunks[look]
                    found = parts[chunk >> _SHIFT & _PART].get(chunk, 0)
                    # A name stands for all chunks before it, so only those who expect them may expect it.
                    expect = expected and expecting.get(chunk, 0)
                    if found == number and expect == expected:
                        place, step = look, 2 * step
                    else:
                        after, next_number, next_expected = look, found, expect
                place, number, expected = after, next_number, next_expected
            self._asked, self._known = chunks, [*known, (end, 0, False)]
        return self._known

    def overlap(
        self, chunks: Sequence[int], tokens: int, block_size: int, among: int, stores: int = 0
    ) -> Overlap:
        """Finds the cached beginning of a prompt at each worker of `among`, a set of rows. Those of `stores`
        have what the shared store has, too.

        A cached prefix ends at its first missing chunk. The search stops where no worker has more, so an
        unknown prompt costs one lookup. Of the different lengths only the longest `MAX_LEVELS` count.
        """
        known = self._rows_with(chunks)
        if len(known) == 1:
            return NOTHING_CACHED
        levels: list[tuple[int, int]] = []
        rows, most = among, 0
        for depth, holders, stored in known:
            if stored:
                holders |= stores
            if (with_chunk := rows & holders) != rows:
                hit = min(depth * CHUNK_TOKENS, tokens - 1) // block_size * block_size
                if hit > most:
                    most = hit
                    levels.append((hit, rows))
                rows = with_chunk
                if not rows:
                    break
        return Overlap(levels[-MAX_LEVELS:])
