"""Builds OpenAI's responses (POST /v1/responses)."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import msgspec

from baton.router.active_request import ActiveRequest
from baton.router.api.messages import parsed_arguments
from baton.router.api.openai_responses.tools import Called, CustomInput
from baton.router.endpoints.builders.base import Block, BlocksBuilder, Event, LogprobEntries, sent_events
from baton.router.errors import ApiError
from baton.router.generation.output import Delta
from baton.router.tools.parser import Part

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
_PREFIXES = {
    "reasoning": "rs_", "content": "msg_", "function": "fc_", "custom": "ctc_", "local_shell": "lsh_",
    "tool_search": "tsc_",
}  # fmt: skip
_EVENTS = {
    "reasoning": "response.reasoning_text",
    "content": "response.output_text",
    "function": "response.function_call_arguments",
    "custom": "response.custom_tool_call_input",
}
"""For each kind of item: how the names of its events begin. Others are sent as a whole."""
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class OpenAIResponsesBuilder(BlocksBuilder):
    """Builds one response. Its blocks are items: reasoning, messages and function calls.

    Attributes:
        id: of the response.
    """

    def __init__(
        self,
        request: ActiveRequest,
        id: str,
        on_end: Callable[[dict[str, Any]], None],
        on_events: Callable[[list[bytes]], None] | None = None,
    ) -> None:
        """`on_end` gets the response when it is complete, incomplete or failed, before the client does.
        `on_events` gets all events of a stream."""
        super().__init__(request)
        self.id = id
        self._called = request.prepared.called
        self._input = CustomInput()  # of the open block, if that is a call of a custom tool
        self._on_end, self._on_events = on_end, on_events
        self._entries = LogprobEntries(request, kept=True)
        self._logprobs = request.options.logprobs_wanted is not None
        self._pending: list[tuple[str, Any]] = []  # tokens that may be in a message: text and logprobs
        self._sequence_number = 0
        self._frame = {
            **_fields(request.prepared.repeated),
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),  # noqa: TID251 - a timestamp
            "model": self._model,
            "service_tier": "default",
            "temperature": round(request.sampling.temperature, 6),  # it is a 32-bit number
            "top_p": round(request.sampling.top_p, 6),
        }

    @property
    def begun(self) -> bool:
        """True if there was a token."""
        return self._last is not None

    def response(self, status: Status, error: ApiError | None = None) -> dict[str, Any]:
        """Returns the response as it is now."""
        output = [] if status in ("queued", "in_progress") else self._items(cut=status != "completed")
        return {
            **self._frame,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,  # noqa: TID251 - a timestamp
            "output": output,
            "error": None if error is None else {"code": "server_error", "message": error.message},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": self._usage() if status in ("completed", "incomplete") else None,
        }

    def whole(self) -> dict[str, Any]:
        assert self._last is not None
        response = self.response("incomplete" if self._last.finish_reason == "length" else "completed")
        self._on_end(response)
        return response

    def end(self) -> bytes:
        response = self.whole()
        return self._written(self._numbered({"type": f"response.{response['status']}", "response": response}))

    def failed(self, error: ApiError) -> bytes:
        begin = [*self._begin()]
        response = self.response("failed", error)
        self._on_end(response)
        return self._written([*begin, *self._numbered({"type": "response.failed", "response": response})])

    def cancelled(self) -> None:
        self._on_end(self.response("cancelled"))

    def _numbered(self, *events: Event) -> Iterator[Event]:
        for event in events:
            yield {**event, "sequence_number": self._sequence_number}
            self._sequence_number += 1

    def begin(self) -> bytes:
        """Returns the first events, before there is a token."""
        return self._written(self._begin())

    def _written(self, events: Iterable[Event]) -> bytes:
        new = sent_events(events)
        if self._on_events is not None:
            self._on_events(new)
        return b"".join(new)

    def _begin(self) -> Iterator[Event]:
        if self._sequence_number:
            return
        response = self.response("in_progress")
        for kind in ("response.created", "response.in_progress"):
            yield from self._numbered({"type": kind, "response": response})

    def _see(self, delta: Delta, parts: list[Part]) -> None:
        if self._logprobs:
            self._pending.append((delta.text, self._entries.of_chat(delta)))
            if parts and all(part.kind != "content" for part in parts):
                self._pending.clear()

    def _taken(self, text: str) -> list[Any]:
        """Returns the logprobs of the last tokens, those that hold `text`.

        A token without text is a part of the character that a later token completes.
        """
        entries: list[Any] = []
        length = 0
        while self._pending and (length < len(text) or not self._pending[-1][0]):
            spelled, entry = self._pending.pop()
            length += len(spelled)
            entries.append(entry)
        self._pending.clear()
        return entries[::-1]

    def _opened(self, block: Block) -> Iterator[Event]:
        place = {"output_index": block.index}
        self._input = CustomInput()
        item = self._item(block, "in_progress")
        yield from self._numbered({"type": "response.output_item.added", **place, "item": item})
        if block.head.kind != "call":
            place |= {"item_id": item["id"], "content_index": 0}
            part = _part(block)
            yield from self._numbered({"type": "response.content_part.added", **place, "part": part})

    def _grown(self, block: Block, text: str) -> Iterator[Event]:
        kind = self._kind(block)
        text = self._input.push(text) if kind == "custom" else text
        if not text or kind not in _EVENTS:
            return  # the first part of a call may have no arguments yet
        event = {"type": f"{_EVENTS[kind]}.delta", **self._place(block), "delta": text}
        if block.head.kind == "content":
            event["logprobs"] = self._taken(text)
            block.logprobs += event["logprobs"]
        yield from self._numbered(event)

    def _closed(self, block: Block, *, cut: bool) -> Iterator[Event]:
        place, kind = self._place(block), self._kind(block)
        item = self._item(block, "incomplete" if cut else "completed")
        item_done = {"type": "response.output_item.done", "output_index": block.index, "item": item}
        if (name := _EVENTS.get(kind)) is None:
            yield from self._numbered(item_done)
            return
        if block.head.kind == "call":
            said = ("name", "arguments") if kind == "function" else ("input",)
            done = {"type": f"{name}.done", **place, **{each: item[each] for each in said}}
            yield from self._numbered(done, item_done)
            return
        done = {"type": f"{name}.done", **place, "text": block.text}
        if kind == "content":
            done["logprobs"] = block.logprobs
        part_done = {"type": "response.content_part.done", **place, "part": _part(block)}
        yield from self._numbered(done, part_done, item_done)

    def _items(self, *, cut: bool) -> list[dict[str, Any]]:
        last = len(self._blocks) - 1
        return [
            self._item(block, "incomplete" if cut and block.index == last else "completed")
            for block in self._blocks
        ]

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        head = {"id": self._id(block), "status": status}
        content = [] if status == "in_progress" else [_part(block)]
        match block.head.kind:
            case "reasoning":
                item = head | {"type": "reasoning", "summary": [], "content": content}
                if self._request.prepared.seals_reasoning and content:
                    item["encrypted_content"] = self._sealed(block)
                return item
            case "content":
                return head | {"type": "message", "role": "assistant", "content": content}
            case "call":
                return head | self._call(block)

    def _call(self, block: Block) -> dict[str, Any]:
        """What the item of a call has beside its id and status."""
        name, call_id, arguments = block.head.name or "", block.head.call_id, block.text
        called = self._called.get(name) or Called("function", name)
        group = {} if called.namespace is None else {"namespace": called.namespace}
        match called.kind:
            case "custom":
                said = {"name": called.name, **group, "input": CustomInput().push(arguments)}
                return {"type": "custom_tool_call", "call_id": call_id, **said}
            case "local_shell":
                action = {"type": "exec", "command": [], "env": {}, **parsed_arguments(arguments)}
                return {"type": "local_shell_call", "call_id": call_id, "action": action}
            case "tool_search":
                said = {"execution": "client", "arguments": parsed_arguments(arguments)}
                return {"type": "tool_search_call", "call_id": call_id, **said}
            case "function":
                said = {"name": called.name, **group, "arguments": arguments}
                return {"type": "function_call", "call_id": call_id, **said}

    def _kind(self, block: Block) -> str:
        """A key of `_PREFIXES`."""
        if block.head.kind != "call":
            return block.head.kind
        called = self._called.get(block.head.name or "")
        return "function" if called is None else called.kind

    def _id(self, block: Block) -> str:
        return _PREFIXES[self._kind(block)] + block.id

    def _place(self, block: Block) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": self._id(block), "output_index": block.index}
        return place if block.head.kind == "call" else {**place, "content_index": 0}

    def _usage(self) -> dict[str, Any]:
        used = self._request.usage()
        return {
            "input_tokens": used.prompt_tokens,
            "input_tokens_details": {"cached_tokens": used.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": used.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._parser.text.reasoning_tokens},
            "total_tokens": used.prompt_tokens + used.completion_tokens,
            **used.weights,
        }


def _part(block: Block) -> dict[str, Any]:
    if block.head.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": block.logprobs}
