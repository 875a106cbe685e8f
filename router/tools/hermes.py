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
        self._space = ""  # held back, because space before a call is not content
        self._call: CallReader | None = None

    @classmethod
    def grammar(cls, tools: Sequence[Tool], *, many: bool, spell: Callable[[str], str]) -> str:
        one = f'"{OPEN}\\n" call "\\n{CLOSE}"'
        start = f'start: one ("\\n" one)*\none: {one}' if many else f"start: {one}"
        return f"{start}\n{arguments_grammar(tools, 'arguments')}"

    def _take(self, character: str) -> Iterator[Piece]:
        call = self._call
        if call is None:
            text, opened = self._open.take(character)
            yield from self._content(text)
            self._call = CallReader() if opened else None
            return
        if call.over:
            call.raw += character
        else:
            yield from self._read(call, character)
        if call.begun:
            self._space = ""
        if call.over and self._close.take(character)[1]:
            if not call.begun:
                yield from self._content(OPEN + call.raw)
            self._call = None

    def _end(self) -> Iterator[Piece]:
        if self._call is None:
            yield from self._content(self._open.held)
        elif not self._call.begun:
            yield from self._content(OPEN + self._call.raw)
        if self._space and not self.num_calls:
            yield Piece(self._space)

    def _content(self, text: str) -> Iterator[Piece]:
        kept = text.rstrip(SPACE)
        if kept:
            yield Piece(self._space + kept)
            self._space = ""
        self._space += text[len(kept) :]
