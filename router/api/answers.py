"""Answers in OpenAI's shapes: chat and text completions, whole and in chunks."""

import secrets
import string
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from router.api.bodies import ChatOptions, CompletionOptions
from router.faces.serving import Answer, Usage
from router.generation.choice import Delta
from router.text.tokenizer import ModelTokenizer
from router.tools import Piece
from rpc import worker_pb2 as pb

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""
_ALPHANUMERIC = string.ascii_letters + string.digits
_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class _Written:
    """One choice of a whole answer as far as it came, or what one delta adds.

    Logprobs become JSON token by token: those of a whole answer take seconds, and would stop the event loop.
    """

    texts: list[str]
    token_ids: list[int]
    logprobs: list[Any]
    """As `Format._logprob` returns them; empty where they are not wanted."""
    last: Delta


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
        self._logprobs = answer.body.logprobs_wanted is not None
        self._whole: dict[int, _Written] = {}

    def add(self, index: int, delta: Delta) -> None:
        """The next one of the choice `index`, for `whole`."""
        new, written = self._written(index, delta), self._whole.get(index)
        if written is None:
            self._whole[index] = new
            return
        written.texts += new.texts
        written.token_ids += new.token_ids
        written.logprobs += new.logprobs
        written.last = delta

    def whole(self) -> dict[str, Any]:
        """All that was added, once every choice has its last delta."""
        choices = [self._choice(index, written) for index, written in sorted(self._whole.items())]
        return {**self._frame, "object": self.kind, "choices": choices, "usage": _usage(self._answer.usage())}

    def chunk(self, index: int, delta: Delta, *, usage: bool) -> dict[str, Any]:
        """One delta of the choice `index`; `usage` adds what was used so far."""
        chunk: dict[str, Any] = {
            **self._frame,
            "object": self.chunk_kind,
            "choices": [self._chunk_choice(index, self._written(index, delta))],
        }
        if usage:
            chunk["usage"] = _usage(self._answer.usage())
        return chunk

    def usage_chunk(self) -> dict[str, Any]:
        usage = _usage(self._answer.usage())
        return {**self._frame, "object": self.chunk_kind, "choices": [], "usage": usage}

    def _written(self, index: int, delta: Delta) -> _Written:
        logprobs = [self._logprob(index, delta)] if self._logprobs else []
        return _Written([delta.text], [delta.token.token_id], logprobs, delta)

    def _choice(self, index: int, written: _Written) -> dict[str, Any]:
        """Of a whole answer."""
        raise NotImplementedError

    def _chunk_choice(self, index: int, written: _Written) -> dict[str, Any]:
        """Of a stream."""
        raise NotImplementedError

    def _logprob(self, index: int, delta: Delta) -> Any:
        raise NotImplementedError

    def _spelled(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")


class ChatFormat(Format):
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def __init__(self, answer: Answer, model: str, tokenizer: ModelTokenizer) -> None:
        super().__init__(answer, model, tokenizer)
        body = answer.body
        assert isinstance(body, ChatOptions)
        self._max_calls = 1 if body.parallel_tool_calls is False else None
        self._only_calls = body.must_call
        tool_format = tokenizer.tool_format if body.offered_tools else None
        self._parsers = [tool_format() for _ in answer.choices] if tool_format is not None else []

    def whole(self) -> dict[str, Any]:
        whole = super().whole()
        if self._token_ids:
            whole["prompt_token_ids"] = self._answer.prompts[0]
        return whole

    def chunk(self, index: int, delta: Delta, *, usage: bool) -> dict[str, Any]:
        chunk = super().chunk(index, delta, usage=usage)
        if self._token_ids and delta.first:
            chunk["prompt_token_ids"] = self._answer.prompts[0]
        return chunk

    def _choice(self, index: int, written: _Written) -> dict[str, Any]:
        content, calls = self._parsed(index, "".join(written.texts), last=True)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["content"] = content or None
            message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in calls]
        return {"index": index, "message": message, **self._rest(index, written)}

    def _chunk_choice(self, index: int, written: _Written) -> dict[str, Any]:
        delta = written.last
        content, calls = self._parsed(index, delta.text, last=delta.finish_reason is not None)
        said: dict[str, Any] = {"role": "assistant"} if delta.first else {}
        if content or not calls:
            said["content"] = content
        if calls:
            said["tool_calls"] = calls
        return {"index": index, "delta": said, **self._rest(index, written)}

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

    def _rest(self, index: int, written: _Written) -> dict[str, Any]:
        last = written.last
        called = last.finish_reason == "stop" and self._parsers and self._parsers[index].num_calls
        rest: dict[str, Any] = {
            "logprobs": {"content": written.logprobs} if self._logprobs else None,
            "finish_reason": "tool_calls" if called else last.finish_reason,
        }
        if last.finish_reason:
            rest["stop_reason"] = last.stop_reason
        if self._token_ids:
            rest["token_ids"] = written.token_ids
        return rest

    def _logprob(self, index: int, delta: Delta) -> msgspec.Raw:
        given = delta.token.logprobs or pb.TokenLogprobs()
        top = zip(given.top_ids, given.top_logprobs, strict=True)
        entry = {
            **self._entry(delta.token.token_id, given.logprob),
            "top_logprobs": [self._entry(token_id, logprob) for token_id, logprob in top],
        }
        return msgspec.Raw(_encode(entry))

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
        self._echo = answer.echoes
        self._n = body.n
        self._offsets = [0] * len(answer.choices)

    def _choice(self, index: int, written: _Written) -> dict[str, Any]:
        return self._any_choice(index, written, first=True)

    def _chunk_choice(self, index: int, written: _Written) -> dict[str, Any]:
        return self._any_choice(index, written, first=written.last.first)

    def _echoed(self, index: int) -> str:
        return self._echo[index // self._n] if self._echo else ""

    def _any_choice(self, index: int, written: _Written, *, first: bool) -> dict[str, Any]:
        last, text = written.last, "".join(written.texts)
        logprobs: dict[str, Any] | None = None
        if self._logprobs:
            names = "tokens", "token_logprobs", "top_logprobs", "text_offset"
            logprobs = dict(zip(names, zip(*written.logprobs, strict=True), strict=True))
        choice: dict[str, Any] = {
            "index": index,
            "text": self._echoed(index) + text if first else text,
            "logprobs": logprobs,
            "finish_reason": last.finish_reason,
        }
        if last.finish_reason:
            choice["stop_reason"] = last.stop_reason
        if self._token_ids:
            choice["token_ids"] = written.token_ids
            if first:
                choice["prompt_token_ids"] = self._answer.prompts[index // self._n]
        return choice

    def _logprob(self, index: int, delta: Delta) -> tuple[str, float, msgspec.Raw, int]:
        """One of each list in `logprobs`."""
        given = delta.token.logprobs or pb.TokenLogprobs()
        text, logprob = self._spelled(delta.token.token_id), max(given.logprob, LOWEST_LOGPROB)
        top = zip(given.top_ids, given.top_logprobs, strict=True)
        spelled = {self._spelled(i): max(other, LOWEST_LOGPROB) for i, other in top}
        offset = self._offsets[index]
        self._offsets[index] += len(text)
        # OpenAI always adds the token itself.
        return text, logprob, msgspec.Raw(_encode({**spelled, text: logprob})), offset


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
