"""The HTTP endpoints that generate: read a request, generate, and send the response.

A response is whole, or a stream of server-sent events.
"""

from collections.abc import Mapping
from contextvars import ContextVar

from aiohttp import web

from baton.router import access_log
from baton.router.active_request import ActiveRequest
from baton.router.admission.keys import Account
from baton.router.api.bodies import ChatOptions
from baton.router.config import RouterConfig
from baton.router.endpoints.answers import ResponseBuilder, collect, stream
from baton.router.endpoints.builders.anthropic import AnthropicBuilder
from baton.router.endpoints.builders.base import encode
from baton.router.endpoints.builders.completions import ChatBuilder, CompletionBuilder
from baton.router.endpoints.frontend import Frontend
from baton.router.endpoints.http_writer import EventStream
from baton.router.endpoints.request_body import read_body
from baton.router.preparation.prepare import Generated

REQUEST_ID: ContextVar[str] = ContextVar("request_id")
ACCOUNT: ContextVar[Account] = ContextVar("account")
UNENFORCED = "x-baton-unenforced"
"""Response header, and the key in a request of the JSON pointers that it has."""
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


def json_response(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


class HttpGeneration:
    """Receives a request, generates, and sends the response."""

    def __init__(self, config: RouterConfig, frontend: Frontend) -> None:
        self._config = config
        self._frontend = frontend

    async def generate(self, request: web.Request, kind: Generated) -> web.StreamResponse:
        """Handles a request to an endpoint that keeps no responses."""
        with self._frontend.admit(ACCOUNT.get(), REQUEST_ID.get()) as entry:
            raw = await read_body(request, self._config, entry)
            active = await self._frontend.activate(kind, raw, entry, request.headers)
            request[UNENFORCED] = active.unenforced
            del raw  # frees the body, which may be large, before the generation, which may be long
            if kind == "invocation":
                kind = "chat" if isinstance(active.options, ChatOptions) else "completion"
            return await self.respond(request, active, _BUILDERS[kind](active))

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
            self._frontend.admit(account, name) as entry,
        ):
            entry.receive(len(raw))
            active = await self._frontend.activate(kind, raw, entry, headers)
            builder = _BUILDERS[kind](active)
            with active.generating():
                await collect(active, builder)
                return encode(builder.whole())

    async def respond(
        self, request: web.Request, active: ActiveRequest, builder: ResponseBuilder
    ) -> web.StreamResponse:
        """Generates, and sends the response if it is a stream. Raises ApiError if nothing is sent yet."""
        with active.generating():
            if active.options.stream:
                events = EventStream(request)
                await stream(active, builder, events)
                return events.response
            await collect(active, builder)
            return json_response(encode(builder.whole()))
