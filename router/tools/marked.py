"""Formats that put marks around each call."""

import re
from collections.abc import Iterator, Sequence
from typing import ClassVar

from baton.router.api.messages import Tool
from baton.router.tools.json_text import SPACE
from baton.router.tools.marker import Marker
from baton.router.tools.pairs import Pairs, PairsReader
from baton.router.tools.parser import Part, ToolParser
from baton.router.tools.readers import CallReader, NamedCallReader, Reader


class MarkedParser(ToolParser):
    """Calls between an opening and a closing mark."""

    opening: ClassVar[str]
    bare: ClassVar[tuple[str, ...]] = ()
    """What begins a call whose opening mark the model has left out."""
    closing: ClassVar[str] = ""
    """Empty: the reader of a call finds its end."""
    section_marks: ClassVar[tuple[str, ...]] = ()
    """Marks around all calls. They are never content."""
    before_closing: ClassVar[str] = "}`"
    """Characters that may stand between a call and its closing mark, with space."""
    head: ClassVar[re.Pattern[str]]
    """What is between the opening mark and the arguments, if these are an object."""
    pairs: ClassVar[Pairs | None] = None
    """If the arguments are keys and values."""

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        super().__init__(tools)
        bare = () if self._strict else self.bare
        marks = self.opening, *bare, *self.section_marks, *filter(None, (self.closing,))
        specials = (each for each in self.specials if not any(each in mark for mark in marks))
        self._open = Marker(*marks, *specials)
        end = self.pairs.end if self.pairs is not None else ""
        self._ends = tuple(filter(None, (end, self.closing))) or ("\0",)
        self._close = Marker(*self._ends)
        self._closing = False  # a call has ended, and its closing mark may follow

    def _reader(self, opening: str) -> Reader:
        if self.pairs is not None:
            return PairsReader(self.pairs, opening, self._tools)
        ends = (each for each in (self.closing, self.opening, *self.section_marks) if each)
        return NamedCallReader(self.head, opening, self._tools, tuple(ends))

    def _plain_end(self, text: str, at: int) -> int:
        return at if self._closing else self._open.begin(text, at)

    def _take(self, character: str) -> Iterator[Part]:
        call = self._call
        if character == "{" and isinstance(call, PairsReader) and not call.begun:
            self._call = self._json_reader(call)
        yield from super()._take(character)

    def _json_reader(self, call: PairsReader) -> Reader:
        """Returns a reader of JSON, for a call or for arguments that begin where a tag should be."""
        opening, head = call.head
        if opening and not head.strip():
            return CallReader(opening + head, self._tools)
        assert self.pairs is not None
        match = self.pairs.head.fullmatch(head)
        if match is None or match["name"] not in self._tools:
            return call
        reader = NamedCallReader(self.pairs.head, opening, self._tools, self.pairs.ends)
        for each in head:
            reader.take(each)
        return reader

    def _take_outside(self, character: str) -> Iterator[Part]:
        if self._closing:
            text, closed = self._close.take(character)
            if closed:
                self._closing = self._close.mark != self._ends[-1]
                return
            self._closing = not text.strip(SPACE + self.before_closing)
            if self._closing:
                return
            character, self._close.pending = text + self._close.pending, ""
        text, after = self._open.split(character)
        yield from self._content(text)
        if after is None:
            return
        mark = self._open.mark
        if mark == self.opening:
            self._call = self._reader(mark)
        elif mark in self.bare:
            self._call = self._reader("")
            for each in mark:
                self._call.take(each)
        elif mark == self.closing and mark not in self.specials and not self.num_calls:
            self._space.append(mark)

    def _end_call(self, call: Reader) -> None:
        self._space.clear()
        self._closing = bool(self.closing) or not isinstance(call, PairsReader)

    def _give_up(self, raw: str) -> Iterator[Part]:
        return self._content(raw)

    def _end(self) -> Iterator[Part]:
        pending = self._open.pending
        if not self.num_calls or len(pending) == 1:  # else a mark behind a call is cut off
            yield from self._content(pending)
        yield from super()._end()
