"""Blocks of layers with windows: which blocks of requests have one. Pure bookkeeping.

A request reads such layers only from the beginning of its window on (`kv_names.cache_kinds.Window`). So there
are fewer *window blocks* than blocks, and a block has one only as long as something reads it, or nothing else
needs it. A block without one has the KV of all other layers.

    none ──read──▶ read by requests, pins or imports ◀──read── idle
      ▲                          └──────leave, end────────────▶ │
      └───── its block is free, or another block needs the window block (the least recently used goes first)

A reader has a *span* of its block table. Admission promises it as many window blocks as it ever reads
between two steps. The window blocks of a chunk of a prompt come on top, from those that nothing was promised.
These are free again when the step has landed, so a chunk is cut to what there is, and never waits in a
circle.

A part of the window blocks may have no memory (`elastic`). These are in no state.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from baton.engine.core.units import Units
from baton.kv_names.cache_kinds import Window, first_read, window_blocks

NULL = 0
"""The window block that stands for none. What is written there is never read."""


@dataclass(slots=True, eq=False)
class WindowSpan:
    """What one reader reads of its block table."""

    first: int = 0
    stop: int = 0
    """It reads the window blocks of the blocks with indices [first, stop)."""
    promised: int = 0
    """So many it may read at any time."""

    @property
    def owed(self) -> int:
        return max(0, self.promised - (self.stop - self.first))


class WindowBlocks:
    """Owns the window blocks.

    Attributes:
        of: int32 [blocks]: the window block of each block. `NULL`: it has none.
        windows: those of the layers.
        most: window blocks that a request reads between two steps, at most.
        present: window blocks that have memory, with `NULL`.
        on_lost: is called with each block that another one took the window block from.
        on_allocated: is called with each window block that will be written anew.
        on_short: is called when more was promised than has memory. It makes `free` 0.
    """

    def __init__(
        self,
        num_blocks: int,
        count: int,
        block_size: int,
        windows: Collection[Window],
        step_tokens: int,
        units: Units | None = None,
    ) -> None:
        """`num_blocks`: of the block pool. `count`: window blocks, with `NULL`. `step_tokens`: most tokens of
        a step. `units`: those of window blocks that have memory. None: all have."""
        self.of = np.zeros(num_blocks, dtype=np.int32)
        self.units = units = Units.fixed(count) if units is None else units
        self.present = units.present * units.size
        self.most = window_blocks(windows, block_size)
        self.on_lost: Callable[[int], None] = lambda _: None
        self.on_allocated: Callable[[int], None] = lambda _: None
        self.on_short: Callable[[], None] = lambda: None
        self.windows = windows
        self._shortest = max(1 if window.chunked else window.length for window in windows)
        self._block_size = block_size
        self._for_steps = -(-step_tokens // block_size)
        self._free = list(range(NULL + 1, self.present))  # a heap, so that few units are in use
        self._block_of: dict[int, int] = {}  # by window block
        self._readers: dict[int, int] = {}  # by block
        self._idle: OrderedDict[int, None] = OrderedDict()  # blocks; the least recently used first
        self._promised = self._owed = 0
        assert self.free >= self.most, f"{count} window blocks are too few for one request"

    @property
    def free(self) -> int:
        """Window blocks that may be promised."""
        return self.present - 1 - self._for_steps - self._promised

    @property
    def spare(self) -> int:
        """Window blocks that chunks of prompts may take now, beyond what was promised."""
        return len(self._free) + len(self._idle) - self._owed

    @property
    def unused(self) -> bool:
        """Whether nothing was promised."""
        return not self._promised

    def need(self, blocks: int) -> int:
        """Window blocks of a request with so many blocks."""
        return min(blocks, self.most)

    def first(self, position: int) -> int:
        """The index of the first block that the token at this position reads in all layers, and all later
        tokens."""
        return first_read(self.windows, position) // self._block_size

    def has(self, block: int) -> bool:
        return self.of[block] != NULL

    # Spans

    def promise(self, span: WindowSpan, count: int) -> None:
        """The reader may read so many window blocks. So many more must be `free`, or can be had."""
        self._owed -= span.owed
        self._promised += count - span.promised
        span.promised = count
        self._owed += span.owed
        if self.free < 0:
            self.on_short()

    def begin(self, span: WindowSpan, table: Sequence[int], first: int, stop: int) -> None:
        """The reader reads from this index of its table on."""
        assert span.first == span.stop, "a span begins once"
        self._owed -= span.owed
        span.first = span.stop = first
        self._owed += span.owed
        self.reach(span, table, stop)

    def reach(self, span: WindowSpan, table: Sequence[int], stop: int) -> None:
        """The reader reads up to this index. Blocks get window blocks with undefined content."""
        self._owed -= span.owed
        for index in range(span.stop, stop):
            self._read(table[index])
        span.stop = max(span.stop, stop)
        self._owed += span.owed

    def pass_to(self, span: WindowSpan, table: Sequence[int], position: int) -> None:
        """The reader computes no position before this one any more."""
        if (position + 1 - self._shortest) // self._block_size > span.first:  # so most decodes do nothing
            self.leave(span, table, self.first(position))

    def leave(self, span: WindowSpan, table: Sequence[int], first: int) -> None:
        """The reader reads nothing before this index any more."""
        if first <= span.first:
            return
        self._owed -= span.owed
        for index in range(span.first, min(first, span.stop)):
            self._unread(table[index])
        span.first, span.stop = first, max(first, span.stop)
        self._owed += span.owed

    def end(self, span: WindowSpan, table: Sequence[int]) -> None:
        """The reader reads nothing any more, and nothing is promised to it."""
        self.leave(span, table, span.stop)
        self.promise(span, 0)
        span.first = span.stop = 0

    def reachable(self, span: WindowSpan) -> int:
        """The index up to which the span may reach now."""
        return span.stop + span.owed + max(0, self.spare)

    def _read(self, block: int) -> None:
        if not self.has(block):
            if not self._free:
                lost, _ = self._idle.popitem(last=False)
                self._take_from(lost)
                self.on_lost(lost)
            self.of[block] = place = heapq.heappop(self._free)
            self._block_of[place] = block
            self.on_allocated(place)
        self._idle.pop(block, None)
        readers = self._readers[block] = self._readers.get(block, 0) + 1
        if readers == 1:
            self.units.hold(int(self.of[block]))

    def _unread(self, block: int) -> None:
        self._readers[block] -= 1
        if not self._readers[block]:
            del self._readers[block]
            self._idle[block] = None
            self.units.let(int(self.of[block]))

    def next_lost(self, most: int) -> Iterator[int]:
        """The blocks that would lose their window blocks to the next `most` that need one, in order."""
        return islice(self._idle, max(0, most - len(self._free)))

    def freed(self, block: int) -> None:
        """The block has no content any more."""
        if self.has(block):
            assert block not in self._readers, "a free block has no reader"
            del self._idle[block]
            self._take_from(block)

    def put_cached(self, blocks: Mapping[int, int]) -> None:
        """These blocks have these free window blocks, whose KV is theirs. The first ones lose them first."""
        for block, place in blocks.items():
            self.of[block] = place
            self._block_of[place] = block
            self._idle[block] = None
        self._free = [place for place in self._free if place not in self._block_of]
        heapq.heapify(self._free)

    def _take_from(self, block: int) -> None:
        place = int(self.of[block])
        self.of[block] = NULL
        del self._block_of[place]
        heapq.heappush(self._free, place)

    # Memory

    def lease(self, block: int) -> Callable[[], None]:
        """As `BlockPool.lease`, on the window block that the block has now."""
        return self.units.lease(int(self.of[block])) if self.has(block) else lambda: None

    def idle_units(self, blocks: Collection[int]) -> int:
        """How many units would not be idle any more if these blocks were read."""
        units = self.units
        of = {int(self.of[block]) // units.size for block in blocks if self.has(block)}
        return sum(unit in units.idle for unit in of)

    def has_cached(self, places: range) -> bool:
        """Whether a block has one of these window blocks."""
        return any(place in self._block_of for place in places)

    def put_in(self, places: range) -> None:
        """These window blocks have memory now, and are free."""
        for place in places:
            heapq.heappush(self._free, place)
        self.present += len(places)

    def take_out(self, places: range) -> None:
        """These window blocks, which nothing reads, lose their memory."""
        for block in [self._block_of[place] for place in places if place in self._block_of]:
            del self._idle[block]
            self._take_from(block)
            self.on_lost(block)
        self._free = [place for place in self._free if place not in places]
        heapq.heapify(self._free)
        self.present -= len(places)

    def assert_consistent(self) -> None:
        """Asserts that each window block has one owner, and that no chunk can take what was promised."""
        owned = self.of[self.of != NULL].tolist()
        present = self.units.with_memory()
        assert sorted([NULL, *self._free, *owned]) == present, "one was lost or has two owners"
        assert self._block_of == {int(self.of[block]): int(block) for block in self.of.nonzero()[0]}
        blocks = {int(block) for block in self.of.nonzero()[0]}
        assert blocks == self._readers.keys() | self._idle.keys()
        assert not self._readers.keys() & self._idle.keys()
        unread = len(self._free) + len(self._idle)
        assert unread >= self._owed, "chunks have taken what was promised"
        assert self.free >= 0

    def assert_whole(self) -> None:
        """Asserts that nothing reads a window block."""
        self.assert_consistent()
        assert not self._readers, f"blocks still read: {sorted(self._readers)}"
        assert not self._promised
        assert not self._owed
