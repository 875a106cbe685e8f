"""Reads calls whose arguments are keys and values between tags."""

import json
import re
from dataclasses import dataclass

from baton.router.tools.json_text import SPACE, mended
from baton.router.tools.marker import Marker
from baton.router.tools.offered import Keys, OfferedTools
from baton.router.tools.readers import MAX_HEAD, Reader
from baton.router.tools.schema import Types, as_json

_PLAIN = re.compile(r"[^<\"\\\x00-\x1f]+")
"""Characters that begin no tag and need no escape in a JSON string."""


@dataclass(frozen=True)
class Pairs:
    """How a format writes the name of a function, and its arguments as keys and values."""

    head: re.Pattern[str]
    """Between the opening mark and the first pair. Its group is the name of the function. A group `text` has
    no meaning."""
    before_key: str
    after_key: re.Pattern[str]
    """A key and what stands between it and its value. Its group is the key. A group `string` says whether the
    value is a string ("true") or JSON ("false")."""
    value_end: str
    end: str
    """Behind the last pair."""
    begins: tuple[str, ...]
    """What begins another call. Inside of a head only the first one does."""
    closing: str = ""
    """Behind `end`."""
    skips_newlines: bool = False
    """A value is on lines of its own."""

    @property
    def ends(self) -> tuple[str, ...]:
        """What ends a call."""
        return tuple(filter(None, (self.end, self.closing)))


class PairsReader(Reader):
    """Reads a function's name, and its arguments as keys and values between tags.

    The text of a value is what the tool's schema says: a string, which is returned as it arrives, or JSON.

    Models forget tags. The end of a call also ends an open value, if another call or the end of the text
    follows. So does a key that the tool has and the call has not had. All other tags are a part of the value.
    Text between two tags has no meaning.
    """

    def __init__(self, form: Pairs, opening: str, tools: OfferedTools) -> None:
        super().__init__(opening, tools)
        self._form = form
        self._step = self._take_head
        self._pending = ""  # text that is neither returned nor a part of a value
        self._spaces: list[str] = []  # before it, behind an end inside of a value
        self._value: list[str] = []
        self._types: Types = frozenset()
        self._is_json = False  # the model says so
        self._fresh = False  # a new line may precede the value
        self._keys: set[str] = set()  # so far
        self._unused_keys: Keys | None = None  # the tool has these, and the call has not had them
        self._begins_with_key = False  # what has come behind the tag before a key
        tags = form.value_end, *form.ends, form.before_key
        self._tags = Marker(*(f"\n{tag}" for tag in tags if form.skips_newlines), *tags)

    @property
    def head(self) -> tuple[str, str]:
        """The mark before the call, and what has come behind it, if the call has not begun."""
        return self._raw[0], "".join(self._raw[1:])

    def take_plain(self, text: str, at: int) -> str:
        reads = self._step == self._take_value and self._types == {"string"}
        match = _PLAIN.match(text, at) if reads and not self._fresh and not self._tags.pending else None
        return "" if match is None else match[0]

    def finish(self, *, ended: bool) -> str:
        if self._step == self._take_head:
            return self._named(self._pending, self._form.ends[-1]) if ended else ""
        if self._step == self._take_between:
            tags = self._form.before_key, *self._form.ends, *self._form.begins
            cut_off = any(tag.startswith(self._pending) for tag in tags)
            self.unread = "" if cut_off else self._pending
            ended = ended or bool(self._pending)
        if ended or self.unread:
            return self._last_value() + "}"
        if self._step == self._take_key:
            return self._separator() + json.dumps(self._pending, ensure_ascii=False)[:-1]
        if self._step != self._take_value:
            return ""
        if self._types == {"string"}:
            return _escaped(self._tags.pending)
        return as_json("".join(self._value) + self._tags.pending, self._types)

    def _last_value(self) -> str:
        """Returns the end of a value that has none, at the end of the text."""
        if self._step == self._take_value:
            text = self._tags.pending
            return self._end_value("" if text == "\n" or text.strip("\n").startswith("</") else text)
        if self._step == self._take_after_end:
            return self._end_value("")
        if self._step == self._take_next_key:
            return self._end_value(self._tags.mark + self._pending)
        return ""

    def _take_head(self, character: str) -> str:
        self._pending += character
        for tag in (self._form.before_key, *self._form.ends):
            if self._pending.endswith(tag):
                text = self._named(self._pending.removesuffix(tag), tag)
                return text if self.begun else self._break(character)
        begin = self._form.begins[0]
        if self._pending.endswith(begin):
            text = self._named(self._pending.removesuffix(begin), self._form.ends[-1])
            self._break(begin)
            return text
        return self._break(character) if len(self._pending) > MAX_HEAD else ""

    def _named(self, head: str, tag: str) -> str:
        """Takes what precedes the arguments, and the tag behind it."""
        match = self._form.head.fullmatch(head)
        if match is None:
            return ""
        # Without a tag of its own, a name may be any word. Without a mark, all may be text about calls.
        text = "" if self._raw[0] else match.groupdict().get("text") or ""
        if (tag == self._form.ends[-1] or text.strip(SPACE)) and not self._offered(match["name"]):
            return ""
        self.name, self.begun = match["name"], True
        return "{" + self._after_tag(tag)

    def _after_tag(self, tag: str) -> str:
        self._pending = ""
        if tag == self._form.before_key:
            self._step = self._take_key
            return ""
        self.done = tag == self._form.end
        if not self.done:
            self._break(tag)
        return "}"

    def _take_key(self, character: str) -> str:
        self._pending += character
        if character == ">" and (match := self._form.after_key.fullmatch(self._pending)):
            return self._begin_value(match)
        if len(self._pending) > MAX_HEAD:
            self._break(self._form.before_key + self._pending)
            return "}"
        return ""

    def _begin_value(self, match: re.Match[str]) -> str:
        key, self._pending = match["key"].strip(SPACE), ""
        string = match.groupdict().get("string")
        self._types = self._types_of(key, string)
        self._is_json = string == "false" and self._types != {"string"}
        self._value.clear()
        self._step, self._fresh = self._take_value, self._form.skips_newlines
        begin = '"' if self._types == {"string"} else ""
        text = f"{self._separator()}{json.dumps(key, ensure_ascii=False)}: {begin}"
        self._keys.add(key)
        if self._unused_keys is not None:
            self._unused_keys.remove(key)
        return text

    def _separator(self) -> str:
        return ", " if self._keys else ""

    def _types_of(self, key: str, string: str | None) -> Types:
        types = self._tools.types(self.name, key)
        return types & {"string"} or types if string == "true" else types

    def _take_value(self, character: str) -> str:
        text, end_tag = self._tags.take(character)
        text = self._of_value(text)
        if not end_tag:
            return text
        tag = self._tags.mark.strip("\n")
        if tag == self._form.value_end:
            self._step, self._pending = self._take_between, ""
            return text + self._end_value("")
        self._pending, self._spaces, self._begins_with_key = "", [], False
        self._step = self._take_next_key if tag == self._form.before_key else self._take_after_end
        return text

    def _of_value(self, text: str) -> str:
        if self._fresh and text:
            self._fresh, text = False, text.removeprefix("\n")
        if self._types == {"string"}:
            return _escaped(text)
        self._value.append(text)
        return ""

    def _end_value(self, text: str) -> str:
        """`text`: the last part of the value."""
        text = self._of_value(text)
        return text + '"' if self._types == {"string"} else self._json("".join(self._value))

    def _json(self, text: str) -> str:
        better = mended(text)
        if self._is_json and better is not None:
            return better
        word = text.strip()
        if word.lower() in ("true", "false") and "boolean" in self._types:
            return word.lower()
        if better is not None and better[0] == '"' and "string" not in self._types:
            text = json.loads(better)  # "5" for 5
        value = as_json(text, self._types)
        if value.startswith('"') and better is not None and better[0] in "{[":
            better = as_json(better, self._types)
            return value if better.startswith('"') else better
        return value

    def _take_after_end(self, character: str) -> str:
        """Behind a tag that ends the call, inside of a value."""
        if character in SPACE and not self._pending:
            self._spaces.append(character)
            return ""
        self._pending += character
        form, follow = self._form, self._form.begins
        if form.closing and self._tags.mark.strip("\n") == form.end:
            follow = form.closing, *follow
        if self._pending in follow:
            text = self._end_value("") + "}"
            self._break(self._pending)
            return text
        return "" if any(tag.startswith(self._pending) for tag in follow) else self._go_on()

    def _take_next_key(self, character: str) -> str:
        """Behind the tag before a key, inside of a value."""
        self._pending += character
        text = self._pending.lstrip("\"'")
        if self._unused_keys is None:
            self._unused_keys = self._tools.keys(self.name, self._keys)
        keys = self._unused_keys
        self._begins_with_key = self._begins_with_key or "" in keys or text in keys
        match = self._form.after_key.fullmatch(self._pending) if character == ">" else None
        if match is not None and match["key"].strip(SPACE) in keys:
            return self._end_value("") + self._begin_value(match)
        may_be = self._begins_with_key or keys.begins(text)
        return "" if match is None and may_be and len(text) <= MAX_HEAD else self._go_on()

    def _go_on(self) -> str:
        """Takes a tag and the text behind it as a part of the value."""
        behind = "".join(self._spaces) + self._pending
        self._step = self._take_value
        return self._of_value(self._tags.mark) + "".join(map(self.take, behind))

    def _take_between(self, character: str) -> str:
        self._pending = (self._pending + character).lstrip(SPACE)
        form = self._form
        for tag in (form.before_key, *form.ends):
            if self._pending.endswith(tag):
                return self._after_tag(tag)
        begin = next((begin for begin in form.begins if self._pending.endswith(begin)), "")
        if begin or len(self._pending) > MAX_HEAD:
            self._break(begin or self._pending)
            return "}"
        return ""


def _escaped(text: str) -> str:
    """Returns the text as a part of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
