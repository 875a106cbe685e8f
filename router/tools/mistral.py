"""The formats of Mistral: [TOOL_CALLS] [{"name": …, "arguments": {…}}, …], or [TOOL_CALLS]NAME[ARGS]{…}.

Newer models write the second one.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence

from baton.router.api.messages import FUNCTION_NAME, Tool
from baton.router.tools.parser import SPACE, CallReader, Marker, Piece, ToolParser, arguments_grammar

CALLS, ARGS = "[TOOL_CALLS]", "[ARGS]"
_HEAD = re.compile(rf"[{SPACE}]*[\w.-]*[{SPACE}]*(\[(A(R(G(S(\][{SPACE}]*)?)?)?)?)?)?")
"""What may be between the marker and the arguments of a call: its name. The end may be missing."""
_LONGEST_HEAD = 256


class MistralParser(ToolParser):
    name = "mistral"
    specials = (CALLS, ARGS)

    def __init__(self) -> None:
        super().__init__()
        self._marker = Marker(CALLS)
        self._held: list[str] | None = None  # text since the marker or the last call; None: outside of calls
        self._listed = False  # the calls are in a list
        self._call: CallReader | None = None

    @classmethod
    def grammar(cls, tools: Sequence[Tool], *, many: bool, spell: Callable[[str], str]) -> str:
        calls = 'call (", " call)*' if many else "call"
        return f'start: {spell(CALLS)} "[" {calls} "]"\n{arguments_grammar(tools, "arguments")}'

    def _take(self, character: str) -> Iterator[Piece]:
        if self._call is not None:
            yield from self._in_call(self._call, character)
        elif self._held is None:
            text, found = self._marker.take(character)
            if text:
                yield Piece(text)
            self._held = [CALLS] if found else None
        elif self._listed:
            yield from self._in_list(self._held, character)
        else:
            yield from self._in_head("".join(self._held[1:]), self._held, character)

    def _in_list(self, held: list[str], character: str) -> Iterator[Piece]:
        """Takes a character between the calls of a list."""
        if character == "{":
            self._call = CallReader()
            yield from self._in_call(self._call, character)
        elif character == "]" and held[:1] != [CALLS]:
            self._held, self._listed = None, False
        elif character in SPACE + ",":
            held.append(character)
        else:
            yield from self._give_up("", character)

    def _in_head(self, head: str, held: list[str], character: str) -> Iterator[Piece]:
        """Takes a character between the marker and the first call."""
        name = head.strip(SPACE).removesuffix(ARGS).strip(SPACE)
        if character == "{" and re.fullmatch(FUNCTION_NAME, name):
            self._call = CallReader()
            for known in f'{{"name": {json.dumps(name)}, "arguments": ':
                self._call.take(known)
            yield from self._in_call(self._call, character)
        elif character == "[" and not name:
            self._listed = True
            held.append(character)
        elif len(head) < _LONGEST_HEAD and _HEAD.fullmatch(head + character):
            held.append(character)
        else:
            yield from self._give_up("", character)

    def _in_call(self, call: CallReader, character: str) -> Iterator[Piece]:
        yield from self._read(call, character)
        ended = call.over or (not self._listed and call.begun and not call.reading_arguments)
        if not ended:
            return
        self._call = None
        if not call.begun:
            yield from self._give_up(call.raw[:-1], character)
        elif call.broken:
            self._held = []
            yield from self._give_up("", character)
        else:
            # In a list, a comma or the closing bracket follows. Otherwise content or the next marker follows.
            self._held = [] if self._listed else None

    def _give_up(self, text: str, character: str) -> Iterator[Piece]:
        """Reads what is held, and this text, as content. The character may begin a marker."""
        yield Piece("".join(self._held or ()) + text)
        self._held, self._listed = None, False
        yield from self._take(character)

    def _end(self) -> Iterator[Piece]:
        held = "".join(self._held or ())
        if self._call is not None:
            if not self._call.begun:
                yield Piece(held + self._call.raw)
        elif self._held is None:
            yield Piece(self._marker.held)
        elif held.startswith(CALLS):
            yield Piece(held)
