"""Parsers that find tool calls in the text of a model.

They read one character at a time, so the result does not depend on the pieces in which the text arrives.
"""

import json
import re
import secrets
import string
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import ClassVar, Literal, NamedTuple

from baton.router.api.messages import FUNCTION_NAME, Tool

SPACE = " \t\r\n"
_OUTSIDE_STRINGS = frozenset('{}[]:,"+-.0123456789eEtruefalsn' + SPACE)
"""The characters of JSON outside of strings."""
_ALPHANUMERIC = string.ascii_letters + string.digits


class Part(NamedTuple):
    """A part of an output. Later text cannot change it."""

    kind: Literal["reasoning", "content", "call"]
    text: str
    """For a call, a part of its arguments."""
    call: int = -1
    """The index of the call."""
    name: str | None = None
    """The name of the function. Only the first part of a call has it and `call_id`."""
    call_id: str | None = None


class ToolParser:
    """Parses one text. A format says what is outside of the calls, and what ends a call.

    Attributes:
        num_calls: tool calls so far.
    """

    name: ClassVar[str]
    """The name for --tool-call-parser, as in vLLM."""
    specials: ClassVar[tuple[str, ...]] = ()
    """Special tokens of the format. The tokenizer leaves them in the text."""

    key: ClassVar[str] = "arguments"
    """The member of a call that has its arguments."""
    one: ClassVar[str] = "call"
    """The Lark rule of one call with its tags."""
    separator: ClassVar[str]
    """Between two calls, as a Lark string."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._call: CallReader | None = None  # that is read

    @classmethod
    def grammar(cls, tools: Sequence[Tool], *, many: bool, spell: Callable[[str], str]) -> str:
        """Returns a Lark grammar (llguidance's dialect) for one call, or for several if `many`.

        `spell` turns a special token into its form in a grammar.
        """
        start = cls._start(f'one ("{cls.separator}" one)*' if many else "one", spell)
        calls, rules = [], []
        for i, tool in enumerate(tools):
            head = json.dumps(f'{{"name": "{tool.function.name}", "{cls.key}": ')
            calls.append(f'{head} args{i} "}}"')
            rules.append(f"args{i}: %json {tool.schema_text}")
        return "\n".join([f"start: {start}", f"one: {cls.one}", f"call: {' | '.join(calls)}", *rules])

    @classmethod
    def _start(cls, calls: str, spell: Callable[[str], str]) -> str:
        """Returns the Lark rule of an output with these calls."""
        return calls

    def push(self, text: str) -> list[Part]:
        """Takes the next text. Returns the parts that are certain now."""
        return _joined(piece for character in text for piece in self._take(character))

    def finish(self) -> list[Part]:
        """Returns the parts that were held back, at the end of the text."""
        if self._call is None:
            return _joined(self._end())
        if self._call.begun:
            return []
        return _joined(chain(self._give_up(self._call.raw), self._end()))

    def _take(self, character: str) -> Iterator[Part]:
        call = self._call
        if call is None:
            yield from self._take_outside(character)
            return
        before, new = call.begun, call.take(character)
        if call.begun and not before:
            self.num_calls += 1
            # Mistral's chat templates demand an id of nine letters and digits.
            call_id = "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
            yield Part("call", "", self.num_calls - 1, call.name, call_id)
        if new:
            yield Part("call", new, self.num_calls - 1)
        if not self._is_over(call):
            return
        self._call = None
        if call.begun:
            self._end_call(call)
        else:
            yield from self._give_up(call.raw[:-1])
        if call.broken:
            yield from self._take(character)

    def _take_outside(self, character: str) -> Iterator[Part]:
        """Takes a character outside of calls. It may begin a call (`_call`)."""
        raise NotImplementedError

    def _is_over(self, call: "CallReader") -> bool:
        return call.over

    def _end_call(self, call: "CallReader") -> None:
        """Is called when a call is over, before the text behind it."""
        raise NotImplementedError

    def _give_up(self, raw: str) -> Iterator[Part]:
        """Yields what was held back, and `raw`, which looked like a call."""
        raise NotImplementedError

    def _end(self) -> Iterator[Part]:
        """Yields what was held back outside of calls, at the end of the text."""
        raise NotImplementedError


def _joined(parts: Iterator[Part]) -> list[Part]:
    """Joins adjacent parts of the same content or call."""
    joined: list[tuple[Part, list[str]]] = []
    for part in parts:
        if joined and joined[-1][0].call == part.call and part.name is None:
            joined[-1][1].append(part.text)
        else:
            joined.append((part, [part.text]))
    return [Part(p.kind, "".join(texts), p.call, p.name, p.call_id) for p, texts in joined]


class Marker:
    """Finds a fixed text in a text that arrives in pieces. Holds back a possible beginning of it."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.held = ""

    def split(self, text: str) -> tuple[str, str | None]:
        """Takes the next text. Returns what is before the marker, and what follows it; None: it is not
        complete."""
        text = self.held + text
        before, marker, after = text.partition(self._text)
        if marker:
            self.held = ""
            return before, after
        longest = min(len(text), len(self._text) - 1)
        keep = next(n for n in range(longest, -1, -1) if text.endswith(self._text[:n]))
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def take(self, character: str) -> tuple[str, bool]:
        """Returns the text that is not part of the marker, and whether the marker is complete."""
        before, after = self.split(character)
        return before, after is not None


class CallReader:
    """Reads one call, a JSON object {"name": NAME, "arguments": {...}}, or with "parameters" for "arguments".

    Returns the arguments as they arrive, once the name is known.

    Attributes:
        done: the object is complete.
        broken: it is not such an object. If it has begun, the last character is not a part of it.
        begun: the call has a name and arguments.
        reading_arguments: the object of the arguments is not closed yet.
    """

    def __init__(self) -> None:
        self._raw: list[str] = []
        self.done = self.broken = self.begun = self.reading_arguments = False
        self.name: str | None = None
        self._depth = 0  # open brackets
        self._in_string = False
        self._string: list[str] = []  # the last string at depth 1 so far, with its quotes
        self._escaped = False
        self._key: str | None = None  # of the member whose value follows or is read
        self._arguments: str | None = None  # read, but not returned yet; None: before them

    @property
    def raw(self) -> str:
        """All characters so far, if the call has not begun."""
        return "".join(self._raw)

    @property
    def over(self) -> bool:
        """True if the object is complete or broken."""
        return self.done or self.broken

    def take(self, character: str) -> str:
        """Takes a character. Returns the new part of the arguments."""
        if not self.begun:
            self._raw.append(character)
        self._scan(character)
        if self.name is None or self._arguments is None:
            return ""
        self.begun = True
        new, self._arguments = self._arguments, ""
        return new

    def _scan(self, character: str) -> None:
        if not self._in_string:
            allowed = _OUTSIDE_STRINGS if self._depth else "{" + SPACE
            # "<" may begin the closing tag. Other errors inside of arguments are a part of them.
            if character == "<" or (character not in allowed and not self.reading_arguments):
                self.broken = True
                return
        if self._arguments is not None and self.reading_arguments:
            self._arguments += character
        if self._in_string:
            self._take_in_string(character)
        elif character == '"':
            self._in_string, self._string = True, [character]
        elif character in "{[":
            self._open(character)
        elif character in "}]":
            self._close()
        elif self._depth == 1 and character == ":":
            self._key, self._string = _parsed(self._string), []
        elif self._depth == 1 and character == ",":
            self._end_member()

    def _take_in_string(self, character: str) -> None:
        if self._depth == 1:
            self._string.append(character)
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False

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
            name = _parsed(self._string)
            self.name = name if name and re.fullmatch(FUNCTION_NAME, name) else None
            self.broken = self.broken or self.name is None
        self._key, self._string = None, []


def _parsed(string: Sequence[str]) -> str | None:
    try:
        value = json.loads("".join(string))
    except ValueError:
        return None
    return value if isinstance(value, str) and value else None
