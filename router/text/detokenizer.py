"""Turns tokens into text as they arrive, and finds stop strings."""

import codecs
from bisect import bisect_left
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
    """The stop strings of a request, in a form that finds them in bytes. All its choices share it.

    They are UTF-8, in which the bytes of one character never begin inside another one. So the bytes match
    exactly where the characters do, and each comparison is one `memcmp`.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string matches everywhere"
        self._texts = {stop.encode(errors="surrogatepass"): stop for stop in stops}
        self._sorted = sorted(self._texts)
        self._longest_first = tuple(sorted(self._texts, key=len, reverse=True))
        self._lasts = frozenset(stop[-1] for stop in self._texts)
        self._firsts = frozenset(stop[0] for stop in self._texts)

    def __bool__(self) -> bool:
        return bool(self._texts)

    def found(self, text: bytes, checked: int) -> tuple[int, bytes, str] | None:
        """Returns where the first stop string ends after the first `checked` bytes, and that stop string."""
        for end in range(checked + 1, len(text) + 1):
            if text[end - 1] in self._lasts and text.endswith(self._longest_first, 0, end):
                stop = next(stop for stop in self._longest_first if text.endswith(stop, 0, end))
                return end, stop, self._texts[stop]
        return None

    def held(self, text: bytes) -> int:
        """Returns the length of the longest end of `text` that a stop string begins with."""
        longest = len(self._longest_first[0]) - 1
        for start in range(max(0, len(text) - longest), len(text)):
            if text[start] in self._firsts:
                end = text[start:]
                place = bisect_left(self._sorted, end)
                if place < len(self._sorted) and self._sorted[place].startswith(end):
                    return len(end)
        return 0


class StopFinder:
    """Cuts a text before the first stop string, or after it with `include`.

    The result does not depend on the pieces of the text.
    The first stop string is the one that is complete first, if characters arrive one by one. If several are
    complete at the same character, it is the longest. Only text that may become a stop string is held back.

    The time is in proportion to the text: a byte that is no longer held is never compared again.
    """

    def __init__(self, stops: StopStrings, *, include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._held = b""

    def push(self, text: str) -> tuple[str, str | None]:
        """Returns the text that is certain now, and the stop string if it was found.

        Then no push may follow.
        """
        if not self._stops:
            return text, None
        data, checked = self._held + text.encode(), len(self._held)
        found = self._stops.found(data, checked)
        if found is not None:
            end, stop, name = found
            self._held = b""
            return data[: end if self._include else end - len(stop)].decode(), name
        certain = len(data) - self._stops.held(data)
        self._held = data[certain:]
        return data[:certain].decode(), None

    def finish(self) -> str:
        """Returns the text that was held back, at the end of the sequence."""
        held, self._held = self._held, b""
        return held.decode()
