"""Tiers below the device, where the prefix cache lives on: memory of the host, local disk. Pure.

A *place* of a tier holds one *cell* of a pool: a block of KV, or a copy of states. A cell is found by the
name of its content. States have the name of the block that they come after:

    absent ──next_saves──▶ copying out ──ended──▶ there ──next_loads──▶ copying in ──ended──▶ there
      ▲                        │                    │                        │
      └──── the pool gave ─────┴── evicted here: ───┴──── not the bytes ─────┘
            out its cell            least recently used    that were saved

The caller makes the copies. Copies out are of cells that no request holds, before the pool evicts them. The
pool never waits for such a copy: if it gives out the cell meanwhile, the copy is dropped at its end. A cell
that is copied in belongs to a request, so it is not free. It enters the prefix cache only after its checksum
was right. No copy waits for anything but the device and the disk, so nothing here waits in a circle.

The tiers of a pool read one list of what it evicts next (`CellTiers`), and save what each of them lacks. They
know nothing of each other. A load takes each cell from the fastest one that has it.
"""

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from baton.engine.api.stats import OffloadStats
from baton.engine.core.cells import Cells
from baton.engine.core.link import Link
from baton.kv_names import Tier

CLEAN_SHARE = 4
"""Prompts may need many cells at once. So one in `CLEAN_SHARE` cells of the pool should be free, or should
have a copy here and be evicted next."""
LOOKS = 8
"""The list is made again when one in `LOOKS` of these cells has changed."""
PAUSE = 10.0
"""Seconds without copies to a tier after one has failed: the disk is full, or does not work."""


@dataclass(slots=True)
class _Entry:
    place: int
    tenant: bytes
    readers: int = 0  # copies from here that wait or are under way


@dataclass(slots=True, eq=False)
class Load:
    """Cells that one request waits for, whichever tiers have them. `then` gets True if all bytes are as they
    were saved."""

    then: Callable[[bool], None]
    cells: "Counter[OffloadTier]" = field(default_factory=Counter)
    left: "Counter[OffloadTier]" = field(default_factory=Counter)
    """Of these, those that have not come."""
    began: float = field(default_factory=lambda: time.monotonic())
    intact: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class CellCopy:
    """A copy between a cell of the pool and a place of a tier."""

    name: bytes
    cell: int
    entry: _Entry
    load: Load | None = None  # None: from the cell to the place
    let: Callable[[], None] = lambda: None  # of a copy out: ends the lease on the memory of the cell
    epoch: int = 0  # of the cell of a copy out, when it began

    @property
    def place(self) -> int:
        return self.entry.place


class HasTenant(Protocol):
    @property
    def tenant(self) -> bytes: ...


class CellTiers:
    """The tiers of one pool, and what they share.

    Attributes:
        pool: its cells are blocks, or copies of states.
        cell_tokens: positions with KV in a cell. 0: it has states.
        cached: what the cache has, by name.
        lost: gets the names of cells that a tier does not keep any more. The cache reads and empties it.
        tiers: the fastest first.
        clean: so many cells should be free, or should have a copy here and be evicted next.
    """

    def __init__(
        self,
        pool: Cells[bytes],
        cell_tokens: int,
        places: Mapping[Tier, int],
        cached: Mapping[bytes, HasTenant],
        lost: list[bytes],
    ) -> None:
        self.pool = pool
        self.cell_tokens = cell_tokens
        self.cached = cached
        self.lost = lost
        self.tiers = [OffloadTier(tier, num_places, self) for tier, num_places in sorted(places.items())]
        num_cells = len(pool.units.all_places)
        self.clean = max(1, num_cells // CLEAN_SHARE)
        self._leaving: Sequence[tuple[int, bytes]] = ()
        self._looked = -num_cells  # `moves` of the pool then

    def find(self, name: bytes) -> "OffloadTier | None":
        """The fastest tier that has this cell."""
        return next((tier for tier in self.tiers if name in tier), None)

    def leaving(self) -> Sequence[tuple[int, bytes]]:
        """The cells that the pool evicts next, in order, with names. Another list when they have changed."""
        if self.pool.moves - self._looked > self.clean // LOOKS:
            self._looked = self.pool.moves
            self._leaving = [*self.pool.next_evicted(self.clean)]
        return self._leaving

    def drop(self, name: bytes) -> None:
        """Forgets what tiers have under this name."""
        for tier in self.tiers:
            tier.drop(name)


class OffloadTier:
    """Owns the places of one tier, for the cells of one pool.

    Attributes:
        tier: which one it is.
        of_states: the cells are copies of states, and no blocks.
        num_places: places that it may have.
        ready: of these, the first ones, which have memory. All, unless the caller says otherwise.
        changes: as of `Cells`.
        under_way: copies that the caller makes, in order.
        shared: what the tiers of the pool have together.
    """

    def __init__(self, tier: Tier, num_places: int, shared: CellTiers) -> None:
        self.tier = tier
        self.of_states = not shared.cell_tokens
        self.num_places = self.ready = num_places
        self.shared = shared
        self._pool = shared.pool
        self.changes = 0
        self._free = list(range(num_places - 1, -1, -1))
        self._entries: dict[bytes, _Entry] = {}
        self._by_tenant: dict[bytes, OrderedDict[bytes, _Entry]] = {}  # least recently used first
        self._leaving: Sequence[tuple[int, bytes]] = ()
        self._next = 0  # of these, the first that was not looked at
        self._saving: dict[bytes, CellCopy] = {}
        self.under_way: deque[CellCopy] = deque()
        self._waiting: deque[CellCopy] = deque()  # copies in
        self._wanted = 0  # copies in that have not ended
        self._link = Link()
        self._saved = self._loaded = self._dropped = self._failed = self._damaged = 0
        self._paused_until = 0.0  # time.monotonic()

    def __contains__(self, name: bytes) -> bool:
        return name in self._entries

    @property
    def stats(self) -> OffloadStats:
        return OffloadStats(
            self.tier,
            blocks_total=self.num_places,
            blocks_used=len(self._entries),
            tokens_per_s=self._link.tokens_per_s.value,
            saved=self._saved,
            loaded_tokens=self._loaded,
            dropped=self._dropped,
            failed=self._failed,
            damaged=self._damaged,
        )

    @property
    def places_used(self) -> int:
        return self.ready - len(self._free)

    def have(self, ready: int, num_places: int) -> None:
        """So many places have memory. This grows, except before the first copy. `num_places` may fall, if no
        more memory can be had."""
        if ready < self.ready:
            assert not self.places_used, "copies have begun"
            self._free, self.ready = [], 0
        self._free = [*range(ready - 1, self.ready - 1, -1), *self._free]
        self.ready, self.num_places = ready, num_places

    def reads(self, name: bytes) -> bool:
        """Whether copies from here, of what has this name, wait or are under way."""
        return name in self._entries and self._entries[name].readers > 0

    # Copies out

    def drop(self, name: bytes) -> None:
        """Forgets what it has under this name, if it has something."""
        self._saving.pop(name, None)
        if (entry := self._entries.get(name)) is not None:
            self._forget(name, entry)

    def next_saves(self, most: int) -> list[CellCopy]:
        """Up to `most` cells to copy to their places now. The caller calls `ended` for each."""
        if self._paused_until and time.monotonic() < self._paused_until:
            return []
        if (leaving := self.shared.leaving()) is not self._leaving:
            self._leaving, self._next = leaving, 0
        copies: list[CellCopy] = []
        # At most half of the places: otherwise all cells of this tier would also be in the pool.
        for cell, name in leaving[self._next : self.num_places // 2]:
            cached = self.shared.cached.get(name)
            if cached is not None and self._lacks(name) and self._pool.is_evictable(cell, name):
                if len(copies) == most or (place := self._take_place()) is None:
                    break
                entry, let = _Entry(place, cached.tenant), self._pool.lease(cell)
                copy = self._saving[name] = CellCopy(name, cell, entry, let=let, epoch=self._pool.epoch(cell))
                copies.append(copy)
            self._next += 1
        self.under_way += copies
        return copies

    def _lacks(self, name: bytes) -> bool:
        copy = self._saving.get(name)
        return name not in self._entries and (copy is None or not self._is_intact(copy))

    def _is_intact(self, copy: CellCopy) -> bool:
        """Whether its cell has what it had when the copy out began."""
        return self._pool.epoch(copy.cell) == copy.epoch

    def _take_place(self) -> int | None:
        """A place for one more cell. If all are taken, the tenant with most cells gives up the one that is
        least recently used. None: copies read all cells of that tenant, or places get their memory."""
        if self._free:
            return self._free.pop()
        if self.ready < self.num_places:
            return None
        largest = max(self._by_tenant.values(), key=len, default=OrderedDict())
        for name, entry in largest.items():
            if not entry.readers:
                self._forget(name, entry)
                return self._free.pop()
        return None

    def _forget(self, name: bytes, entry: _Entry) -> None:
        del self._entries[name]
        self.changes += 1
        names = self._by_tenant[entry.tenant]
        del names[name]
        if not names:
            del self._by_tenant[entry.tenant]
        if not entry.readers:
            self._free.append(entry.place)
        self.shared.lost.append(name)

    # Copies in

    def pays(self, cells: int, seconds: float) -> bool:
        """As `Link.pays`: whether loading so many cells takes less than `seconds`."""
        return self._link.pays(self._size(cells), seconds, time.monotonic())

    def _size(self, cells: int) -> int:
        """Of a load, in the measured times: in tokens. States have none, so their copies count."""
        return cells * (self.shared.cell_tokens or 1)

    def load(self, name: bytes, cell: int, load: Load) -> None:
        """Copies what is there under this name into this cell, which nothing else uses meanwhile. The caller
        publishes it when the load has ended."""
        entry = self._entries[name]
        entry.readers += 1
        self._by_tenant[entry.tenant].move_to_end(name)
        load.cells[self] += 1
        load.left[self] += 1
        self._wanted += 1
        self._waiting.append(CellCopy(name, cell, entry, load))

    def next_loads(self, most: int) -> list[CellCopy]:
        """Up to `most` places to copy into their cells now. The caller calls `ended` for each."""
        copies = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
        self.under_way += copies
        return copies

    # Both

    def ended(self, intact: bool) -> None:
        """The first copy that is under way is over. `intact`: of a copy in, whether its checksum was that of
        the copy out. Of a copy out, whether the place has all bytes."""
        copy = self.under_way.popleft()
        if copy.load is not None:
            self._in(copy, copy.load, intact)
            return
        copy.let()
        is_last = self._saving.get(copy.name) is copy
        if is_last:
            del self._saving[copy.name]
        if not is_last or not self._is_intact(copy):
            # The cell was given out meanwhile, so the bytes may be of another prompt.
            self._free.append(copy.place)
            self._dropped += 1
        elif not intact:
            self._free.append(copy.place)
            self._failed += 1
            self._paused_until = time.monotonic() + PAUSE
        else:
            self._entries[copy.name] = copy.entry
            self.changes += 1
            self._by_tenant.setdefault(copy.entry.tenant, OrderedDict())[copy.name] = copy.entry
            self._saved += 1

    def _in(self, copy: CellCopy, load: Load, intact: bool) -> None:
        entry = copy.entry
        entry.readers -= 1
        self._wanted -= 1
        if self._entries.get(copy.name) is not entry:  # another load found it damaged
            if not entry.readers:
                self._free.append(entry.place)
        elif not intact:
            self._damaged += 1
            self._forget(copy.name, entry)
        load.intact &= intact
        load.left[self] -= 1
        if not load.left[self]:
            now = time.monotonic()
            self._link.measured(self._size(load.cells[self]), 0.0, now - load.began, now)
        if load.left.total():
            return
        for tier, cells in load.cells.items():
            tier._loaded += tier._size(cells) * load.intact
        load.then(load.intact)

    @property
    def copies(self) -> bool:
        """Whether a copy waits, or is under way."""
        return bool(self.under_way) or self.loading

    @property
    def loading(self) -> bool:
        """Whether a cell waits for its bytes, or gets them."""
        return self._wanted > 0

    def assert_consistent(self) -> None:
        """Asserts that each place has one owner, and that all maps agree."""
        named = [entry.place for entry in self._entries.values()]
        saving = [copy.place for copy in self._saving.values()]
        assert len(self._free) + len(named) + len(saving) <= self.ready, "a place has two owners"
        assert len({*self._free, *named, *saving}) == len(self._free) + len(named) + len(saving)
        by_tenant = {name: entry for names in self._by_tenant.values() for name, entry in names.items()}
        assert by_tenant == self._entries

    def assert_whole(self) -> None:
        """Asserts that no copy waits or is under way."""
        self.assert_consistent()
        assert not self.under_way, "a copy is under way"
        assert not self._waiting, "a copy was left behind"
        assert not any(entry.readers for entry in self._entries.values())
        assert len(self._free) + len(self._entries) == self.ready, "a place was lost"


def stats_of(tiers: Iterable[OffloadTier]) -> list[OffloadStats]:
    """Of each tier, what it has of blocks. Copies of states count only among the copies."""
    by_tier: dict[Tier, OffloadStats] = {}
    for each in tiers:
        stats = each.stats
        if (blocks := by_tier.get(each.tier)) is not None:
            counts = ("saved", "dropped", "failed", "damaged")
            both = {count: getattr(blocks, count) + getattr(stats, count) for count in counts}
            stats = replace(blocks, **both)
        by_tier[each.tier] = stats
    return [*by_tier.values()]
