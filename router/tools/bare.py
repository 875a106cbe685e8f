"""Formats that put no marks around calls."""

from collections.abc import Iterator, Sequence
from typing import ClassVar

from baton.router.api.messages import Tool
from baton.router.tools.json_text import SPACE
from baton.router.tools.parser import Part, ToolParser
from baton.router.tools.readers import CallReader, PythonReader, Reader


class BareParser(ToolParser):
    """Calls in a text without marks around them. What looks like one behind a text is a call only of a tool
    that is offered."""

    marked = False
    before: ClassVar[str] = ""
    """A character that precedes a list of calls."""
    end: ClassVar[str] = ""
    """A character that ends such a list."""
    between: ClassVar[str]
    """Characters that may follow a call, with space."""
    starts: ClassVar[str]
    """The characters that begin a call."""
    reader: ClassVar[type[CallReader] | type[PythonReader]]

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        super().__init__(tools)
        self._listed = False  # a list of calls has begun
        self._follows = False  # a call has ended, and nothing but space and separators has come
        self._said = False  # there is content

    def _take_outside(self, character: str) -> Iterator[Part]:
        if self._strict and self._said:
            yield from self._content(character)
        elif character in self.starts and (self._listed or not self.before):
            names = {tool.function.name for tool in self._tools} if self._said else None
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

    def _end_call(self, call: Reader) -> None:
        self._space.clear()
        self._follows = True

    def _give_up(self, raw: str) -> Iterator[Part]:
        text = "".join(self._space) + raw
        self._space.clear()
        self._said, self._listed, self._follows = True, False, False
        return self._content(text)

    def _end(self) -> Iterator[Part]:
        held = "".join(self._space)
        if held.strip(SPACE + self.between) or not self.num_calls:
            yield Part("content", held)
