"""The format of Llama 3.x: the whole output is {"name": …, "parameters": {…}}, or several of these."""

from collections.abc import Callable, Iterator, Sequence

from baton.router.api.messages import Tool
from baton.router.tools.parser import SPACE, CallReader, Piece, ToolParser, arguments_grammar


class LlamaParser(ToolParser):
    """The special token <|python_tag|> may precede the calls. It is not part of the text."""

    name = "llama3_json"

    def __init__(self) -> None:
        super().__init__()
        self._between: list[str] = []  # characters since the last call, which may be content
        self._call: CallReader | None = None
        self._only_content = False

    @classmethod
    def grammar(cls, tools: Sequence[Tool], *, many: bool, spell: Callable[[str], str]) -> str:
        start = 'start: call ("; " call)*' if many else "start: call"
        return f"{start}\n{arguments_grammar(tools, 'parameters')}"

    def _take(self, character: str) -> Iterator[Piece]:
        if self._only_content:
            yield Piece(character)
            return
        if self._call is None:
            if character == "{":
                self._call = CallReader()
            else:
                self._between.append(character)
                if character not in SPACE + (";," if self.num_calls else ""):
                    yield from self._give_up("")
                return
        call = self._call
        yield from self._read(call, character)
        if not call.over:
            return
        if not call.begun:
            yield from self._give_up(call.raw)
            return
        self._call, self._between = None, []
        if call.broken:
            yield from self._take(character)

    def _end(self) -> Iterator[Piece]:
        if self._call is not None and not self._call.begun:
            yield from self._give_up(self._call.raw)
        elif self._between and not self.num_calls and not self._only_content:
            yield Piece("".join(self._between))

    def _give_up(self, raw: str) -> Iterator[Piece]:
        """Reads this and all further text as content."""
        self._only_content, self._call = True, None
        yield Piece("".join(self._between) + raw)
