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

A part of them may have no memory (`elastic`). These are in no state.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from baton.engine.core.cells import Cells
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


class WindowBlocks(Cells[int]):
    """Owns the window blocks. The name of each is the number of its block.

    Attributes:
        of: int32 [blocks]: the window block of each block. `NULL`: it has none.
        promised: so many of them all readers together may read at any time.
        windows: those of the layers.
        most: window blocks that a request reads between two steps, at most.
        lost: blocks that another one took the window block from. The prefix cache reads and empties it.
        losses: by block, how often each block has lost its window block.
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
        super().__init__(Units.fixed(count) if units is None else units)
        self.most = window_blocks(windows, block_size)
        self.lost: dict[int, None] = {}
        self.losses = [0] * num_blocks
        self.windows = windows
        self._shortest = max(1 if window.chunked else window.length for window in windows)
        self._block_size = block_size
        self._for_steps = -(-step_tokens // block_size)
        taken, _ = self.take(1)
        assert taken == [NULL], "it is the lowest"
        self.units.let(NULL)  # its unit stays anyway
        self.promised = self._owed = 0
        assert self.grantable >= self.most, f"{count} window blocks are too few for one request"

    @property
    def grantable(self) -> int:
        """Window blocks that may be promised."""
        return self.present - 1 - self._for_steps - self.promised

    @property
    def unowed(self) -> int:
        """Window blocks that chunks of prompts may take now, beyond what was promised."""
        return self.free - self._owed

    @property
    def movable(self) -> int:
        return min(self.grantable, self.unowed)

    def need(self, blocks: int) -> int:
        """Window blocks of a request with so many blocks."""
        return min(blocks, self.most)

    def first(self, position: int) -> int:
        """The index of the first block that the token at this position reads in all layers, and all later
        tokens."""
        return first_read(self.windows, position) // self._block_size

    # Spans

    def promise(self, span: WindowSpan, count: int) -> None:
        """The reader may read so many window blocks. So many more must be `grantable`."""
        self._owed -= span.owed
        self.promised += count - span.promised
        self.moves += 1
        span.promised = count
        self._owed += span.owed

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
        self.end(*(int(self.of[block]) for block in table[span.first : min(first, span.stop)]))
        span.first, span.stop = first, max(first, span.stop)
        self._owed += span.owed

    def close(self, span: WindowSpan, table: Sequence[int]) -> None:
        """The reader reads nothing any more, and nothing is promised to it."""
        self.leave(span, table, span.stop)
        self.promise(span, 0)
        span.first = span.stop = 0

    def reachable(self, span: WindowSpan) -> int:
        """The index up to which the span may reach now."""
        return span.stop + span.owed + max(0, self.unowed)

    def _read(self, block: int) -> None:
        if block in self:
            self.share([int(self.of[block])])
            return
        [place], evicted = self.take(1)
        self._lose(evicted)
        self.publish(place, block)
        self.of[block] = place

    def _lose(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._has_none(block)
            self.lost[block] = None

    def _has_none(self, block: int) -> None:
        self.of[block] = NULL
        self.losses[block] += 1

    def forget(self, name: int) -> None:
        """The block of this number has no content any more."""
        if name in self:
            assert not self.cell(int(self.of[name])).leases, "a free block has no reader"
            super().forget(name)
            self._has_none(name)

    def put_cached(self, place: int, name: int) -> None:
        super().put_cached(place, name)
        self.of[name] = place

    # Memory

    def idle_units(self, places: Iterable[int]) -> int:
        """As `Cells.idle_units`, of the window blocks of these blocks."""
        return super().idle_units(int(self.of[block]) for block in places if block in self)

    def take_out(self, places: Iterable[int]) -> list[int]:
        self._lose(evicted := super().take_out(places))
        return evicted

    def assert_consistent(self) -> None:
        """Asserts that each window block has one owner, and that no chunk can take what was promised."""
        super().assert_consistent()
        owners = {int(block): int(self.of[block]) for block in self.of.nonzero()[0]}
        assert {block: self.lookup([block]) for block in self.names} == {
            block: [place] for block, place in owners.items()
        }
        assert self.free >= self._owed, "chunks have taken what was promised"
        assert self.grantable >= 0

    def assert_whole(self) -> None:
        """Asserts that nothing reads a window block."""
        self.assert_consistent()
        assert self.held == 1, "blocks are still read"
        assert not self.promised
        assert not self._owed
