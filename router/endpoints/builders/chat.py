"""Builds chat completions (POST /v1/chat/completions)."""

from collections.abc import Sequence
from typing import Any

import msgspec

from baton.router.active_request import ActiveRequest
from baton.router.endpoints.builders.choices import ChoicePart, ChoicesBuilder
from baton.router.endpoints.builders.output_parser import OutputParser, Part
from baton.router.generation.choice import Delta
from baton.router.text.tokenizer import ModelTokenizer


class ChatBuilder(ChoicesBuilder):
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def __init__(self, request: ActiveRequest, model: str, tokenizer: ModelTokenizer) -> None:
        super().__init__(request, model, tokenizer)
        self._parsers = [OutputParser(request, tokenizer) for _ in request.choices]
        self._said: list[list[Part]] = [[] for _ in request.choices]

    def add(self, index: int, delta: Delta) -> None:
        """Parses with each token: all tokens of a long answer at once would block the event loop."""
        super().add(index, delta)
        self._said[index] += self._parsed(index, delta)

    def _extra(self) -> dict[str, Any]:
        ids = self._request.prompts[0] if self._token_ids else None
        if self._request.body.stream:
            return {"prompt_token_ids": ids} if self._token_ids else {}
        logprobs = None if self._prompt_top is None else self._prompt_logprobs[0]
        return {"prompt_token_ids": ids, "prompt_logprobs": logprobs}

    def _chunk_choice(self, index: int, part: ChoicePart) -> dict[str, Any]:
        delta = part.last
        parts = self._parsed(index, delta)
        reasoning, content = _text(parts, "reasoning"), _text(parts, "content")
        calls = [_tool_call(part) for part in parts if part.kind == "call"]
        message: dict[str, Any] = {"role": "assistant"} if delta.first else {}
        message["reasoning_content"] = None  # clients of DeepSeek's API read it from each delta
        if reasoning:
            message |= _reasoning(reasoning)
        if content or not (calls or reasoning):
            message["content"] = content
        if calls:
            message["tool_calls"] = calls
        return {"index": index, "delta": message, **self._rest(index, part)}

    def _choice(self, index: int, part: ChoicePart) -> dict[str, Any]:
        parts = self._said[index]
        reasoning, content, calls = _text(parts, "reasoning"), _text(parts, "content"), _whole_calls(parts)
        if calls or reasoning:
            content = content or None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        message |= _reasoning(reasoning or None)
        if calls:
            message["tool_calls"] = calls
        return {"index": index, "message": message, "token_ids": None, **self._rest(index, part)}

    def _usage(self) -> dict[str, Any]:
        usage = super()._usage()
        if self._parsers[0].reasons:
            counted = sum(parser.reasoning_tokens for parser in self._parsers)
            usage["completion_tokens_details"] = {"reasoning_tokens": counted}
        return usage

    def _parsed(self, index: int, delta: Delta) -> list[Part]:
        return self._parsers[index].push(delta.text, last=delta.finish_reason is not None)

    def _rest(self, index: int, part: ChoicePart) -> dict[str, Any]:
        last = part.last
        # OpenAI's and vLLM's reason is "stop" if the client named the tool.
        called = last.finish_reason == "stop" and self._parsers[index].chose_to_call
        rest: dict[str, Any] = {
            "logprobs": {"content": part.logprobs} if self._logprobs else None,
            "finish_reason": "tool_calls" if called else last.finish_reason,
        }
        if last.finish_reason:
            rest["stop_reason"] = last.stop_reason
        if self._token_ids:
            rest["token_ids"] = part.token_ids
        return rest

    def _logprob(self, index: int, delta: Delta) -> msgspec.Raw:
        return self._entries.of_chat(delta)


def _reasoning(text: str | None) -> dict[str, str | None]:
    """Returns vLLM's field, and that of DeepSeek and SGLang. Most clients know one of them."""
    return {"reasoning": text, "reasoning_content": text}


def _text(parts: Sequence[Part], kind: str) -> str:
    return "".join(part.text for part in parts if part.kind == kind)


def _tool_call(part: Part) -> dict[str, Any]:
    """Returns one entry of a delta's `tool_calls`. The first part of a call has its id and name."""
    if part.name is None:
        return {"index": part.call, "function": {"arguments": part.text}}
    function = {"name": part.name, "arguments": part.text}
    return {"index": part.call, "id": part.call_id, "type": "function", "function": function}


def _whole_calls(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Returns the calls of a whole response."""
    calls: list[dict[str, Any]] = []
    arguments: list[list[str]] = []
    for part in parts:
        if part.name is not None:
            calls.append({"id": part.call_id, "type": "function", "function": {"name": part.name}})
            arguments.append([])
        if part.kind == "call":
            arguments[-1].append(part.text)
    for call, texts in zip(calls, arguments, strict=True):
        call["function"]["arguments"] = "".join(texts)
    return calls
