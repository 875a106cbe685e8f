"""The simulated clock: events in the order of their times."""

import heapq
import itertools
from collections.abc import Callable


class Clock:
    """Owns the events to come. Events at the same time happen in the order in which they were added.

    Attributes:
        now: seconds from the start.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        self.at(self.now + seconds, event)

    def run(self) -> None:
        """Returns when no event is left."""
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()
