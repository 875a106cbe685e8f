"""The formats of Mistral's models, old and new."""

import hashlib
import re
from collections.abc import Iterator, Sequence

from baton.router.api.messages import Tool
from baton.router.tools.grammar import Written
from baton.router.tools.json_text import SPACE
from baton.router.tools.marked import MarkedParser
from baton.router.tools.parser import Part
from baton.router.tools.readers import NAME, CallReader, NamedCallReader, Reader

CALLS = "[TOOL_CALLS]"
ID = r"[a-zA-Z0-9]{9}"
_ID = rf"(\[CALL_ID\]\s*+((?P<id>{ID})\s*|[^\[\]{{}}]*))?"


class MistralParser(MarkedParser):
    """[TOOL_CALLS] [{"name": …, "arguments": {…}}, …], or [TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{…}.

    Newer models write the second one, with or without the id.
    """

    name = "mistral"
    mark = opening = CALLS
    specials = (CALLS, "[ARGS]", "[CALL_ID]")
    head = re.compile(rf"\s*+{NAME}\s*+{_ID}(\[ARGS\]\s*+)?+")
    written = Written('{"name": "{name}", "arguments": {arguments}}', ", ", begin=CALLS + "[", end="]")

    @classmethod
    def shown_id(cls, call_id: str) -> str:
        """The vendor's templates refuse ids that are not nine letters or digits. Clients send those of other
        models. A digest is the same in each turn, for the call and for its result."""
        if re.fullmatch(ID, call_id):
            return call_id
        return hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        super().__init__(tools)
        self._listed = False  # inside of a list of calls

    def _plain_end(self, text: str, at: int) -> int:
        return at if self._listed else super()._plain_end(text, at)

    def _take(self, character: str) -> Iterator[Part]:
        call = self._call
        if isinstance(call, NamedCallReader) and character in "[{":
            space = call.head
            if not space.strip(SPACE) and character == "{":
                self._call = CallReader(call.raw, self._tools)
            elif not space.strip(SPACE):
                self._call, self._listed = None, True
                self._space.append(space + character)
                return
        yield from super()._take(character)

    def _take_outside(self, character: str) -> Iterator[Part]:
        if not self._listed:
            yield from super()._take_outside(character)
        elif character == "{":
            self._call = CallReader("", self._tools)
            yield from self._take(character)
        elif character in SPACE + ",":
            self._space.append(character)
        elif character == "]":
            self._space.clear()
            self._listed = False
        else:  # text, or the mark again, which begins as a list does
            pending, self._listed = "".join(self._space), False
            self._space.clear()
            for each in pending + character:
                yield from self._take(each)

    def _end_call(self, call: Reader) -> None:
        # In a list, a comma or the closing bracket follows. Otherwise content or the next mark follows.
        self._space.clear()
        self._listed = self._listed and not call.broken

    def _give_up(self, raw: str) -> Iterator[Part]:
        self._listed = False
        return super()._give_up(raw)
