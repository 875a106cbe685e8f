"""The connections of an HTTP server: how many may be open, and the response to bytes that are not HTTP.

Life of a connection: accepted → idle ⇄ serving → closed.

1. `http_writer` writes each response.
2. A client that does not take what is written within `client_timeout` is cut off.
3. When too many are open, one that serves no key (`serving_key`) is cut off.
4. A server that retires says `Connection: close` in each response, and closes what stays idle.
"""

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import stat
import struct
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from baton.router import errors
from baton.router.endpoints.frontend import request_name
from baton.router.endpoints.http_writer import send
from baton.router.errors import ApiError
from baton.system.addresses import cannot_listen, listening_socket
from baton.system.connections import Connection, Connections
from baton.system.directories import cannot_write

log = logging.getLogger(__name__)

READ_BYTES = 8 << 10
"""aiohttp stops parsing a body when twice as many bytes, or a sixteenth as many chunks, wait for its handler.
So chunks of a byte take a turn of the loop at most 2 ms."""
AHEAD_BYTES = 64 << 10
"""Of later requests, that are read while one is served. aiohttp alone would keep 31 of them, 1 MiB each."""
LINGER_SECONDS = 10.0
"""A client may send the rest of a refused body for so long. It could not read its response after a reset."""
RETIRE_SECONDS = 3.0
"""A server that retires closes a connection that stays idle for so long. Clients that reuse connections have
then got a response with `Connection: close`, and load balancers have seen that /routable fails."""
_RESET = struct.pack("ii", 1, 0)  # l_onoff and l_linger of SO_LINGER

Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def is_extra(request: web.BaseRequest) -> bool:
    """Whether more connections are open than the port may have. Then only what is open to all is served."""
    return _of(request).slot.is_extra


@contextlib.contextmanager
def serving_key(request: web.BaseRequest) -> Iterator[None]:
    """While it is open, the connection does not end to make room for others: its request has a valid key."""
    slot = _of(request).slot
    slot.busy()
    try:
        yield
    finally:
        slot.idle()


def refusal(error: ApiError, body: Any = None, **headers: str) -> web.Response:
    """Returns the response that tells a client of an error. `body`: if it is not OpenAI's."""
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    return web.json_response(body or error.body, status=error.status, headers=headers)


class HttpServer:
    """Serves an application while it is open."""

    def __init__(
        self,
        app: web.Application,
        failed: Callable[[ApiError], None] = lambda error: None,
        *,
        client_timeout: float,
        keep_alive: float,
        handler_cancellation: bool = False,
    ) -> None:
        """`failed` is told of each error for bytes that are not HTTP. `client_timeout`, `keep_alive`: seconds
        until a client that does not read, or sends no request, is cut off. `handler_cancellation`: a handler
        ends when its client disconnects."""
        app.on_response_prepare.append(self._announce)
        self._runner = web.AppRunner(app, shutdown_timeout=0.5, handler_cancellation=handler_cancellation)
        self._failed = failed
        self._keep_alive = keep_alive
        self.client_timeout = client_timeout
        self.retired = False
        self._listeners: list[Listener] = []

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        self._server.request_handler = partial(self._handle, self._server.request_handler)
        return self

    async def __aexit__(self, *_: object) -> None:
        for listener in self._listeners:
            listener.close()
        await self._runner.cleanup()

    @property
    def _server(self) -> web.Server:
        server = self._runner.server
        assert server is not None, "the context is open"
        return server

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

    def retire(self) -> None:
        """Goes on serving. Each response closes its connection from now on, and idle connections close."""
        self.retired = True
        for connection in self._server.connections:
            cast(_Connection, connection).retire()

    def _connect(self, slot: Connection) -> RequestHandler:
        # aiohttp would decompress what is left of each refused body at once, without a turn for other tasks.
        return _Connection(
            self,
            self._server,
            slot,
            self._failed,
            access_log=None,
            auto_decompress=False,
            read_bufsize=READ_BYTES,
            lingering_time=0,
            keepalive_timeout=self._keep_alive,
        )

    async def _announce(self, request: web.Request, response: web.StreamResponse) -> None:
        """Tells the client if its connection closes after the response."""
        if self.retired or is_extra(request):
            response.headers["Connection"] = "close"
            response.force_close()

    async def _handle(self, handler: Handle, request: web.BaseRequest) -> web.StreamResponse:
        with _of(request).serve(request):
            # aiohttp itself refuses an unknown expectation outside of all middlewares.
            if request.headers.get("Expect", "100-continue").lower() != "100-continue":
                sent = request.headers["Expect"][:80]
                text = f"the header Expect must be 100-continue, not {sent!r}"
                response: web.StreamResponse = _refused(errors.InvalidRequest(text), self._failed)
            else:
                try:
                    response = await handler(request)
                except web.HTTPException as error:
                    await send(request, error)
                    await _linger(request)
                    raise
            await send(request, response)
            await _linger(request)
            return response


async def _linger(request: web.BaseRequest) -> None:
    """Reads what is left of a body that was refused."""
    if request.content.at_eof():
        return
    with contextlib.suppress(TimeoutError, OSError, web.RequestPayloadError):
        async with asyncio.timeout(LINGER_SECONDS):
            async for _ in request.content.iter_any():
                await asyncio.sleep(0)  # aiohttp would take all that is there in one turn


class _Connection(RequestHandler):
    """Cuts off a client that does not read, and bounds what it sends ahead.

    Responds to bytes that are not valid HTTP in OpenAI's shape. aiohttp itself responds to them with plain
    text, before any middleware runs, and logs the bytes."""

    __slots__ = ("_ahead", "_failed", "_http", "_request", "_unread", "_wire", "slot")

    def __init__(
        self,
        http: HttpServer,
        server: web.Server,
        slot: Connection,
        failed: Callable[[ApiError], None],
        **arguments: Any,
    ) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **arguments)
        self._http = http
        self._failed = failed
        self._ahead = 0  # bytes that came while the request was served, behind its body
        self._request: web.BaseRequest | None = None  # that is served now
        self._unread: asyncio.TimerHandle | None = None  # cuts off the client
        self._wire: asyncio.Transport | None = None  # `transport` is None as soon as aiohttp closes it
        self.slot = slot
        slot.end = self._reset

    # ------------------------------------------------------------ its life

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._wire = cast(asyncio.Transport, transport)
        # `pause_writing` comes as soon as the kernel takes no more, `resume_writing` when it has taken all.
        self._wire.set_write_buffer_limits(high=1, low=0)
        super().connection_made(transport)
        if self._http.retired:
            self.retire()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._unread is not None:
            self._unread.cancel()
        self._wire = None
        self.slot.close()
        super().connection_lost(exc)

    @contextlib.contextmanager
    def serve(self, request: web.BaseRequest) -> Iterator[None]:
        """While it is open, this request is served."""
        self._request = request
        if self._ahead > AHEAD_BYTES and self.transport is not None:
            self.transport.resume_reading()
        self._ahead = 0
        try:
            yield
        finally:
            self._request = None
            if self._http.retired:
                self.retire()

    def retire(self) -> None:
        """Closes the connection if it is still idle after `RETIRE_SECONDS`: its client may be sending."""
        asyncio.get_running_loop().call_later(RETIRE_SECONDS, self._close_idle)

    def _close_idle(self) -> None:
        if self._request is None:
            self.force_close()

    # ------------------------------------------------------------ a client that does not read

    def pause_writing(self) -> None:
        super().pause_writing()
        loop = asyncio.get_running_loop()
        self._unread = loop.call_later(self._http.client_timeout, self._cut_off)

    def resume_writing(self) -> None:
        super().resume_writing()
        assert self._unread is not None, "writing was paused"
        self._unread.cancel()

    def _cut_off(self) -> None:
        log.info("a client at %s does not read its response", self.peername)
        self._reset()

    def _reset(self) -> None:
        """Ends the connection at once, with what this process and the kernel have not sent."""
        if self._wire is not None:
            self._wire.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._wire.abort()

    # ------------------------------------------------------------ what it sends

    def data_received(self, data: bytes) -> None:
        request = self._request
        ahead = request is not None and request.content.is_eof()
        super().data_received(data)
        if ahead:
            self._ahead += len(data)
            if self._ahead > AHEAD_BYTES and self.transport is not None:
                self.transport.pause_reading()

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
        return _refused(error, self._failed)


def _of(request: web.BaseRequest) -> _Connection:
    connection = request.protocol
    assert isinstance(connection, _Connection)
    return connection


def _refused(error: errors.ApiError, failed: Callable[[ApiError], None]) -> web.StreamResponse:
    """Returns the response to a request that reaches no middleware. It closes the connection."""
    failed(error)
    response = refusal(error, **{"x-request-id": request_name(None)})
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
        """Accepts those that the kernel has, and no more. What is open stays open. Idempotent."""
        if self.listening.fileno() >= 0:
            for _ in range(0, BACKLOG, _AT_ONCE):
                self._accept()  # the kernel would reset them
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


SEND_BUFFER_BYTES = 64 << 10
"""Bytes that the kernel buffers for one client that does not read, in twice as much memory. Its default is
megabytes."""
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
