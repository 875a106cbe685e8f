"""The messages to one worker that its stream has not sent yet."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from baton.rpc import worker_pb2 as pb

MAX_UNSENT_BYTES = 8 << 20


class SendQueue:
    """Bounded, in order. The task that owns the stream reads `messages`."""

    def __init__(self) -> None:
        self._queue: deque[pb.RouterMessage] = deque()
        self._bytes = 0
        self._closed = False
        self._filled = asyncio.Event()

    def put(self, message: pb.RouterMessage) -> bool:
        """Returns False if more than MAX_UNSENT_BYTES wait: the worker does not read."""
        self._queue.append(message)
        self._bytes += message.ByteSize()
        self._filled.set()
        return self._bytes <= MAX_UNSENT_BYTES

    def close(self) -> None:
        """Ends `messages`. gRPC waits for that before it ends the stream."""
        self._closed = True
        self._queue.clear()
        self._filled.set()

    async def messages(self) -> AsyncIterator[pb.RouterMessage]:
        while not self._closed:
            await self._filled.wait()
            self._filled.clear()
            while self._queue:
                message = self._queue.popleft()
                self._bytes -= message.ByteSize()
                yield message
