"""Requests that no decode worker has room for wait here, in order of arrival."""

from bisect import insort
from typing import Protocol


class Waiter(Protocol):
    arrival: int
    """Its place in the order in which requests came."""

    def on_room(self) -> bool:
        """There may be room now. Asks a worker for it; False when there still seems to be none."""
        ...


class RoomQueue:
    """Who came first asks first; nobody overtakes. A request that was refused returns to its old place."""

    def __init__(self) -> None:
        self._waiting: list[Waiter] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def blocks(self, waiter: Waiter) -> bool:
        """Whether somebody who came before is waiting."""
        return bool(self._waiting) and self._waiting[0].arrival < waiter.arrival

    def wait(self, waiter: Waiter) -> None:
        if waiter not in self._waiting:
            insort(self._waiting, waiter, key=lambda w: w.arrival)

    def leave(self, waiter: Waiter) -> None:
        if waiter in self._waiting:
            self._waiting.remove(waiter)

    def offer(self) -> None:
        """Loads changed."""
        while self._waiting:
            first = self._waiting.pop(0)
            if not first.on_room():
                self.wait(first)
                return
