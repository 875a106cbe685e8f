"""The tokens of a request that its client has not read yet.

The queue is bounded, so that a client that reads slowly does not delay other requests.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.router.errors import ApiError
from baton.rpc import worker_pb2 as pb

MAX_TAKEN = 128
"""Items that `take` returns at once. Writing them blocks the event loop for some milliseconds."""


@dataclass(frozen=True, slots=True)
class Token:
    """One emitted token of one generation."""

    token_id: int
    logprobs: pb.TokenLogprobs | None
    finish_reason: str
    """Of the last token "stop" or "length", else empty."""
    prompt: Sequence[pb.PromptLogprobs] = ()
    """Of the first token: the log probabilities of all tokens of the prompt but the first, if asked for."""


class TokenQueue:
    """Generations put tokens without waiting; the task that answers the client takes them.

    `on_full` is called soon after more than `limit` items are unread.
    """

    def __init__(self, limit: int, on_full: Callable[[], None]) -> None:
        self._limit = limit
        self._on_full = on_full
        self._items: deque[tuple[int, Token | ApiError]] = deque()
        self._reader: asyncio.Future[None] | None = None

    def put(self, index: int, item: Token | ApiError) -> None:
        """`index` is the number of the generation in its request."""
        self._items.append((index, item))
        if len(self._items) == self._limit + 1:
            asyncio.get_running_loop().call_soon(self._on_full)
        self._wake()

    async def take(self, timeout: float) -> list[tuple[int, Token | ApiError]]:
        """Waits for the first item. Returns at most `MAX_TAKEN` items, or none after `timeout` seconds."""
        if len(self._items) > MAX_TAKEN:
            await asyncio.sleep(0)  # other tasks run between the pieces of a long queue
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
