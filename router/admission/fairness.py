"""Which waiting item is next: lowest rank first, then the key that was served least, then order of arrival.

Each key has a counter of the tokens that it was served. The key with the lowest counter is next. A key that
comes back after a pause starts at the level of the others, so that it has no claim for the time it was away
(virtual token counters: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). Keys that
always have something waiting are served within one request of each other in tokens, whatever they send.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class FairQueue(Generic[K, T]):
    """Pure: no clock, no tasks. Finding the next costs a step for each key that waits at the best rank.

    Attributes:
        served: tokens charged to each key so far, lifted after pauses; of keys ever seen.
    """

    def __init__(self) -> None:
        self.served: dict[K, float] = {}
        # rank → key → (ticket, item) by ticket; none of the inner ones is empty
        self._waiting: dict[int, dict[K, list[tuple[int, T]]]] = {}
        self._queued: dict[K, int] = {}  # key → items waiting, at any rank
        self._places: dict[int, tuple[int, K]] = {}
        self._tickets = 0
        self._level = 0.0  # counter of the key that was served last

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, ticket: int) -> bool:
        return ticket in self._places

    def push(self, key: K, rank: int, item: T, ticket: int | None = None) -> int:
        """Returns its ticket. An item that waits again gives the ticket that it had, and keeps its place."""
        if key not in self._queued:
            others = (self.served[other] for other in self._queued)
            self.served[key] = max(self.served.get(key, 0.0), min(others, default=self._level))
        if ticket is None:
            self._tickets += 1
            ticket = self._tickets
        self.put_back(key, rank, item, ticket)
        return ticket

    def put_back(self, key: K, rank: int, item: T, ticket: int) -> None:
        """Undoes `pop`."""
        self._queued[key] = self._queued.get(key, 0) + 1
        items = self._waiting.setdefault(rank, {}).setdefault(key, [])
        insort(items, (ticket, item), key=_ticket)
        self._places[ticket] = (rank, key)

    def pop(self, may_go: Callable[[K, T], bool] = lambda key, item: True) -> T | None:
        """The next one of the keys that may go; None when there is none. `may_go` is asked about each key,
        with its item that would go."""
        for rank in sorted(self._waiting):
            keys = self._waiting[rank]
            allowed = [key for key, items in keys.items() if may_go(key, items[0][1])]
            if allowed:
                # Among equals the one that came first: tickets grow.
                key = min(allowed, key=lambda k: (self.served[k], keys[k][0][0]))
                self._level = self.served[key]
                return self._take(keys[key][0][0])
        return None

    def remove(self, ticket: int) -> None:
        """It does not wait any more. Harmless when it was popped or removed before."""
        if ticket in self._places:
            self._take(ticket)

    def charge(self, key: K, tokens: float) -> None:
        """The key was served so much."""
        self.served[key] = self.served.get(key, 0.0) + tokens

    def _take(self, ticket: int) -> T:
        rank, key = self._places.pop(ticket)
        items = self._waiting[rank][key]
        _, item = items.pop(bisect_left(items, ticket, key=_ticket))
        if not items:
            del self._waiting[rank][key]
            if not self._waiting[rank]:
                del self._waiting[rank]
        self._queued[key] -= 1
        if not self._queued[key]:
            del self._queued[key]
        return item


def _ticket(entry: tuple[int, object]) -> int:
    return entry[0]
