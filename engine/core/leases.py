"""Leases: what uses the memory of a request, and the attempt that it belongs to. Pure.

A request has one set of leases, which its owner gives to the engine. A step, a load or a transfer begins its
lease and ends it once. Nothing else ends it, so a cancel cannot take memory from a step that is under way.
What ends with the last lease is told to `close`: the memory of the request, and then its attempt.
"""

from collections.abc import Callable, Hashable, Iterator
from typing import Protocol


class Leases:
    """The leases on one request, by holder.

    Attributes:
        closed: the request has ended, so no lease begins.
    """

    __slots__ = ("_holders", "_over", "closed")

    def __init__(self) -> None:
        self.closed = False
        self._over: list[Callable[[], object]] = []
        self._holders: dict[Hashable, None] = {}

    def begin(self, holder: Hashable) -> None:
        """The holder uses the request until `end`."""
        assert not self.closed, f"{holder!r} wants to use what has ended"
        assert holder not in self._holders, f"{holder!r} has this lease already"
        self._holders[holder] = None

    def end(self, holder: Hashable) -> None:
        """The holder uses the request no more. It must have a lease, since each ends once."""
        del self._holders[holder]
        self._finish()

    def close(self, over: Callable[[], object]) -> None:
        """The request has ended. Calls `over` once: now, or when the last lease ends, after the `over` of
        earlier calls."""
        self.closed = True
        self._over.append(over)
        self._finish()

    def _finish(self) -> None:
        if not self._holders:
            over, self._over = self._over, []
            for each in over:
                each()

    def __contains__(self, holder: object) -> bool:
        return holder in self._holders

    def __iter__(self) -> Iterator[Hashable]:
        """The holders, in the order in which their leases began."""
        return iter(self._holders)

    def __len__(self) -> int:
        return len(self._holders)


class Owner(Protocol):
    """What the caller of an engine knows a request by."""

    leases: Leases
    """Those of the request, from `add`, `reserve`, `start` or `resume` on."""
