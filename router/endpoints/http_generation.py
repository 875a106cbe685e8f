"""The HTTP endpoints that generate: read a request, generate, and send the response.

A response is whole, or a stream of server-sent events. `http_connections` sends the whole ones.
"""

import asyncio
import logging
import math
import re
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass

from aiohttp import web

from baton.router import access_log, errors
from baton.router.active_request import ActiveRequest
from baton.router.admission.entry import Entry
from baton.router.admission.keys import Account
from baton.router.api.bodies import ChatOptions
from baton.router.config import RouterConfig
from baton.router.endpoints.builders.anthropic import AnthropicBuilder
from baton.router.endpoints.builders.base import encode
from baton.router.endpoints.builders.completions import ChatBuilder, ChoicesBuilder, CompletionBuilder
from baton.router.endpoints.builders.openai_responses import OpenAIResponsesBuilder
from baton.router.endpoints.frontend import Frontend, seconds_of, unenforced_header
from baton.router.endpoints.request_body import read_body
from baton.router.errors import ApiError
from baton.router.generation.output import Delta
from baton.router.preparation.prepare import Generated

log = logging.getLogger(__name__)

REQUEST_ID: ContextVar[str] = ContextVar("request_id")
ACCOUNT: ContextVar[Account] = ContextVar("account")
UNENFORCED = "x-baton-unenforced"
"""Response header, and the key of its value in a request."""
KEEPALIVE_SECONDS = 5.0
"""A stream that has sent nothing for this time sends a comment. Tokens may come whose text is hidden."""
KEEPALIVE = b": waiting\n\n"
STREAM_HEADERS = {
    "Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no",
}  # fmt: skip
ResponseBuilder = ChatBuilder | CompletionBuilder | AnthropicBuilder | OpenAIResponsesBuilder
"""Makes the response to one request. In a stream: `events` of each delta, then `end` or `failed`.
Else: `add` each delta, then `whole`."""
_BUILDERS: dict[Generated, type[ChatBuilder] | type[CompletionBuilder] | type[AnthropicBuilder]] = {
    "chat": ChatBuilder,
    "completion": CompletionBuilder,
    "messages": AnthropicBuilder,
}


def authorization(request: web.Request) -> str:
    """Returns the value of the Authorization header, which Anthropic's clients send as x-api-key."""
    if (key := request.headers.get("x-api-key")) is not None and "authorization" not in request.headers:
        return f"Bearer {key}"
    return request.headers.get("authorization", "")


def number(request: web.Request, name: str, default: int, least: int, most: int) -> int:
    """Returns a number of the query. Raises InvalidRequest."""
    text = request.query.get(name, str(default))
    number = int(text) if re.fullmatch(r"-?[0-9]{1,10}", text) else None
    if number is None or not least <= number <= most:
        raise errors.InvalidRequest(
            f"{name}: must be a number from {least} to {most}, not {text[:20]!r}", param=name
        )
    return number


def json_response(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


class HttpGeneration:
    """Receives a request, generates, and sends the response."""

    def __init__(self, config: RouterConfig, frontend: Frontend) -> None:
        self._config = config
        self._frontend = frontend

    async def generate(self, request: web.Request, kind: Generated) -> web.StreamResponse:
        """Handles a request to an endpoint that keeps no responses."""
        with self._frontend.admit(ACCOUNT.get()) as entry:
            raw = await read_body(request, self._config, entry)
            active = await self.prepare(request, kind, raw, entry)
            del raw  # frees the body, which may be large, before the generation, which may be long
            if kind == "invocation":
                kind = "chat" if isinstance(active.body, ChatOptions) else "completion"
            return await self.respond(request, active, _BUILDERS[kind](active))

    async def prepare(
        self, request: web.Request, kind: Generated, raw: bytearray, entry: Entry, history: bytes = b""
    ) -> ActiveRequest:
        """As `Frontend.prepare`."""
        name, timeout = REQUEST_ID.get(), seconds_of(request.headers, "x-request-timeout")
        active = await self._frontend.prepare(
            kind, raw, entry, request.headers, history=history, name=name, timeout=timeout
        )
        if active.unenforced:
            request[UNENFORCED] = unenforced_header(active.unenforced)
        return active

    async def whole(
        self, kind: Generated, raw: bytes, account: Account, headers: Mapping[str, str], name: str
    ) -> bytes:
        """Generates for a request that came with no connection. Returns the response in JSON, never a stream.

        Raises ApiError.
        """
        self._frontend.refuse_while_draining()
        route, on = f"batch {kind}", self._config.access_log
        with (
            access_log.request(name, route, account.key.name, on=on),
            self._frontend.admit(account) as entry,
        ):
            entry.receive(len(raw))
            active = await self._frontend.prepare(kind, raw, entry, headers, name=name, timeout=None)
            builder = _BUILDERS[kind](active)
            with active.generating():
                await collect(active, builder)
                return encode(builder.whole())

    async def respond(
        self, request: web.Request, active: ActiveRequest, builder: ResponseBuilder
    ) -> web.StreamResponse:
        """Generates, and sends the response if it is a stream. Raises ApiError if nothing is sent yet."""
        with active.generating():
            if active.body.stream:
                return await self._stream(request, active, builder)
            await collect(active, builder)
            return json_response(encode(builder.whole()))

    async def _stream(
        self, request: web.Request, active: ActiveRequest, builder: ResponseBuilder
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers=STREAM_HEADERS)
        direct = _DirectWriter(request.protocol, active, builder)
        try:
            while not active.finished:
                deltas = await _deltas(active, builder)
                events = b"".join(builder.events(index, delta) for index, delta in deltas)
                if not response.prepared:
                    await response.prepare(request)
                    direct.begin(request, response)
                if events or (not active.finished and (not deltas or direct.silent)):
                    await write(request, response, events or KEEPALIVE)
                    direct.sent_at = asyncio.get_running_loop().time()
            end = direct.last + builder.end()
        except ApiError as error:
            if not response.prepared:
                raise
            active.services.metrics.failed(error, active.name)
            end = builder.failed(error)
        await write(request, response, end)
        return response


async def write(request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    """Writes a part of a stream, and waits until the client makes room for all of it."""
    await response.write(data)
    await request.writer.drain()


@dataclass(slots=True)
class _DirectWriter:
    """Writes the events of a stream to its transport while the task of the request waits for tokens.

    The framework's way from a token to the transport takes longer than all else that is done for the token.
    """

    protocol: web.RequestHandler
    active: ActiveRequest
    builder: ResponseBuilder
    transport: asyncio.Transport | None = None
    """Since the headers are sent."""
    chunked: bool = False
    last: bytes = b""
    """The events of the last deltas, which go out with the end of the response."""
    sent_at: float = -math.inf
    """By the clock of the loop."""

    @property
    def silent(self) -> bool:
        """Whether the client has got nothing for so long that a comment is due."""
        return asyncio.get_running_loop().time() - self.sent_at >= KEEPALIVE_SECONDS

    def begin(self, request: web.Request, response: web.StreamResponse) -> None:
        """The headers are sent, so the events are all that follows."""
        self.chunked, self.transport = (
            response.headers.get("Transfer-Encoding") == "chunked",
            request.transport,
        )
        self.active.consume(self._write)

    def _write(self, now: float) -> bool:
        """Writes what has come. False: the task goes on. It waits for a client that does not read, and writes
        comments."""
        active, transport = self.active, self.transport
        if transport is None or transport.is_closing() or self.protocol.writing_paused:
            return False
        if now - self.sent_at >= KEEPALIVE_SECONDS:
            return False
        make = self.builder.events
        events = b"".join([make(index, delta) for index, delta in active.pop()])
        if active.finished:
            self.last = events
        elif events:
            transport.write(b"%x\r\n%b\r\n" % (len(events), events) if self.chunked else events)
            self.sent_at = now
        return not active.over


async def collect(
    active: ActiveRequest, builder: ResponseBuilder, add: Callable[[int, Delta], None] | None = None
) -> None:
    """Gives all deltas to `add`, by default that of the builder. Raises ApiError."""
    use = add or builder.add

    def consume(_: float) -> bool:
        for index, delta in active.pop():
            use(index, delta)
        return not active.over

    active.consume(consume)
    while not active.finished:
        for index, delta in await _deltas(active, builder):
            use(index, delta)


async def _deltas(active: ActiveRequest, builder: ResponseBuilder) -> list[tuple[int, Delta]]:
    """Takes deltas. The builder has what comes before them: log probabilities of their prompts."""
    deltas = await active.take(KEEPALIVE_SECONDS)
    for index, delta in deltas:
        for part in delta.prompt:
            assert isinstance(builder, ChoicesBuilder), "the other APIs show none"
            builder.add_prompt(index, part)
            await asyncio.sleep(0)  # other tasks run between the parts of a long prompt
    return deltas
