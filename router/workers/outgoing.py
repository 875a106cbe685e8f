"""What a router has to say to one worker: in order, bounded, written by the task that owns the stream."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from rpc import worker_pb2 as pb

MAX_UNSENT_BYTES = 8 << 20


class Outgoing:
    """Messages on their way to a worker, in order."""

    def __init__(self) -> None:
        self._queue: deque[pb.RouterMessage] = deque()
        self._bytes = 0
        self._closed = False
        self._filled = asyncio.Event()

    def put(self, message: pb.RouterMessage) -> bool:
        """False: the worker has left too much unread."""
        self._queue.append(message)
        self._bytes += message.ByteSize()
        self._filled.set()
        return self._bytes <= MAX_UNSENT_BYTES

    def close(self) -> None:
        """The stream is over; gRPC waits for the last message, so it must not wait for ever."""
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
