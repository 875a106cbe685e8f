"""A fair queue between keys.

Items with the lowest rank are next. Of these, the items of the key that was served least are next. Of the
items of one key, those with the lowest order are next, and of these the oldest.

Each key has a counter of the tokens that it was served. A charge may be an estimate that is corrected later.
A key that returns after a pause starts at the level of the others, so that it gains nothing by the pause.
Keys that always have an item waiting are served equally, to within one request. Source: virtual token
counters, Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class FairQueue(Generic[K, T]):
    """Pure: no clock, no tasks. `pop` takes time in proportion to the waiting keys.

    Attributes:
        served: tokens charged to each key ever seen, raised to the level of the others after a pause.
    """

    def __init__(self) -> None:
        self.served: dict[K, float] = {}
        # rank → key → [(order, ticket, item)]; no empty entries
        self._waiting: dict[int, dict[K, list[tuple[int, int, T]]]] = {}
        self._queued: dict[K, int] = {}  # key → waiting items of any rank
        self._places: dict[int, tuple[int, K, int]] = {}  # ticket → rank, key, order
        self._tickets = 0
        self._level = 0.0  # `served` of the key that was served last

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, ticket: int) -> bool:
        return ticket in self._places

    def push(self, key: K, rank: int, item: T, ticket: int | None = None, order: int = 0) -> int:
        """Returns the item's ticket. An item that waits again passes its old ticket, and keeps its place."""
        if key not in self._queued:
            others = (self.served[other] for other in self._queued)
            self.served[key] = max(self.served.get(key, 0.0), min(others, default=self._level))
        if ticket is None:
            self._tickets += 1
            ticket = self._tickets
        self.put_back(key, rank, item, ticket, order)
        return ticket

    def put_back(self, key: K, rank: int, item: T, ticket: int, order: int = 0) -> None:
        """Undoes `pop`."""
        self._queued[key] = self._queued.get(key, 0) + 1
        items = self._waiting.setdefault(rank, {}).setdefault(key, [])
        insort(items, (order, ticket, item), key=_place)
        self._places[ticket] = (rank, key, order)

    def pop(self, may_go: Callable[[K, T], bool] = lambda key, item: True) -> T | None:
        """Removes and returns the next item; None if no key may go.

        `may_go` gets each waiting key and its first item.
        """
        for rank in sorted(self._waiting):
            keys = self._waiting[rank]
            allowed = [key for key, items in keys.items() if may_go(key, items[0][2])]
            if allowed:
                # Among equal keys the item with the lowest ticket came first.
                key = min(allowed, key=lambda k: (self.served[k], keys[k][0][1]))
                self._level = self.served[key]
                return self._take(keys[key][0][1])
        return None

    def remove(self, ticket: int) -> None:
        """Removes an item. Does nothing if it was popped or removed before."""
        if ticket in self._places:
            self._take(ticket)

    def charge(self, key: K, tokens: float) -> None:
        """Counts tokens that the key was served."""
        self.served[key] = self.served.get(key, 0.0) + tokens

    def _take(self, ticket: int) -> T:
        rank, key, order = self._places.pop(ticket)
        items = self._waiting[rank][key]
        _, _, item = items.pop(bisect_left(items, (order, ticket), key=_place))
        if not items:
            del self._waiting[rank][key]
            if not self._waiting[rank]:
                del self._waiting[rank]
        self._queued[key] -= 1
        if not self._queued[key]:
            del self._queued[key]
        return item


def _place(entry: tuple[int, int, object]) -> tuple[int, int]:
    return entry[:2]
