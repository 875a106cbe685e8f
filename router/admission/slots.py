"""Slots for work of several API keys: a thread, child processes, connections.

Keys take turns by the seconds in which their work held slots (`fairness`), so what waits for a key's turn is
work of that key and, for each other key, the piece that runs.

Wait-for graph: work waits for a slot. What holds a slot waits for no other slot of the same kind.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from baton.router.admission.fairness import FairQueue

T = TypeVar("T")
KEY_SHARE = 2
"""A key that holds slots may have this many times what it leaves free: 2 of 3, 10 of 16. Source: as
`queue.KEY_SHARE`."""
_LONG_SECONDS = 0.1


@dataclass(slots=True, eq=False)
class _Slot:
    """The slot of one piece of work, which waits for it or holds it."""

    key: str
    is_long: bool
    granted: asyncio.Future[None] = field(init=False)
    """Of one that has to wait."""


class Slots:
    """Up to `count` pieces of work at a time. No key with slots gets the last one that is free.

    With several slots, at most `count - 1` have long work: what the caller says is long, and that of keys of
    which the last piece took long. Otherwise keys with long work would hold up all others. Of these slots,
    too, no key gets the last one beside another.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._free_for_long = max(1, count - 1)
        self._held = Counter[str]()  # slots by key
        self._slow: set[str] = set()  # keys of which the last piece of work took long
        self._waiting: FairQueue[str, _Slot] = FairQueue()
        self._running: set[asyncio.Future[Any]] = set()

    @asynccontextmanager
    async def turn(self, key: str, *, is_long: bool = False) -> AsyncIterator[None]:
        """Holds a slot for the client's API key `key`."""
        slot = await self._acquire(key, is_long)
        began = time.monotonic()
        try:
            yield
        finally:
            self._release(slot, began)

    async def run(self, key: str, work: Callable[[], Awaitable[T]], *, is_long: bool = False) -> T:
        """Returns what `work` returns, and raises what it raises. When the caller is cancelled, work that has
        begun goes on to its end with its slot."""
        slot = await self._acquire(key, is_long)
        began = time.monotonic()

        def ended(running: asyncio.Future[T]) -> None:
            self._running.discard(running)
            self._release(slot, began)

        running = asyncio.ensure_future(work())
        self._running.add(running)
        running.add_done_callback(ended)
        return await asyncio.shield(running)

    async def close(self) -> None:
        """Cancels the work of `run`, and waits for its end. No work may follow."""
        for running in self._running:
            running.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _acquire(self, key: str, is_long: bool) -> _Slot:
        slot = _Slot(key, is_long)
        if not self._waiting and self._may_go(key, slot):
            self._waiting.pass_by(key)
            self._take(slot)
            return slot
        slot.granted = asyncio.get_running_loop().create_future()
        ticket = self._waiting.push(key, 0, slot, lane=is_long)
        self._dispatch()
        try:
            await slot.granted
        except asyncio.CancelledError:
            self._waiting.remove(ticket)
            if not slot.granted.cancelled():  # the slot was granted at the same moment
                self._release(slot, time.monotonic())
            raise
        return slot

    def _release(self, slot: _Slot, began: float) -> None:
        # The size of a piece of work does not tell how long it takes.
        seconds = time.monotonic() - began
        self._waiting.charge(slot.key, seconds)
        (self._slow.add if seconds > _LONG_SECONDS else self._slow.discard)(slot.key)
        self._free += 1
        self._free_for_long += slot.is_long
        self._held[slot.key] -= 1
        if not self._held[slot.key]:
            del self._held[slot.key]
        self._dispatch()

    def _dispatch(self) -> None:
        while self._free and (slot := self._waiting.pop(self._may_go)) is not None:
            if not slot.granted.done():  # its caller was not cancelled
                self._take(slot)
                slot.granted.set_result(None)

    def _may_go(self, key: str, slot: _Slot) -> bool:
        held = self._held[key]
        if not self._free or (held and held + 1 > KEY_SHARE * (self._free - 1)):
            return False
        return not self._is_long(slot) or self._free_for_long > bool(held)

    def _take(self, slot: _Slot) -> None:
        self._free -= 1
        slot.is_long = self._is_long(slot)
        self._free_for_long -= slot.is_long
        self._held[slot.key] += 1

    def _is_long(self, slot: _Slot) -> bool:
        return slot.is_long or slot.key in self._slow
