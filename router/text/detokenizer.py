"""Turns tokens into text as they arrive, and finds stop strings."""

import codecs
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from baton.router.text.tokenizer import ModelTokenizer


class Detokenizer:
    """The text of one sequence of tokens. Holds back the bytes of an incomplete character."""

    def __init__(self, tokenizer: ModelTokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._inside = False  # a character
        self._texts = tokenizer.whole_texts[skip_special_tokens]

    def push(self, token_id: int) -> str:
        """Returns the characters that the token completes."""
        if not self._inside and (characters := self._texts.get(token_id)) is not None:
            return characters
        if self._skip_special and token_id in self._tokenizer.specials:
            return ""
        text = self._utf8.decode(self._tokenizer.token_bytes(token_id))
        began, self._inside = self._inside, bool(self._utf8.getstate()[0])
        if not began and not self._inside:
            self._texts[token_id] = text
        return text

    def finish(self) -> str:
        """Returns U+FFFD if the sequence ended inside a character, or else an empty text."""
        return self._utf8.decode(b"", final=True)


class _Prefix:
    """The beginning of some stop strings: a state of the automaton."""

    __slots__ = ("fallback", "high", "length", "low", "next", "stop")

    def __init__(self, low: int, high: int, length: int) -> None:
        """The sorted stop strings from `low` to `high` begin with it."""
        self.low, self.high, self.length = low, high, length
        self.next: dict[int, _Prefix] = {}  # by the byte that follows, as far as texts had it
        self.fallback: _Prefix | None = None  # the longest proper end that some stop string begins with
        self.stop = b""  # the longest stop string that it ends with


class StopStrings:
    """The stop strings of a request, as an automaton that reads bytes. All choices of the request share it.

    They are UTF-8, in which the bytes of one character never begin inside another one. So the bytes match
    exactly where the characters do. A state is the longest end of the text that some stop string begins with
    (Aho and Corasick, "Efficient string matching", 1975). States are made when a text first needs them: stop
    strings may have 65,536 characters, and texts meet few of them.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string matches everywhere"
        self.texts = {stop.encode(errors="surrogatepass"): stop for stop in stops}
        self._sorted = sorted(self.texts)
        self.start = _Prefix(0, len(self._sorted), 0)
        self.firsts = frozenset(stop[0] for stop in self._sorted)

    def follow(self, state: _Prefix, byte: int) -> _Prefix:
        """Returns the next state, and records it in `state.next` and in those of the fallbacks on the way."""
        passed: list[tuple[_Prefix, _Prefix | None]] = []
        while (successor := state.next.get(byte)) is None:
            passed.append((state, self._longer(state, byte)))
            if state.fallback is None:
                successor = state
                break
            state = state.fallback
        for state, longer in reversed(passed):
            if longer is not None:
                longer.fallback = successor
                longer.stop = longer.stop or successor.stop
                successor = longer
            state.next[byte] = successor
        return successor

    def _longer(self, state: _Prefix, byte: int) -> _Prefix | None:
        at = state.length
        first = state.low + (len(self._sorted[state.low]) == at)  # the stop string that is this prefix
        low = bisect_left(self._sorted, byte, first, state.high, key=lambda stop: stop[at])
        high = bisect_right(self._sorted, byte, low, state.high, key=lambda stop: stop[at])
        if low == high:
            return None
        longer = _Prefix(low, high, at + 1)
        if len(self._sorted[low]) == at + 1:
            longer.stop = self._sorted[low]
        return longer


class StopFinder:
    """Cuts a text before the first stop string, or after it with `include`.

    The result does not depend on the pieces of the text.
    The first stop string is the one that is complete first, if characters arrive one by one. If several are
    complete at the same character, it is the longest. Only text that may become a stop string is held back.
    """

    def __init__(self, stops: StopStrings, *, include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._state = stops.start
        self._pending = b""

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Returns the text that is certain now, and the stop string if it was found.

        Then no push may follow. Not `may_stop`: stop strings that `text` completes do not count.
        """
        stops, state = self._stops, self._state
        new = text.encode()
        if state is stops.start and stops.firsts.isdisjoint(new):
            return text, None
        data, checked = self._pending + new, len(self._pending)
        for end, byte in enumerate(new, checked + 1):
            state = state.next.get(byte) or stops.follow(state, byte)
            if state.stop and may_stop:
                self._state, self._pending = stops.start, b""
                length = end if self._include else end - len(state.stop)
                return data[:length].decode(), stops.texts[state.stop]
        certain = len(data) - state.length
        self._state, self._pending = state, data[certain:]
        return data[:certain].decode(), None

    def finish(self) -> str:
        """Returns the text that was held back, at the end of the sequence."""
        pending, self._pending, self._state = self._pending, b"", self._stops.start
        return pending.decode()
