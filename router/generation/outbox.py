"""From a request's generations to the one task that answers the client.

A client that reads slowly holds up nobody else: what waits for it is bounded.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from router.errors import ApiError
from rpc import worker_pb2 as pb


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
        self._items: list[tuple[int, Token | ApiError]] = []
        self._reader: asyncio.Future[None] | None = None

    def put(self, index: int, item: Token | ApiError) -> None:
        """`index` tells apart the generations of one request."""
        self._items.append((index, item))
        if len(self._items) == self._limit + 1:
            asyncio.get_running_loop().call_soon(self._on_full)
        self._wake()

    async def take(self, timeout: float) -> list[tuple[int, Token | ApiError]]:
        """All that is there, waiting for the first; nothing after `timeout` seconds."""
        if not self._items:
            loop = asyncio.get_running_loop()
            self._reader = loop.create_future()
            timer = loop.call_later(timeout, self._wake)
            try:
                await self._reader
            finally:
                timer.cancel()
                self._reader = None
        items, self._items = self._items, []
        return items

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
