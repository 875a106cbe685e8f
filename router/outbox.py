"""From a request's generations to the one task that answers the client.

A client that reads slowly holds up nobody else: what waits for it is bounded by its own max_tokens.
"""

import asyncio
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
    """Owned by the task that reads it; filled from the event loop, without waiting."""

    def __init__(self) -> None:
        self._items: list[tuple[int, Token | ApiError]] = []
        self._reader: asyncio.Future[None] | None = None

    def put(self, index: int, item: Token | ApiError) -> None:
        """`index` tells apart the generations of one request."""
        self._items.append((index, item))
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
