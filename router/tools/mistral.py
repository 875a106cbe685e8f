"""The formats of Mistral's models, old and new."""

import re
from collections.abc import Iterator, Sequence

from baton.router.api.messages import Tool
from baton.router.tools.grammar import Written
from baton.router.tools.json_text import SPACE
from baton.router.tools.marker import Marker
from baton.router.tools.parser import Part, ToolParser
from baton.router.tools.readers import NAME, CallReader, NamedCallReader, Reader

CALLS = "[TOOL_CALLS]"
_ID = r"(\[CALL_ID\]\s*+((?P<id>[a-zA-Z0-9]{9})\s*|[^\[\]{}]*))?"
_HEAD = re.compile(rf"\s*+{NAME}\s*+{_ID}(\[ARGS\]\s*+)?+")
"""What is between the marker and the arguments of a call that is not in a list."""


class MistralParser(ToolParser):
    """[TOOL_CALLS] [{"name": …, "arguments": {…}}, …], or [TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{…}.

    Newer models write the second one, with or without the id.
    """

    name = "mistral"
    mark = CALLS
    specials = (CALLS, "[ARGS]", "[CALL_ID]")
    written = Written('{"name": "{name}", "arguments": {arguments}}', ", ", begin=CALLS + "[", end="]")

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        super().__init__(tools)
        self._marker = Marker(*self.specials)
        self._held: list[str] | None = None  # text since the marker or the last call; None: outside of calls
        self._listed = False  # the calls are in a list

    def _plain_end(self, text: str, at: int) -> int:
        return self._marker.begin(text, at) if self._held is None else at

    def _take_outside(self, character: str) -> Iterator[Part]:
        if self._held is None:
            text, found = self._marker.take(character)
            yield from self._content(text)
            self._held = [CALLS] if found and self._marker.found == CALLS else None
        elif self._listed:
            yield from self._take_in_list(self._held, character)
        elif character in SPACE:
            self._held.append(character)
        elif character == "[":
            self._listed = True
            self._held.append(character)
        else:
            named = NamedCallReader(_HEAD, "", self._tools, (CALLS,))
            self._call = CallReader(CALLS, self._tools) if character == "{" else named
            yield from self._take(character)

    def _take_in_list(self, held: list[str], character: str) -> Iterator[Part]:
        """Takes a character between the calls of a list."""
        if character == "{":
            self._call = CallReader("", self._tools)
            yield from self._take(character)
        elif character in SPACE + ",":
            held.append(character)
        elif held[:1] == [CALLS] and CALLS.startswith("".join(held[held.index("[") :]) + character):
            held.append(character)  # the marker again
            if character == "]":
                self._held, self._listed = [CALLS], False
        elif character == "]" and not "".join(held).removeprefix(CALLS).strip("[," + SPACE):
            self._held, self._listed = None, False
        else:
            yield from self._give_up("")
            yield from self._take(character)

    def _end_call(self, call: Reader) -> None:
        # In a list, a comma or the closing bracket follows. Otherwise content or the next marker follows.
        self._space.clear()
        self._listed = self._listed and not call.broken
        self._held = [] if self._listed else None

    def _give_up(self, raw: str) -> Iterator[Part]:
        held = "".join(self._held or ())
        self._held, self._listed = None, False
        return self._content(held + raw)

    def _end(self) -> Iterator[Part]:
        held = [self._marker.held] if self._held is None else self._held
        if self._held is None or held[:1] == [CALLS]:
            yield from self._content("".join(held))
        yield from super()._end()
