"""The logprobs of tokens, as responses show them."""

from collections.abc import Iterable
from typing import Any

import msgspec

from baton.router.active_request import ActiveRequest
from baton.router.endpoints.builders.base import encode
from baton.router.generation.choice import Delta
from baton.router.prompt_logprobs import PromptLogprob
from baton.router.text.tokenizer import ModelTokenizer
from baton.rpc import worker_pb2 as pb

LOWEST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON does not have."""


class LogprobEntries:
    """Makes the entries of one request's tokens, encoded one by one.

    To encode all of a response at once would take seconds and block the event loop.
    """

    def __init__(self, request: ActiveRequest, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self._as_ids = request.body.return_tokens_as_token_ids
        self._named = bool(request.body.logprob_token_ids)

    def of_chat(self, delta: Delta) -> msgspec.Raw:
        """Returns the entry of a chat completion, with the alternatives as a list."""
        logprobs = delta.token.logprobs or pb.TokenLogprobs()
        token = delta.token.token_id
        top = list(zip(logprobs.top_ids, logprobs.top_logprobs, strict=True))
        if self._named and token not in logprobs.top_ids:  # as in vLLM, the token itself is among them
            top.insert(0, (token, logprobs.logprob))
        entry = {
            **self._entry(token, logprobs.logprob),
            "top_logprobs": [self._entry(token_id, logprob) for token_id, logprob in top],
        }
        return msgspec.Raw(encode(entry))

    def of_completion(self, delta: Delta) -> tuple[str, float, msgspec.Raw]:
        """Returns the token's name, its logprob, and the alternatives by name."""
        logprobs = delta.token.logprobs or pb.TokenLogprobs()
        top = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
        return self._of_completion(delta.token.token_id, logprobs.logprob, top)

    def _of_completion(
        self, token_id: int, logprob: float, top: Iterable[tuple[int, float]]
    ) -> tuple[str, float, msgspec.Raw]:
        names = {self.name(i): max(other, LOWEST_LOGPROB) for i, other in top}
        name, logprob = self.name(token_id), max(logprob, LOWEST_LOGPROB)
        # As in OpenAI's API, the token itself is always among them. As in vLLM, it is the first one.
        names.pop(name, None)
        return name, logprob, msgspec.Raw(encode({name: logprob, **names}))

    def of_prompt(self, token_id: int, logprob: PromptLogprob, top: int) -> msgspec.Raw:
        """Returns vLLM's entry for a token of the prompt: the token and `top` alternatives by their ids."""
        ranked = [(token_id, logprob.logprob, logprob.rank)]
        ranked += [(other, value, rank) for rank, (other, value) in enumerate(logprob.top[:top], 1)]
        entry = {
            str(i): {"logprob": max(value, LOWEST_LOGPROB), "rank": rank, "decoded_token": self.spelled(i)}
            for i, value, rank in ranked
        }
        return msgspec.Raw(encode(entry))

    def of_echo(self, token_id: int, logprob: PromptLogprob, top: int) -> tuple[str, float, msgspec.Raw]:
        """As `of_completion`, for a token of the prompt."""
        return self._of_completion(token_id, logprob.logprob, logprob.top[:top])

    def spelled(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.name(token_id),
            "logprob": max(logprob, LOWEST_LOGPROB),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }

    def name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self.spelled(token_id)
