"""Turns the tokens of one generation into text, which ends at stop strings.

A choice is one of the alternative texts of an OpenAI answer.
"""

from collections.abc import Set
from dataclasses import dataclass

from baton.router.generation.token_queue import Token
from baton.router.text.detokenizer import Detokenizer, StopFinder, StopStrings
from baton.router.text.tokenizer import ModelTokenizer


@dataclass(frozen=True, slots=True)
class Delta:
    """The part that one token adds to a choice."""

    text: str
    token: Token
    finish_reason: str | None
    stop_reason: str | int | None
    """The stop string or stop token id that ended the choice; None for EOS."""
    first: bool
    """This is the first delta of its choice."""


class Choice:
    """Owns the text state of one generation. It does not keep deltas, because a stream may be long.

    Attributes:
        num_tokens: tokens so far, including the last one.
        finish_reason: None until the last delta.
    """

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        *,
        stops: StopStrings,
        stop_token_ids: Set[int],
        min_tokens: int,
        skip_special_tokens: bool,
        include_stop: bool,
        generates: bool,
    ) -> None:
        """`generates`: False if the client wants no token. The only token then adds nothing."""
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stops = StopFinder(stops, include=include_stop)
        self._include_stop = include_stop
        self._stop_token_ids = stop_token_ids
        self._min_tokens = min_tokens
        self._generates = generates

    def push(self, token: Token) -> Delta:
        """Returns the delta of a token. The last delta has a finish reason.

        A stop string ends the choice although the model would generate more tokens.
        """
        if not self._generates:
            self.finish_reason = "length"
            return Delta("", token, "length", None, first=True)
        reason = token.finish_reason or None
        stop_reason: str | int | None = None
        stopped = reason == "stop" and not self._include_stop
        text = "" if stopped else self._detokenizer.push(token.token_id)
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
