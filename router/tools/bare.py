"""Formats that put no marks around calls."""

from collections.abc import Iterator, Sequence
from typing import ClassVar

from baton.router.api.messages import Tool
from baton.router.tools.json_text import SPACE, JsonText
from baton.router.tools.marker import Marker
from baton.router.tools.parser import Part, ToolParser
from baton.router.tools.readers import CallReader, PythonReader, Reader


class BareParser(ToolParser):
    """Calls in a text without marks around them. What looks like one behind a text is a call only of a tool
    that is offered."""

    marked = False
    before: ClassVar[str]
    """A character that precedes a list of calls."""
    end: ClassVar[str]
    """A character that ends such a list."""
    in_lists: ClassVar[bool] = True
    """All calls are in lists."""
    between: ClassVar[str]
    """Characters that may follow a call, with space."""
    starts: ClassVar[str]
    """The characters that begin a call."""
    reader: ClassVar[type[CallReader] | type[PythonReader]]
    opening: ClassVar[str]
    """May precede calls. It is not content then. In most tokenizers it is a special token."""
    closing: ClassVar[str | None] = None
    """May follow calls, likewise."""

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        super().__init__(tools)
        self._listed = False  # a list of calls has begun
        self._follows = False  # a call has ended, and nothing but space and separators has come
        self._has_content = False  # there is content
        self._object: JsonText | None = None  # that is no call: what is in it is no call either
        self._around = Marker("```", self.opening, *filter(None, [self.closing]))
        self._language = False  # the name of a language may follow a fence
        self._fenced = False  # a call has ended in a block of Markdown that is not
        starts = "" if self.in_lists or self._strict else self.starts
        self._begin = Marker("`", self.before, self.opening, *starts)

    def _plain_end(self, text: str, at: int) -> int:
        # Behind other text than space. What else is pending has set one of these.
        waits = self._listed or self._follows or self._language or self._fenced or self._around.pending
        return (
            at if waits or self._object is not None or not self._has_content else self._begin.begin(text, at)
        )

    def _take_outside(self, character: str) -> Iterator[Part]:
        if self._object is not None:
            self._object.take(character)
            self._object = None if self._object.done else self._object
            yield from self._content(character)
            return
        if self._strict and self._has_content:
            yield from self._content(character)
        elif self._around.begin(character) == 0:
            yield from self._take_around(character)
        elif self._language and character.isalpha():
            self._space.append(character)
        elif character in self.starts and (self._listed or not self.in_lists):
            names = self._tools if self._has_content else None
            self._call = self.reader(tools=self._tools, names=names)
            yield from self._take(character)
        elif self._listed and self._follows and character == self.end:
            self._space.clear()
            self._listed = False
        elif character == self.before and not self._listed:
            self._listed = True
            self._space.append(character)
        elif character in SPACE or (self._follows and character in self.between):
            self._space.append(character)
        else:
            yield from self._give_up("")
            if character == self.before:
                yield from self._take_outside(character)
            else:
                yield from self._content(character)

    def _take_around(self, character: str) -> Iterator[Part]:
        """Marks around calls, and blocks of Markdown, are not content."""
        text, complete = self._around.take(character)
        if text:
            yield from self._give_up("")
            yield from self._content(text if self._around.pending else text[:-1])
            if not self._around.pending:
                yield from self._take_outside(character)
        elif complete and self._around.mark != "```":
            if not (self._follows and self._around.mark == self.closing):
                self._space.append(self._around.mark)
        elif complete and self._fenced:
            self._space.clear()
            self._fenced = False
        elif complete:
            self._space.append("```")
            self._language = True

    def _end_call(self, call: Reader) -> None:
        self._fenced = self._fenced or "```" in self._space
        self._space.clear()
        self._follows, self._language = True, False

    def _give_up(self, raw: str) -> Iterator[Part]:
        if raw.startswith("{") and raw.endswith(":"):  # behind a key that no call has
            self._object = JsonText()
            for each in raw:
                self._object.take(each)
        text = "".join(self._space) + raw
        self._space.clear()
        self._has_content, self._listed, self._follows = True, False, False
        self._language = self._fenced = False
        return self._content(text)

    def _end(self) -> Iterator[Part]:
        text = "".join(self._space) + self._around.pending
        if text.strip(SPACE + self.between) or not self.num_calls:
            yield Part("content", text)
