"""Leases: what keeps an object after its end, because something still uses its memory. Pure.

    open ──close──▶ closed ──its last lease ends──▶ over
      └───────────── its last lease ends: nothing changes

Two rules hold for each object that has leases:

- A lease begins while the object is open. It ends once, by its holder: the step or the transfer that uses the
  object. Nothing else ends it, so a cancel cannot take memory from a step that is under way.
- The object is over once: when it is closed and has no lease. Only then its memory goes to other objects.
"""

from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

H = TypeVar("H", bound=Hashable)


class Leases(Generic[H]):
    """The leases on one object, by holder: the step, the transfer or the id of one that uses the object.

    Attributes:
        closed: the object has ended for its owner, so no lease begins.
    """

    __slots__ = ("_holders", "_over", "closed")

    def __init__(self, over: Callable[[], object]) -> None:
        """`over` takes the memory of the object back. It is called once, in `close` or in `end`."""
        self.closed = False
        self._over: Callable[[], object] | None = over
        self._holders: dict[H, None] = {}

    def begin(self, holder: H) -> None:
        """The holder uses the object until `end`."""
        assert not self.closed, f"{holder!r} wants to use what has ended"
        assert holder not in self._holders, f"{holder!r} has this lease already"
        self._holders[holder] = None

    def end(self, holder: H) -> None:
        """The holder uses the object no more. It must have a lease, since each ends once."""
        del self._holders[holder]
        if self.closed and not self._holders:
            self._finish()

    def close(self) -> None:
        """The object has ended. It is over at once, or with its last lease."""
        assert not self.closed, "an object ends once"
        self.closed = True
        if not self._holders:
            self._finish()

    def _finish(self) -> None:
        over, self._over = self._over, None  # `over` mostly names the object, which names its leases
        assert over is not None, "an object is over once"
        over()

    def __contains__(self, holder: object) -> bool:
        return holder in self._holders

    def __iter__(self) -> Iterator[H]:
        """The holders, in the order in which their leases began."""
        return iter(self._holders)

    def __len__(self) -> int:
        return len(self._holders)
