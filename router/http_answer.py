"""An answer over HTTP: whole, or as a stream of server-sent events."""

from typing import Any

import msgspec
from aiohttp import web

from router.answers import Format
from router.errors import ApiError
from router.serving import Answer

KEEPALIVE_SECONDS = 5.0
_KEEPALIVE = b": waiting\n\n"
_DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


async def respond(
    request: web.Request, answer: Answer, answer_format: Format, headers: dict[str, str]
) -> web.StreamResponse:
    """Raises ApiError as long as nothing was sent."""
    with answer.generating():
        if answer.body.stream:
            return await _stream(request, answer, answer_format, headers)
        while not answer.finished:
            await answer.take(KEEPALIVE_SECONDS)
        body = _encode(answer_format.whole())
        return web.Response(body=body, content_type="application/json", headers=headers)


async def _stream(
    request: web.Request, answer: Answer, answer_format: Format, headers: dict[str, str]
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
    await response.write(b"".join(map(_event, last)) + _DONE)
    return response


def _event(payload: dict[str, Any]) -> bytes:
    return b"data: " + _encode(payload) + b"\n\n"
