"""An answer over HTTP: whole, or as a stream of server-sent events."""

import asyncio
import logging
from typing import Any

import msgspec
from aiohttp import web

from router.answers import Format
from router.errors import ApiError
from router.serving import Answer

log = logging.getLogger(__name__)

KEEPALIVE_SECONDS = 5.0
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
            await answer.take(KEEPALIVE_SECONDS)
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
    always = options is not None and options.continuous_usage_stats
    last: list[dict[str, Any]] = []
    try:
        while not answer.finished:
            deltas = await answer.take(KEEPALIVE_SECONDS)
            if not response.prepared:
                await response.prepare(request)
            events = (_event(answer_format.chunk(index, delta, usage=always)) for index, delta in deltas)
            async with asyncio.timeout(client_timeout):
                await response.write(b"".join(events) or _KEEPALIVE)
        if options is not None and options.include_usage:
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
        async with asyncio.timeout(client_timeout):
            await response.write(b"".join(map(_event, last)) + _DONE)
    except TimeoutError:
        _cut(request, answer)
    return response


def _cut(request: web.Request, answer: Answer) -> None:
    log.info("request %s: its client reads nothing", answer.name)
    if request.transport is not None:
        request.transport.abort()


def _event(payload: dict[str, Any]) -> bytes:
    return b"data: " + _encode(payload) + b"\n\n"
