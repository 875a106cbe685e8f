"""Answers in OpenAI's shapes: chat and text completions, whole and in chunks."""

import secrets
import string
import time
from collections.abc import Sequence
from typing import Any

from router.api.bodies import ChatOptions, CompletionOptions
from router.faces.serving import Answer, Usage
from router.generation.choice import Delta
from router.text.tokenizer import ModelTokenizer
from router.tools import Piece
from rpc import worker_pb2 as pb

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""
_ALPHANUMERIC = string.ascii_letters + string.digits


class Format:
    """How the answer to one request is written. `id` and `created` are the same in all of its chunks."""

    kind: str  # "object" of a whole answer
    chunk_kind: str
    prefix: str  # of the answer's id

    def __init__(self, answer: Answer, model: str, tokenizer: ModelTokenizer) -> None:
        self._answer = answer
        self._tokenizer = tokenizer
        self._token_ids = answer.body.return_token_ids
        self._frame = {"id": f"{self.prefix}{answer.name}", "created": int(time.time()), "model": model}

    def whole(self, deltas: Sequence[list[Delta]]) -> dict[str, Any]:
        """`deltas`: all of each choice."""
        choices = [self._choice(index, choice) for index, choice in enumerate(deltas)]
        return {**self._frame, "object": self.kind, "choices": choices, "usage": _usage(self._answer.usage())}

    def chunk(self, index: int, delta: Delta, *, usage: bool) -> dict[str, Any]:
        """One delta of the choice `index`; `usage` adds what was used so far."""
        chunk: dict[str, Any] = {
            **self._frame,
            "object": self.chunk_kind,
            "choices": [self._chunk_choice(index, delta)],
        }
        if usage:
            chunk["usage"] = _usage(self._answer.usage())
        return chunk

    def usage_chunk(self) -> dict[str, Any]:
        usage = _usage(self._answer.usage())
        return {**self._frame, "object": self.chunk_kind, "choices": [], "usage": usage}

    def _choice(self, index: int, deltas: list[Delta]) -> dict[str, Any]:
        raise NotImplementedError

    def _chunk_choice(self, index: int, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def _spelled(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")


class ChatFormat(Format):
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def __init__(self, answer: Answer, model: str, tokenizer: ModelTokenizer) -> None:
        super().__init__(answer, model, tokenizer)
        body = answer.body
        assert isinstance(body, ChatOptions)
        self._logprobs = body.logprobs_wanted is not None
        self._max_calls = 1 if body.parallel_tool_calls is False else None
        self._only_calls = body.must_call
        tool_format = tokenizer.tool_format if body.offered_tools else None
        self._parsers = [tool_format() for _ in answer.choices] if tool_format is not None else []

    def whole(self, deltas: Sequence[list[Delta]]) -> dict[str, Any]:
        whole = super().whole(deltas)
        if self._token_ids:
            whole["prompt_token_ids"] = self._answer.prompts[0]
        return whole

    def chunk(self, index: int, delta: Delta, *, usage: bool) -> dict[str, Any]:
        chunk = super().chunk(index, delta, usage=usage)
        if self._token_ids and delta.first:
            chunk["prompt_token_ids"] = self._answer.prompts[0]
        return chunk

    def _choice(self, index: int, deltas: list[Delta]) -> dict[str, Any]:
        content, calls = self._parsed(index, _text(deltas), last=True)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["content"] = content or None
            message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in calls]
        return {"index": index, "message": message, **self._rest(index, deltas)}

    def _chunk_choice(self, index: int, delta: Delta) -> dict[str, Any]:
        content, calls = self._parsed(index, delta.text, last=delta.finish_reason is not None)
        said: dict[str, Any] = {"role": "assistant"} if delta.first else {}
        if content or not calls:
            said["content"] = content
        if calls:
            said["tool_calls"] = calls
        return {"index": index, "delta": said, **self._rest(index, [delta])}

    def _parsed(self, index: int, text: str, *, last: bool) -> tuple[str, list[dict[str, Any]]]:
        """Content and tool calls of the next, and maybe last, piece of a choice's text."""
        if not self._parsers:
            return text, []
        parser = self._parsers[index]
        content, calls = "", []
        for piece in [*parser.push(text), *(parser.finish() if last else ())]:
            if piece.call is None:
                # The grammar lets only calls through: other text is the head of a call that was cut.
                content += "" if self._only_calls else piece.text
            elif self._max_calls is None or piece.call < self._max_calls:
                calls.append(_tool_call(piece))
        return content, calls

    def _rest(self, index: int, deltas: list[Delta]) -> dict[str, Any]:
        last = deltas[-1]
        called = last.finish_reason == "stop" and self._parsers and self._parsers[index].num_calls
        rest: dict[str, Any] = {
            "logprobs": {"content": [self._logprob(delta) for delta in deltas]} if self._logprobs else None,
            "finish_reason": "tool_calls" if called else last.finish_reason,
        }
        if last.finish_reason:
            rest["stop_reason"] = last.stop_reason
        if self._token_ids:
            rest["token_ids"] = [delta.token.token_id for delta in deltas]
        return rest

    def _logprob(self, delta: Delta) -> dict[str, Any]:
        given = delta.token.logprobs or pb.TokenLogprobs()
        top = zip(given.top_ids, given.top_logprobs, strict=True)
        return {
            **self._entry(delta.token.token_id, given.logprob),
            "top_logprobs": [self._entry(token_id, logprob) for token_id, logprob in top],
        }

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        spelled = self._tokenizer.token_bytes(token_id)
        text = spelled.decode("utf-8", "replace")
        return {"token": text, "logprob": max(logprob, LOWEST_LOGPROB), "bytes": list(spelled)}


class CompletionFormat(Format):
    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl-"

    def __init__(self, answer: Answer, model: str, tokenizer: ModelTokenizer) -> None:
        super().__init__(answer, model, tokenizer)
        body = answer.body
        assert isinstance(body, CompletionOptions)
        self._logprobs = body.logprobs_wanted is not None
        self._echo = answer.echoes
        self._n = body.n
        self._offsets = [0] * len(answer.choices)

    def _choice(self, index: int, deltas: list[Delta]) -> dict[str, Any]:
        return self._written(index, self._echoed(index) + _text(deltas), deltas, first=True)

    def _chunk_choice(self, index: int, delta: Delta) -> dict[str, Any]:
        text = self._echoed(index) + delta.text if delta.first else delta.text
        return self._written(index, text, [delta], first=delta.first)

    def _echoed(self, index: int) -> str:
        return self._echo[index // self._n] if self._echo else ""

    def _written(self, index: int, text: str, deltas: list[Delta], *, first: bool) -> dict[str, Any]:
        last = deltas[-1]
        written: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs_of(index, deltas) if self._logprobs else None,
            "finish_reason": last.finish_reason,
        }
        if last.finish_reason:
            written["stop_reason"] = last.stop_reason
        if self._token_ids:
            written["token_ids"] = [delta.token.token_id for delta in deltas]
            if first:
                written["prompt_token_ids"] = self._answer.prompts[index // self._n]
        return written

    def _logprobs_of(self, index: int, deltas: list[Delta]) -> dict[str, Any]:
        tokens, logprobs, tops, offsets = [], [], [], []
        for delta in deltas:
            given = delta.token.logprobs or pb.TokenLogprobs()
            text = self._spelled(delta.token.token_id)
            tokens.append(text)
            logprobs.append(max(given.logprob, LOWEST_LOGPROB))
            top = zip(given.top_ids, given.top_logprobs, strict=True)
            spelled = {self._spelled(i): max(logprob, LOWEST_LOGPROB) for i, logprob in top}
            tops.append({**spelled, text: logprobs[-1]})  # OpenAI always adds the token itself
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        return {
            "tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets
        }  # fmt: skip


def _text(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def _tool_call(piece: Piece) -> dict[str, Any]:
    """One entry of a delta's `tool_calls`; a call's first piece names it."""
    if piece.name is None:
        return {"index": piece.call, "function": {"arguments": piece.text}}
    # Mistral's templates insist on nine letters and digits.
    call_id = "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
    function = {"name": piece.name, "arguments": piece.text}
    return {"index": piece.call, "id": call_id, "type": "function", "function": function}


def _usage(used: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": used.prompt_tokens,
        "completion_tokens": used.completion_tokens,
        "total_tokens": used.prompt_tokens + used.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": used.cached_tokens},
    }
