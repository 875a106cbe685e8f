"""The logprobs of tokens, as responses show them."""

from typing import Any

import msgspec

from router.active_request import ActiveRequest
from router.endpoints.builders.base import encode
from router.generation.choice import Delta
from router.text.tokenizer import ModelTokenizer
from rpc import worker_pb2 as pb

LOWEST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON does not have."""


class LogprobEntries:
    """Makes the entries of one request's tokens, encoded one by one.

    To encode all of a response at once would take seconds and block the event loop.
    """

    def __init__(self, request: ActiveRequest, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self._as_ids = request.body.return_tokens_as_token_ids

    def of_chat(self, delta: Delta) -> msgspec.Raw:
        """Returns the entry of a chat completion, with the alternatives as a list."""
        logprobs = delta.token.logprobs or pb.TokenLogprobs()
        top = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
        entry = {
            **self._entry(delta.token.token_id, logprobs.logprob),
            "top_logprobs": [self._entry(token_id, logprob) for token_id, logprob in top],
        }
        return msgspec.Raw(encode(entry))

    def of_completion(self, delta: Delta) -> tuple[str, float, msgspec.Raw]:
        """Returns the token's name, its logprob, and the alternatives by name."""
        logprobs = delta.token.logprobs or pb.TokenLogprobs()
        token_id, logprob = delta.token.token_id, max(logprobs.logprob, LOWEST_LOGPROB)
        top = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
        names = {self._name(i): max(other, LOWEST_LOGPROB) for i, other in top}
        name = self._name(token_id)
        # As in OpenAI's API, the token itself is always among them.
        return name, logprob, msgspec.Raw(encode({**names, name: logprob}))

    def spelled(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._name(token_id),
            "logprob": max(logprob, LOWEST_LOGPROB),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self.spelled(token_id)
