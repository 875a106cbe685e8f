"""The HTTP end of an answer: JSON, pages, files and errors leave by `send`, events by `EventStream`.

- An answer leaves in pieces, each when the client has taken the one before, within `client_timeout`
  (`http_connections`). Then the client is cut off.
- What waits for a client counts for its key: the bytes of a whole answer until they are sent
  (`HttpEndpoints._handled`), the tokens of a stream until they are written (`TokenQueue`).
- A client that disconnects cancels the handler, or gets ConnectionError from here.
"""

import asyncio
import math
from collections.abc import AsyncIterator
from typing import BinaryIO, cast

from aiohttp import web

PIECE_BYTES = 32 << 10
"""Of a response, that this process gives to the kernel at once. Each must leave within `client_timeout`."""
KEEPALIVE_SECONDS = 5.0
"""A stream that has sent nothing for this time sends a comment. Tokens may come whose text is hidden."""
_KEEPALIVE = b": waiting\n\n"
_STREAM_HEADERS = {
    "Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no",
}  # fmt: skip


async def send(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Sends what is left of a response, in pieces: many clients may take a large one slowly, and TLS would
    copy it for each. Raises ConnectionError when the client has disconnected or is cut off."""
    body = response.body if isinstance(response, web.Response) else None
    if isinstance(body, bytes) and len(body) > PIECE_BYTES and not response.prepared:
        response.headers["Content-Length"] = str(len(body))
        cast(web.Response, response).body = _pieces(request, body)
    await response.prepare(request)
    await response.write_eof()


async def _pieces(request: web.BaseRequest, body: bytes) -> AsyncIterator[memoryview]:
    for start in range(0, len(body), PIECE_BYTES):
        yield memoryview(body)[start : start + PIECE_BYTES]
        await request.writer.drain()  # aiohttp itself waits only after 64 KiB


async def pieces_of_file(request: web.BaseRequest, file: BinaryIO) -> AsyncIterator[bytes]:
    """The body of a response that has the content of an open file."""
    while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
        yield piece
        await request.writer.drain()


class EventStream:
    """A stream of server-sent events, as `answers.Stream`. Its status leaves with the first events: until
    then (`begun`) an error may have another one.

    While the task of the request waits for tokens, `write_now` writes to the transport. The framework's way
    there takes longer than all else that is done for a token.
    """

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response = web.StreamResponse(headers=_STREAM_HEADERS)
        self._protocol = request.protocol
        self._transport: asyncio.Transport | None = None
        self._chunked = False
        self._sent_at = -math.inf  # by the clock of the loop

    @property
    def begun(self) -> bool:
        return self.response.prepared

    @property
    def silent(self) -> bool:
        """Whether the client has got nothing for so long that a comment is due."""
        return asyncio.get_running_loop().time() - self._sent_at >= KEEPALIVE_SECONDS

    async def write(self, events: bytes) -> None:
        """Writes events, or a comment if there are none. Waits until the client makes room for all of it."""
        await self._begin()
        await self.response.write(events or _KEEPALIVE)
        await self._request.writer.drain()
        self._sent_at = asyncio.get_running_loop().time()

    async def end(self, events: bytes = b"", end: bytes = b"") -> None:
        """Writes the last events, with the end of the response. Waits as `write` does."""
        await self._begin()
        await self.response.write_eof(events + end)
        await self._request.writer.drain()

    async def _begin(self) -> None:
        if not self.begun:
            await self.response.prepare(self._request)
            self._transport = self._request.transport
            self._chunked = self.response.headers.get("Transfer-Encoding") == "chunked"

    def write_now(self, events: bytes, now: float) -> bool:
        """Writes, if the client reads and no comment is due."""
        transport = self._transport
        if transport is None or transport.is_closing() or self._protocol.writing_paused:
            return False
        if now - self._sent_at >= KEEPALIVE_SECONDS:
            return False
        if events:
            transport.write(b"%x\r\n%b\r\n" % (len(events), events) if self._chunked else events)
            self._sent_at = now
        return True
