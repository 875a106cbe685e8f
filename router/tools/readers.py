"""Readers of one tool call. Each takes the characters of a call, and returns its arguments as JSON.

- `CallReader`: a JSON object with a name and arguments.
- `NamedCallReader`: the name in a fixed text, then the arguments as a JSON object.
- `PairsReader`: keys and values between tags, with types from the tool's schema.
- `PythonReader`: a call in Python.
"""

import ast
import json
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.router.api.messages import FUNCTION_NAME, Tool
from baton.router.tools.marker import Marker
from baton.router.tools.schema import Types, as_json, resolved, types_of

SPACE = " \t\r\n"
NAME = f"(?P<name>{FUNCTION_NAME.strip('^$')})"
"""The name of a function in the pattern of a head."""
MAX_HEAD = 256
"""Characters before the arguments of a call, or of a key. A longer text is content."""
_OUTSIDE_STRINGS = frozenset('{}[]:,"+-.0123456789eEtruefalsn' + SPACE)
"""The characters of JSON outside of strings."""


class Reader:
    """Reads one call.

    Attributes:
        begun: the call has a name.
        done: the call is complete.
        broken: it is no call, or its end is missing.
        rest: if it is broken, the last characters, which are not a part of it.
        call_id: the model's own name of the call. None: it gave none.
    """

    def __init__(self) -> None:
        self._raw: list[str] = []
        self.begun = self.done = self.broken = False
        self.rest = ""
        self.name: str | None = None
        self.call_id: str | None = None

    @property
    def raw(self) -> str:
        """All characters so far, if the call has not begun, without `rest`."""
        raw = "".join(self._raw)
        return raw[: len(raw) - len(self.rest)]

    @property
    def over(self) -> bool:
        """True if the call is complete or broken."""
        return self.done or self.broken

    def take(self, character: str) -> str:
        """Takes a character. Returns the new part of the arguments."""
        raise NotImplementedError

    def finish(self) -> str:
        """Returns what was held back of the arguments, at the end of the text."""
        return ""

    def _break(self, rest: str) -> None:
        self.broken, self.rest = True, rest


class CallReader(Reader):
    """Reads a JSON object {"name": NAME, "arguments": {...}}, or with "parameters" for "arguments".

    Returns the arguments as they arrive, once the name is known.

    Attributes:
        reading_arguments: the object of the arguments is not closed yet.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reading_arguments = False
        self._depth = 0  # open brackets
        self._in_string = False
        self._string: list[str] = []  # the last string at depth 1 so far, with its quotes
        self._escaped = False
        self._key: str | None = None  # of the member whose value follows or is read
        self._arguments: str | None = None  # read, but not returned yet; None: before them

    def take(self, character: str) -> str:
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
                self._break(character)
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
            self._close(character)
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
                self._break(character)
        self._depth += 1

    def _close(self, character: str) -> None:
        self._depth -= 1
        if self._depth == 1:
            self.reading_arguments = False
        elif self._depth == 0:
            self._end_member()
            self.done = True
            if self.name is None or self._arguments is None:
                self._break(character)

    def _end_member(self) -> None:
        if self._key == "name" and self.name is None:
            name = _parsed(self._string)
            self.name = name if name and re.fullmatch(FUNCTION_NAME, name) else None
            if self.name is None:
                self._break(self._raw[-1])
        self._key, self._string = None, []


def _parsed(string: Sequence[str]) -> str | None:
    try:
        value = json.loads("".join(string))
    except ValueError:
        return None
    return value if isinstance(value, str) and value else None


class NamedCallReader(CallReader):
    """Reads the name of a function in a fixed text, and then the object of its arguments."""

    def __init__(self, head: re.Pattern[str], opening: str) -> None:
        """`head`: what precedes the arguments, with the groups name and, perhaps, id. `opening`: what begins
        a call. Another one before the arguments begins the call anew."""
        super().__init__()
        self._head, self._opening = head, opening

    @property
    def over(self) -> bool:
        return self.broken or (self.begun and not self.reading_arguments)

    def take(self, character: str) -> str:
        if self.name is not None:
            return super().take(character)
        self._raw.append(character)
        if character == "{":
            found = self._head.fullmatch("".join(self._raw[:-1]))
            if found is None:
                self._break("{")
                return ""
            self.name, self.call_id = found["name"], found.groupdict().get("id")
            self._key, self._depth = "arguments", 1
            return super().take(character)
        if "".join(self._raw[-len(self._opening) :]) == self._opening:
            self._break(self._opening)
        elif len(self._raw) > MAX_HEAD:
            self._break(character)
        return ""


@dataclass(frozen=True)
class Pairs:
    """How a format writes the name of a function, and its arguments as keys and values."""

    head: re.Pattern[str]
    """Before the first pair. Its group is the name of the function."""
    before_key: str
    after_key: re.Pattern[str]
    """A key and what stands between it and its value. Its group is the key."""
    value_ends: tuple[str, ...]
    end: str
    """Behind the last pair."""
    skips_newline: bool = False
    """A value begins after a new line."""


class PairsReader(Reader):
    """Reads a function's name, and its arguments as keys and values between tags.

    The text of a value is what the tool's schema says: a string, which is returned as it arrives, or JSON.
    """

    def __init__(self, form: Pairs, opening: str, tools: Sequence[Tool]) -> None:
        super().__init__()
        self._form, self._opening, self._tools = form, opening, tools
        self._state: Callable[[str], str] = self._take_head
        self._held = ""  # text that is neither returned nor a part of a value
        self._value: list[str] = []
        self._types: Types = frozenset()
        self._fresh = False  # a new line may precede the value
        self._num_pairs = 0
        self._end = Marker(*form.value_ends)

    def take(self, character: str) -> str:
        return self._state(character)

    def finish(self) -> str:
        if self._state == self._take_key:
            return self._separator() + json.dumps(self._held, ensure_ascii=False)[:-1]
        if self._state != self._take_value:
            return ""
        if self._types == {"string"}:
            return _escaped(self._end.held)
        return as_json("".join(self._value) + self._end.held, self._types)

    def _take_head(self, character: str) -> str:
        self._raw.append(character)
        self._held += character
        for tag in (self._form.before_key, self._form.end):
            if self._held.endswith(tag):
                found = self._form.head.fullmatch(self._held.removesuffix(tag))
                if found is None:
                    self._break(character)
                    return ""
                self.name, self.begun = found["name"], True
                return "{" + self._after_tag(tag)
        if self._held.endswith(self._opening):
            self._break(self._opening)
        elif len(self._held) > MAX_HEAD:
            self._break(character)
        return ""

    def _after_tag(self, tag: str) -> str:
        self._held = ""
        self.done = tag == self._form.end
        self._state = self._take_key
        return "}" if self.done else ""

    def _take_key(self, character: str) -> str:
        self._held += character
        if character == ">" and (found := self._form.after_key.fullmatch(self._held)):
            key, self._held = found["key"].strip(SPACE), ""
            self._types = self._types_of(key)
            self._value.clear()
            self._state, self._fresh = self._take_value, self._form.skips_newline
            begin = '"' if self._types == {"string"} else ""
            return f"{self._separator()}{json.dumps(key, ensure_ascii=False)}: {begin}"
        if len(self._held) > MAX_HEAD:
            self._break(self._form.before_key + self._held)
            return "}"
        return ""

    def _separator(self) -> str:
        self._num_pairs += 1
        return ", " if self._num_pairs > 1 else ""

    def _types_of(self, key: str) -> Types:
        parameters = next((t.function.parameters for t in self._tools if t.function.name == self.name), None)
        schema = resolved(parameters, parameters)
        properties = schema.get("properties") if isinstance(schema, dict) else None
        return types_of(properties.get(key) if isinstance(properties, dict) else None, parameters, {})

    def _take_value(self, character: str) -> str:
        text, ended = self._end.take(character)
        if self._fresh and text:
            self._fresh, text = False, text.removeprefix("\n")
        if ended:
            self._state = self._take_between
        if self._types == {"string"}:
            return _escaped(text) + ('"' if ended else "")
        self._value.append(text)
        return as_json("".join(self._value), self._types) if ended else ""

    def _take_between(self, character: str) -> str:
        self._held = (self._held + character).lstrip(SPACE)
        tags = self._form.before_key, self._form.end
        if self._held in tags:
            return self._after_tag(self._held)
        if not any(tag.startswith(self._held) for tag in tags):
            self._break(self._held)
            return "}"
        return ""


def _escaped(text: str) -> str:
    """Returns the text as a part of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class PythonReader(Reader):
    """Reads NAME(KEY=VALUE, …) with values that are literals of Python or of JSON. Returns all arguments at
    the end."""

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0
        self._quote = ""  # of the string that is read
        self._escaped = False

    def take(self, character: str) -> str:
        self._raw.append(character)
        if self._quote:
            if not self._escaped and character == self._quote:
                self._quote = ""
            self._escaped = character == "\\" and not self._escaped
        elif not self._depth and character != "(":
            if not (character.isidentifier() or character.isdecimal() or character in "_.-"):
                self._break(character)
        elif character in "\"'":
            self._quote = character
        elif character in "([{":
            self._depth += 1
        elif character in ")]}":
            self._depth -= 1
            if not self._depth:
                return self._end()
        return ""

    def _end(self) -> str:
        call = _python_call("".join(self._raw))
        if call is None:
            self._break("")
            return ""
        self.begun = self.done = True
        self.name, arguments = call
        return arguments


def _python_call(text: str) -> tuple[str, str] | None:
    """Returns the name and, as JSON, the arguments of a call in Python. None: it is no such call."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of unknown escapes in the model's strings
            call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
            return None
        name = text[: text.index("(")]
        given = {k.arg: ast.literal_eval(_JsonNames().visit(k.value)) for k in call.keywords}
        return (name, json.dumps(given, allow_nan=False)) if re.fullmatch(FUNCTION_NAME, name) else None
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


class _JsonNames(ast.NodeTransformer):
    """Turns true, false and null into Python's constants."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        constants = {"true": True, "false": False, "null": None}
        return ast.Constant(constants[node.id]) if node.id in constants else node
