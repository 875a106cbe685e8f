"""The HTTP server: the routes, what happens to every request, and the small endpoints."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from aiohttp import web

from baton import version
from baton.router import access_log, errors
from baton.router.admission.entry import holding
from baton.router.admission.keys import ANY_CLIENT, KeyRing
from baton.router.api.anthropic.reply import error_body
from baton.router.api.jobs import shown
from baton.router.api.openapi import OPERATIONS, encoded
from baton.router.endpoints import http_generation as http
from baton.router.endpoints import pages
from baton.router.endpoints.admin_calls import add_admin_calls
from baton.router.endpoints.answers import defect
from baton.router.endpoints.frontend import Frontend, request_name, unenforced_header
from baton.router.endpoints.http_batches import HttpBatches
from baton.router.endpoints.http_connections import is_extra, refusal, serving_key
from baton.router.endpoints.http_openai_responses import OpenAIResponses
from baton.router.endpoints.http_writer import send
from baton.router.endpoints.request_body import read_body
from baton.router.generation.context import Services
from baton.router.history import REQUESTS
from baton.router.preparation.prepare import Converted
from baton.router.status import PAUSES, health, request_timeline, router_status, scrape_targets
from baton.system.addresses import url_host


class Cors:
    """Lets the pages of other origins use the API in a browser (https://fetch.spec.whatwg.org).

    API keys travel in a header of their own, so the browser's credentials are not allowed.
    """

    def __init__(self, origins: tuple[str, ...]) -> None:
        """`origins`: such as https://chat.example; "*" is any."""
        self._origins = origins

    def preflight(self, request: web.Request) -> web.Response | None:
        """Returns the response to the question that a browser asks first. None: it is no such question."""
        method = request.headers.get("Access-Control-Request-Method")
        if request.method != "OPTIONS" or method is None or not self._allows(request):
            return None
        headers = {"Access-Control-Allow-Methods": "GET, POST, DELETE", "Access-Control-Max-Age": "600"}
        if names := request.headers.get("Access-Control-Request-Headers"):
            headers["Access-Control-Allow-Headers"] = names
        return web.Response(status=204, headers=headers)

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Handles the signal `on_response_prepare`, so errors and streams have the headers, too."""
        if self._origins and "*" not in self._origins:
            response.headers["Vary"] = "Origin"
        if self._allows(request):
            allowed = "*" if "*" in self._origins else request.headers["Origin"]
            response.headers["Access-Control-Allow-Origin"] = allowed
            response.headers["Access-Control-Expose-Headers"] = (
                "x-request-id, Retry-After, x-baton-unenforced"
            )

    def _allows(self, request: web.Request) -> bool:
        origin = request.headers.get("Origin")
        return origin is not None and ("*" in self._origins or origin in self._origins)


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_ADMIN_KEY = {operation.path for operation in OPERATIONS if operation.admin == "key"}
_ADMIN = tuple(operation.path for operation in OPERATIONS if operation.admin)
_POOLING = ("/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank")
_OPEN = {operation.path for operation in OPERATIONS if operation.open} | {f"/{name}" for name in pages.PARTS}


def _route(request: web.Request) -> str:
    """As it is registered: a path of a client may have any text."""
    resource = request.match_info.route.resource
    return "(unknown)" if resource is None else f"{request.method} {resource.canonical}"


class HttpEndpoints:
    """The routes of the HTTP server and their handlers."""

    def __init__(self, services: Services, frontend: Frontend) -> None:
        config = self._config = services.config
        self._admin = None if config.admin_key is None else KeyRing((config.admin_key,))
        self._services = services
        self._frontend = frontend
        self._created = int(time.time())  # noqa: TID251 - a timestamp
        self._cors = Cors(config.allowed_origins)
        generation = http.HttpGeneration(config, frontend)
        responses = OpenAIResponses(config, frontend, generation)
        self.batches = HttpBatches(config, frontend, generation)
        self.app = web.Application(middlewares=[self._guard])
        self.app.on_response_prepare.extend([_add_headers, self._cors.add_headers])
        self.app.add_routes(
            [
                web.post("/v1/chat/completions", partial(generation.generate, kind="chat")),
                web.post("/v1/completions", partial(generation.generate, kind="completion")),
                web.post("/v1/responses", responses.create),
                web.post("/v1/responses/input_tokens", responses.count_tokens),
                web.get("/v1/responses/{id:resp_[^/]+}", responses.retrieve),
                web.get("/v1/responses/{id:resp_[^/]+}/input_items", responses.input_items),
                web.delete("/v1/responses/{id:resp_[^/]+}", responses.delete),
                web.post("/v1/responses/{id:resp_[^/]+}/cancel", responses.cancel),
                web.post("/v1/messages", partial(generation.generate, kind="messages")),
                web.post("/v1/messages/count_tokens", partial(self._convert, kind="count_tokens")),
                # The one endpoint that Amazon SageMaker calls.
                web.post("/invocations", partial(generation.generate, kind="invocation")),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{id:.+}", self._model),
                web.post("/tokenize", partial(self._convert, kind="tokenize")),
                web.post("/detokenize", partial(self._convert, kind="detokenize")),
                web.get("/health", self._health),
                web.get("/ready", self._ready),
                web.get("/routable", self._routable),
                web.get("/ping", self._health),
                web.get("/api/hello", self._health),  # Claude Code asks with HEAD whether there is a server
                web.post("/ping", self._health),
                web.get("/load", self._load),
                web.get("/server_info", self._server_info),
                web.get("/tokenizer_info", self._tokenizer_info),
                web.get("/version", self._version),
                web.get("/openapi.json", self._openapi),
                *self.batches.routes(),
                *pages.routes(("home", "chat", "docs") + (() if config.supervised else ("dashboard",))),
            ]
        )
        if not config.supervised:  # otherwise the admin port serves them for all processes
            add_admin_calls(self.app, config, self._found_status)
            self.app.add_routes(
                [
                    web.get("/metrics", self._metrics),
                    web.get("/metrics/targets", self._targets),
                    web.get("/status", self._status),
                    web.get("/status/requests/{id}", self._timeline),
                ]
            )

    # ------------------------------------------------------------ every request

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Gives the request an id, and logs it."""
        request_id = request_name(request.headers.get("x-request-id"))
        http.REQUEST_ID.set(request_id)
        if (response := self._cors.preflight(request)) is not None:
            return response
        with access_log.request(request_id, _route(request), on=self._is_logged(request)) as access:
            response = await self._answer(request, handler, request_id)
            access.status = response.status
            return response

    def _is_logged(self, request: web.Request) -> bool:
        """Probes, pages and scrapes are not."""
        return self._config.access_log and request.path not in _OPEN and not request.path.startswith(_ADMIN)

    async def _answer(self, request: web.Request, handler: Handler, request_id: str) -> web.StreamResponse:
        """Checks the API key of a request, and turns errors into responses."""
        try:
            return await self._handled(request, handler)
        except errors.ApiError as error:
            return self._refuse(request, error)
        except web.HTTPNotFound:
            missing = f"there is no {request.method} {request.path}"
            if request.path in _POOLING:
                missing = f"{request.path} is not served: Baton's router generates text, and pools nothing"
                missing += "; send it to a vLLM server with this model and --runner pooling"
            if self._config.supervised and request.path.startswith(_ADMIN):
                admin = f"http://{url_host(self._config.admin_host)}:{self._config.admin_port}"
                missing = f"{request.path} is on the admin port, {admin}"
            return self._refuse(request, errors.NotFound(missing))
        except web.HTTPMethodNotAllowed as error:
            allowed = ", ".join(sorted(error.allowed_methods))
            refused = errors.MethodNotAllowed(f"{request.path} takes {allowed}, not {request.method}")
            return self._refuse(request, refused, Allow=allowed)
        except (ConnectionError, asyncio.CancelledError):
            raise  # the client disconnected
        except web.HTTPException:
            raise
        except Exception:
            error = defect(request_id)
            if request.writer.output_size:
                self._services.metrics.failed(error, request_id)
                raise  # the response has begun: aiohttp closes the connection
            return self._refuse(request, error)

    async def _handled(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Checks the API key. What it has asked for counts for it until it is sent. Raises ApiError."""
        if request.path in _OPEN:
            return await handler(request)
        if is_extra(request):
            raise errors.Overloaded("too many connections to this router are open", retry_after=1)
        if request.path in _ADMIN_KEY or (_of_status(request) and self._is_admin(request)):
            return await handler(request)
        account = self._frontend.authorize(http.authorization(request))
        http.ACCOUNT.set(account)
        access_log.authorized(account.key.name)
        with serving_key(request):
            response = await handler(request)
            if not response.prepared:
                with holding(self._services.admission, account, response.content_length or 0):
                    await send(request, response)
            return response

    def _is_admin(self, request: web.Request) -> bool:
        try:
            return self._admin is not None and bool(self._admin.authorize(http.authorization(request)))
        except errors.Unauthorized:
            return False

    def _refuse(self, request: web.Request, error: errors.ApiError, **more: str) -> web.Response:
        """Returns the error in the shape of the endpoint: Anthropic's, or OpenAI's."""
        if request.path not in _OPEN:  # a probe of a router that is not ready is no request that failed
            self._services.metrics.failed(error, http.REQUEST_ID.get())
        anthropic = request.path.startswith("/v1/messages")
        return refusal(error, error_body(error, http.REQUEST_ID.get()) if anthropic else None, **more)

    # ------------------------------------------------------------ the model

    async def _models(self, request: web.Request) -> web.Response:
        cards = [self._card(name) for name in self._config.model_names]
        cards += [self._card(name, each.path) for name, each in self._frontend.adapters.items()]
        return web.json_response({"object": "list", "data": cards})

    async def _model(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        if name in self._config.model_names:
            return web.json_response(self._card(name))
        if (adapter := self._frontend.adapters.get(name)) is None:
            raise errors.ModelNotFound.of(name, (*self._config.model_names, *self._frontend.adapters))
        return web.json_response(self._card(name, adapter.path))

    def _card(self, name: str, path: str | None = None) -> dict[str, Any]:
        """`path`: of an adapter. None: it is the model."""
        model = self._config.model_name
        return {
            "id": name, "object": "model", "created": self._created, "owned_by": "baton",
            "root": path or model, "parent": path and model, "max_model_len": self._frontend.capacity,
            "default_sampling_params": shown(self._services.defaults),
        }  # fmt: skip

    async def _convert(self, request: web.Request, kind: Converted) -> web.StreamResponse:
        with self._frontend.admit(http.ACCOUNT.get()) as entry:
            raw = await read_body(request, self._config, entry)
            return http.json_response(await self._frontend.convert(kind, raw, entry))

    # ------------------------------------------------------------ the router

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response(health("draining" if self._frontend.draining else "serving", self._pause))

    @property
    def _pause(self) -> str:
        return PAUSES[self._services.pool.pause]

    async def _routable(self, request: web.Request) -> web.Response:
        if self._frontend.draining:
            raise errors.ShuttingDown("the router is shutting down")
        if self._services.pool.blind:
            raise errors.NoWorker("the router reaches none of the workers that are listed")
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
        return web.json_response({"server_load": len(self._services.active)})

    async def _server_info(self, request: web.Request) -> web.Response:
        tokenizer = self._services.tokenizer
        tools = tokenizer.tool_format
        info = {
            "version": version(),
            "model": self._config.model_name,
            "max_model_len": self._frontend.capacity,
            "tool_call_parser": None if tools is None else tools.name,
            "reasoning_parser": tokenizer.reasoning_parser,
            "default_sampling_params": shown(self._services.defaults),
        }
        return web.json_response(info)

    async def _tokenizer_info(self, request: web.Request) -> web.Response:
        return web.json_response(self._services.tokenizer.info)

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": version()})

    async def _openapi(self, request: web.Request) -> web.Response:
        keys, admin = bool(self._config.api_keys), not self._config.supervised
        return http.json_response(await asyncio.to_thread(encoded, version(), keys=keys, admin=admin))

    async def _status(self, request: web.Request) -> web.Response:
        status = await router_status(self._services, self._frontend.draining, self._viewer())
        return web.json_response(status)

    def _viewer(self) -> str | None:
        """Name of the API key that asks, which sees its own requests. None: the client sees all, since it has
        the admin key, or there are no API keys."""
        account = http.ACCOUNT.get(None)
        return None if account is None or account.key is ANY_CLIENT else account.key.name

    async def _found_status(self) -> dict[str, Any]:
        return await router_status(self._services, self._frontend.draining)

    async def _timeline(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        if (timeline := await request_timeline(self._services, name, self._viewer())) is None:
            raise errors.NotFound(
                f"no request {name[:128]!r} is among the last {REQUESTS} that have ended here"
            )
        return web.json_response(timeline)

    async def _targets(self, request: web.Request) -> web.Response:
        return web.json_response(scrape_targets(await self._found_status()))


def _of_status(request: web.Request) -> bool:
    return request.path == "/status" or request.path.startswith("/status/")


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Handles the signal `on_response_prepare`."""
    response.headers["x-request-id"] = http.REQUEST_ID.get()
    if unenforced := request.get(http.UNENFORCED):
        response.headers[http.UNENFORCED] = unenforced_header(unenforced)
