"""The endpoint /v1/responses: generates like a chat, and keeps what it made.

Life of a response:

1. `create` finds the conversation that the response continues.
2. The response is generated, for the client or in the background.
3. Its builder gives it to `StoredResponses`.
4. `retrieve`, `delete` or the next `create` finds it there.
"""

import asyncio
import contextlib
import os
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from baton.router import access_log
from baton.router.active_request import ActiveRequest
from baton.router.admission.entry import Entry
from baton.router.api.queries import PageQuery, RetrieveQuery
from baton.router.api.validation import validate
from baton.router.config import RouterConfig
from baton.router.endpoints import http_generation as http
from baton.router.endpoints import http_writer
from baton.router.endpoints.answers import collect, defect
from baton.router.endpoints.builders.base import encode
from baton.router.endpoints.builders.openai_responses import OpenAIResponsesBuilder
from baton.router.endpoints.frontend import Frontend
from baton.router.endpoints.http_writer import EventStream
from baton.router.endpoints.request_body import read_body
from baton.router.endpoints.stored_responses import Events, StoredResponse, StoredResponses, home_tag
from baton.router.errors import ApiError, BodyTooLarge, InvalidRequest
from baton.router.generation.output import MAX_TAKEN, Delta
from baton.router.preparation.input_items import Peek, resolved
from baton.system.addresses import url_host, without_mapping


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


@dataclass(frozen=True, slots=True)
class _Running:
    """A response that is generated in the background."""

    task: asyncio.Task[None]
    builder: OpenAIResponsesBuilder
    events: Events | None
    """None: it is not streamed."""


class OpenAIResponses:
    """Owns the stored responses, and the tasks of those that are generated in the background."""

    def __init__(self, config: RouterConfig, frontend: Frontend, generation: http.HttpGeneration) -> None:
        self._config = config
        self._frontend = frontend
        self._generation = generation
        self._stored = StoredResponses(lambda: frontend.key_names, processes=config.processes)
        self._running: dict[tuple[str, str], _Running] = {}

    async def create(self, request: web.Request) -> web.StreamResponse:
        with contextlib.ExitStack() as admitted:
            admission = self._frontend.admit(http.ACCOUNT.get(), http.REQUEST_ID.get())
            entry = admitted.enter_context(admission)
            raw = await read_body(request, self._config, entry)
            turn = await self._turn(raw, entry)
            active = await self._frontend.activate(
                "responses", raw, entry, request.headers, history=turn.history
            )
            request[http.UNENFORCED] = active.unenforced
            del raw  # frees the body, which may be large, before the generation, which may be long
            events = Events() if turn.background and active.options.stream else None
            builder = self._builder(request, active, turn, events)
            if not turn.background:
                return await self._generation.respond(request, active, builder)
            until_end = admitted.pop_all()
        until_end.callback(self._running.pop, (turn.key, builder.id))
        task = asyncio.create_task(self._generate_unseen(active, builder, events, turn.key))
        self._running[turn.key, builder.id] = _Running(task, builder, events)
        task.add_done_callback(lambda _: until_end.close())
        if events is not None:
            return await self._follow(request, events, 0)
        return http.json_response(encode(builder.response("queued")))

    async def retrieve(self, request: web.Request) -> web.StreamResponse:
        key, id = http.ACCOUNT.get().key.name, request.match_info["id"]
        stored = self._running.get((key, id)) or self._stored.get(key, id)
        query = validate(RetrieveQuery, dict(request.query))
        if query.stream:
            if stored.events is None:
                raise InvalidRequest.at("stream", f"{id} was not made with both background and stream")
            return await self._follow(request, stored.events, query.starting_after + 1)
        if isinstance(stored, _Running):
            status = "in_progress" if stored.builder.begun else "queued"
            return http.json_response(encode(stored.builder.response(status)))
        return http.json_response(stored.response)

    async def input_items(self, request: web.Request) -> web.StreamResponse:
        key, id = http.ACCOUNT.get().key.name, request.match_info["id"]
        if (key, id) in self._running:
            raise InvalidRequest(f"response {id} is not complete yet")
        query = validate(PageQuery, dict(request.query))
        with self._frontend.admit(http.ACCOUNT.get()) as entry:
            turns = b"[" + b",".join(self._stored.get(key, id).conversation[:-1]) + b"]"
            asked = query.model_dump_json().encode()
            page = await self._frontend.convert("input_items", asked, entry, turns)
            return http.json_response(page)

    async def count_tokens(self, request: web.Request) -> web.StreamResponse:
        with self._frontend.admit(http.ACCOUNT.get()) as entry:
            raw = await read_body(request, self._config, entry)
            turn = await self._turn(raw, entry)
            counted = await self._frontend.convert("input_tokens", raw, entry, turn.history)
            return http.json_response(counted)

    async def _follow(self, request: web.Request, events: Events, position: int) -> web.StreamResponse:
        """Sends the events from this place on, until the response ends or the client leaves."""
        stream = EventStream(request)
        while position < len(events.all) or not events.ended:
            if position >= len(events.all) and not await events.wait(http_writer.KEEPALIVE_SECONDS):
                await stream.write(b"")
            new = events.all[position : position + MAX_TAKEN]
            if new:
                await stream.write(b"".join(new))
            position += len(new)
        await stream.end()
        return stream.response

    async def delete(self, request: web.Request) -> web.Response:
        key, id = http.ACCOUNT.get().key.name, request.match_info["id"]
        await self._cancel(key, id)
        self._stored.delete(key, id)
        return http.json_response(encode({"id": id, "object": "response", "deleted": True}))

    async def cancel(self, request: web.Request) -> web.StreamResponse:
        key, id = http.ACCOUNT.get().key.name, request.match_info["id"]
        await self._cancel(key, id)
        stored = self._stored.get(key, id)
        if not stored.background:
            raise InvalidRequest(f"Cannot cancel a synchronous response: {id} was not made with background")
        return http.json_response(stored.response)

    async def _cancel(self, key: str, id: str) -> None:
        if (running := self._running.get((key, id))) is not None:
            running.task.cancel()
            await asyncio.wait([running.task])

    async def _turn(self, raw: bytearray, entry: Entry) -> _Turn:
        """Puts stored items in the places of their references into the body.

        Raises NotFound and InvalidRequest when the turn before it is not stored, and BodyTooLarge."""
        packed = await self._frontend.convert("peek", raw, entry)
        peek = msgspec.msgpack.decode(packed, type=Peek)
        key, previous = entry.account.key.name, peek.previous_response_id
        earlier: tuple[bytes, ...] = ()
        if previous is not None:
            if not previous.startswith("resp_"):
                text = f"must begin with resp_, not {previous[:80]!r}"
                raise InvalidRequest.at("previous_response_id", text)
            if (key, previous) in self._running:
                text = f"response {previous} is not complete yet"
                raise InvalidRequest.at("previous_response_id", text)
            earlier = self._stored.get(key, previous, "previous_response_id").conversation
        if len(raw) + sum(map(len, earlier)) > self._config.max_body_bytes:
            text = f"the conversation is larger than {self._config.max_body_bytes} bytes"
            raise BodyTooLarge(text, param="previous_response_id")
        if peek.references:
            most = max(0, self._config.max_body_bytes - len(raw) - sum(map(len, earlier)))
            items = self._stored.items(key, peek.references, most)
            input = resolved(bytes(memoryview(raw)[peek.start : peek.stop]), items)
            raw[peek.start : peek.stop] = input
            peek.stop = peek.start + len(input)
        input = bytes(memoryview(raw)[peek.start : peek.stop]) if peek.stored else None
        return _Turn(key, earlier, input, peek.background)

    def _builder(
        self, request: web.Request, active: ActiveRequest, turn: _Turn, events: Events | None
    ) -> OpenAIResponsesBuilder:
        def keep(response: dict[str, Any]) -> None:
            if turn.input is not None:
                conversation = (*turn.earlier, turn.input, encode(response["output"]))
                items = tuple(item["id"] for item in response["output"])
                stored = StoredResponse(encode(response), conversation, turn.background, items, events)
                self._stored.put(turn.key, response["id"], stored)

        return OpenAIResponsesBuilder(active, _new_id(request), keep, None if events is None else events.add)

    async def _generate_unseen(
        self, active: ActiveRequest, builder: OpenAIResponsesBuilder, events: Events | None, key: str
    ) -> None:
        """Generates in the background."""

        def add(index: int, delta: Delta) -> None:
            if events is None:
                builder.add(index, delta)
            else:
                before = events.bytes
                builder.events(index, delta)
                active.keep(events.bytes - before)

        def failed(error: ApiError) -> None:
            access.status = error.status
            self._frontend.metrics.failed(error, name)
            builder.failed(error)

        name, route, on = active.entry.name, "background responses", self._config.access_log
        with access_log.request(name, route, key, on=on) as access:
            try:
                with active.generating():
                    if events is not None:
                        builder.begin()
                        active.keep(events.bytes)
                    await collect(active, builder, add)
                builder.end()
            except asyncio.CancelledError:
                access.status = access_log.CLOSED_BY_CLIENT
                builder.cancelled()
            except ApiError as error:
                failed(error)
            except Exception:  # noqa: BLE001 - `defect` logs it
                failed(defect(name))
            finally:
                if events is not None:
                    events.end()


def _new_id(request: web.Request) -> str:
    """Returns an id that leads an endpoint picker back to this router."""
    host, port, *_ = request.get_extra_info("sockname", ("", 0))
    return home_tag(f"{url_host(without_mapping(host))}:{port}") + os.urandom(14).hex()
