"""Readers of one tool call. Each takes the characters of a call, and returns its arguments as JSON.

- `CallReader`: a JSON object with a name and arguments.
- `NamedCallReader`: the name in a fixed text, then the arguments as a JSON object.
- `PythonReader`: a call in Python.
- `PairsReader` of `pairs`: keys and values between tags, with types from the tool's schema.
"""

import ast
import json
import math
import re
import warnings
from collections.abc import Callable, Container, Sequence
from functools import partial

from baton.router.api.messages import FUNCTION_NAME
from baton.router.tools.json_text import QUOTES, SPACE, Arguments, JsonText
from baton.router.tools.marker import Marker
from baton.router.tools.offered import OfferedTools

NAME = f"(?P<name>{FUNCTION_NAME.strip('^$')})"
"""The name of a function in the pattern of a head."""
MAX_HEAD = 256
"""Characters before the arguments of a call, or of a key. A longer text is content."""
_OUTSIDE_STRINGS = frozenset("{}[]:,\"'+-.0123456789eEtruefalsnTFN" + SPACE)
"""The characters of JSON and of Python's constants outside of strings."""
_KEYS = {"name", "function", "arguments", "parameters", "type", "id"}
"""What an object without a mark before it has, if it is a call."""
_BEFORE_OBJECT = SPACE + "[`json"
"""What may be between a mark and an object: a list or a block of Markdown begins."""
_BREAKS = {"\n": "\\n", "\r": "\\r", "\0": "\\x00"}
"""What ends a string of Python or its code, and the escape of it."""
_PARAMETER = "__"
"""Ends the names of parameters in a call in Python, while it is read."""
NO_TOOLS = OfferedTools(())
_NO_ARGUMENTS = r"\s*+(null|None|\[\s*+\])?+\s*+(```)?+\s*+"


class Reader:
    """Reads one call.

    Attributes:
        begun: the call has a name.
        done: the call is complete.
        broken: it is no call, or its end is missing.
        rest: if it is broken, the last characters, which are not a part of it.
        call_id: the model's own name of the call. None: it gave none.
    """

    def __init__(self, opening: str = "", tools: OfferedTools = NO_TOOLS) -> None:
        """`opening`: the mark before the call. `tools`: those that the model may call."""
        self._raw = [opening]
        self._tools = tools
        self.begun = self.done = self.broken = False
        self.unread = ""
        self.name: str | None = None
        self.call_id: str | None = None
        self._step: Callable[[str], str]  # takes the next character

    @property
    def raw(self) -> str:
        """The mark and all characters so far, if the call has not begun, without `unread`."""
        raw = "".join(self._raw)
        return raw[: len(raw) - len(self.unread)]

    @property
    def over(self) -> bool:
        """True if the call is complete or broken."""
        return self.done or self.broken

    def take(self, character: str) -> str:
        """Takes a character. Returns the new part of the arguments."""
        if not self.begun:
            self._raw.append(character)
        return self._step(character)

    def take_plain(self, text: str, at: int) -> str:
        """Takes as many characters from `at` on as are the same in the arguments. Returns these, if any."""
        return ""

    def finish(self, *, ended: bool) -> str:
        """Returns the last part of the arguments, at the end of the text.

        `ended`: the model ended the text, so the call is complete. Otherwise a limit cut it off.
        """
        return ""

    def _break(self, unread: str) -> str:
        self.broken, self.unread = True, unread
        return ""

    def _offered(self, name: str | None) -> bool:
        return name in self._tools


class ObjectReader(Reader):
    """Reads a call whose arguments are a JSON object. Returns them as they arrive, once the name is known."""

    def __init__(self, opening: str, tools: OfferedTools) -> None:
        super().__init__(opening, tools)
        self._arguments: Arguments | None = None
        self._early: list[str] = []  # arguments before the name

    def take_plain(self, text: str, at: int) -> str:
        arguments = self._arguments if self.begun else None
        return "" if arguments is None else arguments.take_plain(text, at)

    def finish(self, *, ended: bool) -> str:
        if ended:
            return self._close()
        return self._arguments.pending() if self.begun and self._arguments is not None else ""

    def _close(self) -> str:
        """Ends the call, whatever is missing."""
        raise NotImplementedError

    def _new(self, arguments: str) -> str:
        """Returns the new part of the arguments, and all earlier ones that waited for the name."""
        if arguments:
            self._early.append(arguments)
        if self.name is None or not self._early:
            return ""
        self.begun = True
        arguments = "".join(self._early)
        self._early.clear()
        return arguments


class CallReader(ObjectReader):
    """Reads a JSON object {"name": NAME, "arguments": {...}}, or with "parameters" for "arguments"."""

    def __init__(
        self, opening: str = "", tools: OfferedTools = NO_TOOLS, names: Container[str] | None = None
    ) -> None:
        """`names`: the only ones that make it a call. None: all."""
        super().__init__(opening, tools)
        self._names, self._marked = names, bool(opening)
        self._step = self._take_begin
        self._depth = 0  # open braces of the call
        self._key = ""  # of the member whose value follows or is read
        self._value = JsonText()  # a key, or a value that is not the arguments
        self._string: list[str] = []  # of this key or of the name

    def _close(self) -> str:
        if self._arguments is None and not self._marked and not self._offered(self.name):
            return ""
        arguments = self._arguments or Arguments()
        text = arguments.finish()
        return "" if arguments.broken else self._new(text)

    def _wrong(self, character: str) -> str:
        """Breaks the call. A tag ends it, and what is open."""
        text = self._close() if self.begun or character == "<" else ""
        self._break(character)
        return text

    def _take_begin(self, character: str) -> str:
        if character == "{":
            self._depth, self._step = 1, self._take_member
        elif character not in (_BEFORE_OBJECT if self._marked else SPACE):
            return self._wrong(character)
        return ""

    def _take_member(self, character: str) -> str:
        if character in QUOTES:
            self._value, self._string, self._step = JsonText(), [], self._take_key
            return self._step(character)
        if character == "}":
            self._depth -= 1
            if self._depth:
                return ""
            text = "" if self.begun else self._close()
            self.done = True
            if not self.begun:
                self._break("")
            return text
        return "" if character in SPACE + "," else self._wrong(character)

    def _take_key(self, character: str) -> str:
        self._string.append(self._value.take(character))
        if self._value.done:
            self._key, self._step = json.loads("".join(self._string)), self._take_colon
        return ""

    def _take_colon(self, character: str) -> str:
        if character == ":" and not self._marked and self._key not in _KEYS:
            return self._wrong("")
        if character == ":":
            self._step = self._take_first
        elif character not in SPACE:
            return self._wrong(character)
        return ""

    def _take_first(self, character: str) -> str:
        """Takes the first character of a value."""
        if character in SPACE:
            return ""
        if character in "},":
            self._step = self._take_member
        elif self._key in ("arguments", "parameters") and self._arguments is None:
            self._arguments, self._step = Arguments(), self._take_arguments
        elif self._key == "function" and character == "{" and self.name is None:
            self._depth, self._step = self._depth + 1, self._take_member
            return ""
        else:
            self._value, self._string, self._step = JsonText(), [], self._take_value
        return self._step(character)

    def _take_arguments(self, character: str) -> str:
        arguments = self._arguments
        assert arguments is not None
        if character == "<" and not arguments.in_string:
            return self._wrong(character)
        text = self._new(arguments.take(character))
        if arguments.broken:
            return self._wrong(character)
        if arguments.done:
            self._step = self._take_member
            if arguments.unread:
                text += self._step(arguments.unread)
        return text

    def _take_value(self, character: str) -> str:
        if not self._value.in_string and character not in _OUTSIDE_STRINGS:
            return self._wrong(character)
        text = self._value.take(character)
        is_name = self._key in ("name", "function") and self.name is None
        if is_name:
            self._string.append(text)
        if not self._value.done:
            return ""
        self._step = self._take_member
        if is_name:
            string = "".join(self._string)
            if string.startswith('"') and self._allowed(name := json.loads(string).strip()):
                self.name = name
            elif self._key == "name":
                return self._wrong(character)
        return self._new("") + (self._step(self._value.unread) if self._value.unread else "")

    def _allowed(self, name: str) -> bool:
        return bool(re.fullmatch(FUNCTION_NAME, name)) and (self._names is None or name in self._names)


class NamedCallReader(ObjectReader):
    """Reads the name of a function in a fixed text, and then the object of its arguments."""

    def __init__(
        self, head: re.Pattern[str], opening: str, tools: OfferedTools, ends: Sequence[str] = ()
    ) -> None:
        """`head`: what precedes the arguments, with the groups name and, perhaps, id. `ends`: marks that end
        a call."""
        super().__init__(opening, tools)
        self._head, self._ends = head, tuple(ends)
        self._mark = Marker(*ends)  # outside of strings
        self._before = ""  # what has come of the head, at most MAX_HEAD characters
        self._step = self._take_head

    @property
    def head(self) -> str:
        """What has come between the mark and the arguments."""
        return self._before

    def _take_head(self, character: str) -> str:
        if character in ("{", *QUOTES) and (match := self._head.fullmatch(self._before)):
            self._arguments = Arguments()
            self._step = partial(self._take_arguments, self._arguments)
            self._name(match)
            return self._step(character)
        self._before += character
        if end := next((end for end in self._ends if self._before.endswith(end)), ""):
            text = self._without_arguments(self._before.removesuffix(end))
            self._break(end)
            return text
        if character == "{" or len(self._before) > MAX_HEAD:
            self._break(character)
        return ""

    def _close(self) -> str:
        if self._arguments is None:
            return self._without_arguments(self._before)
        text = "".join(map(self._arguments.take, self._mark.pending.removeprefix("<")))
        return self._new(text + self._arguments.finish())

    def _name(self, head: re.Match[str]) -> None:
        self.name, self.call_id = head["name"], head.groupdict().get("id")

    def _take_arguments(self, arguments: Arguments, character: str) -> str:
        characters, ended = (character, False) if arguments.in_string else self._mark.take(character)
        text = ""
        for i, each in enumerate(characters):
            if each == "<" and not arguments.in_string:
                self._break(characters[i:])
                return text + self._new(arguments.finish())
            text += self._new(arguments.take(each))
            if arguments.done or arguments.broken:
                self.done = self.begun
                if not self.begun or characters[i + 1 :]:
                    self._break(characters[i + 1 :])
                return text
        if ended:
            self._break(self._mark.mark)
            text += self._new(arguments.finish())
        return text

    def _without_arguments(self, head: str) -> str:
        """A name alone is a call if there is such a tool."""
        match = re.fullmatch(self._head.pattern + _NO_ARGUMENTS, head)
        if match is not None:
            self._name(match)
        if not self._offered(self.name):
            return ""
        self.begun = True
        return "{}"


class PythonReader(Reader):
    """Reads NAME(KEY=VALUE, …) with values that are literals of Python or of JSON. Returns all arguments at
    the end."""

    def __init__(
        self, opening: str = "", tools: OfferedTools = NO_TOOLS, names: Container[str] | None = None
    ) -> None:
        """`names`: as of `CallReader`. Behind an `opening` a list may begin."""
        super().__init__(opening, tools)
        self._before = SPACE + "[" if opening else ""
        self._names, self._step = names, self._take_code
        self._code: list[str] = []  # with line breaks in strings as escapes
        self._closers: list[str] = []  # of the open brackets
        self._quote = ""  # of the string that is read
        self._escaped = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing has come but what may be before the call."""
        return not self._code

    def _take_code(self, character: str) -> str:
        if not self._code and character in self._before:
            return ""
        code = _BREAKS.get(character, character) if self._quote else character
        self._code.append("\\" + code if self._escaped and code != character else code)
        if self._quote:
            if not self._escaped and character == self._quote:
                self._quote = ""
            self._escaped = character == "\\" and not self._escaped
        elif not self._closers and character != "(":
            if not (character.isidentifier() or character.isdecimal() or character in "_.-"):
                self._break(character)
        elif character in "\"'":
            self._quote = character
        elif character == "=" and len(self._closers) == 1:
            self._code.insert(-1, _PARAMETER)  # its name may be a keyword of Python
        elif character in "([{":
            self._closers.append(")]}"["([{".index(character)])
        elif character in ")]}":
            self._closers.pop()
            if not self._closers:
                return self._end()
        return ""

    def finish(self, *, ended: bool) -> str:
        if not ended or not self._closers:
            return ""
        self._code += [self._quote, *reversed(self._closers)]
        return self._end()

    def _end(self) -> str:
        call = _python_call("".join(self._code))
        if call is None or (self._names is not None and call[0] not in self._names):
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
        if not isinstance(call, ast.Call) or call.args:
            return None
        named = [(k.arg.removesuffix(_PARAMETER), k.value) for k in call.keywords if k.arg is not None]
        if len(named) < len(call.keywords):
            return None
        name = text[: text.index("(")]
        arguments = {name: ast.literal_eval(_JsonValues().visit(value)) for name, value in named}
        return (name, json.dumps(arguments, allow_nan=False)) if re.fullmatch(FUNCTION_NAME, name) else None
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


class _JsonValues(ast.NodeTransformer):
    """Turns true, false and null into Python's constants, and what is too large for a float into an integer
    that is, too."""

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Constant(10**400) if node.value == math.inf else node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        constants = {"true": True, "false": False, "null": None}
        return ast.Constant(constants[node.id]) if node.id in constants else node
