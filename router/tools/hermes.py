"""The format of Hermes, Qwen 2.5 and Qwen 3: <tool_call>{"name": …, "arguments": {…}}</tool_call>."""

from collections.abc import Callable, Iterator, Sequence

from baton.router.api.messages import Tool
from baton.router.tools.parser import SPACE, CallReader, Marker, Piece, ToolParser, arguments_grammar

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    name = "hermes"

    def __init__(self) -> None:
        super().__init__()
        self._open, self._close = Marker(OPEN), Marker(CLOSE)
        self._space: list[str] = []  # held back, because space before a call is not content
        self._call: CallReader | None = None
        self._closing = False  # a call has ended, and its closing tag may follow

    @classmethod
    def grammar(cls, tools: Sequence[Tool], *, many: bool, spell: Callable[[str], str]) -> str:
        one = f'"{OPEN}\\n" call "\\n{CLOSE}"'
        start = f'start: one ("\\n" one)*\none: {one}' if many else f"start: {one}"
        return f"{start}\n{arguments_grammar(tools, 'arguments')}"

    def _take(self, character: str) -> Iterator[Piece]:
        if self._call is not None:
            yield from self._in_call(self._call, character)
            return
        if self._closing:
            text, closed = self._close.take(character)
            self._closing = not closed and not text.strip(SPACE + "}")
            if closed or self._closing:
                return
            character, self._close.held = text + self._close.held, ""
        text, after = self._open.split(character)
        yield from self._content(text)
        self._call = None if after is None else CallReader()

    def _in_call(self, call: CallReader, character: str) -> Iterator[Piece]:
        yield from self._read(call, character)
        if call.begun:
            self._space.clear()
        if not call.over:
            return
        self._call, self._closing = None, call.begun
        if not call.begun:
            yield from self._content(OPEN + call.raw[:-1])
        if call.broken:
            yield from self._take(character)

    def _end(self) -> Iterator[Piece]:
        if self._call is None:
            yield from self._content(self._open.held)
        elif not self._call.begun:
            yield from self._content(OPEN + self._call.raw)
        if self._space and not self.num_calls:
            yield Piece("".join(self._space))

    def _content(self, text: str) -> Iterator[Piece]:
        kept = text.rstrip(SPACE)
        if kept:
            yield Piece("".join(self._space) + kept)
            self._space.clear()
        if len(kept) < len(text):
            self._space.append(text[len(kept) :])
