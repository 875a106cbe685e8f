"""The formats of tool calls: how each family of models writes them."""

import json
import re
from collections.abc import Callable, Iterator

from baton.router.api.messages import FUNCTION_NAME
from baton.router.tools.parser import SPACE, CallReader, Marker, Part, ToolParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    """Hermes, Qwen 2.5 and Qwen 3: <tool_call>{"name": …, "arguments": {…}}</tool_call>."""

    name = "hermes"
    one = f'"{OPEN}\\n" call "\\n{CLOSE}"'
    separator = "\\n"

    def __init__(self) -> None:
        super().__init__()
        self._open, self._close = Marker(OPEN), Marker(CLOSE)
        self._space: list[str] = []  # held back, because space before a call is not content
        self._closing = False  # a call has ended, and its closing tag may follow

    def _take_outside(self, character: str) -> Iterator[Part]:
        if self._closing:
            text, closed = self._close.take(character)
            self._closing = not closed and not text.strip(SPACE + "}")
            if closed or self._closing:
                return
            character, self._close.held = text + self._close.held, ""
        text, after = self._open.split(character)
        yield from self._content(text)
        self._call = None if after is None else CallReader()

    def _end_call(self, call: CallReader) -> None:
        self._space.clear()
        self._closing = True

    def _give_up(self, raw: str) -> Iterator[Part]:
        return self._content(OPEN + raw)

    def _end(self) -> Iterator[Part]:
        yield from self._content(self._open.held)
        if self._space and not self.num_calls:
            yield Part("content", "".join(self._space))

    def _content(self, text: str) -> Iterator[Part]:
        kept = text.rstrip(SPACE)
        if kept:
            yield Part("content", "".join(self._space) + kept)
            self._space.clear()
        if len(kept) < len(text):
            self._space.append(text[len(kept) :])


class LlamaParser(ToolParser):
    """Llama 3.x: the whole output is {"name": …, "parameters": {…}}, or several of these.

    The special token <|python_tag|> may precede the calls. It is not part of the text.
    """

    name = "llama3_json"
    key = "parameters"
    separator = "; "

    def __init__(self) -> None:
        super().__init__()
        self._between: list[str] = []  # characters since the last call, which may be content
        self._only_content = False

    def _take_outside(self, character: str) -> Iterator[Part]:
        if self._only_content:
            yield Part("content", character)
        elif character == "{":
            self._call = CallReader()
            yield from self._take(character)
        else:
            self._between.append(character)
            if character not in SPACE + (";," if self.num_calls else ""):
                yield from self._give_up("")

    def _end_call(self, call: CallReader) -> None:
        self._between = []

    def _give_up(self, raw: str) -> Iterator[Part]:
        """All further text is content, too."""
        self._only_content = True
        yield Part("content", "".join(self._between) + raw)

    def _end(self) -> Iterator[Part]:
        if self._between and not self.num_calls and not self._only_content:
            yield Part("content", "".join(self._between))


CALLS, ARGS = "[TOOL_CALLS]", "[ARGS]"
_HEAD = re.compile(rf"[{SPACE}]*[\w.-]*[{SPACE}]*(\[(A(R(G(S(\][{SPACE}]*)?)?)?)?)?)?")
"""What may be between the marker and the arguments of a call: its name. The end may be missing."""
_LONGEST_HEAD = 256


class MistralParser(ToolParser):
    """[TOOL_CALLS] [{"name": …, "arguments": {…}}, …], or [TOOL_CALLS]NAME[ARGS]{…}.

    Newer models write the second one.
    """

    name = "mistral"
    specials = (CALLS, ARGS)
    separator = ", "

    def __init__(self) -> None:
        super().__init__()
        self._marker = Marker(CALLS)
        self._held: list[str] | None = None  # text since the marker or the last call; None: outside of calls
        self._listed = False  # the calls are in a list

    @classmethod
    def _start(cls, calls: str, spell: Callable[[str], str]) -> str:
        return f'{spell(CALLS)} "[" {calls} "]"'

    def _take_outside(self, character: str) -> Iterator[Part]:
        if self._held is None:
            text, found = self._marker.take(character)
            if text:
                yield Part("content", text)
            self._held = [CALLS] if found else None
        elif self._listed:
            yield from self._take_in_list(self._held, character)
        else:
            yield from self._take_in_head("".join(self._held[1:]), self._held, character)

    def _take_in_list(self, held: list[str], character: str) -> Iterator[Part]:
        """Takes a character between the calls of a list."""
        if character == "{":
            self._call = CallReader()
            yield from self._take(character)
        elif character == "]" and held[:1] != [CALLS]:
            self._held, self._listed = None, False
        elif character in SPACE + ",":
            held.append(character)
        else:
            yield from self._give_up("")
            yield from self._take(character)

    def _take_in_head(self, head: str, held: list[str], character: str) -> Iterator[Part]:
        """Takes a character between the marker and the first call."""
        name = head.strip(SPACE).removesuffix(ARGS).strip(SPACE)
        if character == "{" and re.fullmatch(FUNCTION_NAME, name):
            self._call = CallReader()
            for known in f'{{"name": {json.dumps(name)}, "arguments": ':
                self._call.take(known)
            yield from self._take(character)
        elif character == "[" and not name:
            self._listed = True
            held.append(character)
        elif len(head) < _LONGEST_HEAD and _HEAD.fullmatch(head + character):
            held.append(character)
        else:
            yield from self._give_up("")
            yield from self._take(character)

    def _is_over(self, call: CallReader) -> bool:
        return call.over or (not self._listed and call.begun and not call.reading_arguments)

    def _end_call(self, call: CallReader) -> None:
        # In a list, a comma or the closing bracket follows. Otherwise content or the next marker follows.
        self._listed = self._listed and not call.broken
        self._held = [] if self._listed else None

    def _give_up(self, raw: str) -> Iterator[Part]:
        yield Part("content", "".join(self._held or ()) + raw)
        self._held, self._listed = None, False

    def _end(self) -> Iterator[Part]:
        held = [self._marker.held] if self._held is None else self._held
        if self._held is None or held[:1] == [CALLS]:
            yield Part("content", "".join(held))


FORMATS: dict[str, type[ToolParser]] = {p.name: p for p in (HermesParser, LlamaParser, MistralParser)}
"""The formats of tool calls, by name."""
# A text that is in the chat templates of models with this format.
_MARKS = {
    OPEN: HermesParser,
    CALLS: MistralParser,
    '{"name": function name, "parameters":': LlamaParser,
}


def format_of(template: str) -> type[ToolParser] | None:
    """Returns the format that this chat template uses, or None if it is unknown."""
    return next((parser for mark, parser in _MARKS.items() if mark in template), None)
