"""From a request's generations to the one task that answers the client.

A client that reads slowly holds up nobody else: what waits for it is bounded.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from router.errors import ApiError
from rpc import worker_pb2 as pb

MAX_TAKEN = 128
"""Items that are taken at once: to write them takes some milliseconds, in which the event loop does nothing
else."""


@dataclass(frozen=True, slots=True)
class Token:
    """One emitted token of one generation."""

    token_id: int
    logprobs: pb.TokenLogprobs | None
    finish_reason: str  # "" while more follow, else "stop" or "length"


class Outbox:
    """Owned by the task that reads it; filled from the event loop, without waiting.

    `on_full` is called soon after more than `limit` items are left unread.
    """

    def __init__(self, limit: int, on_full: Callable[[], None]) -> None:
        self._limit = limit
        self._on_full = on_full
        self._items: deque[tuple[int, Token | ApiError]] = deque()
        self._reader: asyncio.Future[None] | None = None

    def put(self, index: int, item: Token | ApiError) -> None:
        """`index` tells apart the generations of one request."""
        self._items.append((index, item))
        if len(self._items) == self._limit + 1:
            asyncio.get_running_loop().call_soon(self._on_full)
        self._wake()

    async def take(self, timeout: float) -> list[tuple[int, Token | ApiError]]:
        """At most `MAX_TAKEN` of what is there, waiting for the first; nothing after `timeout` seconds."""
        if len(self._items) > MAX_TAKEN:
            await asyncio.sleep(0)  # a client that reads again may have thousands left
        if not self._items:
            loop = asyncio.get_running_loop()
            self._reader = loop.create_future()
            timer = loop.call_later(timeout, self._wake)
            try:
                await self._reader
            finally:
                timer.cancel()
                self._reader = None
        return [self._items.popleft() for _ in range(min(len(self._items), MAX_TAKEN))]

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
