"""The output of attached routers: their bounded queues.

A message is the bytes of a `WorkerMessage`. Most are those that the engine process has made.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping

import grpc.aio

from baton.rpc import LONGEST_REPORT
from baton.rpc import worker_pb2 as pb
from baton.worker.messages import ToRouter

MAX_UNREAD_BYTES = 8 << 20
MAX_UNREAD_CACHE_BYTES = 1 << 20
"""A router with more unread bytes gets no further cache events, so that it can read its tokens first."""


class RouterStream:
    """The output queue of one Attach call. `put` never waits, so a slow router cannot delay the engine."""

    def __init__(self, number: int, report_seconds: float = LONGEST_REPORT) -> None:
        """`report_seconds`: the least time between two reports of the status that the router can take."""
        self.number = number
        self.report_seconds = report_seconds
        self.unread_bytes = 0
        self.pixels = bytearray()
        """Of the images of the next attempt that the router submits."""
        self._queue: deque[bytes] = deque()
        self._snapshot: Iterator[bytes] | None = None  # the parts to come
        self._new_snapshot: Callable[[], Iterator[bytes]] | None = None  # None: no cache events
        self._behind = True  # the router lacks changes, so it needs a snapshot
        self._changed = asyncio.Event()
        self._finishing = False
        self.overflow = asyncio.Event()
        """Set when the router leaves more than MAX_UNREAD_BYTES unread. From then on `put` drops messages."""

    def take_pixels(self) -> bytearray:
        """Those that have come for the attempt that is submitted now."""
        taken, self.pixels = self.pixels, bytearray()
        return taken

    def put(self, message: bytes) -> None:
        if self.overflow.is_set():
            return
        self.unread_bytes += len(message)
        self._queue.append(message)
        if self.unread_bytes > MAX_UNREAD_BYTES:
            self.overflow.set()
            self.discard()
        self._changed.set()

    def put_cache_events(self, message: bytes) -> None:
        """Queues cache events. Drops them if the router has too much unread, and all later ones up to the
        next snapshot."""
        self._behind |= self.unread_bytes > MAX_UNREAD_CACHE_BYTES
        if not self._behind:
            self.put(message)

    def want_cache_events(self, new_snapshot: Callable[[], Iterator[bytes]]) -> None:
        """The router gets a snapshot of the cache, and the events after it.

        A part of a snapshot is made when the queue is empty. So a snapshot of any size leaves little unread,
        and no token waits for more than one part."""
        self._new_snapshot = new_snapshot
        self._changed.set()

    def finish(self) -> None:
        """Makes `write_to` return after it has written all queued messages."""
        self._finishing = True
        self._changed.set()

    def discard(self) -> None:
        """Drops the queue. `write_to` returns after the message that it is writing."""
        self._queue.clear()
        self.finish()

    async def write_to(self, context: grpc.aio.ServicerContext) -> None:
        while self._queue or not self._finishing:
            self._changed.clear()
            message = self._queue.popleft() if self._queue else self._next_part()
            if message is None:
                await self._changed.wait()
            else:
                await context.write(message)
                self.unread_bytes -= len(message)

    def _next_part(self) -> bytes | None:
        """Of the snapshot. It counts as unread, as a queued message does until it is written."""
        if self._behind and self._new_snapshot is not None:
            self._snapshot, self._behind = self._new_snapshot(), False
        part = next(self._snapshot, None) if self._snapshot else None
        if part is None:
            self._snapshot = None
        else:
            self.unread_bytes += len(part)
        return part


class Routers:
    """The streams of all attached routers.

    Attributes:
        waiting: as `EngineStatus.waiting_of_streams`, of the last status.
    """

    def __init__(self) -> None:
        self.waiting: Mapping[int, int] = {}
        self._streams: dict[int, RouterStream] = {}
        self._opened = 0
        self._opening = asyncio.Event()

    @property
    def expected(self) -> int:
        """Streams that will have been opened when all routers of now have attached again."""
        return self._opened + len(self._streams)

    async def opened(self, count: int) -> None:
        """Returns when so many streams have been opened."""
        while self._opened < count:
            self._opening.clear()
            await self._opening.wait()

    def open(self, report_seconds: float) -> RouterStream:
        self._opened += 1
        self._opening.set()
        stream = self._streams[self._opened] = RouterStream(self._opened, report_seconds)
        return stream

    def remove(self, stream: RouterStream) -> bool:
        """Returns False if it was removed before."""
        return self._streams.pop(stream.number, None) is not None

    def deliver(self, message: ToRouter) -> None:
        """Queues a message. Drops it if its router has detached."""
        if message.stream is None:
            self.broadcast(message.data)
        elif (stream := self._streams.get(message.stream)) is not None:
            stream.put(message.data)

    def broadcast(self, message: bytes) -> None:
        for stream in self._streams.values():
            stream.put(message)

    def tell(self, status: pb.WorkerStatus) -> None:
        """Each router gets the status of the worker, and how much of it other routers have sent."""
        for number, stream in self._streams.items():
            message = pb.WorkerMessage(status=status)
            message.status.tokens_of_others = max(0, status.tokens_waiting - self.waiting.get(number, 0))
            stream.put(message.SerializeToString())

    def broadcast_cache_events(self, message: bytes) -> None:
        for stream in self._streams.values():
            stream.put_cache_events(message)

    @property
    def report_seconds(self) -> float:
        """Time between two reports of the status. One router knows what it sent, so it needs few reports.
        Several routers learn of each other's requests from them."""
        if len(self._streams) < 2:
            return LONGEST_REPORT
        return max(stream.report_seconds for stream in self._streams.values())

    def finish(self) -> None:
        """Ends every stream after its queued messages are written."""
        for stream in self._streams.values():
            stream.finish()
