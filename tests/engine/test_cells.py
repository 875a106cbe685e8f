"""Places under random operations, compared with a table of what each has; and the contracts of readers."""

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.engine.api.pools import Outcome, RecordMemory
from baton.engine.core.cells import Cells, Rank
from baton.engine.core.kept_table import KeptTable
from baton.engine.core.units import Units

PLACES, UNIT = 8, 2
NAMES = st.integers(0, 9)


def sums(places: Sequence[int]) -> Outcome:
    return Outcome(lambda: True, lambda: [0] * len(places))


class CellsMachine(RuleBasedStateMachine):
    """The model: names, leases, ranks and ages of all places with memory, as plain tables."""

    def __init__(self) -> None:
        super().__init__()
        self.units = Units(0, PLACES, UNIT, PLACES // UNIT, keeps_first=False)
        self.cells = Cells[int](self.units)
        self.cells.records = KeptTable(RecordMemory(memoryview(bytearray(64 * PLACES)), sums), 64)
        self.taken = self.cells.records.taken
        self.present = set(range(PLACES))
        self.name: dict[int, int] = {}
        self.leases = dict.fromkeys(range(PLACES), 0)
        self.rank = dict.fromkeys(range(PLACES), Rank.ONLY)
        self.idle_since = dict.fromkeys(range(PLACES), 0)
        self.epochs = dict.fromkeys(range(PLACES), 0)
        self.now = 0

    @property
    def unheld(self) -> list[int]:
        return [place for place in self.present if not self.leases[place]]

    @property
    def order(self) -> list[int]:
        """Of eviction."""
        idle = [place for place in self.unheld if place in self.name]
        return sorted(idle, key=lambda place: (self.rank[place], self.idle_since[place]))

    def lost(self, places: list[int]) -> list[int]:
        """These places lose what they have. Returns their names."""
        for place in places:
            assert self.cells.epoch(place) > self.epochs[place]
        return [self.name.pop(place) for place in places if place in self.name]

    def tick(self, place: int) -> None:
        self.now += 1
        self.idle_since[place] = self.now

    @rule(count=st.integers(0, PLACES))
    def take(self, count: int) -> None:
        count = min(count, len(self.unheld))
        free = [place for place in self.unheld if place not in self.name]
        going = self.order[: max(0, count - len(free))]
        seen = [name for _, name in self.cells.next_evicted(count)]
        taken, evicted = self.cells.take(count)
        assert evicted == self.lost(going)
        assert seen == [name for name, place in zip(evicted, going, strict=True) if self.rank[place]]
        assert taken == [*sorted(free), *going][:count]
        assert self.taken == taken, "whose records end then"
        self.taken.clear()
        for place in [*taken, *going]:
            self.rank[place] = Rank.ONLY
        for place in taken:
            self.leases[place] = 1

    @rule(place=st.integers(0, PLACES - 1), name=NAMES, rank=st.sampled_from(Rank))
    def publish(self, place: int, name: int, rank: Rank) -> None:
        if self.leases[place] != 1:
            return
        is_new = place not in self.name and name not in self.name.values()
        assert self.cells.publish(place, name, rank) is is_new
        if is_new:
            self.name[place], self.rank[place] = name, rank

    @rule(name=NAMES)
    def share(self, name: int) -> None:
        found = self.cells.lookup([name])
        assert found == [p for p, its in self.name.items() if its == name and self.rank[p] is not Rank.PART]
        self.cells.share(found)
        for place in found:
            self.leases[place] += 1

    @rule(name=NAMES)
    def adopt(self, name: int) -> None:
        for place in [p for p in self.order if self.name[p] == name and self.rank[p] is Rank.PART]:
            assert self.cells.adopt(name) == place
            self.lost([place])
            self.rank[place], self.leases[place] = Rank.ONLY, 1

    @rule(place=st.integers(0, PLACES - 1))
    def end(self, place: int) -> None:
        if self.leases[place]:
            self.cells.end(place)
            self.leases[place] -= 1
            self.tick(place)
            if place not in self.name:
                self.rank[place] = Rank.ONLY

    @rule(name=NAMES)
    def forget(self, name: int) -> None:
        self.cells.forget(name)
        self.lost([place for place, its in self.name.items() if its == name])

    @rule(place=st.integers(0, PLACES - 1), rank=st.sampled_from([Rank.COPY, Rank.ONLY]))
    def rerank(self, place: int, rank: Rank) -> None:
        if self.rank[place] is Rank.PART:
            return
        self.cells.rank([place], rank)
        if place in self.name and self.rank[place] is not rank:
            self.rank[place] = rank
            self.tick(place)

    @rule()
    def take_out(self) -> None:
        if self.units.idle:
            unit = next(iter(self.units.idle))
            places = [*self.units.places(unit)]
            assert self.cells.take_out(places) == self.lost(places)
            self.units.remove(unit)
            self.present -= {*places}

    @rule()
    def put_in(self) -> None:
        if self.units.absent:
            places = self.units.places(self.units.add())
            self.cells.put_in(places)
            self.present |= {*places}
            self.rank.update(dict.fromkeys(places, Rank.ONLY))

    @invariant()
    def accounts_are_right(self) -> None:
        self.cells.assert_consistent()
        assert self.cells.free == len(self.unheld)
        assert self.cells.spare == len(self.unheld) - sum(self.rank[p] is Rank.ONLY for p in self.order)
        assert self.cells.held == sum(count > 0 for count in self.leases.values())
        idle = {unit for unit in range(PLACES // UNIT) if {*self.units.places(unit)} <= {*self.unheld}}
        assert idle == {*self.units.idle}
        self.epochs = {place: self.cells.epoch(place) for place in range(PLACES)}

    def teardown(self) -> None:
        for place, count in self.leases.items():
            for _ in range(count):
                self.cells.end(place)
        self.cells.assert_whole()


TestCells = CellsMachine.TestCase
TestCells.settings = settings(max_examples=60, stateful_step_count=40)
