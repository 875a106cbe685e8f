"""One budget of memory for blocks of KV and for slots of states. Pure; the memory is the engine's.

Each pool has numbers for as many places as it could ever have. A part of them is *present*: it has memory.
Places come and go in units, and each unit has pages of its own:

    absent ──add──▶ present, held by requests ◀──hold / let──▶ present, idle ──remove──▶ absent

An idle unit has places that are free, or have cached content that no request holds. When a pool is short,
`Budget.provide` takes the pages of idle units of another pool, those with nothing cached first. A pool is
short if the eviction of all that it has cached would not be enough.

Nothing waits here: what a request needs is there at once, or the request waits as for any other block. A
place is held as long as a step, a copy or a transfer may touch it: all of these have leases
(`machine.leases`), and tiers hold what they copy. So pages are moved after the last use of their unit. The
first unit of blocks and that of slots never go: padding of graphs may read the first place of each.
"""

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

from baton.engine.api.stats import MemoryStats
from baton.engine.core.block_pool import BlockPool, StatePool
from baton.engine.core.state_copies import StateCopies
from baton.engine.core.units import Units


class Cells(IntEnum):
    """What a unit has."""

    BLOCKS = 0
    SLOTS = 1


class Move(NamedTuple):
    """A unit that gets its memory, or gives it up."""

    cells: Cells
    unit: int
    present: bool


GROWTH = 8
"""Copies of states look for memory again when one in `GROWTH` blocks has changed its state."""


class Budget:
    """Moves pages between the pools.

    Attributes:
        move: called with moves, which it makes at once, in their order.
    """

    def __init__(
        self,
        pool: BlockPool,
        states: StatePool,
        copies: StateCopies | None,
        *,
        block_pages: int,
        slot_pages: int,
        page_bytes: int,
        free_pages: int,
    ) -> None:
        """`block_pages`, `slot_pages`: of a unit. `free_pages`: those of no unit."""
        assert pool.units is not None, "its blocks come and go"
        assert states.units is not None, "its slots come and go"
        self.move: Callable[[Sequence[Move]], None] = lambda _: None
        self.free_pages = free_pages
        self.block_pages = block_pages
        self.slot_pages = slot_pages
        self._page_bytes = page_bytes
        self._moved_pages = 0
        self._seconds = 0.0
        self._pool = pool
        self._states = states
        self._copies = copies
        self._blocks: Units = pool.units
        self._slots: Units = states.units
        self._looked = -pool.num_blocks  # `moves` of the pool when copies found no memory
        self._of_copies = None if copies is None else copies.units
        if copies is not None:
            copies.grow = self._grow_copies

    @property
    def more_blocks(self) -> int:
        """Blocks beside those of the pool that it could have now, if no request needed a slot."""
        idle = len(self._slots.idle) + self._idle_copies
        units = (self.free_pages + idle * self.slot_pages) // self.block_pages
        return min(units, len(self._blocks.absent)) * self._blocks.size

    @property
    def block_bytes(self) -> float:
        """Of a block, on this rank."""
        return self.block_pages * self._page_bytes / self._blocks.size

    @property
    def slot_bytes(self) -> float:
        """Of the states of a request, on this rank."""
        return self.slot_pages * self._page_bytes / self._slots.size

    @property
    def stats(self) -> MemoryStats:
        slots = self._slots.present + (0 if self._of_copies is None else self._of_copies.present)
        return MemoryStats(
            kv_bytes=self._blocks.present * self.block_pages * self._page_bytes,
            state_bytes=slots * self.slot_pages * self._page_bytes,
            free_bytes=self.free_pages * self._page_bytes,
            moved_bytes=self._moved_pages * self._page_bytes,
            moving_seconds=self._seconds,
        )

    @property
    def _idle_copies(self) -> int:
        return 0 if self._of_copies is None else len(self._of_copies.idle)

    def has_room(
        self, blocks: int, slots: int, hits: Collection[int] = (), *, free_blocks: int, free_slots: int
    ) -> bool:
        """Whether requests can get so many blocks and slots at the same time, and `hits`, which are cached
        blocks, with the states behind these. Beyond what is free now, `free_blocks` and `free_slots` count
        places that will be idle soon."""
        lacking_blocks, lacking_slots = max(0, blocks - free_blocks), max(0, slots - free_slots)
        block_units, slot_units = self._blocks.units(lacking_blocks), self._slots.units(lacking_slots)
        if block_units > len(self._blocks.absent) or slot_units > len(self._slots.absent):
            return False
        wanted = block_units * self.block_pages + slot_units * self.slot_pages
        if not wanted:
            return True
        supply = self.free_pages + max(0, self._idle_copies - bool(hits)) * self.slot_pages
        if not lacking_slots:
            soon = (free_slots - self._states.free) // self._slots.size
            spare = (free_slots - slots) // self._slots.size
            supply += min(len(self._slots.idle) + soon, spare) * self.slot_pages
        if not lacking_blocks:
            soon = (free_blocks - self._pool.free) // self._blocks.size
            spare = (free_blocks - blocks) // self._blocks.size
            kept = sum(unit in self._blocks.idle for unit in {block // self._blocks.size for block in hits})
            supply += min(len(self._blocks.idle) - kept + soon, spare) * self.block_pages
        return wanted <= supply

    def provide(self, blocks: int, slots: int) -> None:
        """Gets so many free blocks and slots, for which `has_room`. It leaves them where they are free."""
        lacking_blocks = self._blocks.units(max(0, blocks - self._pool.free))
        lacking_slots = self._slots.units(max(0, slots - self._states.free))
        wanted = lacking_blocks * self.block_pages + lacking_slots * self.slot_pages
        if not wanted:
            return
        moves: list[Move] = []
        self._free_up(wanted, blocks, slots, moves, takes_blocks=not lacking_blocks)
        for _ in range(lacking_blocks):
            self._add(Cells.BLOCKS, self._blocks, self._pool.put_in, moves)
        for _ in range(lacking_slots):
            self._add(Cells.SLOTS, self._slots, self._states.put_in, moves)
        self._make(moves)

    def _free_up(self, pages: int, blocks: int, slots: int, moves: list[Move], *, takes_blocks: bool) -> None:
        """Takes memory from idle units until so many pages are free. So many blocks and slots stay free."""

        def remove(
            cells: Cells, units: Units, which: Iterable[int], take_out: Callable[[range], None], most: float
        ) -> None:
            for count, unit in enumerate([*which]):
                if self.free_pages >= pages or count >= most:
                    return
                take_out(units.places(unit))
                units.remove(unit)
                moves.append(Move(cells, unit, present=False))
                self.free_pages += self.block_pages if cells is Cells.BLOCKS else self.slot_pages

        states, pool, copies, of_copies = self._states, self._pool, self._copies, self._of_copies
        if copies is not None and of_copies is not None:
            empty = (unit for unit in of_copies.idle if not copies.has_cached(of_copies.places(unit)))
            remove(Cells.SLOTS, of_copies, empty, copies.take_out, float("inf"))
        spare_slots = (states.free - slots) // self._slots.size
        remove(Cells.SLOTS, self._slots, self._slots.idle, states.take_out, spare_slots)
        if takes_blocks:
            units = self._blocks
            empty = [unit for unit in units.idle if not pool.has_cached(units.places(unit))]
            first = dict.fromkeys((*empty, *units.idle))
            remove(Cells.BLOCKS, units, first, pool.take_out, (pool.free - blocks) // units.size)
        if copies is not None and of_copies is not None:
            remove(Cells.SLOTS, of_copies, of_copies.idle, copies.take_out, float("inf"))
        assert self.free_pages >= pages, "the caller asked whether there is room"

    def _add(self, cells: Cells, units: Units, put_in: Callable[[range], None], moves: list[Move]) -> None:
        unit = units.add()
        put_in(units.places(unit))
        moves.append(Move(cells, unit, present=True))
        pages = self.block_pages if cells is Cells.BLOCKS else self.slot_pages
        self.free_pages -= pages
        self._moved_pages += pages

    def _make(self, moves: Sequence[Move]) -> None:
        began = time.perf_counter()
        self.move(moves)
        self._seconds += time.perf_counter() - began

    def _grow_copies(self) -> None:
        """Gives copies one more unit, from free pages and from blocks with nothing in them. Copies with less
        than half of what they may have also take cached blocks, the least recently used ones."""
        copies, units, pool = self._copies, self._of_copies, self._pool
        assert copies is not None, "they ask for it"
        assert units is not None, "their slots come and go"
        if not units.absent or pool.moves - self._looked < pool.num_blocks // GROWTH:
            return
        few = units.present < len(units.absent)
        wanted = -(-max(0, self.slot_pages - self.free_pages) // self.block_pages)
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
            moves.append(Move(Cells.BLOCKS, unit, present=False))
            self.free_pages += self.block_pages
        self._add(Cells.SLOTS, units, copies.put_in, moves)
        self._make(moves)

    def assert_whole(self) -> None:
        """Asserts, when idle, that all pages but those of the first units could go to either pool."""
        for units in (self._blocks, self._slots, self._of_copies):
            assert units is None or units.present - len(units.idle) <= 1, "a place of an idle pool is held"
            assert units is None or units.is_whole
