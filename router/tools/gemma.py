"""Calls of Gemma 4, whose arguments are an object in a language of its own."""

import re
from collections.abc import Sequence

from baton.router.tools.json_text import Arguments
from baton.router.tools.marker import Marker
from baton.router.tools.offered import OfferedTools
from baton.router.tools.readers import NAME, NamedCallReader

QUOTE = '<|"|>'
"""Before and behind a string, which may have any characters."""
_HEAD = re.compile(rf"\s*+(call:)?+\s*+{NAME}\s*+")
_LOOKED_AT = 4096
_ESCAPED = {'"': '\\"', "\\": "\\\\"}


class GemmaReader(NamedCallReader):
    """Reads call:NAME{KEY:<|"|>TEXT<|"|>,KEY:1.5,…}. Keys have no quotes, and JSON is read as well."""

    def __init__(self, opening: str, tools: OfferedTools, ends: Sequence[str]) -> None:
        super().__init__(_HEAD, opening, tools, ends)
        self._quote = Marker(QUOTE)
        self._in_text = False  # between two of these

    def take_plain(self, text: str, at: int) -> str:
        if self._quote.pending:
            return ""
        # At most so much of a long text is looked at again for each of its marks.
        end = text.find("<", at, at + _LOOKED_AT)
        return super().take_plain(text[at : end if end >= 0 else at + _LOOKED_AT], 0)

    def _take_arguments(self, arguments: Arguments, character: str) -> str:
        text, quote = self._quote.take(character)
        pieces = "".join(self._take_each(arguments, text))
        if quote and not self.over:
            self._in_text = not self._in_text
            pieces += super()._take_arguments(arguments, '"')
        return pieces

    def _take_each(self, arguments: Arguments, text: str) -> list[str]:
        pieces: list[str] = []
        for at, each in enumerate(text):
            if self.over:
                self.unread += text[at:]
                break
            for escaped in _ESCAPED.get(each, each) if self._in_text else each:
                pieces.append(super()._take_arguments(arguments, escaped))
        return pieces
