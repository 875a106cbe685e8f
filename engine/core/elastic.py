"""One budget of memory for blocks of KV, and for what requests need beside them: slots of states, and window
blocks if layers have windows (`window_blocks`). Pure; the memory is the engine's.

Each pool has numbers for as many places as it could ever have. A part of them is *present*: it has memory.
Places come and go in units, and each unit has pages of its own:

    absent ──add──▶ present, held by requests ◀──hold / let──▶ present, idle ──remove──▶ absent

An idle unit has places that are free, or have cached content that no request holds. When a pool is short,
`Budget.provide` takes the pages of idle units of the others, those with nothing cached first. A pool is
short if the eviction of all that it has cached would not be enough.

Beyond that, window blocks get the share of the memory that requests need of them. `Budget.ended` measures it
on each request that ends, and moves some units if the pools have another share. So the cache keeps about as
many ends of prompts as prompts.

Moves take time in which no step is launched. While requests decode, each step may move as many pages as its
gap target leaves time for, and one unit at least (`go_on`). A new request that needs more of them waits, as
for any other block, while steps move what it lacks. A request that decodes and must grow gets its memory at
once: mostly that is one unit.

A place is held as long as a step, a copy or a transfer may touch it: all of these have leases
(`engine.core.leases`), and tiers hold what they copy. So pages are moved after the last use of their unit.
The first unit of each pool of requests never goes: padding of graphs may read the first place of each.
"""

import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from baton.engine.api.pools import Pool
from baton.engine.api.stats import MemoryStats
from baton.engine.core.block_pool import BlockPool
from baton.engine.core.cells import Cells
from baton.engine.core.state_copies import StateCopies
from baton.engine.core.window_blocks import WindowBlocks


class Move(NamedTuple):
    """A unit that gets its memory, or gives it up."""

    kind: Pool
    unit: int
    present: bool


class Amounts(NamedTuple):
    """Places, or pages of a unit, by `Pool`."""

    blocks: int = 0
    slots: int = 0
    windows: int = 0


class Lacking(NamedTuple):
    """What pages move for, over several steps."""

    wants: Amounts
    """So many are to be free."""
    hits: Collection[int]
    """Cached blocks that stay."""


@dataclass(frozen=True, slots=True)
class _Share:
    """The places of one kind."""

    kind: Pool
    cells: Cells[Any]
    pages: int
    """Of a unit."""


GROWTH = 8
"""Copies of states look for memory again when one in `GROWTH` blocks has changed its state. The share of
window blocks follows requests when it is off by more than one in `GROWTH`."""


class Budget:
    """Moves pages between the pools.

    Attributes:
        move: called with moves, which it makes at once, in their order.
        clock: in seconds.
        decodes: whether requests decode, so that a move makes a gap longer.
        lacking: what steps move pages for now. None: nothing waits for a move.
    """

    def __init__(
        self,
        pool: BlockPool,
        slots: Cells[bytes] | None,
        copies: StateCopies | None,
        *,
        pages: Amounts,
        page_bytes: int,
        free_pages: int,
        memory: int = 1,
    ) -> None:
        """`slots`: None without layers with states. `pages`: of a unit. `free_pages`: those of no unit.
        `memory`: so many requests that ended last count for the share of window blocks."""
        self.move: Callable[[Sequence[Move]], None] = lambda _: None
        self.clock: Callable[[], float] = time.perf_counter
        self.decodes: Callable[[], bool] = lambda: False
        self.lacking: Lacking | None = None
        self.free_pages = free_pages
        self.pages = pages
        self._page_bytes = page_bytes
        self._moved_pages = 0
        self._seconds = 0.0
        self._pool, self._windows, self._copies = pool, pool.windows, copies
        all_cells = zip(Pool, (pool, slots, pool.windows), pages, strict=True)
        self._shares = [_Share(kind, cells, of) for kind, cells, of in all_cells if cells is not None]
        self._least_pages = max(share.pages for share in self._shares)
        self._left: float = self._least_pages  # that may move before the next step, while requests decode
        self._looked = -pool.num_blocks  # `moves` of the pool when copies found no memory
        self._memory = memory
        self._taken: tuple[float, float] | None = None  # blocks and window blocks of a request, on average

    @property
    def free(self) -> Amounts:
        """Places that may be taken now."""
        return Amounts(**{share.kind.name.lower(): share.cells.grantable for share in self._shares})

    @property
    def more_blocks(self) -> int:
        """Blocks beside those of the pool that it could have now, for a request that needs no slot. Negative:
        its window blocks would take memory of so many."""
        pages = self.free_pages + self._idle_copies * self.pages.slots
        for share in self._shares[1:]:
            cells = share.cells
            wanted = cells.most if isinstance(cells, WindowBlocks) else 0
            lacking = cells.units.units(max(0, wanted - cells.grantable))
            pages += (self._beyond(share, wanted, cells.grantable) - lacking) * share.pages
        units = self._pool.units
        return min(pages // self.pages.blocks, len(units.absent)) * units.size

    def place_bytes(self, kind: Pool) -> float:
        """Of a place, on this rank."""
        [units] = [share.cells.units for share in self._shares if share.kind is kind]
        return self.pages[kind] * self._page_bytes / units.size

    @property
    def stats(self) -> MemoryStats:
        pages = dict.fromkeys(Pool, 0)
        for share in self._shares:
            pages[share.kind] = share.cells.units.present * share.pages
        if self._copies is not None:
            pages[Pool.SLOTS] += self._copies.units.present * self.pages.slots
        return MemoryStats(
            kv_memory_bytes=pages[Pool.BLOCKS] * self._page_bytes,
            state_memory_bytes=pages[Pool.SLOTS] * self._page_bytes,
            window_memory_bytes=pages[Pool.WINDOWS] * self._page_bytes,
            free_bytes=self.free_pages * self._page_bytes,
            moved_bytes=self._moved_pages * self._page_bytes,
            moving_seconds=self._seconds,
        )

    @property
    def _idle_copies(self) -> int:
        return 0 if self._copies is None else len(self._copies.units.idle)

    def has_room(self, wants: Amounts, hits: Collection[int] = (), *, free: Amounts | None = None) -> bool:
        """Whether requests can get so many places at the same time, and `hits`, which are cached blocks, with
        the states behind these and their window blocks. `free`: places that will be idle soon, beyond those
        that are free now."""
        free = self.free if free is None else free
        wanted, supply = 0, self.free_pages + max(0, self._idle_copies - bool(hits)) * self.pages.slots
        for share in self._shares:
            want, have = wants[share.kind], free[share.kind]
            if want > have:
                units = share.cells.units.units(want - have)
                if units > len(share.cells.units.absent):
                    return False
                wanted += units * share.pages
            else:
                supply += self._beyond(share, want, have, hits) * share.pages
        return not wanted or wanted <= supply

    def may_provide(self, wants: Amounts, hits: Collection[int], *, waits: bool) -> bool:
        """Whether `provide` takes no longer than the next step may wait. There is room for so many places
        beside `hits`. `waits`: if not, the next steps make the moves."""
        if self._lacking_pages(wants) <= max(0, self._left) or not self.decodes():
            return True
        if waits and self.lacking is None:
            self.lacking = Lacking(wants, hits)
        return False

    def go_on(self, seconds: float) -> float:
        """A step comes that may wait for moves of so many seconds. Makes those of `lacking`, as far as these
        are enough. Returns how long they took."""
        self._left = math.inf
        if seconds < math.inf:
            pages_per_s = self._moved_pages / max(self._seconds, 1e-9)
            self._left = max(self._least_pages, int(seconds * pages_per_s))
        if self.lacking is None:
            return 0.0
        before, (wants, hits) = self._seconds, self.lacking
        hits = [block for block in hits if self._pool.has_cached(range(block, block + 1))]
        if not self.has_room(wants, hits):
            self.lacking = None  # others took it
            return 0.0
        with ExitStack() as kept:
            for block in hits:
                kept.callback(self._pool.lease(block))
            self.provide(wants, most=self._left)
        if not self._lacking_pages(wants):
            self.lacking = None
        return self._seconds - before

    def _beyond(self, share: _Share, wanted: int, free: int, hits: Collection[int] = ()) -> int:
        """Idle units beyond so many places. The rest is as in `has_room`."""
        cells = share.cells
        size, idle, more = cells.units.size, len(cells.units.idle), free - cells.grantable
        kept = cells.idle_units(hits) if hits and share.kind is not Pool.SLOTS else 0
        return max(0, min(idle - kept + more // size, (cells.movable + more - wanted) // size))

    def provide(self, wants: Amounts, *, most: float = math.inf) -> None:
        """Gets so many free places, for which `has_room`. It leaves them where they are free. With fewer than
        these, `most` pages are theirs now."""
        coming: list[_Share] = []  # for each unit
        pages = 0
        for share in self._shares:
            if (lacking := self._lacking_units(share, wants)) > 0:
                units = int(min(lacking, (most - pages) // share.pages))
                pages += units * share.pages
                coming += [share] * units
        if not coming:
            return
        moves: list[Move] = []
        self._free_up(pages, wants, moves)
        for share in coming:
            self._add(share.kind, share.cells, moves)
        self._make(moves)

    def _lacking_units(self, share: _Share, wants: Amounts) -> int:
        """Units that must come until so many places are free."""
        lacking = wants[share.kind] - share.cells.grantable
        return share.cells.units.units(lacking) if lacking > 0 else 0

    def _lacking_pages(self, wants: Amounts) -> int:
        return sum(self._lacking_units(share, wants) * share.pages for share in self._shares)

    def _free_up(self, pages: int, wants: Amounts, moves: list[Move]) -> None:
        """Takes memory from idle units until so many pages are free. `wants` stay free."""
        copies = self._copies
        if copies is not None:
            empty = [unit for unit in copies.units.idle if not copies.has_cached(copies.units.places(unit))]
            self._remove(Pool.SLOTS, copies, empty, pages, moves)
        for share in (*self._shares[1:], self._shares[0]):
            cells, units = share.cells, share.cells.units
            spare = self._beyond(share, wants[share.kind], cells.grantable)
            if spare and self.free_pages < pages:
                empty = [unit for unit in units.idle if not cells.has_cached(units.places(unit))]
                which = [*dict.fromkeys((*empty, *units.idle))]  # those with nothing in them first
                self._remove(share.kind, cells, which[:spare], pages, moves)
        if copies is not None:
            self._remove(Pool.SLOTS, copies, [*copies.units.idle], pages, moves)
        assert self.free_pages >= pages, "the caller asked whether there is room"

    def _remove(
        self,
        kind: Pool,
        cells: Cells[Any],
        which: Iterable[int],
        pages: int,
        moves: list[Move],
    ) -> None:
        """Takes the memory of these idle units, until so many pages are free."""
        for unit in which:
            if self.free_pages >= pages:
                return
            cells.take_out(cells.units.places(unit))
            cells.units.remove(unit)
            moves.append(Move(kind, unit, present=False))
            self.free_pages += self.pages[kind]

    def ended(self, blocks: int, watermark: int) -> None:
        """A request has ended that took so many blocks beside cached ones. Window blocks get the share of the
        memory that they have in such requests. `watermark`: blocks that stay free."""
        windows = self._windows
        if windows is None or blocks <= 0 or self.lacking is not None:
            return
        taken, weight = (blocks, windows.need(blocks)), 1 / self._memory
        before = self._taken or taken
        of_blocks, of_windows = self._taken = (
            before[0] + (taken[0] - before[0]) * weight,
            before[1] + (taken[1] - before[1]) * weight,
        )
        units, block_units, of_pages = windows.units, self._pool.units, self.pages
        window_pages = of_windows * of_pages.windows / units.size
        block_pages = of_blocks * of_pages.blocks / block_units.size
        pages = self.free_pages + block_units.present * of_pages.blocks + units.present * of_pages.windows
        wanted = int(pages * window_pages / (window_pages + block_pages)) // of_pages.windows
        if abs(wanted - units.present) * GROWTH <= wanted:
            return
        some = units.units(taken[1])  # so that no request ends with many moves
        if self.decodes():
            some = int(min(some, max(0, self._left) // of_pages.windows))
        if wanted > units.present:
            more = min(some, wanted - units.present, len(units.absent)) * units.size
            wants = Amounts(blocks=watermark, windows=windows.grantable + more)
        else:
            gained = min(some, units.present - wanted) * of_pages.windows // of_pages.blocks
            more = min(gained, len(block_units.absent)) * block_units.size
            wants = Amounts(blocks=self._pool.free + more, windows=windows.most)
        if more and self.has_room(wants):
            self.provide(wants)

    def _add(self, kind: Pool, cells: Cells[Any], moves: list[Move]) -> None:
        unit = cells.units.add()
        cells.put_in(cells.units.places(unit))
        moves.append(Move(kind, unit, present=True))
        pages = self.pages[kind]
        self.free_pages -= pages
        self._moved_pages += pages
        self._left -= pages

    def _make(self, moves: Sequence[Move]) -> None:
        began = self.clock()
        self.move(moves)
        self._seconds += self.clock() - began

    def grow_copies(self) -> None:
        """Gives copies one more unit, from free pages and from blocks with nothing in them. Copies with less
        than half of what they may have also take cached blocks, the least recently used ones."""
        copies, pool = self._copies, self._pool
        assert copies is not None, "they ask for it"
        units, blocks = copies.units, pool.units
        if not units.absent or pool.moves - self._looked < pool.num_blocks // GROWTH:
            return
        if self._left < self.pages.slots and self.decodes():
            return
        few = units.present < len(units.absent)
        wanted = -(-max(0, self.pages.slots - self.free_pages) // self.pages.blocks)
        of_idle = (unit for unit in blocks.idle if few or not pool.has_cached(blocks.places(unit)))
        idle = [*islice(of_idle, 2 * wanted + 1)] if wanted else []
        if wanted and len(idle) <= 2 * wanted:  # some stay for the next requests
            self._looked = pool.moves
            return
        moves: list[Move] = []
        self._remove(Pool.BLOCKS, pool, idle, self.pages.slots, moves)
        self._add(Pool.SLOTS, copies, moves)
        self._make(moves)

    def assert_whole(self) -> None:
        """Asserts, when idle, that all pages but those of the first units could go to each pool."""
        of_copies = [] if self._copies is None else [self._copies.units]
        for units in (*(share.cells.units for share in self._shares), *of_copies):
            assert units.present - len(units.idle) <= 1, "a place of an idle pool is held"
            assert units.is_whole
