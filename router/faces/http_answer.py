"""An answer over HTTP: whole, or as a stream of server-sent events."""

import asyncio
import logging
from typing import Any

import msgspec
from aiohttp import web

from router.api.answers import Format
from router.errors import ApiError
from router.faces.serving import Answer

log = logging.getLogger(__name__)

KEEPALIVE_SECONDS = 5.0
CANNOT_WAIT_BYTES = 16 << 10
"""A transport with less in its buffer takes more at once (asyncio's and uvloop's low-water mark)."""
_KEEPALIVE = b": waiting\n\n"
_DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


async def respond(
    request: web.Request,
    answer: Answer,
    answer_format: Format,
    headers: dict[str, str],
    client_timeout: float,
) -> web.StreamResponse:
    """Raises ApiError as long as nothing was sent.

    A client that leaves what it is sent unread for `client_timeout` seconds is cut off.
    """
    with answer.generating():
        if answer.body.stream:
            return await _stream(request, answer, answer_format, headers, client_timeout)
        while not answer.finished:
            for index, delta in await answer.take(KEEPALIVE_SECONDS):
                answer_format.add(index, delta)
        body = _encode(answer_format.whole())
    response = web.Response(body=body, content_type="application/json", headers=headers)
    try:
        async with asyncio.timeout(client_timeout):
            await response.prepare(request)
            await response.write_eof()
    except TimeoutError:
        _cut(request, answer)
    return response


async def _stream(
    request: web.Request,
    answer: Answer,
    answer_format: Format,
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
    options = answer.body.stream_options
    always = options is not None and options.usage_in_each_chunk
    last: list[dict[str, Any]] = []
    try:
        while not answer.finished:
            deltas = await answer.take(KEEPALIVE_SECONDS)
            if not response.prepared:
                await response.prepare(request)
            events = (_event(answer_format.chunk(index, delta, usage=always)) for index, delta in deltas)
            await _write(request, response, b"".join(events) or _KEEPALIVE, client_timeout)
        if options is not None and options.usage_at_the_end:
            last.append(answer_format.usage_chunk())
    except ApiError as error:
        if not response.prepared:
            raise
        answer.metrics.failed(error)
        last.append(error.body)
    except ConnectionResetError:
        return response  # the client went, before we were cancelled for it
    except TimeoutError:
        _cut(request, answer)
        return response
    try:
        await _write(request, response, b"".join(map(_event, last)) + _DONE, client_timeout)
    except TimeoutError:
        _cut(request, answer)
    return response


async def _write(
    request: web.Request, response: web.StreamResponse, data: bytes, client_timeout: float
) -> None:
    """Raises TimeoutError when the client leaves too much unread for too long."""
    transport = request.transport
    if transport is not None and transport.get_write_buffer_size() + len(data) < CANNOT_WAIT_BYTES:
        await response.write(data)  # a timer for each token would cost more than the write
    else:
        async with asyncio.timeout(client_timeout):
            await response.write(data)


def _cut(request: web.Request, answer: Answer) -> None:
    log.info("request %s: its client reads nothing", answer.name)
    if request.transport is not None:
        request.transport.abort()


def _event(payload: dict[str, Any]) -> bytes:
    return b"data: " + _encode(payload) + b"\n\n"
