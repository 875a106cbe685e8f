"""Turns tokens into text as they arrive, and finds stop strings."""

import codecs
from collections.abc import Sequence

from baton.router.text.tokenizer import ModelTokenizer


class Detokenizer:
    """The text of one sequence of tokens. Holds back the bytes of an incomplete character."""

    def __init__(self, tokenizer: ModelTokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Returns the characters that the token completes."""
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """Returns U+FFFD if the sequence ended inside a character, or else an empty text."""
        return self._utf8.decode(b"", final=True)


class StopStrings:
    """Cuts a text before the first stop string, or after it with `include`.

    The result does not depend on the pieces of the text.
    The first stop string is the one that is complete first, if characters arrive one by one. If several are
    complete at the same character, it is the longest. Only text that may become a stop string is held back.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        assert all(stops), "an empty stop string matches everywhere"
        self._stops = stops
        self._include = include
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Returns the text that is certain now, and the stop string if it was found.

        Then no push may follow.
        """
        if not self._stops:
            return text, None
        text = self._held + text
        found: tuple[int, int, str] | None = None  # end, start, stop
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (found is None or (start + len(stop), start) < found[:2]):
                found = (start + len(stop), start, stop)
        if found is not None:
            self._held = ""
            return text[: found[0] if self._include else found[1]], found[2]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def finish(self) -> str:
        """Returns the text that was held back, at the end of the sequence."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
