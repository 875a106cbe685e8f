"""Answers in OpenAI's shapes: chat and text completions, whole and in chunks."""

import time
from collections.abc import Sequence
from typing import Any

from router.api import ChatBody, CompletionBody
from router.choice import Choice, Delta
from router.tokenizer import ModelTokenizer
from rpc import worker_pb2 as pb

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


class Format:
    """How the answer to one request is written. `id` and `created` are the same in all of its chunks."""

    kind: str  # "object" of a whole answer
    chunk_kind: str
    prefix: str  # of the answer's id

    def __init__(self, request_id: str, model: str, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self._frame = {"id": f"{self.prefix}{request_id}", "created": int(time.time()), "model": model}

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        listed = [self._choice(i, choice) for i, choice in enumerate(choices)]
        return {**self._frame, "object": self.kind, "choices": listed, "usage": usage}

    def chunk(self, index: int, choice: Choice, delta: Delta) -> dict[str, Any]:
        """One delta, which is the last that `choice` has."""
        return {
            **self._frame,
            "object": self.chunk_kind,
            "choices": [self._chunk_choice(index, choice, delta)],
        }

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._frame, "object": self.chunk_kind, "choices": [], "usage": usage}

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def _chunk_choice(self, index: int, choice: Choice, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def _spelled(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")


class ChatFormat(Format):
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def __init__(
        self, request_id: str, model: str, tokenizer: ModelTokenizer, body: ChatBody, prompt_ids: list[int]
    ) -> None:
        super().__init__(request_id, model, tokenizer)
        self._logprobs = body.logprobs
        self._token_ids = body.return_token_ids
        self._prompt_ids = prompt_ids

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        answer = super().whole(choices, usage)
        if self._token_ids:
            answer["prompt_token_ids"] = self._prompt_ids
        return answer

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return {"index": index, "message": message, **self._rest(choice.deltas)}

    def _chunk_choice(self, index: int, choice: Choice, delta: Delta) -> dict[str, Any]:
        content = {"content": delta.text}
        if choice.num_tokens == 1:
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

    def __init__(
        self,
        request_id: str,
        model: str,
        tokenizer: ModelTokenizer,
        body: CompletionBody,
        prompts: list[list[int]],
    ) -> None:
        super().__init__(request_id, model, tokenizer)
        self._logprobs = body.logprobs is not None
        self._token_ids = body.return_token_ids
        self._prompts = prompts
        self._echo = [
            prompt if isinstance(prompt, str) else tokenizer.decode(prompt, skip_special_tokens=False)
            for prompt in (body.prompt if body.echo else [])
        ]
        self._n = body.n
        self._offsets = [0] * (len(prompts) * body.n)

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        return self._written(index, self._echoed(index) + choice.text, choice.deltas, first=True)

    def _chunk_choice(self, index: int, choice: Choice, delta: Delta) -> dict[str, Any]:
        first = choice.num_tokens == 1
        text = self._echoed(index) + delta.text if first else delta.text
        return self._written(index, text, [delta], first=first)

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
                written["prompt_token_ids"] = self._prompts[index // self._n]
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


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
