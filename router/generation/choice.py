"""One choice of an answer: its tokens become text, cut at stop strings."""

from collections.abc import Set
from dataclasses import dataclass

from router.generation.outbox import Token
from router.text.detokenizer import Detokenizer, StopStrings
from router.text.tokenizer import ModelTokenizer


@dataclass(frozen=True, slots=True)
class Delta:
    """What one token adds to a choice."""

    text: str
    token: Token
    finish_reason: str | None
    stop_reason: str | int | None  # the stop string or stop token id that ended it; None for EOS
    first: bool  # of its choice


class Choice:
    """Owns the text state of one generation. It keeps no delta: a stream may be long.

    Attributes:
        num_tokens: tokens so far, including the one that ended it.
        finish_reason: None until the last delta.
    """

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        *,
        stops: list[str],
        stop_token_ids: Set[int],
        min_tokens: int,
        skip_special_tokens: bool,
    ) -> None:
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stops = StopStrings(stops)
        self._stop_token_ids = stop_token_ids
        self._min_tokens = min_tokens

    def push(self, token: Token) -> Delta:
        """A delta with a finish reason is the last one, also where the token itself was not."""
        reason = token.finish_reason or None
        stop_reason: str | int | None = None
        # The token that stops the model is no part of the text.
        text = "" if reason == "stop" else self._detokenizer.push(token.token_id)
        if reason:
            text += self._detokenizer.finish()
        if self.num_tokens + 1 > self._min_tokens:
            text, stop_reason = self._stops.push(text)
        if stop_reason is not None:
            reason = "stop"
        elif reason:
            text += self._stops.finish()
            if reason == "stop" and token.token_id in self._stop_token_ids:
                stop_reason = token.token_id
        self.num_tokens += 1
        self.finish_reason = reason
        return Delta(text, token, reason, stop_reason, first=self.num_tokens == 1)
