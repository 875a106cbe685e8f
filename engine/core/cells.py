"""Cells: the places of one kind of memory, each with what it has, for whom, and until when. Pure bookkeeping;
the memory is the engine's. Blocks, window blocks, slots of states and copies of states are cells.

A place is one record, a `Cell`. It is in exactly one of these states:

    free ──take──▶ held, without a name ──publish──▶ held, named ◀──share── idle, named
     ▲                   │ end ▲                          └────── end ─────▶ │
     └───────────────────┘     └────────────────── take (evicts) ───────────┘

- *Name.* It says what the place has, and no other place has it. What has a name is never written.
- *Leases.* A place is held as long as it has one. Each holder begins its own, with `take` or `share`, and
  ends it once, with `end`. Nothing else ends it: neither eviction nor `forget` take a place that is held.
- *Eviction.* Only `take` and `take_out` evict. `take` evicts idle places in the order of their ranks: parts,
  copies, then the rest; of one rank first what has been idle for longest. Both return the names that are
  found no more. They call nothing, so nothing else changes meanwhile.
- *Epoch.* It grows whenever the place loses its content. A reader without a lease compares it afterwards.
- *Record.* What an engine leaves to the next one (`kept_table`). It ends when a place that was taken is read.

The contracts of match, lock, insert and evict follow those of caches of prefixes in SGLang and mini-sglang.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain, islice
from typing import Generic, TypeVar

from baton.engine.core.kept_table import KeptTable
from baton.engine.core.units import Units

K = TypeVar("K", bound=Hashable)


class Rank(IntEnum):
    """The order of eviction."""

    PART = 0
    """Has the end of a request, which does not fill it. One request may go on with it (`adopt`)."""
    COPY = 1
    """Another worker has it, too, and used it last. So two workers do not cache the same, and hold twice as
    much."""
    ONLY = 2


@dataclass(slots=True, eq=False)
class Cell(Generic[K]):
    place: int
    name: K | None = None
    leases: int = 0
    rank: Rank = Rank.ONLY
    epoch: int = 0


class Cells(Generic[K]):
    """Owns the places of one kind.

    Attributes:
        units: which places have memory.
        records: of what the next engine may use. They learn which places `take` gave out. None: there are
            none.
        held: places with a lease.
        moves: grows when a place changes its state.
        changes: names that came or went so far. What was looked up before the last one may be wrong.
    """

    def __init__(self, units: Units) -> None:
        self.units = units
        self.records: KeptTable | None = None
        self.held = self.moves = self.changes = 0
        self._first = units.all_places.start
        self._cells: list[Cell[K]] = [Cell(place) for place in units.all_places]
        self._lowest = units.with_memory()
        """The free places, and some that are not (a heap). The lowest is taken: so few units are used."""
        self._free = {*self._lowest}
        self._named: dict[K, Cell[K]] = {}
        self._idle: Sequence[OrderedDict[int, Cell[K]]] = tuple(OrderedDict() for _ in Rank)
        """By rank, those that are idle and named."""

    # What there is

    @property
    def free(self) -> int:
        """Places that `take` can give out now."""
        parts, copies, only = self._idle
        return len(self._free) + len(parts) + len(copies) + len(only)

    @property
    def grantable(self) -> int:
        """Places that a request may be given now."""
        return self.free

    @property
    def movable(self) -> int:
        """Free places whose memory others may have."""
        return self.free

    @property
    def present(self) -> int:
        """Places that have memory."""
        return self.units.present * self.units.size

    @property
    def unused(self) -> int:
        """Places with nothing in them."""
        return len(self._free)

    @property
    def spare(self) -> int:
        """The part of `free` that has nothing which is cached here only."""
        return self.free - len(self._idle[Rank.ONLY])

    @property
    def cached(self) -> int:
        """Places that `lookup` finds, held or not."""
        return len(self._named) - len(self._idle[Rank.PART])

    def lookup(self, names: Iterable[K]) -> list[int]:
        """The places with the longest beginning of these names. Begins no lease."""
        places, named, part = [], self._named, Rank.PART
        for name in names:
            cell = named.get(name)
            if cell is None or cell.rank is part:
                break
            places.append(cell.place)
        return places

    def find(self, name: K) -> int | None:
        """The place with this name, as `lookup` finds it."""
        cell = self._named.get(name)
        return None if cell is None or cell.rank is Rank.PART else cell.place

    def __contains__(self, name: K) -> bool:
        return name in self._named

    @property
    def names(self) -> Iterable[K]:
        """All, with those of parts."""
        return self._named.keys()

    def cell(self, place: int) -> Cell[K]:
        """The record of a place, which only this class changes."""
        return self._cells[place - self._first]

    def epoch(self, place: int) -> int:
        return self._cells[place - self._first].epoch

    def unreferenced(self, places: Iterable[int]) -> int:
        """How many of these named places `free` counts. `share` would take them out of it."""
        cells, first = self._cells, self._first
        return [cells[place - first].leases for place in places].count(0)

    def is_evictable(self, place: int, name: K) -> bool:
        """Whether a place with this content, of which a tier may have a copy, is idle."""
        cell = self._named.get(name)
        return cell is not None and cell.place == place and not cell.leases and cell.rank is not Rank.PART

    def has_cached(self, places: Iterable[int]) -> bool:
        """Whether `lookup` finds one of these places."""
        cells = map(self.cell, places)
        return any(cell.name is not None and cell.rank is not Rank.PART for cell in cells)

    def next_evicted(self, most: int) -> Iterator[tuple[int, K]]:
        """The places that `take` would evict for the next `most` ones, in order, with names; no parts."""
        count = max(0, most - len(self._free) - len(self._idle[Rank.PART]))
        idle = chain(self._idle[Rank.COPY].values(), self._idle[Rank.ONLY].values())
        return ((cell.place, cell.name) for cell in islice(idle, count) if cell.name is not None)

    # Leases

    def take(self, count: int) -> tuple[list[int], list[K]]:
        """Begins a lease on `count` places, whose content is undefined: on free ones, the lowest first, and
        then on idle ones, which it evicts. Returns the places, and the names of those that had one."""
        assert count <= self.free, f"{count} places wanted, {self.free} free"
        places: list[int] = []
        evicted: list[K] = []
        cells, first, free, lowest, named = self._cells, self._first, self._free, self._lowest, self._named
        unused = min(count, len(free))
        while len(places) < unused:
            if (place := heapq.heappop(lowest)) in free:  # else it lost its memory, or was found in it
                free.remove(place)
                cells[place - first].leases = 1
                places.append(place)
        for idle in self._idle:
            while idle and len(places) < count:
                place, cell = idle.popitem(last=False)
                assert cell.name is not None, "it is named"
                del named[cell.name]
                evicted.append(cell.name)
                cell.name, cell.rank, cell.leases = None, Rank.ONLY, 1
                cell.epoch += 1
                places.append(place)
        if self.records is not None:
            self.records.taken += places
        self.units.hold(*places)
        self.held += count
        self.moves += count
        self.changes += len(evicted)
        return places, evicted

    def share(self, places: Sequence[int]) -> None:
        """Begins a lease on each of these named places."""
        self.moves += len(places)
        cells, first = self._cells, self._first
        held: list[int] = []
        for place in places:
            cell = cells[place - first]
            if not cell.leases:
                del self._idle[cell.rank][place]
                held.append(place)
            cell.leases += 1
        self.units.hold(*held)
        self.held += len(held)

    def end(self, *places: int) -> None:
        """Ends a lease on each of these places. Without one, a place is idle if it is named, else free."""
        self.moves += len(places)
        cells, first = self._cells, self._first
        let: list[int] = []
        for place in places:
            cell = cells[place - first]
            assert cell.leases, "a lease ends once"
            cell.leases -= 1
            if cell.leases:
                continue
            let.append(place)
            if cell.name is None:
                self._make_free(cell)
            else:
                self._idle[cell.rank][place] = cell
        self.units.let(*let)
        self.held -= len(let)

    def adopt(self, name: K) -> int:
        """Begins a lease on a part, which has this name no more: its holder writes behind what it has."""
        cell = self._named.pop(name)
        assert cell.rank is Rank.PART, "what is shared is never written"
        self.share([cell.place])
        cell.name, cell.rank = None, Rank.ONLY
        cell.epoch += 1
        self.changes += 1
        return cell.place

    def _make_free(self, cell: Cell[K]) -> None:
        cell.rank = Rank.ONLY
        cell.epoch += 1
        self._free.add(cell.place)
        heapq.heappush(self._lowest, cell.place)

    # Names

    def publish(self, place: int, name: K, rank: Rank = Rank.ONLY) -> bool:
        """Names a place, whose holder writes no more to it. False: it has a name, or another one has this
        one."""
        cell = self._cells[place - self._first]
        if cell.name is not None or name in self._named:
            return False
        assert cell.leases, "the holder names it"
        cell.name, cell.rank = name, rank
        self._named[name] = cell
        self.changes += 1
        return True

    def put_cached(self, place: int, name: K) -> None:
        """A free place has the content of this name, which no other one has. It is idle."""
        self._free.remove(place)
        cell = self._named[name] = self._idle[Rank.ONLY][place] = self.cell(place)
        cell.name = name
        self.changes += 1

    def use(self, name: K) -> None:
        """A named place counts as used now."""
        self.moves += 1
        cell = self._named[name]
        if not cell.leases:
            self._idle[cell.rank].move_to_end(cell.place)

    def rank(self, places: Iterable[int], rank: Rank) -> None:
        """Gives named places this rank. Idle ones are the last ones of it then."""
        for cell in map(self.cell, places):
            if cell.name is None or cell.rank is rank:
                continue
            if not cell.leases:
                del self._idle[cell.rank][cell.place]
                self._idle[rank][cell.place] = cell
            cell.rank = rank

    def forget(self, name: K) -> None:
        """Nothing finds the place with this name any more, if there is one. Those that hold it keep it."""
        if (cell := self._named.get(name)) is not None:
            self._forget(cell)
            if not cell.leases:
                self._make_free(cell)

    def _forget(self, cell: Cell[K]) -> None:
        assert cell.name is not None, "it is named"
        del self._named[cell.name]
        cell.name = None
        cell.epoch += 1
        self.changes += 1
        if not cell.leases:
            del self._idle[cell.rank][cell.place]

    # Memory

    def idle_units(self, places: Iterable[int]) -> int:
        """How many units would not be idle any more if these places were held."""
        return sum(unit in self.units.idle for unit in {place // self.units.size for place in places})

    def lease(self, place: int) -> Callable[[], None]:
        """The memory of a place is used until what this returns is called. The place may be evicted
        meanwhile."""
        return self.units.lease(place)

    def put_in(self, places: Sequence[int]) -> None:
        """These places have memory now, and are free."""
        self.moves += len(places)
        for place in places:
            self._free.add(place)
            heapq.heappush(self._lowest, place)
        if len(self._lowest) > 2 * len(self._cells):  # most lost their memory, and got it again
            self._lowest = sorted(self._free)

    def take_out(self, places: Iterable[int]) -> list[K]:
        """These places, which nothing holds, lose their memory. Returns the names of those that had one."""
        evicted: list[K] = []
        for cell in map(self.cell, places):
            assert not cell.leases, "nothing holds the place"
            if cell.name is None:
                self._free.remove(cell.place)
            else:
                evicted.append(cell.name)
                self._forget(cell)
            cell.rank = Rank.ONLY
            cell.epoch += 1
            self.moves += 1
        return evicted

    def clear(self) -> None:
        """Nothing is cached any more. Nothing holds a place."""
        places = self.units.with_memory()
        self.take_out(places)
        self.put_in(places)

    # Checks

    def assert_consistent(self) -> None:
        """Asserts that each place is in exactly one state, and that the names agree."""
        idle = {place: cell for each in self._idle for place, cell in each.items()}
        held = {cell.place for cell in self._cells if cell.leases}
        assert sorted([*self._free, *idle, *held]) == self.units.with_memory(), (
            "one was lost or has two owners"
        )
        assert sum(map(len, self._idle)) == len(idle)
        assert len(held) == self.held
        assert self._named == {cell.name: cell for cell in self._cells if cell.name is not None}
        assert {cell.place for cell in self._named.values()} == idle.keys() | {
            place for place in held if self.cell(place).name is not None
        }
        for rank in Rank:
            assert all(cell.rank is rank for cell in self._idle[rank].values())

    def assert_whole(self) -> None:
        """Asserts that nothing holds a place."""
        self.assert_consistent()
        assert not self.held, f"still held: {[cell for cell in self._cells if cell.leases]}"
