"""A fair queue between keys.

Items with the lowest rank are next. Of these, the items of the key that was served least are next. Of the
items of one key, those with the lowest order are next, and of these the oldest. If this item may not go, the
others of its key and lane wait, too, also those with a higher rank: they might keep it waiting for good.

Each key has a counter of the tokens that it was served. A charge may be an estimate that is corrected later.
A key that returns after a pause starts at the level of the others, so that it gains nothing by the pause.
Keys that always have an item waiting are served equally, to within one request. Source: virtual token
counters, Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

Place = tuple[int, int, int]
"""Rank, order and ticket: where an item stands among those of its lane."""


@dataclass(slots=True)
class _Lane:
    """The items of one key that go or wait together, except the first."""

    places: list[Place] = field(default_factory=list)
    """A heap. Those of removed items stay until they come first, or are more than half."""
    waiting: int = 0


class FairQueue(Generic[K, T]):
    """Pure: no clock, no tasks. `pop` takes time in proportion to the waiting keys, and to the logarithm of
    their items, whatever ranks and orders these have.

    Attributes:
        served: tokens charged to each key ever seen, raised to the level of the others after a pause.
    """

    def __init__(self) -> None:
        self.served: dict[K, float] = {}
        self._lanes: dict[tuple[K, bool], _Lane] = {}  # no empty ones
        self._items: dict[int, tuple[K, bool, Place, T]] = {}  # by ticket
        self._tickets = 0
        self._level = 0.0  # `served` of the key that was served last

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, ticket: int) -> bool:
        return ticket in self._items

    def push(
        self, key: K, rank: int, item: T, ticket: int | None = None, order: int = 0, *, lane: bool = False
    ) -> int:
        """Returns the item's ticket. An item that waits again passes its old ticket, and keeps its place.

        `lane`: a key may have items of two kinds. If the first of one kind may not go, the other kind may.
        """
        if (key, False) not in self._lanes and (key, True) not in self._lanes:
            others = (self.served[other] for other, _ in self._lanes)
            self.served[key] = max(self.served.get(key, 0.0), min(others, default=self._level))
        if ticket is None:
            self._tickets += 1
            ticket = self._tickets
        self.put_back(key, rank, item, ticket, order, lane=lane)
        return ticket

    def put_back(
        self, key: K, rank: int, item: T, ticket: int, order: int = 0, *, lane: bool = False
    ) -> None:
        """Undoes `pop`."""
        place = (rank, order, ticket)
        to = self._lanes.setdefault((key, lane), _Lane())
        heappush(to.places, place)
        to.waiting += 1
        self._items[ticket] = (key, lane, place, item)

    def pop(self, may_go: Callable[[K, T], bool] = lambda key, item: True) -> T | None:
        """Removes and returns the next item; None if no key may go.

        `may_go` gets each waiting key and its first item of each lane.
        """
        best: tuple[int, float, int] | None = None
        for (key, _), lane in self._lanes.items():
            rank, _, ticket = self._first(lane)
            if may_go(key, self._items[ticket][3]):
                # Among equal keys the item with the lowest ticket came first.
                candidate = (rank, self.served[key], ticket)
                best = candidate if best is None else min(best, candidate)
        if best is None:
            return None
        self._level = best[1]
        return self._take(best[2])

    def remove(self, ticket: int) -> None:
        """Removes an item. Does nothing if it was popped or removed before."""
        if ticket in self._items:
            self._take(ticket)

    def charge(self, key: K, tokens: float) -> None:
        """Counts tokens that the key was served."""
        self.served[key] = self.served.get(key, 0.0) + tokens

    def _is_waiting(self, place: Place) -> bool:
        found = self._items.get(place[2])
        return found is not None and found[2] == place

    def _first(self, lane: _Lane) -> Place:
        while not self._is_waiting(lane.places[0]):
            heappop(lane.places)
        return lane.places[0]

    def _take(self, ticket: int) -> T:
        key, kind, _, item = self._items.pop(ticket)
        lane = self._lanes[key, kind]
        lane.waiting -= 1
        if not lane.waiting:
            del self._lanes[key, kind]
        elif len(lane.places) > 2 * lane.waiting:
            lane.places = [place for place in lane.places if self._is_waiting(place)]
            heapify(lane.places)
        return item
