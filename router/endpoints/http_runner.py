"""Runs the HTTP application. Bytes that are not valid HTTP get an error in OpenAI's shape.

aiohttp itself responds to such bytes before any middleware runs, with plain text, and logs the bytes.
"""

import logging
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import ContentEncodingError
from aiohttp.web_protocol import RequestHandler

from baton.router.endpoints.frontend import request_name
from baton.router.errors import ApiError, InvalidRequest, UnsupportedMediaType
from baton.router.metrics import Metrics

log = logging.getLogger(__name__)

ENCODINGS = ("identity", "gzip", "deflate")
"""Accepted encodings of a body. aiohttp ignores unknown ones, and reads more if optional libraries are
installed."""


def unsupported_encoding() -> UnsupportedMediaType:
    return UnsupportedMediaType("the Content-Encoding of a body must be gzip or deflate, if there is one")


class HttpRunner(web.AppRunner):
    """Takes the arguments of `web.AppRunner`, and the router's metrics."""

    __slots__ = ("_metrics",)

    def __init__(self, app: web.Application, metrics: Metrics, **arguments: Any) -> None:
        super().__init__(app, **arguments)
        self._metrics = metrics

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(made, self._metrics, **self._kwargs)


class _Server(web.Server):
    """Copies the server that aiohttp made, but with `_Connection` as its connections."""

    def __init__(self, other: web.Server, metrics: Metrics, **arguments: Any) -> None:
        factory = other.request_factory
        super().__init__(other.request_handler, request_factory=factory, **arguments)
        self.metrics = metrics

    def __call__(self) -> RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Connection(RequestHandler):
    __slots__ = ("_metrics",)

    def __init__(self, server: _Server, **arguments: Any) -> None:
        super().__init__(server, **arguments)
        self._metrics = server.metrics

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
        error: ApiError
        if isinstance(exc, ContentEncodingError):
            error = unsupported_encoding()
        elif status == 400:
            # The first line is the reason. The other lines quote the bytes, which may hold a key or a prompt.
            reason = (message or "").partition("\n")[0].rstrip(":")
            error = InvalidRequest(f"the request is not valid HTTP: {reason}")
            log.debug("a request from %s is not valid HTTP: %s", request.remote, type(exc).__name__)
        else:
            error = ApiError("the request failed inside the router")
            log.error("a request from %s failed", request.remote, exc_info=exc)
        self._metrics.failed(error)
        headers = {"x-request-id": request_name(None)}
        response = web.json_response(error.body, status=error.status, headers=headers)
        response.force_close()
        return response
