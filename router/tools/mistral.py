"""The formats of Mistral: [TOOL_CALLS] [{"name": …, "arguments": {…}}, …], or [TOOL_CALLS]NAME[ARGS]{…}.

Newer models write the second one.
"""

import json
from collections.abc import Callable, Iterator, Sequence

from baton.router.api.messages import Tool
from baton.router.tools.parser import SPACE, CallReader, Marker, Piece, ToolParser, arguments_grammar

CALLS, ARGS = "[TOOL_CALLS]", "[ARGS]"


class MistralParser(ToolParser):
    name = "mistral"
    specials = (CALLS, ARGS)

    def __init__(self) -> None:
        super().__init__()
        self._marker = Marker(CALLS)
        self._head: str | None = None  # text between the marker and a call; None: outside of calls
        self._listed = False  # the calls are in a list
        self._call: CallReader | None = None

    @classmethod
    def grammar(cls, tools: Sequence[Tool], *, many: bool, spell: Callable[[str], str]) -> str:
        calls = 'call (", " call)*' if many else "call"
        return f'start: {spell(CALLS)} "[" {calls} "]"\n{arguments_grammar(tools, "arguments")}'

    def _take(self, character: str) -> Iterator[Piece]:
        if self._call is not None:
            yield from self._in_call(self._call, character)
        elif self._head is None:
            text, found = self._marker.take(character)
            if text:
                yield Piece(text)
            self._head = "" if found else None
        elif character == "{":
            yield from self._begin(self._head)
        elif self._listed and character == "]":
            self._head, self._listed = None, False
        elif character == "[" and not self._listed and not self._head.strip(SPACE):
            self._listed = True
        else:
            self._head += character

    def _begin(self, head: str) -> Iterator[Piece]:
        """Begins a call, at its first brace. `head` is the text before it."""
        call = CallReader()
        if not self._listed:
            name = head.strip(SPACE).removesuffix(ARGS).strip(SPACE)
            if not name:
                self._head = None
                yield Piece(CALLS + head + "{")
                return
            for character in f'{{"name": {json.dumps(name)}, "arguments": ':
                call.take(character)
        self._call = call
        yield from self._in_call(call, "{")

    def _in_call(self, call: CallReader, character: str) -> Iterator[Piece]:
        yield from self._read(call, character)
        named = not self._listed
        if call.over or (named and call.begun and not call.reading_arguments):
            if not call.begun:
                yield Piece(call.raw)
            self._call = None
            # In a list, a comma or the closing bracket follows. Otherwise content or the next marker follows.
            self._head = None if named else ""

    def _end(self) -> Iterator[Piece]:
        if self._call is not None:
            if not self._call.begun:
                yield Piece(self._call.raw)
        elif self._head is None:
            yield from [Piece(self._marker.held)] if self._marker.held else []
        elif not self.num_calls:
            yield Piece(CALLS + self._head)
