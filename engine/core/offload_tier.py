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

from baton.engine.api.config import TierCells
from baton.engine.api.request import CachedBlock
from baton.engine.api.stats import OffloadStats
from baton.engine.core.cells import Cells
from baton.engine.core.link import Link
from baton.engine.core.units import Units
from baton.kv_names import Tier

CLEAN_SHARE = 4
"""Prompts may need many cells at once. So one in `CLEAN_SHARE` cells of the pool should be free, or should
have a copy here and be evicted next."""
LOOKS = 8
"""The list is made again when one in `LOOKS` of these cells has changed."""
PAUSE = 10.0
"""Seconds without copies to a tier after one has failed: the disk is full, or does not work."""


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
    place: int
    load: Load | None = None  # None: from the cell to the place
    let: Callable[[], None] = lambda: None  # of a copy out: ends the lease on the memory of the cell
    epoch: int = 0  # of the cell of a copy out, when it began


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
        places: Mapping[TierCells, int],
        cached: Mapping[bytes, CachedBlock],
        lost: list[bytes],
    ) -> None:
        """`places`: of each tier, for cells of this and of other kinds."""
        self.pool = pool
        self.cell_tokens = cell_tokens
        self.cached = cached
        self.lost = lost
        self.tiers = [
            OffloadTier(tier, num_places, self)
            for (tier, of_states), num_places in sorted(places.items())
            if of_states is not bool(cell_tokens)
        ]
        num_cells = len(pool.units.all_places)
        self.clean = max(1, num_cells // CLEAN_SHARE)
        self._leaving: Sequence[tuple[int, bytes]] = ()
        self._looked = -num_cells  # `moves` of the pool then

    def find(self, name: bytes) -> "OffloadTier | None":
        """The fastest tier that has this cell."""
        for tier in self.tiers:
            if name in tier:
                return tier
        return None

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
    """Owns the places of one tier, for the cells of one pool. They are `Cells`, too: a copy is a lease.

    Attributes:
        tier: which one it is.
        of_states: the cells are copies of states, and no blocks.
        num_places: places that it may have.
        ready: of these, the first ones, which have memory. All, unless the caller says otherwise.
        under_way: copies that the caller makes, in order.
        shared: what the tiers of the pool have together.
    """

    def __init__(self, tier: Tier, num_places: int, shared: CellTiers) -> None:
        self.tier = tier
        self.of_states = not shared.cell_tokens
        self.num_places = self.ready = num_places
        self.shared = shared
        self._pool = shared.pool
        self._places: Cells[bytes] = Cells(Units.fixed(num_places))
        self._by_tenant: dict[bytes, OrderedDict[bytes, None]] = {}  # least recently used first
        self._leaving: Sequence[tuple[int, bytes]] = ()
        self._next = 0  # of these, the first that was not looked at
        self._saving: dict[bytes, CellCopy] = {}
        self.under_way: deque[CellCopy] = deque()
        self._waiting: deque[CellCopy] = deque()  # copies in
        self._link = Link()
        self._saved = self._loaded = self._dropped = self._failed = self._damaged = 0
        self._paused_until = 0.0  # time.monotonic()

    def __contains__(self, name: bytes) -> bool:
        return name in self._places

    @property
    def changes(self) -> int:
        """As of `Cells`."""
        return self._places.changes

    @property
    def stats(self) -> OffloadStats:
        return OffloadStats(
            self.tier,
            blocks_total=self.num_places,
            blocks_used=self._places.cached,
            tokens_per_s=self._link.tokens_per_s.value,
            saved=self._saved,
            loaded_tokens=self._loaded,
            dropped=self._dropped,
            failed=self._failed,
            damaged=self._damaged,
        )

    @property
    def places_used(self) -> int:
        return len(self._places.units.all_places) - self._places.unused

    def have(self, ready: int, num_places: int) -> None:
        """So many places have memory. This grows, except before the first copy. `num_places` may fall, if no
        more memory can be had."""
        assert self.places_used <= ready, "copies have begun"
        self.ready, self.num_places = ready, num_places

    def reads(self, name: bytes) -> bool:
        """Whether copies from here, of what has this name, wait or are under way."""
        return (place := self._places.find(name)) is not None and not self._places.unreferenced([place])

    # Copies out

    def drop(self, name: bytes) -> None:
        """Forgets what it has under this name, if it has something."""
        self._saving.pop(name, None)
        if name in self._places:
            self._forget(name)

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
                let, epoch = self._pool.lease(cell), self._pool.epoch(cell)
                copy = self._saving[name] = CellCopy(name, cell, place, let=let, epoch=epoch)
                copies.append(copy)
            self._next += 1
        self.under_way += copies
        return copies

    def _lacks(self, name: bytes) -> bool:
        copy = self._saving.get(name)
        return name not in self._places and (copy is None or not self._is_intact(copy))

    def _is_intact(self, copy: CellCopy) -> bool:
        """Whether its cell has what it had when the copy out began."""
        return self._pool.epoch(copy.cell) == copy.epoch

    def _take_place(self) -> int | None:
        """A place for one more cell. If all are taken, the tenant with most cells gives up the one that is
        least recently used. None: copies read all cells of that tenant, or places get their memory."""
        if self.places_used == self.ready:
            if self.ready < self.num_places:
                return None
            largest = max(self._by_tenant.values(), key=len, default=())
            unread = next((name for name in largest if not self.reads(name)), None)
            if unread is None:
                return None
            self._forget(unread)
        [place], _ = self._places.take(1)  # the lowest, which has memory
        return place

    def _forget(self, name: bytes) -> None:
        self._places.forget(name)
        names = self._by_tenant[tenant := self.shared.cached[name].tenant]
        del names[name]
        if not names:
            del self._by_tenant[tenant]
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
        place = self._places.find(name)
        assert place is not None, "it is there"
        self._places.share([place])
        self._by_tenant[self.shared.cached[name].tenant].move_to_end(name)
        load.cells[self] += 1
        load.left[self] += 1
        self._waiting.append(CellCopy(name, cell, place, load))

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
            self._dropped += 1
        elif not intact:
            self._failed += 1
            self._paused_until = time.monotonic() + PAUSE
        else:
            self._places.publish(copy.place, copy.name)
            tenant = self.shared.cached[copy.name].tenant
            self._by_tenant.setdefault(tenant, OrderedDict())[copy.name] = None
            self._saved += 1
        self._places.end(copy.place)

    def _in(self, copy: CellCopy, load: Load, intact: bool) -> None:
        if not intact and self._places.find(copy.name) == copy.place:  # else another load found it damaged
            self._damaged += 1
            self._forget(copy.name)
        self._places.end(copy.place)
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
        return bool(self.under_way or self._waiting)

    @property
    def loading(self) -> bool:
        """Whether a cell waits for its bytes, or gets them."""
        return bool(self._waiting) or any(copy.load is not None for copy in self.under_way)

    def assert_consistent(self) -> None:
        """Asserts that each place has one owner, and that all maps agree."""
        self._places.assert_consistent()
        assert self.places_used <= self.ready
        assert sorted(name for names in self._by_tenant.values() for name in names) == sorted(
            self._places.names
        )

    def assert_whole(self) -> None:
        """Asserts that no copy waits or is under way."""
        self.assert_consistent()
        assert not self.copies, "a copy waits or is under way"
        self._places.assert_whole()


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
