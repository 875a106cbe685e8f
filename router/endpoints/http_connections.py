"""The connections of an HTTP server: how many may be open, and the response to bytes that are not HTTP."""

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import ContentEncodingError
from aiohttp.web_protocol import RequestHandler

from baton.machine.connections import Connection
from baton.machine.system import cannot_write
from baton.router import errors
from baton.router.endpoints import http_generation as http
from baton.router.endpoints.frontend import request_name
from baton.router.errors import ApiError

log = logging.getLogger(__name__)


def is_extra(request: web.Request) -> bool:
    """Whether more connections are open than the port may have. Then only what is open to all is served."""
    slot = getattr(request.protocol, "slot", None)
    return slot is not None and slot.is_extra


class HttpRunner(web.AppRunner):
    """Takes the arguments of `web.AppRunner`, and what is told of each error that a client gets."""

    __slots__ = ("_failed",)

    def __init__(self, app: web.Application, failed: Callable[[ApiError], None], **arguments: Any) -> None:
        super().__init__(app, **arguments)
        self._failed = failed

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(made, self._failed, **self._kwargs)

    async def listen_at(self, path: str | None) -> None:
        """Also listens on a Unix socket, unless `path` is None. Raises ValueError if that cannot be made."""
        if path is not None:
            try:
                await web.UnixSite(self, path).start()
            except OSError as error:
                raise ValueError(cannot_write("--admin-socket", Path(path), error)) from error

    def connect(self, slot: Connection) -> RequestHandler:
        """Returns the protocol for one connection."""
        assert isinstance(self._server, _Server), "`setup` has made it"
        return _Connection(self._server, slot, loop=self._server._loop, **self._server._kwargs)


class _Server(web.Server):
    """Copies the server that aiohttp made, but with `_Connection` as its connections."""

    def __init__(self, other: web.Server, failed: Callable[[ApiError], None], **arguments: Any) -> None:
        factory = other.request_factory
        super().__init__(other.request_handler, request_factory=factory, **arguments)
        self.failed = failed

    def __call__(self) -> RequestHandler:
        return _Connection(self, None, loop=self._loop, **self._kwargs)


class _Connection(RequestHandler):
    """Responds to bytes that are not valid HTTP in OpenAI's shape. aiohttp itself responds to them with plain
    text, before any middleware runs, and logs the bytes."""

    __slots__ = ("_failed", "slot")

    def __init__(self, server: _Server, slot: Connection | None, **arguments: Any) -> None:
        """`slot`: None for a connection that nothing counts."""
        super().__init__(server, **arguments)
        self._failed = server.failed
        self.slot = slot
        if slot is not None:
            slot.end = self.force_close

    def connection_lost(self, exc: BaseException | None) -> None:
        if self.slot is not None:
            self.slot.close()
        super().connection_lost(exc)

    async def _handle_request(
        self,
        request: web.BaseRequest,
        start_time: float | None,
        request_handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
    ) -> tuple[web.StreamResponse, bool]:
        arguments = request, start_time, request_handler
        if self.slot is None:
            return await super()._handle_request(*arguments)
        self.slot.busy()
        try:
            return await super()._handle_request(*arguments)
        finally:
            self.slot.idle()

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
        if isinstance(exc, ContentEncodingError):
            error = http.unsupported_encoding()
        elif status == 400:
            # The first line is the reason. The other lines quote the bytes, which may hold a key or a prompt.
            reason = (message or "").partition("\n")[0].rstrip(":")
            error = errors.InvalidRequest(f"the request is not valid HTTP: {reason}")
            log.debug("a request from %s is not valid HTTP: %s", request.remote, type(exc).__name__)
        else:
            error = errors.ApiError("the request failed inside the router")
            log.error("a request from %s failed", request.remote, exc_info=exc)
        self._failed(error)
        headers = {"x-request-id": request_name(None)}
        response = web.json_response(error.body, status=error.status, headers=headers)
        response.force_close()
        return response
