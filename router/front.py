"""The HTTP face: OpenAI's endpoints, and those by which a router is watched."""

import asyncio
import hashlib
import hmac
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

from aiohttp import web

from router import errors
from router.answers import ChatFormat, CompletionFormat
from router.api import Body, ChatBody, CompletionBody, DetokenizeBody, GenerationBody, TokenizeBody, parse
from router.config import RouterConfig
from router.jobs import chat_prompt, completion_prompts, encode, make_jobs
from router.serving import Answer, Services
from router.status import router_status

log = logging.getLogger(__name__)

B = TypeVar("B", bound=Body)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_REQUEST_ID: ContextVar[str] = ContextVar("request_id")
_OPEN = {"/health", "/ready", "/metrics", "/version"}
_NAMEABLE = re.compile(r"[\x21-\x7e]{1,128}")


class Front:
    """Routes and their handlers. `draining` makes it refuse new generations."""

    def __init__(self, config: RouterConfig, services: Services) -> None:
        self._config = config
        self._services = services
        self._created = int(time.time())
        self._keys = [hashlib.sha256(key.encode()).digest() for key in config.api_keys]
        self.draining = False
        self.app = web.Application(middlewares=[self._guard], client_max_size=config.max_body_bytes)
        self.app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._completion),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{id:.+}", self._model),
                web.post("/tokenize", self._tokenize),
                web.post("/detokenize", self._detokenize),
                web.get("/health", self._health),
                web.get("/ready", self._ready),
                web.get("/metrics", self._metrics),
                web.get("/version", self._version),
                web.get("/status", self._status),
            ]
        )

    # ------------------------------------------------------------ every request

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Gives it an id, checks its key, and says what went wrong in OpenAI's shape."""
        sent = request.headers.get("x-request-id", "")
        request_id = sent if _NAMEABLE.fullmatch(sent) else os.urandom(16).hex()
        _REQUEST_ID.set(request_id)
        try:
            if request.path not in _OPEN:
                self._authorize(request)
            return await handler(request)
        except errors.ApiError as error:
            return _error(error, request_id)
        except web.HTTPRequestEntityTooLarge:
            text = f"the body is larger than {self._config.max_body_bytes} bytes"
            return _error(errors.BodyTooLarge(text), request_id)
        except web.HTTPNotFound:
            return _error(errors.NotFound(f"there is no {request.method} {request.path}"), request_id)
        except web.HTTPMethodNotAllowed as error:
            text = f"{request.path} takes {', '.join(sorted(error.allowed_methods))}, not {request.method}"
            return _error(errors.MethodNotAllowed(text), request_id)
        except (ConnectionResetError, asyncio.CancelledError):
            raise  # the client went
        except web.HTTPException:
            raise
        except Exception:
            # A bug of ours must not look like the client's: it is logged whole, and the client learns its id.
            log.exception("request %s", request_id)
            if request.writer.output_size:
                raise  # an answer has begun: all that is left is to close the connection
            return _error(errors.ApiError(f"request {request_id} failed inside the router"), request_id)

    def _authorize(self, request: web.Request) -> None:
        if not self._keys:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        sent = hashlib.sha256(key.strip().encode(errors="replace")).digest()
        # Every key is compared, so that the time says nothing about which.
        matches = [hmac.compare_digest(sent, known) for known in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise errors.Unauthorized("send a valid API key as `Authorization: Bearer KEY`")

    # ------------------------------------------------------------ generation

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await self._parse(request, ChatBody)
        prompt = await chat_prompt(self._services.tokenizer, body)
        name, model = _REQUEST_ID.get(), self._config.model_name
        answer_format = ChatFormat(name, model, self._services.tokenizer, body, prompt)
        return await self._generate(request, body, [prompt], "messages", answer_format)

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        body = await self._parse(request, CompletionBody)
        prompts = await completion_prompts(self._services.tokenizer, body)
        name, model = _REQUEST_ID.get(), self._config.model_name
        answer_format = CompletionFormat(name, model, self._services.tokenizer, body, prompts)
        return await self._generate(request, body, prompts, "prompt", answer_format)

    async def _generate(
        self,
        request: web.Request,
        body: GenerationBody,
        prompts: list[list[int]],
        field: str,
        answer_format: ChatFormat | CompletionFormat,
    ) -> web.StreamResponse:
        if self.draining:
            raise errors.ShuttingDown("the router is shutting down", retry_after=1)
        services = self._services
        jobs = make_jobs(
            body,
            prompts,
            field=field,
            capacity=self._capacity,
            vocab_size=services.tokenizer.vocab_size,
            session=request.headers.get("x-session-id"),
        )
        answer = Answer(services, body, jobs, answer_format, _REQUEST_ID.get())
        return await answer.run(request, {"x-request-id": _REQUEST_ID.get()})

    @property
    def _capacity(self) -> int:
        smallest = self._services.pool.capacity
        own = self._services.tokenizer.max_model_len
        return own if smallest is None else min(own, smallest)

    async def _parse(self, request: web.Request, kind: type[B]) -> B:
        body = parse(kind, await request.read())
        if body.model not in (None, self._config.model_name):
            raise errors.ModelNotFound(f"there is no model {body.model!r} here", param="model")
        return body

    # ------------------------------------------------------------ about the model

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
            "parent": None, "max_model_len": self._capacity,
        }  # fmt: skip

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await self._parse(request, TokenizeBody)
        tokenizer = self._services.tokenizer
        if body.messages is not None:
            tokens = await chat_prompt(tokenizer, ChatBody(messages=body.messages))
        else:
            tokens = await encode(tokenizer, body.prompt or "", add_special_tokens=body.add_special_tokens)
        answer = {"count": len(tokens), "max_model_len": self._capacity, "tokens": tokens}
        return _json(answer)

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = await self._parse(request, DetokenizeBody)
        tokenizer = self._services.tokenizer
        if max(body.tokens, default=0) >= tokenizer.vocab_size:
            raise errors.InvalidRequest(
                f"tokens: {max(body.tokens)} is not below the vocabulary's {tokenizer.vocab_size}",
                param="tokens",
            )
        return _json({"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)})

    # ------------------------------------------------------------ about the router

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _ready(self, request: web.Request) -> web.Response:
        if self.draining:
            raise errors.ShuttingDown("the router is shutting down")
        if not self._services.pool.complete:
            raise errors.NoWorker("there is no worker of one of the roles")
        return web.Response()

    async def _metrics(self, request: web.Request) -> web.Response:
        text = self._services.metrics.exposition()
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _version(self, request: web.Request) -> web.Response:
        return _json({"version": _version()})

    async def _status(self, request: web.Request) -> web.Response:
        return _json(await router_status(self._config, self._services, self.draining))


def _version() -> str:
    try:
        return version("baton")
    except PackageNotFoundError:
        return "unknown"  # run from a checkout that is not installed


def _json(payload: Any) -> web.Response:
    return web.json_response(payload, headers={"x-request-id": _REQUEST_ID.get()})


def _error(error: errors.ApiError, request_id: str) -> web.Response:
    headers = {"x-request-id": request_id}
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    return web.json_response(error.body, status=error.status, headers=headers)
