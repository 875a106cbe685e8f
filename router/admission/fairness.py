"""Who of those that wait is next: priority first, then the key that was served least, then who came first.

Each key has a counter of the tokens that it was served. The key with the lowest counter is next; one that
comes back after a pause starts at the level of the others, so that nobody saves up a claim by staying away
(virtual token counters: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). Keys that
always have something waiting are served within one request of each other in tokens, whatever they send.
"""

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Pure: no clock, no tasks. Costs a step for each key that waits at the best priority.

    Attributes:
        served: tokens charged to each key so far, lifted after pauses; of keys ever seen.
    """

    def __init__(self) -> None:
        self.served: dict[str, float] = {}
        # priority → key → ticket → item; none of the inner ones is empty
        self._waiting: dict[int, dict[str, OrderedDict[int, T]]] = {}
        self._queued: dict[str, int] = {}  # key → items waiting, at any priority
        self._places: dict[int, tuple[int, str]] = {}
        self._tickets = 0
        self._level = 0.0  # counter of the key that was served last

    def __len__(self) -> int:
        return len(self._places)

    def push(self, key: str, priority: int, item: T) -> int:
        """Returns the ticket with which it can be removed."""
        if key not in self._queued:
            others = (self.served[other] for other in self._queued)
            self.served[key] = max(self.served.get(key, 0.0), min(others, default=self._level))
        self._queued[key] = self._queued.get(key, 0) + 1
        self._tickets += 1
        self._waiting.setdefault(priority, {}).setdefault(key, OrderedDict())[self._tickets] = item
        self._places[self._tickets] = (priority, key)
        return self._tickets

    def pop(self) -> T:
        """The next one; there must be one."""
        keys = self._waiting[min(self._waiting)]
        # Among equals the one that came first: tickets grow.
        key = min(keys, key=lambda k: (self.served[k], next(iter(keys[k]))))
        self._level = self.served[key]
        return self._take(next(iter(keys[key])))

    def remove(self, ticket: int) -> None:
        """It does not wait any more. Harmless when it was popped or removed before."""
        if ticket in self._places:
            self._take(ticket)

    def charge(self, key: str, tokens: float) -> None:
        """The key was served so much."""
        self.served[key] = self.served.get(key, 0.0) + tokens

    def _take(self, ticket: int) -> T:
        priority, key = self._places.pop(ticket)
        items = self._waiting[priority][key]
        item = items.pop(ticket)
        if not items:
            del self._waiting[priority][key]
            if not self._waiting[priority]:
                del self._waiting[priority]
        self._queued[key] -= 1
        if not self._queued[key]:
            del self._queued[key]
        return item
