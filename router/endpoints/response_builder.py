"""Builds responses in OpenAI's shapes: chat and text completions, whole and in chunks."""

import secrets
import string
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from router.active_request import ActiveRequest, TokenCounts
from router.api.bodies import ChatOptions, CompletionOptions
from router.generation.choice import Delta
from router.text.tokenizer import ModelTokenizer
from router.tools import Piece
from rpc import worker_pb2 as pb

LOWEST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON does not have."""
_ALPHANUMERIC = string.ascii_letters + string.digits
_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class _Part:
    """A part of one choice: one delta, or all deltas so far.

    Logprobs are encoded to JSON token by token. To encode all of a response at once would take seconds and
    block the event loop.
    """

    texts: list[str]
    token_ids: list[int]
    logprobs: list[Any]
    """Results of `_logprob`; empty unless the client asked for logprobs."""
    last: Delta


class ResponseBuilder:
    """Builds the response to one request. `id` and `created` are the same in all of its chunks."""

    kind: str  # "object" of a whole response
    chunk_kind: str  # "object" of a chunk
    prefix: str  # of the response's id

    def __init__(self, request: ActiveRequest, model: str, tokenizer: ModelTokenizer) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._token_ids = request.body.return_token_ids
        self._frame = {"id": f"{self.prefix}{request.name}", "created": int(time.time()), "model": model}
        self._logprobs = request.body.logprobs_wanted is not None
        self._parts: dict[int, _Part] = {}

    def add(self, index: int, delta: Delta) -> None:
        """Adds the next delta of the choice `index` to the whole response."""
        new, part = self._part(index, delta), self._parts.get(index)
        if part is None:
            self._parts[index] = new
            return
        part.texts += new.texts
        part.token_ids += new.token_ids
        part.logprobs += new.logprobs
        part.last = delta

    def whole(self) -> dict[str, Any]:
        """Returns the whole response. Every choice must have its last delta."""
        choices = [self._choice(index, part) for index, part in sorted(self._parts.items())]
        return {
            **self._frame,
            "object": self.kind,
            "choices": choices,
            "usage": _usage(self._request.usage()),
        }

    def chunk(self, index: int, delta: Delta, *, usage: bool) -> dict[str, Any]:
        """Returns one delta of the choice `index` as a chunk. `usage`: with the usage up to now."""
        chunk: dict[str, Any] = {
            **self._frame,
            "object": self.chunk_kind,
            "choices": [self._chunk_choice(index, self._part(index, delta))],
        }
        if usage:
            chunk["usage"] = _usage(self._request.usage())
        return chunk

    def usage_chunk(self) -> dict[str, Any]:
        """Returns the last chunk, which has no choice."""
        usage = _usage(self._request.usage())
        return {**self._frame, "object": self.chunk_kind, "choices": [], "usage": usage}

    def _part(self, index: int, delta: Delta) -> _Part:
        logprobs = [self._logprob(index, delta)] if self._logprobs else []
        return _Part([delta.text], [delta.token.token_id], logprobs, delta)

    def _choice(self, index: int, part: _Part) -> dict[str, Any]:
        """Returns a choice of a whole response."""
        raise NotImplementedError

    def _chunk_choice(self, index: int, part: _Part) -> dict[str, Any]:
        """Returns a choice of a chunk."""
        raise NotImplementedError

    def _logprob(self, index: int, delta: Delta) -> Any:
        raise NotImplementedError

    def _name(self, token_id: int) -> str:
        """The token as it is shown in logprobs."""
        return (
            f"token_id:{token_id}"
            if self._request.body.return_tokens_as_token_ids
            else self._spelled(token_id)
        )

    def _spelled(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")


class ChatResponseBuilder(ResponseBuilder):
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def __init__(self, request: ActiveRequest, model: str, tokenizer: ModelTokenizer) -> None:
        super().__init__(request, model, tokenizer)
        body = request.body
        assert isinstance(body, ChatOptions)
        self._max_calls = 1 if body.parallel_tool_calls is False else None
        self._only_calls = body.must_call
        tool_format = tokenizer.tool_format if body.offered_tools else None
        self._parsers = [tool_format() for _ in request.choices] if tool_format is not None else []
        reasoning = tokenizer.reasoning_parser
        self._reasoning = [reasoning(request.beginning) for _ in request.choices] if reasoning else []
        self._with_reasoning = body.include_reasoning

    def whole(self) -> dict[str, Any]:
        whole = super().whole()
        if self._token_ids:
            whole["prompt_token_ids"] = self._request.prompts[0]
        return whole

    def chunk(self, index: int, delta: Delta, *, usage: bool) -> dict[str, Any]:
        chunk = super().chunk(index, delta, usage=usage)
        if self._token_ids and delta.first:
            chunk["prompt_token_ids"] = self._request.prompts[0]
        return chunk

    def _choice(self, index: int, part: _Part) -> dict[str, Any]:
        reasoning, text = self._divided(index, "".join(part.texts), last=True)
        content, calls = self._parsed(index, text, last=True)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._reasoning:
            message |= {"content": content or None, "reasoning": reasoning or None}
        if calls:
            message["content"] = content or None
            message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in calls]
        return {"index": index, "message": message, **self._rest(index, part)}

    def _chunk_choice(self, index: int, part: _Part) -> dict[str, Any]:
        delta = part.last
        last = delta.finish_reason is not None
        reasoning, text = self._divided(index, delta.text, last=last)
        content, calls = self._parsed(index, text, last=last)
        message: dict[str, Any] = {"role": "assistant"} if delta.first else {}
        if reasoning:
            message["reasoning"] = reasoning
        if content or not (calls or reasoning):
            message["content"] = content
        if calls:
            message["tool_calls"] = calls
        return {"index": index, "delta": message, **self._rest(index, part)}

    def _divided(self, index: int, text: str, *, last: bool) -> tuple[str, str]:
        """Returns reasoning and other text of the next piece of a choice's text. `last`: no piece follows."""
        if not self._reasoning:
            return "", text
        parser = self._reasoning[index]
        pieces = [parser.push(text), *([parser.finish()] if last else [])]
        reasoning = "".join(piece.reasoning for piece in pieces) if self._with_reasoning else ""
        return reasoning, "".join(piece.content for piece in pieces)

    def _parsed(self, index: int, text: str, *, last: bool) -> tuple[str, list[dict[str, Any]]]:
        """Returns content and tool calls of the next piece of a choice's text. `last`: no piece follows."""
        if not self._parsers:
            return text, []
        parser = self._parsers[index]
        content, calls = "", []
        for piece in [*parser.push(text), *(parser.finish() if last else ())]:
            if piece.call is None:
                # The grammar allows only calls. Other text is the beginning of a call that was cut off.
                content += "" if self._only_calls else piece.text
            elif self._max_calls is None or piece.call < self._max_calls:
                calls.append(_tool_call(piece))
        return content, calls

    def _rest(self, index: int, part: _Part) -> dict[str, Any]:
        last = part.last
        called = last.finish_reason == "stop" and self._parsers and self._parsers[index].num_calls
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
        logprobs = delta.token.logprobs or pb.TokenLogprobs()
        top = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
        entry = {
            **self._entry(delta.token.token_id, logprobs.logprob),
            "top_logprobs": [self._entry(token_id, logprob) for token_id, logprob in top],
        }
        return msgspec.Raw(_encode(entry))

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        spelled = self._tokenizer.token_bytes(token_id)
        return {
            "token": self._name(token_id),
            "logprob": max(logprob, LOWEST_LOGPROB),
            "bytes": list(spelled),
        }


class CompletionResponseBuilder(ResponseBuilder):
    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl-"

    def __init__(self, request: ActiveRequest, model: str, tokenizer: ModelTokenizer) -> None:
        super().__init__(request, model, tokenizer)
        body = request.body
        assert isinstance(body, CompletionOptions)
        self._echo = request.echoes
        self._n = body.n
        self._offsets = [0] * len(request.choices)

    def _choice(self, index: int, part: _Part) -> dict[str, Any]:
        return self._any_choice(index, part, first=True)

    def _chunk_choice(self, index: int, part: _Part) -> dict[str, Any]:
        return self._any_choice(index, part, first=part.last.first)

    def _echoed(self, index: int) -> str:
        return self._echo[index // self._n] if self._echo else ""

    def _any_choice(self, index: int, part: _Part, *, first: bool) -> dict[str, Any]:
        last, text = part.last, "".join(part.texts)
        logprobs: dict[str, Any] | None = None
        if self._logprobs:
            names = "tokens", "token_logprobs", "top_logprobs", "text_offset"
            logprobs = dict(zip(names, zip(*part.logprobs, strict=True), strict=True))
        choice: dict[str, Any] = {
            "index": index,
            "text": self._echoed(index) + text if first else text,
            "logprobs": logprobs,
            "finish_reason": last.finish_reason,
        }
        if last.finish_reason:
            choice["stop_reason"] = last.stop_reason
        if self._token_ids:
            choice["token_ids"] = part.token_ids
            if first:
                choice["prompt_token_ids"] = self._request.prompts[index // self._n]
        return choice

    def _logprob(self, index: int, delta: Delta) -> tuple[str, float, msgspec.Raw, int]:
        """Returns one entry for each list in `logprobs`."""
        logprobs = delta.token.logprobs or pb.TokenLogprobs()
        token_id, logprob = delta.token.token_id, max(logprobs.logprob, LOWEST_LOGPROB)
        top = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
        names = {self._name(i): max(other, LOWEST_LOGPROB) for i, other in top}
        offset = self._offsets[index]
        self._offsets[index] += len(self._spelled(token_id))
        name = self._name(token_id)
        # As in OpenAI's API, the token itself is always among them.
        return name, logprob, msgspec.Raw(_encode({**names, name: logprob})), offset


def _tool_call(piece: Piece) -> dict[str, Any]:
    """Returns one entry of a delta's `tool_calls`. The first piece of a call has its id and name."""
    if piece.name is None:
        return {"index": piece.call, "function": {"arguments": piece.text}}
    # Mistral's chat templates demand an id of nine letters and digits.
    call_id = "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
    function = {"name": piece.name, "arguments": piece.text}
    return {"index": piece.call, "id": call_id, "type": "function", "function": function}


def _usage(used: TokenCounts) -> dict[str, Any]:
    return {
        "prompt_tokens": used.prompt_tokens,
        "completion_tokens": used.completion_tokens,
        "total_tokens": used.prompt_tokens + used.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": used.cached_tokens},
    }
