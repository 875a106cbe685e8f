"""Reads JSON that a model has written, and mends what other languages allow and JSON does not.

`JsonText` reads one value, `Arguments` the value that is to be the arguments of a call.
"""

import json
import re
from typing import Literal

SPACE = " \t\r\n"
_CLOSERS = {"{": "}", "[": "]"}
_WORDS = {"True": "true", "False": "false", "None": "null"}
_JSON_WORD = re.compile(r"true|false|null|-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
QUOTES = "'", '"'
_BEGINNINGS = ("{", "[", "n", "N", "", *QUOTES)
"""What arguments begin with. Nothing: they are missing."""
_PLAIN = re.compile(r"[^\"'\\\x00-\x1f\ud800-\udfff]+")
"""Characters of any JSON string."""
_HEX = frozenset("0123456789abcdefABCDEF")


class JsonText:
    """Takes the characters of one value. Returns the same as JSON, as soon as later ones cannot change it.

    It mends control characters in strings, escapes that JSON does not have, single quotes, the constants of
    Python, words without quotes, and commas, colons, values and closing brackets that are missing or too
    many. So an object or a list is always JSON.

    Attributes:
        done: the value is complete.
        unread: the character that ended it, if it is not a part of it.
    """

    def __init__(self) -> None:
        self.done = False
        self.unread = ""
        self._closers: list[str] = []  # of the open brackets
        self._open = dict.fromkeys(_CLOSERS.values(), 0)  # how many brackets each of them closes
        self._due: Literal["key", "colon", "value", "comma"] = "value"  # in the innermost of them
        self._quote = ""  # of the string that is read
        self._escape = ""  # that is read, from its backslash on
        self._word: list[str] = []  # outside of strings, in characters
        self._is_key = False  # the string or word that is read is a key
        self._comma: list[str] = []  # held back, with the space behind it

    @property
    def in_string(self) -> bool:
        return bool(self._quote)

    def take(self, character: str) -> str:
        if self._quote:
            return self._take_in_string(character)
        if self._word and character not in '{}[]:,"\r\n':
            self._word.append(character)
            return ""
        word = self._end_word()
        if word and not self._closers:
            self.done, self.unread = True, character
            return word
        return word + self._take_outside(character)

    def take_plain(self, text: str, at: int) -> str:
        """Takes the characters of a string from `at` on that need no escape. Returns them."""
        match = _PLAIN.match(text, at) if self._quote and not self._escape else None
        return "" if match is None else match[0]

    def finish(self) -> str:
        """Returns what is held back, and what the value lacks: ends of strings and of brackets."""
        text = '"' if self._quote else self._end_word()
        text += self._missing() + "".join(reversed(self._closers))
        self._closers.clear()
        self._quote = self._escape = ""
        self._comma.clear()
        self.done = True
        return text

    def pending(self) -> str:
        """Returns what is held back, as the model has written it."""
        return "".join(self._comma) + "".join(self._word) + self._escape

    def _take_outside(self, character: str) -> str:
        if character in SPACE:
            if not self._comma:
                return character
            self._comma.append(character)
        elif character == ",":
            text = self._missing()
            if self._due == "comma" and not self._comma:
                self._comma.append(character)
            return text
        elif character == ":":
            if self._due == "colon":
                self._due = "value"
                return character
        else:
            return self._close(character) if character in "}]" else self._begin(character)
        return ""

    def _in_object(self) -> bool:
        return self._closers[-1:] == ["}"]

    def _missing(self) -> str:
        """Returns what a key lacks."""
        if self._due == "colon" or (self._due == "value" and self._in_object()):
            text = "null" if self._due == "value" else ": null"
            self._due = "comma"
            return text
        return ""

    def _begin(self, character: str) -> str:
        """Begins a key or a value."""
        is_key = self._due == "key" or (self._due == "comma" and self._in_object())
        if is_key and character in "{[":
            return ""
        text = ": " if self._due == "colon" else ""
        if self._due == "comma" and self._closers:
            text = "".join(self._comma) or ", "
            self._comma.clear()
        self._is_key, self._due = is_key, "colon" if is_key else "comma"
        if character in QUOTES:
            self._quote = character
            return text + '"'
        if character in "{[":
            self._closers.append(_CLOSERS[character])
            self._open[_CLOSERS[character]] += 1
            self._due = "key" if character == "{" else "value"
            return text + character
        self._word.append(character)
        return text

    def _end_word(self) -> str:
        word = "".join(self._word)
        self._word.clear()
        stripped = word.rstrip(SPACE)
        if not stripped:
            return ""
        space = word[len(stripped) :]
        if self._is_key or not _JSON_WORD.fullmatch(stripped):
            constant = None if self._is_key else _WORDS.get(stripped)
            stripped = constant or '"' + "".join(map(_in_json, stripped)) + '"'
        return stripped + space

    def _close(self, bracket: str) -> str:
        """Closes all brackets up to the last one of this kind. If there is none, it is left out."""
        space = "".join(self._comma[1:])
        self._comma.clear()
        if not self._open[bracket]:
            return space
        text = self._missing()
        while not text.endswith(bracket):
            text += self._closers.pop()
            self._open[text[-1]] -= 1
        self._due = "comma"
        self.done = not self._closers
        return space + text

    def _take_in_string(self, character: str) -> str:
        if self._escape:
            return self._take_in_escape(character)
        if character == "\\":
            self._escape = character
            return ""
        if character == self._quote:
            self._quote = ""
            self.done = not self._closers
            return '"'
        return _in_json(character)

    def _take_in_escape(self, character: str) -> str:
        escape = self._escape + character
        self._escape = ""
        if len(escape) == 2 and character in '"\\/bfnrt':
            return escape
        if len(escape) == 2 and character == "'":
            return character
        if character == "u" if len(escape) == 2 else character in _HEX:
            self._escape = escape if len(escape) < 6 else ""
            return "" if self._escape else escape
        return "\\" + escape[:-1] + self._take_in_string(character)


def _in_json(character: str) -> str:
    """Returns the character as a part of a JSON string."""
    if character in '"\\' or character < " ":
        return json.dumps(character)[1:-1]
    return f"\\u{ord(character):04x}" if "\ud800" <= character <= "\udfff" else character


def mended(text: str) -> str | None:
    """Returns an object, a list or a string as JSON. None: the text is not a whole one."""
    reader, json_text = JsonText(), ""
    for character in text.strip(SPACE):
        if reader.done:
            return None
        json_text += reader.take(character)
    if reader.unread or not reader.done:
        return None
    try:
        json.loads(json_text)
    except (ValueError, RecursionError):
        return None
    return json_text


class Arguments:
    """Takes the characters of a call's arguments. Returns the JSON of an object.

    The model may write an object, the same as a JSON string, or nothing that has a meaning: null, "", [].

    Attributes:
        done: they are complete.
        broken: they are no object.
        unread: as of `JsonText`.
    """

    def __init__(self) -> None:
        self.done = self.broken = False
        self._value = JsonText()
        self._kind = ""  # the first character of the value
        self._text: Arguments | None = None  # what is in the string, if the value is one
        self._other_value: list[str] = []  # a value that is neither a string nor an object
        self._in_text = False  # the first quote has come

    @property
    def unread(self) -> str:
        return self._value.unread

    @property
    def in_string(self) -> bool:
        return self._value.in_string

    def take(self, character: str) -> str:
        return self._take(self._value.take(character), character)

    def take_plain(self, text: str, at: int) -> str:
        """As of `JsonText`."""
        return self._value.take_plain(text, at) if self._kind == "{" and not self.done else ""

    def finish(self) -> str:
        """Returns the end of the object, as if the value ended here."""
        return "" if self.done or self.broken else self._take(self._value.finish(), "")

    def pending(self) -> str:
        return "" if self._text is not None else self._value.pending()

    def _take(self, text: str, character: str) -> str:
        if not self._kind:
            if character and character in SPACE:
                return ""
            self._kind = character
            self._text = Arguments() if character in QUOTES else None
            self.broken = character not in _BEGINNINGS
        self.done = self._value.done
        if self._kind == "{":
            return text
        if self._text is not None:
            return self._take_text(self._text, text)
        self._other_value.append(text)
        if not self.done:
            return ""
        self.broken = re.sub(r"\s", "", "".join(self._other_value)) not in ("", "null", "[]")
        return "" if self.broken else "{}"

    def _take_text(self, inner: "Arguments", text: str) -> str:
        """Takes a part of a JSON string, with its quotes."""
        if not self._in_text:
            self._in_text, text = True, text[1:]
        if self.done:
            text = text[:-1]
        decoded = json.loads(f'"{text}"') if "\\" in text else text
        new = "".join(inner.take(character) for character in decoded if not inner.done)
        if self.done:
            new += inner.finish()
        self.broken = inner.broken
        return new
