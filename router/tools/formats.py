"""The formats of tool calls: how each family of models writes them.

A format is a `ToolParser` with data: its marks, the reader of one call, and how the grammar writes a call.
"""

import re
import string
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from baton.router.api.messages import Tool
from baton.router.tools import harmony
from baton.router.tools.grammar import Written
from baton.router.tools.marker import Marker
from baton.router.tools.parser import Part, ToolParser
from baton.router.tools.readers import (
    NAME,
    SPACE,
    CallReader,
    NamedCallReader,
    Pairs,
    PairsReader,
    PythonReader,
    Reader,
)


class MarkedParser(ToolParser):
    """Calls between an opening and a closing mark."""

    opening: ClassVar[str]
    closing: ClassVar[str] = ""
    """Empty: the reader of a call finds its end."""
    around: ClassVar[tuple[str, ...]] = ()
    """Marks around all calls. They are not content."""
    before_closing: ClassVar[str] = "}"
    """Characters that may stand between a call and its closing mark, with space."""
    head: ClassVar[re.Pattern[str]]
    """What is between the opening mark and the arguments, if these are an object."""
    pairs: ClassVar[Pairs | None] = None
    """If the arguments are keys and values."""

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        super().__init__(tools)
        self._open, self._close = Marker(self.opening, *self.around), Marker(self.closing or "\0")
        self._space: list[str] = []  # held back: space and marks before a call are not content
        self._closing = False  # a call has ended, and its closing mark may follow

    def _reader(self) -> Reader:
        if self.pairs is not None:
            return PairsReader(self.pairs, self.opening, self._tools)
        return NamedCallReader(self.head, self.opening)

    def _take_outside(self, character: str) -> Iterator[Part]:
        if self._closing:
            text, closed = self._close.take(character)
            self._closing = not closed and not text.strip(SPACE + self.before_closing)
            if closed or self._closing:
                return
            character, self._close.held = text + self._close.held, ""
        text, after = self._open.split(character)
        yield from self._content(text)
        if after is not None and self._open.found == self.opening:
            self._call = self._reader()
        elif after is not None:
            self._space.append(self._open.found)

    def _end_call(self, call: Reader) -> None:
        self._space.clear()
        self._closing = bool(self.closing)

    def _give_up(self, raw: str) -> Iterator[Part]:
        return self._content(self.opening + raw)

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


class HermesParser(MarkedParser):
    """Hermes, Qwen 2.5 and Qwen 3: <tool_call>{"name": …, "arguments": {…}}</tool_call>."""

    name = "hermes"
    mark = opening = "<tool_call>"
    closing = "</tool_call>"
    written = Written(f'{opening}\n{{"name": "{{name}}", "arguments": {{arguments}}}}\n{closing}', "\n")

    def _reader(self) -> Reader:
        return CallReader()


class QwenCoderParser(MarkedParser):
    """Qwen3-Coder and Qwen 3.5: <function=NAME><parameter=KEY>VALUE</parameter>…</function>."""

    name = "qwen3_coder"
    mark = opening = "<tool_call>"
    closing = "</tool_call>"
    pairs = Pairs(
        head=re.compile(rf"\s*<function={NAME}>\s*"),
        before_key="<parameter=",
        after_key=re.compile(r"(?P<key>[^<>]+)>"),
        value_ends=("\n</parameter>", "</parameter>"),
        end="</function>",
        skips_newline=True,
    )
    written = Written(
        f"{opening}\n<function={{name}}>\n{{arguments}}</function>\n{closing}", "\n",
        pair="<parameter={key}>\n{value}\n", value_end="\n</parameter>", keys=r"[^<>\s]+",
    )  # fmt: skip


class Glm45Parser(MarkedParser):
    """GLM 4.5: <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…</tool_call>."""

    name = "glm45"
    mark = opening = "<tool_call>"
    pairs = Pairs(
        head=re.compile(rf"\s*{NAME}\s*"),
        before_key="<arg_key>",
        after_key=re.compile(r"(?P<key>[^<>]+)</arg_key>\s*<arg_value>"),
        value_ends=("</arg_value>",),
        end="</tool_call>",
    )
    written = Written(
        f"{opening}{{name}}\n{{arguments}}</tool_call>", "\n",
        pair="<arg_key>{key}</arg_key>\n<arg_value>{value}\n", value_end="</arg_value>", keys=r"[^<>\s]+",
    )  # fmt: skip


class Glm47Parser(Glm45Parser):
    """GLM 4.7 writes the same without line breaks."""

    name = "glm47"
    written = Written(
        f"{Glm45Parser.opening}{{name}}{{arguments}}</tool_call>", "",
        pair="<arg_key>{key}</arg_key><arg_value>{value}", value_end="</arg_value>", keys=r"[^<>\s]+",
    )  # fmt: skip


class DeepSeekV31Parser(MarkedParser):
    """DeepSeek V3.1: NAME, a separator and {…} between special tokens."""

    name = "deepseek_v31"
    opening, closing = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    mark = "<｜tool▁calls▁begin｜>"
    around = mark, "<｜tool▁calls▁end｜>"
    specials = (opening, closing, *around, "<｜tool▁sep｜>")
    head = re.compile(rf"\s*{NAME}\s*<｜tool▁sep｜>\s*")
    written = Written(
        f"{opening}{{name}}<｜tool▁sep｜>{{arguments}}{closing}", "", begin=around[0], end=around[1]
    )


class DeepSeekV3Parser(DeepSeekV31Parser):
    """DeepSeek V3 and R1: the type of the call, a separator, NAME, and {…} as a block of Markdown."""

    name = "deepseek_v3"
    before_closing = "}`"
    head = re.compile(rf"\s*function<｜tool▁sep｜>{NAME}\s*```(json)?\s*")
    written = Written(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>",
        "\n",
        begin=DeepSeekV31Parser.around[0],
        end=DeepSeekV31Parser.around[1],
    )


class KimiParser(MarkedParser):
    """Kimi K2: functions.NAME:NUMBER, which is the id of the call, and {…} between special tokens."""

    name = "kimi_k2"
    opening, closing = "<|tool_call_begin|>", "<|tool_call_end|>"
    mark = "<|tool_calls_section_begin|>"
    around = mark, "<|tool_calls_section_end|>"
    specials = (opening, closing, *around, "<|tool_call_argument_begin|>")
    head = re.compile(rf"\s*(?P<id>(functions\.)?{NAME}:\d+)\s*<\|tool_call_argument_begin\|>\s*")
    written = Written(
        f"{opening}functions.{{name}}:{{number}}<|tool_call_argument_begin|>{{arguments}}{closing}", "",
        begin=around[0], end=around[1],
    )  # fmt: skip


class HarmonyParser(MarkedParser):
    """gpt-oss: a message to a function. `harmony` has taken all other messages out of the text."""

    name = "openai"
    opening, closing = "<|channel|>commentary to=functions.", "<|call|>"
    specials = harmony.SPECIALS
    head = re.compile(rf"{NAME}\s*((<\|constrain\|>)?json)?\s*<\|message\|>\s*")
    # The end of a call ends the output, so there is one.
    written = Written(f"{opening}{{name}} <|constrain|>json<|message|>{{arguments}}", None)

    @classmethod
    def grammar(
        cls, tools: Sequence[Tool], *, many: bool, spell: Callable[[str], str], text: bool = False
    ) -> str:
        calls = super().grammar(tools, many=many, spell=spell)
        if not text:
            return calls
        rest = calls.replace("start:", "calls:", 1)
        return f"start: calls | answer\n{rest}\nanswer: {harmony.final(spell)} /(?s:.*)/"


class BareParser(ToolParser):
    """The whole output is calls. Text before the first one makes it content."""

    before: ClassVar[str] = ""
    """A character that must precede the first call."""
    between: ClassVar[str]
    """Characters that may follow a call, with space."""
    end: ClassVar[str] = ""
    """A character that ends a list of calls. It is not content."""
    starts: ClassVar[str]
    """The characters that begin a call."""
    reader: ClassVar[type[CallReader] | type[PythonReader]]

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        super().__init__(tools)
        self._between: list[str] = []  # characters since the last call, which may be content
        self._only_content = False

    def _take_outside(self, character: str) -> Iterator[Part]:
        begun = bool(self.num_calls) or not self.before or self.before in self._between
        if self._only_content:
            yield Part("content", character)
        elif begun and character in self.starts:
            self._call = self.reader()
            yield from self._take(character)
        elif self.num_calls and character == self.end:
            self._between = []
        else:
            self._between.append(character)
            if character not in SPACE + (self.between if self.num_calls else "" if begun else self.before):
                yield from self._give_up("")

    def _end_call(self, call: Reader) -> None:
        self._between = []

    def _give_up(self, raw: str) -> Iterator[Part]:
        """All further text is content, too."""
        self._only_content = True
        yield Part("content", "".join(self._between) + raw)

    def _end(self) -> Iterator[Part]:
        if self._between and not self.num_calls and not self._only_content:
            yield Part("content", "".join(self._between))


class LlamaParser(BareParser):
    """Llama 3.x: the whole output is {"name": …, "parameters": {…}}, or several of these.

    The special token <|python_tag|> may precede the calls. It is not part of the text.
    """

    name = "llama3_json"
    between, starts, mark = ";,", "{", "{"
    reader = CallReader
    written = Written('{"name": "{name}", "parameters": {arguments}}', "; ")


class PythonicParser(BareParser):
    """Llama 3.2 and 4, ToolACE: the whole output is a list of calls in Python, [NAME(KEY=VALUE, …), …]."""

    name = "pythonic"
    mark = before = "["
    between, end, starts = ",", "]", string.ascii_letters + "_"
    reader = PythonReader
    written = Written(
        "{name}({arguments})", ", ", begin="[", end="]",
        pair="{key}={value}", between_pairs=", ", keys=r"[A-Za-z_][A-Za-z0-9_]*",
    )  # fmt: skip


CALLS, ARGS = "[TOOL_CALLS]", "[ARGS]"
_HEAD = re.compile(rf"{NAME}\s*(\[ARGS\]\s*)?")
"""What is between the marker and the arguments of a call that is not in a list, but for space before it."""


class MistralParser(ToolParser):
    """[TOOL_CALLS] [{"name": …, "arguments": {…}}, …], or [TOOL_CALLS]NAME[ARGS]{…}.

    Newer models write the second one.
    """

    name = "mistral"
    mark = CALLS
    specials = (CALLS, ARGS)
    written = Written('{"name": "{name}", "arguments": {arguments}}', ", ", begin=CALLS + "[", end="]")

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        super().__init__(tools)
        self._marker = Marker(CALLS)
        self._held: list[str] | None = None  # text since the marker or the last call; None: outside of calls
        self._listed = False  # the calls are in a list

    def _take_outside(self, character: str) -> Iterator[Part]:
        if self._held is None:
            text, found = self._marker.take(character)
            if text:
                yield Part("content", text)
            self._held = [CALLS] if found else None
        elif self._listed:
            yield from self._take_in_list(self._held, character)
        elif character in SPACE:
            self._held.append(character)
        elif character == "[":
            self._listed = True
            self._held.append(character)
        else:
            self._call = NamedCallReader(_HEAD, CALLS)
            yield from self._take(character)

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

    def _end_call(self, call: Reader) -> None:
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


FORMATS: dict[str, type[ToolParser]] = {
    parser.name: parser
    for parser in (
        HermesParser, LlamaParser, MistralParser, QwenCoderParser, Glm45Parser, Glm47Parser,
        DeepSeekV3Parser, DeepSeekV31Parser, KimiParser, HarmonyParser, PythonicParser,
    )
}  # fmt: skip
"""The formats of tool calls, by name."""
# Texts that are in the chat templates of models with this format. The first match counts.
_MARKS: tuple[tuple[type[ToolParser], tuple[str, ...]], ...] = (
    (QwenCoderParser, ("<function=",)),
    (Glm47Parser, ("{function-name}<arg_key>",)),
    (Glm45Parser, ("<arg_key>",)),
    (HermesParser, (HermesParser.opening,)),
    (MistralParser, (CALLS,)),
    (LlamaParser, ('{"name": function name, "parameters":',)),
    (DeepSeekV3Parser, ("<｜tool▁sep｜>", "```json")),
    (DeepSeekV31Parser, ("<｜tool▁sep｜>",)),
    (KimiParser, (KimiParser.opening,)),
    (HarmonyParser, (HarmonyParser.closing,)),
    (PythonicParser, ("[func_name1(",)),
)


def format_of(template: str) -> type[ToolParser] | None:
    """Returns the format that this chat template uses, or None if it is unknown."""
    return next((parser for parser, marks in _MARKS if all(mark in template for mark in marks)), None)
