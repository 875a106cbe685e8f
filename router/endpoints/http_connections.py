"""The connections of an HTTP server: how many may be open, and the response to bytes that are not HTTP."""

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import stat
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from aiohttp import web
from aiohttp.http import RawRequestMessage
from aiohttp.web_protocol import RequestHandler

from baton.machine.connections import Connection, Connections
from baton.machine.system import cannot_listen, cannot_write, listening_socket
from baton.router import errors
from baton.router.endpoints.frontend import request_name
from baton.router.errors import ApiError

log = logging.getLogger(__name__)


def is_extra(request: web.Request) -> bool:
    """Whether more connections are open than the port may have. Then only what is open to all is served."""
    slot = getattr(request.protocol, "slot", None)
    return slot is not None and slot.is_extra


READ_BYTES = 8 << 10
"""aiohttp stops parsing a body when twice as many bytes, or a sixteenth as many chunks, wait for its handler.
So chunks of a byte take a turn of the loop at most 2 ms."""
LINGER_SECONDS = 10.0
"""A client may send the rest of a refused body for so long. It could not read its response after a reset."""


class HttpServer:
    """Serves an application while it is open."""

    def __init__(
        self, app: web.Application, failed: Callable[[ApiError], None] = lambda error: None, **arguments: Any
    ) -> None:
        """`failed` is told of each error for bytes that are not HTTP. `arguments`: of `web.AppRunner`."""
        # aiohttp would decompress what is left of each refused body at once, without a turn for other tasks.
        self._runner = web.AppRunner(
            app,
            access_log=None,
            shutdown_timeout=0.5,
            auto_decompress=False,
            read_bufsize=READ_BYTES,
            lingering_time=0,
            **arguments,
        )
        self._failed = failed
        self._listeners: list[Listener] = []

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        return self

    async def __aexit__(self, *_: object) -> None:
        for listener in self._listeners:
            listener.close()
        await self._runner.cleanup()

    def serve(
        self, listening: socket.socket, connections: Connections, context: ssl.SSLContext | None = None
    ) -> "Listener":
        """Serves at a listening socket, until the listener closes."""
        listener = Listener(listening, self._connect, connections, context)
        self._listeners.append(listener)
        return listener

    def serve_unix(self, path: str | None) -> None:
        """Serves at a Unix socket, unless `path` is None. Raises ValueError if that cannot be made."""
        if path is not None:
            self.serve(_listen_unix("--admin-socket", path), Connections("--admin-socket", ADMINS))

    def _connect(self, slot: Connection) -> RequestHandler:
        server = self._runner.server
        assert server is not None, "the context is open"
        return _Connection(server, slot, self._failed, loop=server._loop, **server._kwargs)


class _Connection(RequestHandler):
    """Responds to bytes that are not valid HTTP in OpenAI's shape. aiohttp itself responds to them with plain
    text, before any middleware runs, and logs the bytes."""

    __slots__ = ("_failed", "slot")

    def __init__(
        self, server: web.Server, slot: Connection, failed: Callable[[ApiError], None], **arguments: Any
    ) -> None:
        super().__init__(server, **arguments)
        self._failed = failed
        self.slot = slot
        slot.end = self.force_close

    def connection_lost(self, exc: BaseException | None) -> None:
        self.slot.close()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """aiohttp responds to bytes that are not HTTP after the requests before them. If they are in the body
        of such a request, its handler would wait for the rest of that body, which never comes."""
        super().data_received(data)
        if not self._messages or isinstance(fault := self._messages[-1][0], RawRequestMessage):
            return
        if len(self._messages) > 1:
            body = self._messages[-2][1]
        elif self._current_request is not None:
            body = self._current_request.content
        else:
            return
        if not body.is_eof():
            body.set_exception(web.RequestPayloadError(f"it is not valid HTTP: {_reason(fault.message)}"))

    async def _handle_request(
        self,
        request: web.BaseRequest,
        start_time: float | None,
        request_handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
    ) -> tuple[web.StreamResponse, bool]:
        self.slot.busy()
        # aiohttp itself refuses an unknown expectation outside of all middlewares.
        supported = request.headers.get("Expect", "100-continue").lower() == "100-continue"
        try:
            sent = await super()._handle_request(
                request, start_time, request_handler if supported else self._refuse_expectation
            )
        finally:
            self.slot.idle()
        with contextlib.suppress(TimeoutError, OSError, web.RequestPayloadError):
            async with asyncio.timeout(LINGER_SECONDS):
                async for _ in request.content.iter_any():
                    await asyncio.sleep(0)  # aiohttp would take all that is there in one turn
        return sent

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Responds and closes the connection.

        `status` is 400 for invalid HTTP, otherwise a handler raised `exc`.
        """
        if request.writer.output_size or isinstance(exc, ConnectionError):
            raise ConnectionError("the response has begun, or the client disconnected")
        error: errors.ApiError
        if status == 400:
            error = errors.InvalidRequest(f"the request is not valid HTTP: {_reason(message)}")
            log.debug("a request from %s is not valid HTTP: %s", request.remote, type(exc).__name__)
        else:
            error = errors.ApiError("the request failed inside the router")
            log.error("a request from %s failed", request.remote, exc_info=exc)
        return self._refused(error)

    async def _refuse_expectation(self, request: web.BaseRequest) -> web.StreamResponse:
        sent = request.headers["Expect"][:80]
        return self._refused(errors.InvalidRequest(f"the header Expect must be 100-continue, not {sent!r}"))

    def _refused(self, error: errors.ApiError) -> web.StreamResponse:
        """Returns the response to a request that reaches no middleware. It closes the connection."""
        self._failed(error)
        headers = {"x-request-id": request_name(None)}
        response = web.json_response(error.body, status=error.status, headers=headers)
        response.force_close()
        return response


def _reason(message: str | None) -> str:
    """Returns the first line of aiohttp's message. The others quote bytes, which may hold a prompt."""
    return (message or "").partition("\n")[0].rstrip(":")


_AT_ONCE = 64
"""Connections that a `Listener` accepts before others may use the event loop."""
_PAUSE_SECONDS = 0.1
"""Before the next try, when this process or the system has no descriptor left."""


@dataclass(eq=False)
class Listener:
    """Accepts the connections of a listening socket, and keeps to the bound of `connections`."""

    listening: socket.socket
    connect: Callable[[Connection], asyncio.BaseProtocol]
    """Makes the protocol of a connection, which says when that is busy, idle and closed."""
    connections: Connections
    context: ssl.SSLContext | None = None

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._failing = False  # accept has failed, and the log says so
        self.listening.setblocking(False)
        self._loop.add_reader(self.listening.fileno(), self._accept)

    def close(self) -> None:
        """Accepts no more connections. Those that are open stay open. Idempotent."""
        if self.listening.fileno() >= 0:
            self._loop.remove_reader(self.listening.fileno())
            self.listening.close()

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                sock, address = self.listening.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                self._pause(error)
                return
            self._failing = False
            sock.setblocking(False)
            host = address[0] if address else ""  # a Unix socket has none
            slot = self.connections.open(host, sock.close)
            if slot is None:
                sock.close()
                continue
            handshake = asyncio.create_task(self._open(sock, slot))
            slot.end = handshake.cancel
            self._handshakes.add(handshake)
            handshake.add_done_callback(self._handshakes.discard)

    async def _open(self, sock: socket.socket, slot: Connection) -> None:
        """With TLS this takes until the client has done its part."""
        try:
            await self._loop.connect_accepted_socket(lambda: self.connect(slot), sock, ssl=self.context)
        except (OSError, asyncio.CancelledError):  # the client failed, or too many connections are open
            slot.close()
            sock.close()

    def _pause(self, error: OSError) -> None:
        """There are no descriptors, or no memory for a socket."""
        if not self._failing:
            self._failing = True
            log.error("connections wait, since none can be accepted: %s", error.strerror)
        self.connections.evict()
        self._loop.remove_reader(self.listening.fileno())
        self._loop.call_later(_PAUSE_SECONDS, self._resume)

    def _resume(self) -> None:
        if self.listening.fileno() >= 0:
            self._loop.add_reader(self.listening.fileno(), self._accept)


SEND_BUFFER_BYTES = 256 << 10
"""Bytes that the kernel buffers for one client that does not read. Its default is megabytes."""
BACKLOG = 1024
EXTRA = 64
"""Connections above the bound of clients, so that a probe is always answered."""
ADMINS = 256
"""Connections to the admin port."""


def listen(flag: str, host: str, port: int, *, share: bool = False) -> socket.socket:
    """Returns a listening TCP socket. `share`: other processes of this router listen at the same address.

    Raises ValueError naming the flag.
    """
    try:
        listener = listening_socket(host, port, backlog=BACKLOG, share=share)
    except OSError as error:
        raise ValueError(cannot_listen(flag, host, port, error)) from error
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # accepted sockets inherit it
    return listener


def _listen_unix(flag: str, path: str) -> socket.socket:
    """Returns a listening Unix socket. Raises ValueError naming the flag."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.stat(path).st_mode):  # of a router that was killed
                os.remove(path)
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ValueError(cannot_write(flag, Path(path), error)) from error
    return listener
