"""The endpoint /v1/responses: generates like a chat, and keeps what it made.

Life of a response:

1. `create` finds the conversation that the response continues.
2. The response is generated, for the client or in the background.
3. Its builder gives it to `StoredResponses`.
4. `retrieve`, `delete` or the next `create` finds it there.
"""

import asyncio
import contextlib
import logging
import os
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from baton.machine.system import url_host
from baton.router.active_request import ActiveRequest
from baton.router.admission.queue import Entry
from baton.router.config import RouterConfig
from baton.router.endpoints.builders.base import encode
from baton.router.endpoints.builders.openai_responses import OpenAIResponsesBuilder
from baton.router.endpoints.frontend import Frontend
from baton.router.endpoints.http_generation import (
    ACCOUNT,
    REQUEST_ID,
    HttpGeneration,
    collect,
    json_response,
    read_body,
)
from baton.router.endpoints.stored_responses import StoredResponse, StoredResponses, home_tag
from baton.router.errors import ApiError, BodyTooLarge, InvalidRequest, Unsupported
from baton.router.preparation.prepare import Peek

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Turn:
    """One turn of a conversation."""

    key: str
    """The name of the API key."""
    earlier: tuple[bytes, ...]
    """The inputs and outputs of the earlier turns, each as JSON."""
    input: bytes | None
    """None: the turn is not stored."""
    background: bool

    @property
    def history(self) -> bytes:
        """The earlier turns as a JSON array, or nothing if there are none."""
        return b"[" + b",".join(self.earlier) + b"]" if self.earlier else b""


class OpenAIResponses:
    """Owns the stored responses, and the tasks of those that are generated in the background."""

    def __init__(self, config: RouterConfig, frontend: Frontend, generation: HttpGeneration) -> None:
        self._config = config
        self._frontend = frontend
        self._generation = generation
        self._stored = StoredResponses(lambda: frontend.key_names)
        self._running: dict[tuple[str, str], tuple[asyncio.Task[None], OpenAIResponsesBuilder]] = {}

    async def create(self, request: web.Request) -> web.StreamResponse:
        with contextlib.ExitStack() as admitted:
            entry = admitted.enter_context(self._frontend.admit(ACCOUNT.get()))
            raw = await read_body(request, self._config, entry)
            turn = await self._turn(raw, entry)
            active = await self._generation.prepare(request, "responses", raw, entry, turn.history)
            del raw  # frees the body, which may be large, before the generation, which may be long
            builder = self._builder(request, active, turn)
            if not turn.background:
                return await self._generation.respond(request, active, builder)
            until_end = admitted.pop_all()
        until_end.callback(self._running.pop, (turn.key, builder.id))
        task = asyncio.create_task(self._generate_unseen(active, builder))
        self._running[turn.key, builder.id] = task, builder
        task.add_done_callback(lambda _: until_end.close())
        return json_response(encode(builder.response("queued")))

    async def retrieve(self, request: web.Request) -> web.Response:
        if request.query.get("stream", "false").lower() not in ("false", "0"):
            raise Unsupported("stream is not supported here: ask again for the response", param="stream")
        key, id = ACCOUNT.get().key.name, request.match_info["id"]
        if (running := self._running.get((key, id))) is not None:
            return json_response(encode(running[1].response("in_progress" if running[1].begun else "queued")))
        return json_response(self._stored.get(key, id).response)

    async def delete(self, request: web.Request) -> web.Response:
        key, id = ACCOUNT.get().key.name, request.match_info["id"]
        await self._cancel(key, id)
        self._stored.delete(key, id)
        return json_response(encode({"id": id, "object": "response", "deleted": True}))

    async def cancel(self, request: web.Request) -> web.Response:
        key, id = ACCOUNT.get().key.name, request.match_info["id"]
        await self._cancel(key, id)
        stored = self._stored.get(key, id)
        if not stored.background:
            raise InvalidRequest(f"Cannot cancel a synchronous response: {id} was not made with background")
        return json_response(stored.response)

    async def _cancel(self, key: str, id: str) -> None:
        if (running := self._running.get((key, id))) is not None:
            running[0].cancel()
            await asyncio.wait([running[0]])

    async def _turn(self, raw: bytearray, entry: Entry) -> _Turn:
        """Raises NotFound and InvalidRequest when the turn before it is not stored, and BodyTooLarge."""
        found = await self._frontend.convert("peek", raw, entry)
        peek = msgspec.msgpack.decode(found, type=Peek)
        key, previous = entry.key.name, peek.previous_response_id
        earlier: tuple[bytes, ...] = ()
        if previous is not None:
            if (key, previous) in self._running:
                text = f"previous_response_id: response {previous} is not complete yet"
                raise InvalidRequest(text, param="previous_response_id")
            earlier = self._stored.get(key, previous, "previous_response_id").conversation
        if len(raw) + sum(map(len, earlier)) > self._config.max_body_bytes:
            text = f"the conversation is larger than {self._config.max_body_bytes} bytes"
            raise BodyTooLarge(text, param="previous_response_id")
        input = bytes(memoryview(raw)[peek.start : peek.stop]) if peek.stored else None
        return _Turn(key, earlier, input, peek.background)

    def _builder(self, request: web.Request, active: ActiveRequest, turn: _Turn) -> OpenAIResponsesBuilder:
        def keep(response: dict[str, Any]) -> None:
            if turn.input is not None:
                conversation = (*turn.earlier, turn.input, encode(response["output"]))
                stored = StoredResponse(encode(response), conversation, turn.background)
                self._stored.put(turn.key, response["id"], stored)

        return OpenAIResponsesBuilder(active, _new_id(request), keep)

    async def _generate_unseen(self, active: ActiveRequest, builder: OpenAIResponsesBuilder) -> None:
        """Generates in the background."""
        try:
            with active.generating():
                await collect(active, builder)
            builder.whole()
        except asyncio.CancelledError:
            builder.cancelled()
        except Exception as raised:
            error = raised
            if not isinstance(error, ApiError):
                error = ApiError(f"request {REQUEST_ID.get()} failed inside the router")
                log.exception("request %s", REQUEST_ID.get())
            active.services.metrics.failed(error)
            builder.failed(error)


def _new_id(request: web.Request) -> str:
    """Returns an id that leads an endpoint picker back to this router."""
    host, port, *_ = request.get_extra_info("sockname", ("", 0))
    return home_tag(f"{url_host(host)}:{port}") + os.urandom(14).hex()
