"""Answers in OpenAI's shapes: chat and text completions, whole and in chunks."""

import time
from typing import Any

from router.api import CompletionBody
from router.choice import Choice, Delta
from router.serving import Answer, Usage
from router.tokenizer import ModelTokenizer
from rpc import worker_pb2 as pb

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


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

    def whole(self) -> dict[str, Any]:
        choices = [self._choice(i, choice) for i, choice in enumerate(self._answer.choices)]
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

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def _chunk_choice(self, index: int, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def _spelled(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")


class ChatFormat(Format):
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def __init__(self, answer: Answer, model: str, tokenizer: ModelTokenizer) -> None:
        super().__init__(answer, model, tokenizer)
        self._logprobs = answer.body.logprobs_wanted is not None

    def whole(self) -> dict[str, Any]:
        whole = super().whole()
        if self._token_ids:
            whole["prompt_token_ids"] = self._answer.prompts[0]
        return whole

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return {"index": index, "message": message, **self._rest(choice.deltas)}

    def _chunk_choice(self, index: int, delta: Delta) -> dict[str, Any]:
        content = {"content": delta.text}
        if delta.first:
            content = {"role": "assistant", **content}
        return {"index": index, "delta": content, **self._rest([delta])}

    def _rest(self, deltas: list[Delta]) -> dict[str, Any]:
        last = deltas[-1]
        rest: dict[str, Any] = {
            "logprobs": {"content": [self._logprob(delta) for delta in deltas]} if self._logprobs else None,
            "finish_reason": last.finish_reason,
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
        assert isinstance(body, CompletionBody)
        self._logprobs = body.logprobs_wanted is not None
        self._echo = [
            prompt if isinstance(prompt, str) else tokenizer.decode(prompt, skip_special_tokens=False)
            for prompt in (body.prompt if body.echo else [])
        ]
        self._n = body.n
        self._offsets = [0] * len(answer.choices)

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        return self._written(index, self._echoed(index) + choice.text, choice.deltas, first=True)

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
            tops.append({self._spelled(i): max(logprob, LOWEST_LOGPROB) for i, logprob in top})
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        return {
            "tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets
        }  # fmt: skip


def _usage(used: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": used.prompt_tokens,
        "completion_tokens": used.completion_tokens,
        "total_tokens": used.prompt_tokens + used.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": used.cached_tokens},
    }
