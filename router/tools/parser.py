"""Text of a model, character by character, becomes content and tool calls.

One character at a time, so that it does not matter in which pieces the text comes.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from router.api.tools import Tool

SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Piece:
    """Something that is certain."""

    text: str = ""
    """Of the content, or of the arguments of a call."""
    call: int | None = None
    """Which call it belongs to, counted from 0; None: the content."""
    name: str | None = None
    """Of the function, with the first piece of a call."""


class ToolParser:
    """Of one text. A format says what its characters mean in `_take`, and what is left in `_end`."""

    name: ClassVar[str]
    """By which users choose it: vLLM's."""
    specials: ClassVar[tuple[str, ...]] = ()
    """Special tokens that the format is made of: they are to be part of the text."""

    def __init__(self) -> None:
        self.num_calls = 0

    @classmethod
    def grammar(cls, tools: Sequence[Tool], *, many: bool, spell: Callable[[str], str]) -> str:
        """Lark (llguidance's), for a call of one of the tools, or several. `spell` writes a special token."""
        raise NotImplementedError

    def push(self, text: str) -> list[Piece]:
        return _joined(piece for character in text for piece in self._take(character))

    def finish(self) -> list[Piece]:
        """What was held back, now that nothing follows."""
        return _joined(self._end())

    def _take(self, character: str) -> Iterator[Piece]:
        raise NotImplementedError

    def _end(self) -> Iterator[Piece]:
        raise NotImplementedError

    def _read(self, call: "CallReader", character: str) -> Iterator[Piece]:
        """What one more character of a call makes certain."""
        before, new = call.begun, call.take(character)
        if call.begun and not before:
            self.num_calls += 1
            yield Piece(call=self.num_calls - 1, name=call.name)
        if new:
            yield Piece(new, self.num_calls - 1)


def _joined(pieces: Iterator[Piece]) -> list[Piece]:
    """With neighbours that belong together as one."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last is not None and last.call == piece.call and piece.name is None:
            joined[-1] = Piece(last.text + piece.text, last.call, last.name)
        else:
            joined.append(piece)
    return joined


class Marker:
    """Finds a fixed text in a stream of characters, and holds back what may be its beginning."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.held = ""

    def take(self, character: str) -> tuple[str, bool]:
        """What is certainly not the marker, and whether the marker is complete (nothing is held then)."""
        self.held += character
        if self.held.endswith(self._text):
            before, self.held = self.held[: -len(self._text)], ""
            return before, True
        keep = next(n for n in range(len(self._text) - 1, -1, -1) if self.held.endswith(self._text[:n]))
        before, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return before, False


class CallReader:
    """Reads one call written as a JSON object, {"name": NAME, "arguments": {...}}; "parameters" is as good as
    "arguments". These become pieces as they come, once the name is known.

    Attributes:
        raw: all characters so far.
        done: the object is complete.
        broken: it is not such an object; characters after that were not looked at.
        begun: the call has a name and arguments.
        reading_arguments: they are open.
    """

    def __init__(self) -> None:
        self.raw = ""
        self.done = self.broken = self.begun = self.reading_arguments = False
        self.name: str | None = None
        self._depth = 0  # open brackets
        self._string = ""  # what is open: "" or the string so far, with its quote
        self._escaped = False
        self._key: str | None = None  # of the member whose value is awaited or read
        self._last = ""  # string that ended last, at depth 1
        self._arguments: str | None = None  # None: not yet; what was read and is not a piece yet

    @property
    def over(self) -> bool:
        return self.done or self.broken

    def take(self, character: str) -> str:
        """Returns what is new of the arguments (which end with the object's closing bracket or before)."""
        self.raw += character
        self._scan(character)
        if self.name is None or self._arguments is None:
            return ""
        self.begun = True
        new, self._arguments = self._arguments, ""
        return new

    def _scan(self, character: str) -> None:
        if not self._string and (character == "<" or (self._depth == 0 and character not in "{" + SPACE)):
            self.broken = True  # JSON has it only in strings; a tag that closes the call may begin with it
            return
        if self._arguments is not None and self.reading_arguments:
            self._arguments += character
        if self._string:
            self._in_string(character)
        elif character == '"':
            self._string = character
        elif character in "{[":
            self._open(character)
        elif character in "}]":
            self._close()
        elif self._depth == 1 and character == ":":
            self._key, self._last = _parsed(self._last), ""
        elif self._depth == 1 and character == ",":
            self._end_member()

    def _in_string(self, character: str) -> None:
        self._string += character if self._depth == 1 else ""
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._last, self._string = (self._string if self._depth == 1 else ""), ""

    def _open(self, character: str) -> None:
        if self._depth == 1 and self._key in ("arguments", "parameters") and self._arguments is None:
            if character == "{":
                self.reading_arguments, self._arguments = True, character
            else:
                self.broken = True
        self._depth += 1

    def _close(self) -> None:
        self._depth -= 1
        if self._depth == 1:
            self.reading_arguments = False
        elif self._depth == 0:
            self._end_member()
            self.done = True
            self.broken = self.broken or self.name is None or self._arguments is None

    def _end_member(self) -> None:
        if self._key == "name" and self.name is None:
            self.name = _parsed(self._last)
            self.broken = self.broken or self.name is None
        self._key, self._last = None, ""


def _parsed(text: str) -> str | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) and value else None


def arguments_grammar(tools: Sequence[Tool], key: str) -> str:
    """Lark rules: `call` is one of the tools, called as CallReader reads it."""
    calls, rules = [], []
    for i, tool in enumerate(tools):
        head = json.dumps(f'{{"name": "{tool.function.name}", "{key}": ')
        calls.append(f'{head} args{i} "}}"')
        rules.append(f"args{i}: %json {tool.schema_text}")
    return "\n".join([f"call: {' | '.join(calls)}", *rules])
