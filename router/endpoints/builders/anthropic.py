"""Builds Anthropic's messages (POST /v1/messages)."""

from collections.abc import Iterator
from typing import Any

from baton.kv_names import CHUNK_TOKENS
from baton.router.active_request import ActiveRequest
from baton.router.api.anthropic.reply import error_body
from baton.router.api.messages import parsed_arguments
from baton.router.endpoints.builders.base import Block, BlocksBuilder, Event
from baton.router.errors import ApiError
from baton.router.text.sealed import signature

_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "content": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}
"""For each kind of block: the type of a delta, and the member that has its text."""


class AnthropicBuilder(BlocksBuilder):
    """Builds one message. Its blocks are thinking, text and tool_use."""

    def __init__(self, request: ActiveRequest) -> None:
        super().__init__(request)
        head = {"id": f"msg_{request.entry.name}", "type": "message", "role": "assistant"}
        self._frame = {**head, "model": self._model}

    def whole(self) -> dict[str, Any]:
        content = [self._content(block, signed=True) for block in self._blocks]
        return {**self._frame, "content": content, **self._stop(), "usage": self._usage()}

    def end(self) -> bytes:
        delta = {"type": "message_delta", "delta": self._stop(), "usage": self._usage()}
        return self._written([delta, {"type": "message_stop"}])

    def failed(self, error: ApiError) -> bytes:
        return self._written([error_body(error, self._request.entry.name)])

    def _begin(self) -> Iterator[Event]:
        nothing = {"content": [], "stop_reason": None, "stop_sequence": None}
        usage = self._usage() | {"output_tokens": 0}  # as in vLLM; the last event has all of them
        yield {"type": "message_start", "message": {**self._frame, **nothing, "usage": usage}}

    def _opened(self, block: Block) -> Iterator[Event]:
        empty = self._content(block, signed=False)
        yield {"type": "content_block_start", "index": block.index, "content_block": empty}

    def _grown(self, block: Block, text: str) -> Iterator[Event]:
        if not text or (block.head.kind == "reasoning" and self._request.prepared.seals_reasoning):
            return  # the first part of a call may have no arguments yet
        kind, member = _DELTAS[block.head.kind]
        delta = {"type": kind, member: text}
        yield {"type": "content_block_delta", "index": block.index, "delta": delta}

    def _closed(self, block: Block, *, cut: bool) -> Iterator[Event]:
        if block.head.kind == "reasoning":
            delta = {"type": "signature_delta", "signature": self._signature(block)}
            yield {"type": "content_block_delta", "index": block.index, "delta": delta}
        yield {"type": "content_block_stop", "index": block.index}

    def _stop(self) -> dict[str, Any]:
        last = self._last
        assert last is not None
        if last.finish_reason == "length":
            reason = "model_context_window_exceeded" if self._fills_context() else "max_tokens"
            return {"stop_reason": reason, "stop_sequence": None}
        if isinstance(last.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": last.stop_reason}
        reason = "tool_use" if self._parser.text.num_calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": None}

    def _fills_context(self) -> bool:
        """Whether an output of its greatest length ends where the context does, before `max_tokens`."""
        max_tokens, defaults = self._request.options.max_tokens_wanted, self._request.services.defaults
        assert max_tokens is not None
        if defaults.limits_output and defaults.max_tokens is not None:
            max_tokens = min(max_tokens, defaults.max_tokens)
        return self._request.sampling.max_tokens < max_tokens

    def _usage(self) -> dict[str, Any]:
        used = self._request.usage()
        # What is new of the prompt in whole chunks is cached now.
        whole = used.prompt_tokens // CHUNK_TOKENS * CHUNK_TOKENS if self._request.prepared.marks_cache else 0
        created = max(0, whole - used.cached_tokens)
        return {
            "input_tokens": used.prompt_tokens - used.cached_tokens - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": used.cached_tokens,
            "output_tokens": used.completion_tokens,
            "output_tokens_details": {"thinking_tokens": self._parser.text.reasoning_tokens},
            **used.weights,
        }

    def _content(self, block: Block, *, signed: bool) -> dict[str, Any]:
        match block.head.kind:
            case "reasoning":
                thinking = "" if self._request.prepared.seals_reasoning else block.text
                return {
                    "type": "thinking",
                    "thinking": thinking,
                    "signature": self._signature(block) if signed else "",
                }
            case "content":
                return {"type": "text", "text": block.text}
            case "call":
                head = {"type": "tool_use", "id": block.head.call_id, "name": block.head.name}
                return {**head, "input": parsed_arguments(block.text)}

    def _signature(self, block: Block) -> str:
        if self._request.prepared.seals_reasoning:
            return self._sealed(block)
        return signature(block.text, self._request.services.config.secret)
