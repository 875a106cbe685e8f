"""Builds text completions (POST /v1/completions)."""

from typing import Any

import msgspec

from baton.router.active_request import ActiveRequest
from baton.router.api.bodies import CompletionOptions
from baton.router.endpoints.builders.choices import ChoicePart, ChoicesBuilder
from baton.router.generation.choice import Delta
from baton.router.prompt_logprobs import PromptLogprob
from baton.router.text.tokenizer import ModelTokenizer

COLUMNS = "tokens", "token_logprobs", "top_logprobs", "text_offset"
Entry = tuple[str, float | None, msgspec.Raw | None, int]
"""Of one token: its value in each of the columns."""


class CompletionBuilder(ChoicesBuilder):
    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl-"

    def __init__(self, request: ActiveRequest, model: str, tokenizer: ModelTokenizer) -> None:
        super().__init__(request, model, tokenizer)
        body = request.body
        assert isinstance(body, CompletionOptions)
        self._echo = request.echoes
        self._n = body.n
        self._offsets = [0] * len(request.choices)
        self._echo_top = body.logprobs if body.echo else None
        self._echo_logprobs: list[list[Entry]] = [[] for _ in request.choices]
        if self._echo_top is not None:
            for index, echoed in enumerate(self._echo_logprobs):
                token_id = request.prompts[index // body.n][0]
                echoed.append((self._entries.name(token_id), None, None, self._offset(index, token_id)))

    def _add_prompt_token(self, index: int, token_id: int, logprob: PromptLogprob) -> None:
        super()._add_prompt_token(index, token_id, logprob)
        if self._echo_top is not None:
            entry = self._entries.of_echo(token_id, logprob, self._echo_top)
            self._echo_logprobs[index].append((*entry, self._offset(index, token_id)))

    def _choice(self, index: int, part: ChoicePart) -> dict[str, Any]:
        asked = self._prompt_top is not None
        prompt_logprobs = self._prompt_logprobs[index] if asked else None
        ids = {"token_ids": None, "prompt_token_ids": None}
        return {**ids, **self._any_choice(index, part, first=True), "prompt_logprobs": prompt_logprobs}

    def _chunk_choice(self, index: int, part: ChoicePart) -> dict[str, Any]:
        return self._any_choice(index, part, first=part.last.first)

    def _echoed(self, index: int) -> str:
        return self._echo[index // self._n] if self._echo else ""

    def _any_choice(self, index: int, part: ChoicePart, *, first: bool) -> dict[str, Any]:
        last, text = part.last, "".join(part.texts)
        logprobs: dict[str, Any] | None = None
        if self._logprobs:
            entries = [*self._echo_logprobs[index], *part.logprobs] if first else part.logprobs
            columns = zip(*entries, strict=True) if entries else [()] * len(COLUMNS)
            logprobs = dict(zip(COLUMNS, columns, strict=True))
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

    def _logprob(self, index: int, delta: Delta) -> Entry:
        return *self._entries.of_completion(delta), self._offset(index, delta.token.token_id)

    def _offset(self, index: int, token_id: int) -> int:
        """Returns where the next token of a choice begins in its text."""
        offset = self._offsets[index]
        self._offsets[index] += len(self._entries.spelled(token_id))
        return offset
