"""Sends a response over HTTP: whole, or as a stream of server-sent events."""

import asyncio
import logging

from aiohttp import web

from baton.router.active_request import ActiveRequest
from baton.router.endpoints.builders import ResponseBuilder
from baton.router.endpoints.builders.base import encode
from baton.router.errors import ApiError
from baton.router.generation.choice import Delta

log = logging.getLogger(__name__)

KEEPALIVE_SECONDS = 5.0
"""Without a delta for this time, a stream sends a comment."""
LOW_WATER_BYTES = 16 << 10
"""A transport with fewer buffered bytes never makes a writer wait (low-water mark of asyncio and uvloop)."""
_KEEPALIVE = b": waiting\n\n"


async def respond(
    request: web.Request,
    active: ActiveRequest,
    builder: ResponseBuilder,
    headers: dict[str, str],
    client_timeout: float,
) -> web.StreamResponse:
    """Generates, and sends the response. Raises ApiError if nothing has been sent yet.

    Cuts the connection when the client reads nothing for `client_timeout` seconds.
    """
    with active.generating():
        if active.body.stream:
            return await _stream(request, active, builder, headers, client_timeout)
        await _collect(active, builder)
        body = encode(builder.whole())
    response = web.Response(body=body, content_type="application/json", headers=headers)
    try:
        async with asyncio.timeout(client_timeout):
            await response.prepare(request)
            await response.write_eof()
    except TimeoutError:
        _cut(request, active)
    return response


async def collect(active: ActiveRequest, builder: ResponseBuilder) -> None:
    """Generates, and gives all deltas to the builder. Raises ApiError."""
    with active.generating():
        await _collect(active, builder)


async def _collect(active: ActiveRequest, builder: ResponseBuilder) -> None:
    while not active.finished:
        for index, delta in await _deltas(active, builder):
            builder.add(index, delta)


async def _deltas(active: ActiveRequest, builder: ResponseBuilder) -> list[tuple[int, Delta]]:
    """Takes deltas. The builder has what comes before them: log probabilities of their prompts."""
    deltas = await active.take(KEEPALIVE_SECONDS)
    for index, delta in deltas:
        for part in delta.token.prompt:
            builder.add_prompt(index, part)
            await asyncio.sleep(0)  # other tasks run between the parts of a long prompt
    return deltas


async def _stream(
    request: web.Request,
    active: ActiveRequest,
    builder: ResponseBuilder,
    headers: dict[str, str],
    client_timeout: float,
) -> web.StreamResponse:
    response = web.StreamResponse(
        headers={
            **headers,
            "Content-Type": "text/event-stream",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",
        }
    )
    try:
        while not active.finished:
            deltas = await _deltas(active, builder)
            if not response.prepared:
                await response.prepare(request)
            events = b"".join(builder.events(index, delta) for index, delta in deltas)
            await _write(request, response, events or _KEEPALIVE, client_timeout)
        end = builder.end()
    except ApiError as error:
        if not response.prepared:
            raise
        active.metrics.failed(error)
        end = builder.failed(error)
    except ConnectionResetError:
        return response  # the client disconnected, and aiohttp has not cancelled this task yet
    except TimeoutError:
        _cut(request, active)
        return response
    try:
        await _write(request, response, end, client_timeout)
    except TimeoutError:
        _cut(request, active)
    return response


async def _write(
    request: web.Request, response: web.StreamResponse, data: bytes, client_timeout: float
) -> None:
    """Raises TimeoutError when the transport's buffer is full and stays full for `client_timeout` seconds."""
    transport = request.transport
    if transport is not None and transport.get_write_buffer_size() + len(data) < LOW_WATER_BYTES:
        await response.write(data)  # a timer for each token would cost more than the write
    else:
        async with asyncio.timeout(client_timeout):
            await response.write(data)


def _cut(request: web.Request, active: ActiveRequest) -> None:
    log.info("request %s: the client does not read its response", active.name)
    if request.transport is not None:
        request.transport.abort()
