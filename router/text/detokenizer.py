"""Tokens become text as they arrive: whole characters only, and nothing that may be part of a stop string."""

import codecs
from collections.abc import Sequence

from router.text.tokenizer import ModelTokenizer


class Detokenizer:
    """Text of one growing sequence of tokens; bytes of an unfinished character wait for the next token."""

    def __init__(self, tokenizer: ModelTokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """U+FFFD when the sequence ended inside a character."""
        return self._utf8.decode(b"", final=True)


class StopStrings:
    """Cuts a text before the first stop string, wherever the text is broken into pieces.

    "First" is the one that is complete earliest, as if characters came one by one; of several that end
    there, the longest. Only what may still become a stop string is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string stops everything"
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that is certain now, and the stop string if it was met (nothing may follow then)."""
        if not self._stops:
            return text, None
        text = self._held + text
        met: tuple[int, int, str] | None = None  # end, start, stop
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (met is None or (start + len(stop), start) < met[:2]):
                met = (start + len(stop), start, stop)
        if met is not None:
            self._held = ""
            return text[: met[1]], met[2]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def finish(self) -> str:
        """What was held back, now that no stop string can follow."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`, without being all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
