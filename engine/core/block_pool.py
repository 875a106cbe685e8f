"""The pool of KV blocks. Pure bookkeeping; the memory is the engine's.

A block is a place of `Cells`. A named one is full and never written. It is found by the name of all tokens up
to its end (`kv_names`), so requests share a prefix block by block.

A *remnant* is a part: it has the KV of a request's last tokens, which do not fill it. One request may adopt
it, and goes on after these tokens. So the next turn of a chat does not compute the end of the turn before
again.

Of a model with states or windows a part of the blocks may have no memory (`elastic`). These blocks are in no
state.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from baton.engine.core.cells import Cell, Cells, Rank
from baton.engine.core.state_copies import CopyLease
from baton.engine.core.units import Units
from baton.engine.core.window_blocks import WindowBlocks, WindowSpan


@dataclass(slots=True, eq=False)
class Held:
    """The handle of what is held: that of a request, a pin, an import, and of blocks that a tier fills.

    - *Match.* `BlockPool.lookup` finds cached blocks by their names, and holds nothing.
    - *Lock.* `hold` begins one lease on each of these, `extend` one on each further block. `release` ends all
      of them, and what the holder reads of layers with windows. Each handle is released once.
    - *Insert.* `publish` names a block that the holder has written. From then on nothing writes to it.
    - *Evict.* `hold` and `extend` evict blocks without a lease, and never one of a handle.
    """

    table: "array[int]" = field(default_factory=lambda: array("i"))
    """Block table: position p is in slot table[p // block_size] * block_size + p % block_size."""
    first: int = 0
    """Entries before this one mean nothing, and are not held."""
    windows: WindowSpan = field(default_factory=WindowSpan)
    """What is read of the table in layers with windows, if these have blocks of their own."""
    copy: CopyLease | None = None
    """On the states at its end, if they are read with it."""
    beside: Sequence[int] = ()
    """Cached blocks that stay, too."""

    @property
    def blocks(self) -> "array[int]":
        return self.table[self.first :]


class BlockPool(Cells[bytes]):
    """Owns the blocks, and the window blocks that some of them have. `Held` says how they are held.

    Attributes:
        block_size: positions of a block.
        windows: None: all layers have the same blocks.
        evicted: the names of blocks and states that a place has lost, here or in a tier below, in order. The
            prefix cache reads and empties it.
        halved: names of cached blocks without a window block of which a tier has all. The prefix cache writes
            it.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        windows: WindowBlocks | None = None,
        units: Units | None = None,
    ) -> None:
        """`units`: those of blocks that have memory. None: all have."""
        super().__init__(Units.fixed(num_blocks) if units is None else units)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.windows = windows
        self.evicted: list[bytes] = []
        self.halved: set[bytes] = set()

    def hold(
        self, count: int = 0, hits: Sequence[int] = (), *, before: int = 0, beside: Sequence[int] = ()
    ) -> Held:
        """Begins a handle: of these cached blocks, and of `count` blocks with undefined content behind them.
        `before`: so many entries before them mean nothing. `beside`: cached blocks that stay, too."""
        self.share([*hits, *beside] if beside else hits)
        held = Held(array("i", [*[0] * before, *hits] if before else hits), before, beside=beside)
        self.extend(held, count)
        return held

    def extend(self, held: Held, count: int) -> None:
        """Adds `count` blocks with undefined content. Evicts idle ones where needed."""
        if not count:
            return
        blocks, evicted = self.take(count)
        held.table.extend(blocks)
        if evicted:
            self.evicted += evicted
            if self.windows is not None:
                for block in blocks:
                    self.windows.forget(block)

    def release(
        self,
        held: Held,
        remnant: tuple[int, bytes] | None = None,
        *,
        copied: bool | None = None,
        first_copied: int = 0,
    ) -> None:
        """Ends a handle.

        `remnant`: one of its blocks, and the name of the tokens whose KV ends in it. `copied`: whether
        another worker has the cached ones now, too, from this index of the table on, and goes on with them.
        None: as before."""
        if held.copy is not None:
            held.copy.end()
        if self.windows is not None:
            self.windows.close(held.windows, held.table)
        blocks = held.blocks
        if copied is not None:
            copies = held.table[max(held.first, first_copied) :] if copied else blocks
            self.rank(copies, Rank.COPY if copied else Rank.ONLY)
        if remnant is not None and self.has_window(remnant[0]):
            self.publish(*remnant, Rank.PART)
        # Reversed, so that the end of a prefix is evicted first: more requests share its beginning.
        self.end(*reversed(blocks), *reversed(held.beside))

    def has_remnant(self, name: bytes) -> bool:
        """Not if it has lost its window block."""
        cell = self._named.get(name)
        return cell is not None and cell.rank is Rank.PART and self.has_window(cell.place)

    def is_evictable(self, place: int, name: bytes) -> bool:
        """As `Cells.is_evictable`. Of a block without a window block a tier has more."""
        return name not in self.halved and super().is_evictable(place, name)

    def only_here(self, blocks: Iterable[int] | None) -> None:
        """No other worker has these blocks any more. None: none of the blocks."""
        blocks = [cell.place for cell in self._cells] if blocks is None else blocks
        self.rank((block for block in blocks if self.cell(block).rank is Rank.COPY), Rank.ONLY)

    def next_evicted(self, most: int) -> Iterator[tuple[int, bytes]]:
        """As `Cells.next_evicted`, and then those that would lose their window blocks."""
        evicted = super().next_evicted(most)
        if self.windows is None:
            return evicted
        lost = self.windows.next_evicted(self.windows.present * most // self.num_blocks)
        cells = (self.cell(block) for _, block in lost)
        cells = (cell for cell in cells if not cell.leases and cell.rank is not Rank.PART)
        return chain(evicted, ((cell.place, cell.name) for cell in cells if cell.name is not None))

    # Those that requests hold

    def freed_by(self, released: Iterable[Sequence[int]]) -> set[int]:
        """The blocks that nothing holds once these tables are released."""
        holders = Counter(chain.from_iterable(released))
        return {block for block, count in holders.items() if self.cell(block).leases == count}

    # Window blocks

    def has_window(self, block: int) -> bool:
        """Whether the block has KV of layers with windows, as far as it has that of others."""
        return self.windows is None or block in self.windows

    def _make_free(self, cell: Cell[bytes]) -> None:
        super()._make_free(cell)
        if self.windows is not None:
            self.windows.forget(cell.place)

    def epoch(self, place: int) -> int:
        """It grows, too, when the block loses its window block."""
        return super().epoch(place) + (0 if self.windows is None else self.windows.losses[place])

    # Memory

    def lease(self, place: int) -> Callable[[], None]:
        """As `Cells.lease`, with the memory of its window block."""
        ends = [super().lease(place)]
        if self.windows is not None and place in self.windows:
            ends.append(self.windows.lease(int(self.windows.of[place])))

        def end() -> None:
            for each in ends:
                each()

        return end

    def take_out(self, places: Iterable[int]) -> list[bytes]:
        places = [*places]
        evicted = super().take_out(places)
        if self.windows is not None:
            for place in places:
                self.windows.forget(place)
        self.evicted += evicted
        return evicted

    # Checks

    def assert_consistent(self) -> None:
        super().assert_consistent()
        if self.windows is not None:
            self.windows.assert_consistent()
            assert not any(block in self.windows for block in self._free)

    def assert_whole(self) -> None:
        super().assert_whole()
        if self.windows is not None:
            self.windows.assert_whole()
