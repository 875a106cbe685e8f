"""The HTTP endpoints: OpenAI's API, and those for operators (health, metrics, status)."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from aiohttp import web

from router import errors
from router.active_request import Services
from router.admission.account import Account
from router.api.defaults import shown
from router.api.openapi import OPERATIONS, description
from router.api.sampling import MAX_TIMEOUT
from router.config import RouterConfig
from router.endpoints.builders import ChatBuilder, ChoicesBuilder, CompletionBuilder
from router.endpoints.cors import Cors
from router.endpoints.frontend import Frontend, request_name
from router.endpoints.http_response import respond
from router.endpoints.http_runner import ENCODINGS, unsupported_encoding
from router.status import router_status, scrape_targets
from rpc.ports import url_host

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_REQUEST_ID: ContextVar[str] = ContextVar("request_id")
_ACCOUNT: ContextVar[Account] = ContextVar("account")
_ADMIN = ("/metrics", "/metrics/targets", "/status")
_OPEN = {operation.path for operation in OPERATIONS if operation.open}


class HttpEndpoints:
    """The routes of the HTTP server and their handlers."""

    def __init__(self, config: RouterConfig, services: Services, frontend: Frontend) -> None:
        self._config = config
        self._services = services
        self._frontend = frontend
        self._created = int(time.time())
        self._cors = Cors(config.allowed_origins)
        self.app = web.Application(middlewares=[self._guard])
        self.app.on_response_prepare.append(self._cors.add_headers)
        self.app.add_routes(
            [
                web.post("/v1/chat/completions", partial(self._generate, kind="chat", builder=ChatBuilder)),
                web.post(
                    "/v1/completions",
                    partial(self._generate, kind="completion", builder=CompletionBuilder),
                ),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{id:.+}", self._model),
                web.post("/tokenize", partial(self._convert, kind="tokenize")),
                web.post("/detokenize", partial(self._convert, kind="detokenize")),
                web.get("/health", self._health),
                web.get("/ready", self._ready),
                web.get("/ping", self._health),
                web.post("/ping", self._health),
                web.get("/load", self._load),
                web.get("/server_info", self._server_info),
                web.get("/tokenizer_info", self._tokenizer_info),
                web.get("/version", self._version),
                web.get("/openapi.json", self._openapi),
            ]
        )
        if not config.supervised:  # otherwise the admin port serves them for all processes
            for path, handler in zip(_ADMIN, (self._metrics, self._targets, self._status), strict=True):
                self.app.router.add_get(path, handler)

    # ------------------------------------------------------------ every request

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Gives the request an id, checks its API key, and turns errors into responses of OpenAI's shape."""
        request_id = request_name(request.headers.get("x-request-id"))
        _REQUEST_ID.set(request_id)
        if (response := self._cors.preflight(request)) is not None:
            return response
        try:
            if request.path not in _OPEN:
                _ACCOUNT.set(self._frontend.authorize(request.headers.get("authorization", "")))
            return await handler(request)
        except errors.ApiError as error:
            return self._refuse(error, request_id)
        except web.HTTPNotFound:
            missing = f"there is no {request.method} {request.path}"
            if self._config.supervised and request.path in _ADMIN:
                admin = f"http://{url_host(self._config.admin_host)}:{self._config.admin_port}"
                missing = f"{request.path} is on the admin port, {admin}"
            return self._refuse(errors.NotFound(missing), request_id)
        except web.HTTPMethodNotAllowed as error:
            allowed = ", ".join(sorted(error.allowed_methods))
            refused = errors.MethodNotAllowed(f"{request.path} takes {allowed}, not {request.method}")
            return self._refuse(refused, request_id, Allow=allowed)
        except (ConnectionResetError, asyncio.CancelledError):
            raise  # the client disconnected
        except web.HTTPException:
            raise
        except Exception:
            # A bug in the router: the log has its stack, and the client gets the id of the request.
            log.exception("request %s", request_id)
            if request.writer.output_size:
                raise  # the response has begun: aiohttp closes the connection
            return self._refuse(errors.ApiError(f"request {request_id} failed inside the router"), request_id)

    def _refuse(self, error: errors.ApiError, request_id: str, **more: str) -> web.Response:
        self._services.metrics.failed(error)
        headers = {"x-request-id": request_id, **more}
        if error.retry_after is not None:
            headers["Retry-After"] = str(error.retry_after)
        return web.json_response(error.body, status=error.status, headers=headers)

    # ------------------------------------------------------------ generation

    async def _generate(
        self, request: web.Request, kind: Literal["chat", "completion"], builder: type[ChoicesBuilder]
    ) -> web.StreamResponse:
        name = _REQUEST_ID.get()
        raw = await self._read(request)
        with self._frontend.admit(_ACCOUNT.get(), len(raw)) as entry:
            active = await self._frontend.prepare(
                kind,
                raw,
                entry,
                name=name,
                session=request.headers.get("x-session-id"),
                timeout=_seconds(request.headers.get("x-request-timeout")),
                traceparent=request.headers.get("traceparent"),
            )
            del raw  # frees the body, which may be large, before the generation, which may be long
            building = builder(active, self._config.model_name, self._services.tokenizer)
            headers = {"x-request-id": name}
            return await respond(request, active, building, headers, self._config.client_timeout)

    async def _read(self, request: web.Request) -> bytearray:
        """Returns the body. Its type must be JSON, and it must arrive within the client's timeout."""
        _check_type(request.headers.get("content-type"))
        if request.headers.get("content-encoding", "identity").lower() not in ENCODINGS:
            raise unsupported_encoding()
        body = bytearray()
        try:
            async with asyncio.timeout(self._config.client_timeout):
                async for piece in request.content.iter_any():  # `request.read` would copy it and keep it
                    body += piece
                    if len(body) > self._config.max_body_bytes:
                        text = f"the body is larger than {self._config.max_body_bytes} bytes"
                        raise errors.BodyTooLarge(text)
        except TimeoutError:
            text = f"the body did not arrive within {self._config.client_timeout:g} s"
            raise errors.TooSlow(text) from None
        except web.RequestPayloadError as error:
            encoding = request.headers.get("content-encoding", "identity")
            text = f"the body cannot be read: it is not what Content-Encoding says ({encoding[:20]})"
            raise errors.InvalidRequest(text) from error
        return body

    # ------------------------------------------------------------ the model

    async def _models(self, request: web.Request) -> web.Response:
        return _json({"object": "list", "data": [self._card()]})

    async def _model(self, request: web.Request) -> web.Response:
        if request.match_info["id"] != self._config.model_name:
            raise errors.ModelNotFound(f"there is no model {request.match_info['id']!r} here", param="model")
        return _json(self._card())

    def _card(self) -> dict[str, Any]:
        name = self._config.model_name
        return {
            "id": name, "object": "model", "created": self._created, "owned_by": "baton", "root": name,
            "parent": None, "max_model_len": self._frontend.capacity,
            "default_sampling_params": shown(self._services.defaults),
        }  # fmt: skip

    async def _convert(self, request: web.Request, kind: Literal["tokenize", "detokenize"]) -> web.Response:
        body = await self._frontend.convert(kind, await self._read(request), _ACCOUNT.get())
        headers = {"x-request-id": _REQUEST_ID.get()}
        return web.Response(body=body, content_type="application/json", headers=headers)

    # ------------------------------------------------------------ the router

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _ready(self, request: web.Request) -> web.Response:
        if self._frontend.draining:
            raise errors.ShuttingDown("the router is shutting down")
        if not self._services.pool.complete:
            raise errors.NoWorker("a pool of the cluster has no worker")
        return web.Response()

    async def _metrics(self, request: web.Request) -> web.Response:
        text = self._services.metrics.exposition()
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _load(self, request: web.Request) -> web.Response:
        return _json({"server_load": len(self._services.active)})

    async def _server_info(self, request: web.Request) -> web.Response:
        tokenizer = self._services.tokenizer
        tools, reasoning = tokenizer.tool_format, tokenizer.reasoning_parser
        info = {
            "version": _version(),
            "model": self._config.model_name,
            "max_model_len": self._frontend.capacity,
            "tool_call_parser": None if tools is None else tools.name,
            "reasoning_parser": None if reasoning is None else reasoning.name,
            "default_sampling_params": shown(self._services.defaults),
        }
        return _json(info)

    async def _tokenizer_info(self, request: web.Request) -> web.Response:
        return _json(self._services.tokenizer.info)

    async def _version(self, request: web.Request) -> web.Response:
        return _json({"version": _version()})

    async def _openapi(self, request: web.Request) -> web.Response:
        keys, admin = bool(self._config.api_keys), not self._config.supervised
        return _json(description(_version(), keys=keys, admin=admin))

    async def _status(self, request: web.Request) -> web.Response:
        return _json(await router_status(self._config, self._services, self._frontend.draining))

    async def _targets(self, request: web.Request) -> web.Response:
        return _json(
            scrape_targets(await router_status(self._config, self._services, self._frontend.draining))
        )


def _check_type(header: str | None) -> None:
    """Raises UnsupportedMediaType unless the body is JSON, as vLLM does.

    A browser sends a body of another type to another origin without asking for permission first.
    """
    sent = "none" if header is None else repr(header[:80])
    if header is None or header.partition(";")[0].strip().lower() != "application/json":
        text = f"the Content-Type must be application/json, not {sent}"
        raise errors.UnsupportedMediaType(f"{text}: curl needs -H 'Content-Type: application/json'")


def _seconds(header: str | None) -> float | None:
    """Returns the value of x-request-timeout, a header for clients that cannot add a field to the body."""
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_TIMEOUT:
        text = f"x-request-timeout: must be seconds above 0, at most {MAX_TIMEOUT:g}, not {header[:20]!r}"
        raise errors.InvalidRequest(text, param="x-request-timeout")
    return seconds


def _version() -> str:
    try:
        return version("baton-llm")
    except PackageNotFoundError:
        return "unknown"  # runs from a checkout, without installation


def _json(payload: Any) -> web.Response:
    return web.json_response(payload, headers={"x-request-id": _REQUEST_ID.get()})
