"""A fair queue between keys.

Items with the lowest rank are next. Of these, the items of the key that was served least are next. Of the
items of one key, those with the lowest order are next, and of these the one that is due first. If this item
may not go, the others of its key and lane wait, too, also those with a higher rank: they might keep it
waiting for good.

An item is due when it would be done if the waiting items of its key were served at the same time, each at
the same speed. So short items do not wait for long ones, and no item waits longer than it would then, however
many short ones come later. Items of the same size go in the order in which they came. Source: the fair
sojourn protocol, Friedman and Henderson, "Fairness and Efficiency in Web Server Protocols", SIGMETRICS 2003.

Each key has a counter of the tokens that it was served. A charge may be an estimate that is corrected later.
A key that returns after a pause starts at the level of the others, so that it gains nothing by the pause.
Keys that always have an item waiting are served equally, to within one request. Source: virtual token
counters, Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Ticket(NamedTuple):
    """Names an item, and orders it among those of its key with the same rank and order."""

    due: float
    """What each item of its key got by then, if all were served at the same time, in tokens."""
    number: int
    """Of items in the order in which they came."""


Place = tuple[int, int, Ticket]
"""Rank, order and ticket: where an item stands among those of its lane."""


@dataclass(slots=True)
class _Lane:
    """The items of one key that go or wait together, except the first."""

    places: list[Place] = field(default_factory=list)
    """A heap. Those of removed items stay until they come first, or are more than half."""
    waiting: int = 0


@dataclass(slots=True)
class _Sharing:
    """The items of one key as if they were served at the same time, each at the same speed."""

    passed: float = 0.0
    """Tokens that an item got which was there all the time."""
    dues: list[float] = field(default_factory=list)
    """A heap: `passed` when each unfinished item is done."""

    def join(self, tokens: float) -> float:
        """Returns when an item with so many tokens is done."""
        due = self.passed + tokens
        heappush(self.dues, due)
        return due

    def serve(self, tokens: float) -> None:
        """All items together get so many tokens."""
        while self.dues:
            lowest = self.dues[0] - self.passed
            if tokens < lowest * len(self.dues):
                self.passed += tokens / len(self.dues)
                return
            tokens -= lowest * len(self.dues)
            self.passed = heappop(self.dues)


class FairQueue(Generic[K, T]):
    """Pure: no clock, no tasks. `pop` takes time in proportion to the waiting keys, and to the logarithm of
    their items, whatever ranks and orders these have.

    Attributes:
        served: tokens charged to each key ever seen, raised to the level of the others after a pause.
    """

    def __init__(self) -> None:
        self.served: dict[K, float] = {}
        self._lanes: dict[tuple[K, bool], _Lane] = {}  # no empty ones
        self._items: dict[Ticket, tuple[K, bool, Place, float, T]] = {}
        self._tickets = 0
        self._sharing: dict[K, _Sharing] = {}
        self._popped: tuple[Ticket, K, float] | None = None  # the last one, unless it was put back or counted
        self._level = 0.0  # `served` of the key that was served last

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, ticket: Ticket) -> bool:
        return ticket in self._items

    def push(
        self,
        key: K,
        rank: int,
        item: T,
        ticket: Ticket | None = None,
        order: int = 0,
        *,
        tokens: float = 0.0,
        lane: bool = False,
    ) -> Ticket:
        """Returns the item's ticket. An item that waits again passes its old ticket, and keeps its place.

        `tokens`: its size, as far as known when it first waits. `lane`: a key may have items of two kinds.
        If the first of one kind may not go, the other kind may.
        """
        if (key, False) not in self._lanes and (key, True) not in self._lanes:
            waiting_levels = (self.served[other] for other, _ in self._lanes)
            self.served[key] = max(self.served.get(key, 0.0), min(waiting_levels, default=self._level))
        self._count_popped()
        if ticket is None:
            self._tickets += 1
            ticket = Ticket(self._sharing.setdefault(key, _Sharing()).join(tokens), self._tickets)
        else:
            tokens = 0.0
        self._put(key, lane, (rank, order, ticket), tokens, item)
        return ticket

    def pass_by(self, key: K) -> None:
        """An item of this key goes without waiting. None may be waiting."""
        self._level = self.served[key] = max(self.served.get(key, 0.0), self._level)

    def put_back(
        self, key: K, rank: int, item: T, ticket: Ticket, order: int = 0, *, lane: bool = False
    ) -> None:
        """Undoes the last `pop`."""
        tokens = 0.0
        if self._popped is not None and self._popped[0] == ticket:
            tokens, self._popped = self._popped[2], None
        self._put(key, lane, (rank, order, ticket), tokens, item)

    def pop(self, may_go: Callable[[K, T], bool] = lambda key, item: True) -> T | None:
        """Removes and returns the next item; None if no key may go.

        `may_go` gets each waiting key and its first item of each lane.
        """
        self._count_popped()
        best: tuple[int, float, int, Ticket] | None = None
        for (key, _), lane in self._lanes.items():
            rank, _, ticket = self._first(lane)
            if may_go(key, self._items[ticket][4]):
                # Among equal keys the item that came first is next: what is due counts within a key.
                candidate = (rank, self.served[key], ticket.number, ticket)
                best = candidate if best is None else min(best, candidate)
        if best is None:
            return None
        self._level = best[1]
        key, tokens, item = self._take(best[3])
        self._popped = best[3], key, tokens
        return item

    def remove(self, ticket: Ticket) -> None:
        """Removes an item. Does nothing if it was popped or removed before."""
        if ticket in self._items:
            key, tokens, _ = self._take(ticket)
            self._sharing[key].serve(tokens)

    def charge(self, key: K, tokens: float) -> None:
        """Counts tokens that the key was served."""
        self.served[key] = self.served.get(key, 0.0) + tokens

    def _put(self, key: K, lane: bool, place: Place, tokens: float, item: T) -> None:
        """`tokens`: its size. 0 if that counts as served."""
        to = self._lanes.setdefault((key, lane), _Lane())
        heappush(to.places, place)
        to.waiting += 1
        self._items[place[2]] = (key, lane, place, tokens, item)

    def _count_popped(self) -> None:
        """The item that was popped last is served."""
        if self._popped is not None:
            (_, key, tokens), self._popped = self._popped, None
            self._sharing[key].serve(tokens)

    def _is_waiting(self, place: Place) -> bool:
        item = self._items.get(place[2])
        return item is not None and item[2] == place

    def _first(self, lane: _Lane) -> Place:
        while not self._is_waiting(lane.places[0]):
            heappop(lane.places)
        return lane.places[0]

    def _take(self, ticket: Ticket) -> tuple[K, float, T]:
        key, kind, _, tokens, item = self._items.pop(ticket)
        lane = self._lanes[key, kind]
        lane.waiting -= 1
        if not lane.waiting:
            del self._lanes[key, kind]
        elif len(lane.places) > 2 * lane.waiting:
            lane.places = [place for place in lane.places if self._is_waiting(place)]
            heapify(lane.places)
        return key, tokens, item
