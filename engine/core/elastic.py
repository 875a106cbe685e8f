"""One budget of memory for blocks of KV, and for what requests need beside them. Pure; the memory is the
engine's. Requests need slots of states, or window blocks if layers have windows (`window_blocks`).

Each pool has numbers for as many places as it could ever have. A part of them is *present*: it has memory.
Places come and go in units, and each unit has pages of its own:

    absent ──add──▶ present, held by requests ◀──hold / let──▶ present, idle ──remove──▶ absent

An idle unit has places that are free, or have cached content that no request holds. When a pool is short,
`Budget.provide` takes the pages of idle units of another pool, those with nothing cached first. A pool is
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
from enum import IntEnum
from typing import NamedTuple

from baton.engine.api.stats import MemoryStats
from baton.engine.core.block_pool import BlockPool
from baton.engine.core.cells import Cells
from baton.engine.core.state_copies import StateCopies
from baton.engine.core.units import Units
from baton.engine.core.window_blocks import WindowBlocks


class Kind(IntEnum):
    """What a unit has."""

    BLOCKS = 0
    SLOTS = 1
    WINDOWS = 2


class Move(NamedTuple):
    """A unit that gets its memory, or gives it up."""

    kind: Kind
    unit: int
    present: bool


class Lacking(NamedTuple):
    """What pages move for, over several steps."""

    blocks: int
    """So many are to be free."""
    places: int
    """The same of slots, or of window blocks."""
    hits: Collection[int]
    """Cached blocks that stay."""


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
        places: Cells[bytes] | WindowBlocks,
        copies: StateCopies | None,
        *,
        block_pages: int,
        place_pages: int,
        page_bytes: int,
        free_pages: int,
        memory: int = 1,
    ) -> None:
        """`block_pages`, `place_pages`: of a unit. `free_pages`: those of no unit. `memory`: so many requests
        that ended last count for the share of window blocks."""
        self.move: Callable[[Sequence[Move]], None] = lambda _: None
        self.clock: Callable[[], float] = time.perf_counter
        self.decodes: Callable[[], bool] = lambda: False
        self.lacking: Lacking | None = None
        self._least_pages = max(block_pages, place_pages)
        self._left: float = self._least_pages  # that may move before the next step, while requests decode
        self.free_pages = free_pages
        self.block_pages = block_pages
        self.place_pages = place_pages
        self._page_bytes = page_bytes
        self._moved_pages = 0
        self._seconds = 0.0
        self._pool = pool
        self._places = places
        self._windows = places if isinstance(places, WindowBlocks) else None
        self._kind = Kind.SLOTS if self._windows is None else Kind.WINDOWS
        self._copies = copies
        self._blocks: Units = pool.units
        self._units: Units = places.units
        self._looked = -pool.num_blocks  # `moves` of the pool when copies found no memory
        self._of_copies = None if copies is None else copies.units
        self._memory = memory
        self._taken: tuple[float, float] | None = None  # blocks and window blocks of a request, on average

    @property
    def more_blocks(self) -> int:
        """Blocks beside those of the pool that it could have now, for a request that needs no slot. Negative:
        its window blocks would take memory of so many."""
        pages, windows = self.free_pages + self._idle_copies * self.place_pages, self._windows
        if windows is None:
            pages += len(self._units.idle) * self.place_pages
        else:
            pages += self._beyond(windows.most, windows.free) * self.place_pages
            pages -= self._units.units(max(0, windows.most - windows.free)) * self.place_pages
        return min(pages // self.block_pages, len(self._blocks.absent)) * self._blocks.size

    @property
    def block_bytes(self) -> float:
        """Of a block, on this rank."""
        return self.block_pages * self._page_bytes / self._blocks.size

    @property
    def place_bytes(self) -> float:
        """Of the states of a request or of a window block, on this rank."""
        return self.place_pages * self._page_bytes / self._units.size

    @property
    def stats(self) -> MemoryStats:
        places = self._units.present + (0 if self._of_copies is None else self._of_copies.present)
        of_places = places * self.place_pages * self._page_bytes
        return MemoryStats(
            kv_bytes=self._blocks.present * self.block_pages * self._page_bytes,
            state_bytes=of_places if self._windows is None else 0,
            window_bytes=0 if self._windows is None else of_places,
            free_bytes=self.free_pages * self._page_bytes,
            moved_bytes=self._moved_pages * self._page_bytes,
            moving_seconds=self._seconds,
        )

    @property
    def _idle_copies(self) -> int:
        return 0 if self._of_copies is None else len(self._of_copies.idle)

    def has_room(
        self, blocks: int, places: int, hits: Collection[int] = (), *, free_blocks: int, free_places: int
    ) -> bool:
        """Whether requests can get so many blocks and places at the same time, and `hits`, which are cached
        blocks, with the states behind these or their window blocks. Beyond what is free now, `free_blocks`
        and `free_places` count places that will be idle soon."""
        lacking_blocks, lacking_places = max(0, blocks - free_blocks), max(0, places - free_places)
        block_units, place_units = self._blocks.units(lacking_blocks), self._units.units(lacking_places)
        if block_units > len(self._blocks.absent) or place_units > len(self._units.absent):
            return False
        wanted = block_units * self.block_pages + place_units * self.place_pages
        if not wanted:
            return True
        supply = self.free_pages + max(0, self._idle_copies - bool(hits)) * self.place_pages
        if not lacking_places:
            supply += self._beyond(places, free_places, hits) * self.place_pages
        if not lacking_blocks:
            soon = (free_blocks - self._pool.free) // self._blocks.size
            spare = (free_blocks - blocks) // self._blocks.size
            kept = sum(unit in self._blocks.idle for unit in {block // self._blocks.size for block in hits})
            supply += min(len(self._blocks.idle) - kept + soon, spare) * self.block_pages
        return wanted <= supply

    def may_provide(self, blocks: int, places: int, hits: Collection[int], *, waits: bool) -> bool:
        """Whether `provide` takes no longer than the next step may wait. There is room for so many blocks and
        places beside `hits`. `waits`: if not, the next steps make the moves."""
        pages = self._lacking_pages(blocks, places)
        if pages <= max(0, self._left) or not self.decodes():
            return True
        if waits and self.lacking is None:
            self.lacking = Lacking(blocks, places, hits)
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
        before, (blocks, places, hits) = self._seconds, self.lacking
        hits = [block for block in hits if self._pool.has_cached(range(block, block + 1))]
        if not self._has_room_now(blocks, places, hits):
            self.lacking = None  # others took it
            return 0.0
        with ExitStack() as kept:
            for block in hits:
                kept.callback(self._pool.lease(block))
            self.provide(blocks, places, most=self._left)
        if not self._lacking_pages(blocks, places):
            self.lacking = None
        return self._seconds - before

    def _beyond(self, places: int, free_places: int, hits: Collection[int] = ()) -> int:
        """Idle units of places beyond so many places. The rest is as in `has_room`."""
        more = free_places - self._places.free
        spare = (min(free_places, self._places.spare + more) - places) // self._units.size
        kept = 0 if self._windows is None or not hits else self._windows.idle_units(hits)
        return max(0, min(len(self._units.idle) - kept + more // self._units.size, spare))

    def provide(self, blocks: int, places: int, *, most: float = math.inf) -> None:
        """Gets so many free blocks and places, for which `has_room`. It leaves them where they are free. With
        fewer than these, `most` pages are theirs now."""
        lacking_blocks, lacking_places = self._lacking_units(blocks, places)
        takes_blocks = not lacking_blocks
        lacking_blocks = int(min(lacking_blocks, most // self.block_pages))
        most -= lacking_blocks * self.block_pages
        lacking_places = int(min(lacking_places, most // self.place_pages))
        wanted = lacking_blocks * self.block_pages + lacking_places * self.place_pages
        if not wanted:
            return
        moves: list[Move] = []
        self._free_up(wanted, blocks, places, moves, takes_blocks=takes_blocks)
        for _ in range(lacking_blocks):
            self._add(Kind.BLOCKS, self._blocks, self._pool.put_in, moves)
        for _ in range(lacking_places):
            self._add(self._kind, self._units, self._places.put_in, moves)
        self._make(moves)

    def _lacking_units(self, blocks: int, places: int) -> tuple[int, int]:
        """Units of blocks and of places that must come until so many of these are free."""
        lacking_blocks = self._blocks.units(max(0, blocks - self._pool.free))
        return lacking_blocks, self._units.units(max(0, places - self._places.free))

    def _lacking_pages(self, blocks: int, places: int) -> int:
        block_units, place_units = self._lacking_units(blocks, places)
        return block_units * self.block_pages + place_units * self.place_pages

    def _free_up(
        self, pages: int, blocks: int, places: int, moves: list[Move], *, takes_blocks: bool
    ) -> None:
        """Takes memory from idle units until so many pages are free. So many blocks and places stay free."""

        def remove(
            kind: Kind, units: Units, which: Iterable[int], take_out: Callable[[range], object], most: float
        ) -> None:
            for count, unit in enumerate([*which]):
                if self.free_pages >= pages or count >= most:
                    return
                take_out(units.places(unit))
                units.remove(unit)
                moves.append(Move(kind, unit, present=False))
                self.free_pages += self.block_pages if kind is Kind.BLOCKS else self.place_pages

        def idle(units: Units, has_cached: Callable[[range], bool]) -> Iterable[int]:
            """Those with nothing in them first."""
            empty = [unit for unit in units.idle if not has_cached(units.places(unit))]
            return dict.fromkeys((*empty, *units.idle))

        pool, of_places, copies, of_copies = self._pool, self._places, self._copies, self._of_copies
        if copies is not None and of_copies is not None:
            empty = (unit for unit in of_copies.idle if not copies.has_cached(of_copies.places(unit)))
            remove(Kind.SLOTS, of_copies, empty, copies.take_out, float("inf"))
        if self.free_pages < pages:
            spare = self._beyond(places, of_places.free)
            remove(
                self._kind, self._units, idle(self._units, of_places.has_cached), of_places.take_out, spare
            )
        if takes_blocks:
            units = self._blocks
            spare = (pool.free - blocks) // units.size
            remove(Kind.BLOCKS, units, idle(units, pool.has_cached), pool.take_out, spare)
        if copies is not None and of_copies is not None:
            remove(Kind.SLOTS, of_copies, of_copies.idle, copies.take_out, float("inf"))
        assert self.free_pages >= pages, "the caller asked whether there is room"

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
        units = self._units
        window_pages = of_windows * self.place_pages / units.size
        block_pages = of_blocks * self.block_pages / self._blocks.size
        pages = self.free_pages + self._blocks.present * self.block_pages + units.present * self.place_pages
        wanted = int(pages * window_pages / (window_pages + block_pages)) // self.place_pages
        if abs(wanted - units.present) * GROWTH <= wanted:
            return
        some = units.units(taken[1])  # so that no request ends with many moves
        if self.decodes():
            some = int(min(some, max(0, self._left) // self.place_pages))
        if wanted > units.present:
            more = min(some, wanted - units.present, len(units.absent)) * units.size
            if more and self._has_room_now(watermark, windows.free + more):
                self.provide(watermark, windows.free + more)
            return
        pages = min(some, units.present - wanted) * self.place_pages
        more = min(pages // self.block_pages, len(self._blocks.absent)) * self._blocks.size
        if more and self._has_room_now(self._pool.free + more, windows.most):
            self.provide(self._pool.free + more, windows.most)

    def _has_room_now(self, blocks: int, places: int, hits: Collection[int] = ()) -> bool:
        free_blocks, free_places = self._pool.free, self._places.free
        return self.has_room(blocks, places, hits, free_blocks=free_blocks, free_places=free_places)

    def _add(self, kind: Kind, units: Units, put_in: Callable[[range], None], moves: list[Move]) -> None:
        unit = units.add()
        put_in(units.places(unit))
        moves.append(Move(kind, unit, present=True))
        pages = self.block_pages if kind is Kind.BLOCKS else self.place_pages
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
        units = copies.units
        if not units.absent or pool.moves - self._looked < pool.num_blocks // GROWTH:
            return
        if self._left < self.place_pages and self.decodes():
            return
        few = units.present < len(units.absent)
        wanted = -(-max(0, self.place_pages - self.free_pages) // self.block_pages)
        idle: list[int] = []
        for unit in self._blocks.idle if wanted else ():
            if few or not pool.has_cached(self._blocks.places(unit)):
                idle.append(unit)
            if len(idle) > 2 * wanted:
                break
        if wanted and len(idle) <= 2 * wanted:  # some stay for the next requests
            self._looked = pool.moves
            return
        moves: list[Move] = []
        for unit in idle[:wanted]:
            pool.take_out(self._blocks.places(unit))
            self._blocks.remove(unit)
            moves.append(Move(Kind.BLOCKS, unit, present=False))
            self.free_pages += self.block_pages
        self._add(Kind.SLOTS, units, copies.put_in, moves)
        self._make(moves)

    def assert_whole(self) -> None:
        """Asserts, when idle, that all pages but those of the first units could go to each pool."""
        for units in (self._blocks, self._units, self._of_copies):
            assert units is None or units.present - len(units.idle) <= 1, "a place of an idle pool is held"
            assert units is None or units.is_whole
