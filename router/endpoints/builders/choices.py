"""The parts that chat and text completions share: a response is a list of choices."""

import time
from dataclasses import dataclass
from typing import Any

import msgspec

from baton.router import prompt_logprobs
from baton.router.active_request import ActiveRequest
from baton.router.endpoints.builders.base import ResponseBuilder, event
from baton.router.endpoints.builders.logprobs import LogprobEntries
from baton.router.errors import ApiError
from baton.router.generation.choice import Delta
from baton.router.prompt_logprobs import PromptLogprob
from baton.router.text.tokenizer import ModelTokenizer
from baton.rpc import worker_pb2 as pb

_DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class ChoicePart:
    """A part of one choice: one delta, or all deltas so far."""

    texts: list[str]
    token_ids: list[int]
    logprobs: list[Any]
    """Results of `_logprob`; empty unless the client asked for logprobs."""
    last: Delta


class ChoicesBuilder(ResponseBuilder):
    """Builds completions. `id` and `created` are the same in all chunks of a stream."""

    kind: str  # "object" of a whole response
    chunk_kind: str  # "object" of a chunk
    prefix: str  # of the response's id

    def __init__(self, request: ActiveRequest, model: str, tokenizer: ModelTokenizer) -> None:
        self._request = request
        self._entries = LogprobEntries(request, tokenizer)
        self._token_ids = request.body.return_token_ids
        self._frame = {"id": f"{self.prefix}{request.name}", "created": int(time.time()), "model": model}
        self._logprobs = request.body.logprobs_wanted is not None
        options = request.body.stream_options
        self._generates = request.body.max_tokens_wanted != 0
        self._prompt_top = request.body.prompt_logprobs
        # Nothing comes before the first token, so it has no probability.
        self._prompt_logprobs: list[list[msgspec.Raw | None]] = [[None] for _ in request.choices]
        self._usage_at_the_end = options is not None and options.usage_at_the_end
        self._usage_in_each_chunk = options is not None and options.usage_in_each_chunk
        self._parts: dict[int, ChoicePart] = {}

    def add_prompt(self, index: int, part: pb.PromptLogprobs) -> None:
        prompt = self._request.prompts[index // self._request.body.n]
        of_tokens = zip(prompt[part.position :], prompt_logprobs.read(part), strict=False)
        for token_id, logprob in of_tokens:
            self._add_prompt_token(index, token_id, logprob)

    def _add_prompt_token(self, index: int, token_id: int, logprob: PromptLogprob) -> None:
        if self._prompt_top is not None:
            entry = self._entries.of_prompt(token_id, logprob, self._prompt_top)
            self._prompt_logprobs[index].append(entry)

    def add(self, index: int, delta: Delta) -> None:
        new, part = self._part(index, delta), self._parts.get(index)
        if part is None:
            self._parts[index] = new
            return
        part.texts += new.texts
        part.token_ids += new.token_ids
        part.logprobs += new.logprobs
        part.last = delta

    def whole(self) -> dict[str, Any]:
        choices = [self._choice(index, part) for index, part in sorted(self._parts.items())]
        return {
            **self._frame,
            "object": self.kind,
            "choices": choices,
            "usage": self._usage(),
            **self._extra(),
        }

    def events(self, index: int, delta: Delta) -> bytes:
        chunk = self._chunk([self._chunk_choice(index, self._part(index, delta))])
        if delta.first:
            chunk |= self._extra()
        if self._usage_in_each_chunk:
            chunk["usage"] = self._usage()
        return event(chunk)

    def end(self) -> bytes:
        """With the usage, if the client asked for it, as a chunk without a choice."""
        if not self._usage_at_the_end:
            return _DONE
        return event({**self._chunk([]), "usage": self._usage()}) + _DONE

    def failed(self, error: ApiError) -> bytes:
        return event(error.body) + _DONE

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._frame, "object": self.chunk_kind, "choices": choices}

    def _part(self, index: int, delta: Delta) -> ChoicePart:
        if not self._generates:
            return ChoicePart([], [], [], delta)
        logprobs = [self._logprob(index, delta)] if self._logprobs else []
        return ChoicePart([delta.text], [delta.token.token_id], logprobs, delta)

    def _extra(self) -> dict[str, Any]:
        """Returns further fields of a whole response, and of the first chunk of each choice."""
        return {}

    def _usage(self) -> dict[str, Any]:
        used = self._request.usage()
        return {
            "prompt_tokens": used.prompt_tokens,
            "completion_tokens": used.completion_tokens,
            "total_tokens": used.prompt_tokens + used.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": used.cached_tokens},
        }

    def _choice(self, index: int, part: ChoicePart) -> dict[str, Any]:
        """Returns a choice of a whole response."""
        raise NotImplementedError

    def _chunk_choice(self, index: int, part: ChoicePart) -> dict[str, Any]:
        """Returns a choice of a chunk."""
        raise NotImplementedError

    def _logprob(self, index: int, delta: Delta) -> Any:
        raise NotImplementedError
