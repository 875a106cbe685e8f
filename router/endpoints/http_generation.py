"""The HTTP endpoints that generate, except /v1/responses, which also stores."""

from aiohttp import web

from baton.router.active_request import ActiveRequest, Services
from baton.router.admission.queue import Entry
from baton.router.api.bodies import ChatOptions
from baton.router.config import RouterConfig
from baton.router.endpoints.builders import AnthropicBuilder, ChatBuilder, CompletionBuilder, ResponseBuilder
from baton.router.endpoints.frontend import Frontend
from baton.router.endpoints.http_request import ACCOUNT, REQUEST_ID, read_body, timeout_of
from baton.router.endpoints.http_response import respond
from baton.router.preparation.prepare import Generated

_BUILDERS: dict[Generated, type[ChatBuilder] | type[CompletionBuilder] | type[AnthropicBuilder]] = {
    "chat": ChatBuilder,
    "completion": CompletionBuilder,
    "messages": AnthropicBuilder,
}


class HttpGeneration:
    """Receives a request, generates, and sends the response."""

    def __init__(self, config: RouterConfig, services: Services, frontend: Frontend) -> None:
        self._config = config
        self._model = config.model_name
        self._tokenizer = services.tokenizer
        self._frontend = frontend

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, "chat")

    async def completion(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, "completion")

    async def messages(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, "messages")

    async def invocation(self, request: web.Request) -> web.StreamResponse:
        """The one endpoint that Amazon SageMaker calls."""
        return await self._generate(request, "invocation")

    async def prepare(
        self, request: web.Request, kind: Generated, raw: bytearray, entry: Entry, history: bytes = b""
    ) -> ActiveRequest:
        """As `Frontend.prepare`, with what the headers say."""
        return await self._frontend.prepare(
            kind,
            raw,
            entry,
            history=history,
            name=REQUEST_ID.get(),
            session=request.headers.get("x-session-id"),
            timeout=timeout_of(request),
            traceparent=request.headers.get("traceparent"),
        )

    async def respond(
        self, request: web.Request, active: ActiveRequest, builder: ResponseBuilder
    ) -> web.StreamResponse:
        headers = {"x-request-id": REQUEST_ID.get()}
        return await respond(request, active, builder, headers, self._config.client_timeout)

    async def _generate(self, request: web.Request, kind: Generated) -> web.StreamResponse:
        with self._frontend.admit(ACCOUNT.get()) as entry:
            raw = await read_body(request, self._config, entry)
            active = await self.prepare(request, kind, raw, entry)
            del raw  # frees the body, which may be large, before the generation, which may be long
            if kind == "invocation":
                kind = "chat" if isinstance(active.body, ChatOptions) else "completion"
            return await self.respond(request, active, _BUILDERS[kind](active, self._model, self._tokenizer))
