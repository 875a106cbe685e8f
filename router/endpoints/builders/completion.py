"""Builds text completions (POST /v1/completions)."""

from typing import Any

import msgspec

from router.active_request import ActiveRequest
from router.api.bodies import CompletionOptions
from router.endpoints.builders.choices import ChoicePart, ChoicesBuilder
from router.generation.choice import Delta
from router.text.tokenizer import ModelTokenizer


class CompletionBuilder(ChoicesBuilder):
    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl-"

    def __init__(self, request: ActiveRequest, model: str, tokenizer: ModelTokenizer) -> None:
        super().__init__(request, model, tokenizer)
        body = request.body
        assert isinstance(body, CompletionOptions)
        self._echo = request.echoes
        self._n = body.n
        self._offsets = [0] * len(request.choices)

    def _choice(self, index: int, part: ChoicePart) -> dict[str, Any]:
        return self._any_choice(index, part, first=True)

    def _chunk_choice(self, index: int, part: ChoicePart) -> dict[str, Any]:
        return self._any_choice(index, part, first=part.last.first)

    def _echoed(self, index: int) -> str:
        return self._echo[index // self._n] if self._echo else ""

    def _any_choice(self, index: int, part: ChoicePart, *, first: bool) -> dict[str, Any]:
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
        offset = self._offsets[index]
        self._offsets[index] += len(self._entries.spelled(delta.token.token_id))
        return *self._entries.of_completion(delta), offset
