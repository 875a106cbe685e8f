"""The formats of tool calls: how each family of models writes them.

A format is a `ToolParser` with data: its marks, the reader of one call, and how the grammar writes a call.
"""

import re
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from baton.router.api.messages import Tool
from baton.router.tools import harmony
from baton.router.tools.bare import BareParser
from baton.router.tools.gemma import QUOTE, GemmaReader
from baton.router.tools.grammar import Written
from baton.router.tools.json_text import SPACE
from baton.router.tools.kimi import KimiReader
from baton.router.tools.marked import MarkedParser
from baton.router.tools.mistral import CALLS, MistralParser
from baton.router.tools.pairs import Pairs
from baton.router.tools.parser import Part, ToolParser
from baton.router.tools.readers import NAME, CallReader, PythonReader, Reader


class HermesParser(MarkedParser):
    """Hermes, Qwen 2.5 and Qwen 3, Granite 4: <tool_call>{"name": …, "arguments": {…}}</tool_call>."""

    name = "hermes"
    mark = opening = "<tool_call>"
    closing = "</tool_call>"
    tokens = (opening, closing)
    before_closing = "}],`"
    written = Written(f'{opening}\n{{"name": "{{name}}", "arguments": {{arguments}}}}\n{closing}', "\n")

    def _reader(self, opening: str) -> Reader:
        return CallReader(opening, self._tools)

    def _take_outside(self, character: str) -> Iterator[Part]:
        if self._closing and character == "{":  # the marks are around several calls
            self._call = self._reader("")
            yield from self._take(character)
        else:
            yield from super()._take_outside(character)


def _function_tags(opening: str, closing: str) -> tuple[Pairs, Written]:
    """Returns <function=NAME><parameter=KEY>VALUE</parameter>…</function> between two marks."""
    pairs = Pairs(
        head=re.compile(rf"(?s:.*?)<function=\s*[\"']?{NAME}[\"']?\s*/?(>(?P<text>[^<]*))?"),
        before_key="<parameter=",
        after_key=re.compile(r"\s*[\"']?(?P<key>[^<>\"']+)[\"']?\s*>"),
        value_end="</parameter>",
        end="</function>",
        closing=closing,
        begins=(opening, "<function="),
        skips_newlines=True,
    )
    written = Written(
        f"{opening}\n<function={{name}}>\n{{arguments}}</function>\n{closing}", "\n",
        pair="<parameter={key}>\n{value}\n", value_end="\n</parameter>", keys=r"[^\"'<>\s]+",
    )  # fmt: skip
    return pairs, written


class QwenCoderParser(MarkedParser):
    """Qwen3-Coder and Qwen 3.5: <tool_call><function=NAME>…</function></tool_call>."""

    name = "qwen3_coder"
    mark = opening = "<tool_call>"
    closing = "</tool_call>"
    tokens = (opening, closing)
    bare = ("<function=",)
    pairs, written = _function_tags(opening, closing)


class SeedOssParser(QwenCoderParser):
    """Seed-OSS writes the same with other marks."""

    name = "seed_oss"
    mark = opening = "<seed:tool_call>"
    closing = "</seed:tool_call>"
    specials, tokens = (opening, closing), ()
    pairs, written = _function_tags(opening, closing)


class Glm45Parser(MarkedParser):
    """GLM 4.5: <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…</tool_call>."""

    name = "glm45"
    mark = opening = "<tool_call>"
    tokens = (opening, "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    pairs = Pairs(
        head=re.compile(rf"\s*{NAME}\s*"),
        before_key="<arg_key>",
        after_key=re.compile(r"(?P<key>[^<>]+)(</arg_key>)?\s*<arg_value>"),
        value_end="</arg_value>",
        end="</tool_call>",
        begins=(opening,),
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


def _invocations(begin: str, end: str, dsml: str = "") -> tuple[Pairs, Written]:
    """Returns <invoke name="NAME"><parameter name="KEY">VALUE</parameter>…</invoke>, between marks around all
    calls. `dsml`: begins the name of each tag."""
    pairs = Pairs(
        head=re.compile(rf"[\"']?{NAME}[\"']?\s*/?>\s*"),
        before_key=f"<{dsml}parameter name=",
        after_key=re.compile(r"[\"']?(?P<key>[^\"'<>]+)[\"']?(\s+string=\"(?P<string>[^\"]*)\")?\s*>"),
        value_end=f"</{dsml}parameter>",
        end=f"</{dsml}invoke>",
        closing=end,
        begins=(f"<{dsml}invoke name=",),
    )
    written = Written(
        f'<{dsml}invoke name="{{name}}">\n{{arguments}}</{dsml}invoke>\n', "", begin=f"{begin}\n", end=end,
        pair=f'<{dsml}parameter name="{{key}}">{{value}}\n', value_end=pairs.value_end, keys=r"[^\"'<>\s]+",
    )  # fmt: skip
    return pairs, written


class MiniMaxM2Parser(MarkedParser):
    """MiniMax M2: <invoke name="NAME">…</invoke>, with a pair of marks around all calls."""

    name = "minimax_m2"
    opening = "<invoke name="
    mark = "<minimax:tool_call>"
    tokens = section_marks = mark, "</minimax:tool_call>"
    pairs, written = _invocations(*section_marks)


class DeepSeekV32Parser(MarkedParser):
    """DeepSeek V3.2: DSML, in which each parameter says whether it is a string."""

    name = "deepseek_v32"
    opening = "<｜DSML｜invoke name="
    mark = "<｜DSML｜function_calls>"
    section_marks = mark, "</｜DSML｜function_calls>"
    specials = ("｜DSML｜",)
    pairs, written = _invocations(*section_marks, "｜DSML｜")


class DeepSeekV4Parser(DeepSeekV32Parser):
    """DeepSeek V4: the same with other marks around all calls."""

    name = "deepseek_v4"
    mark = "<｜DSML｜tool_calls>"
    section_marks = mark, "</｜DSML｜tool_calls>", "<｜DSML｜toolcalls>", "<｜DSML｜tool>"
    pairs, written = _invocations(*section_marks[:2], "｜DSML｜")


class DeepSeekV31Parser(MarkedParser):
    """DeepSeek V3.1: NAME, a separator and {…} between special tokens."""

    name = "deepseek_v31"
    opening, closing = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    mark = "<｜tool▁calls▁begin｜>"
    section_marks = mark, "<｜tool▁calls▁end｜>"
    specials = (opening, closing, *section_marks, "<｜tool▁sep｜>")
    # Models write the head of V3, too, and leave out its parts.
    head = re.compile(
        rf"\s*+(function\s*<｜tool▁sep｜>\s*)?{NAME}\s*+(<｜tool▁sep｜>)?+\s*+(```(json)?\s*+)?+"
    )
    written = Written(
        f"{opening}{{name}}<｜tool▁sep｜>{{arguments}}{closing}",
        "",
        begin=section_marks[0],
        end=section_marks[1],
    )


class DeepSeekV3Parser(DeepSeekV31Parser):
    """DeepSeek V3 and R1: the type of the call, a separator, NAME, and {…} as a block of Markdown."""

    name = "deepseek_v3"
    written = Written(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>",
        "\n",
        begin=DeepSeekV31Parser.section_marks[0],
        end=DeepSeekV31Parser.section_marks[1],
    )


class KimiParser(MarkedParser):
    """Kimi K2: functions.NAME:NUMBER, which is the id of the call, and {…} between special tokens."""

    name = "kimi_k2"
    opening, closing = "<|tool_call_begin|>", "<|tool_call_end|>"
    mark = "<|tool_calls_section_begin|>"
    section_marks = (
        mark, "<|tool_calls_section_end|>", "<|tool_call_section_begin|>", "<|tool_call_section_end|>",
    )  # fmt: skip
    specials = (opening, closing, *section_marks, "<|tool_call_argument_begin|>")
    written = Written(
        f"{opening}functions.{{name}}:{{number}}<|tool_call_argument_begin|>{{arguments}}{closing}", "",
        begin=section_marks[0], end=section_marks[1],
    )  # fmt: skip

    def _reader(self, opening: str) -> Reader:
        return KimiReader(opening, self._tools, (self.closing, self.opening, *self.section_marks))


class HarmonyParser(MarkedParser):
    """gpt-oss: a message to a function. `harmony` has taken all other messages out of the text."""

    name = "openai"
    opening, closing = "<|channel|>commentary to=functions.", "<|call|>"
    specials = harmony.SPECIALS
    head = re.compile(rf"{NAME}\s*((<\|constrain\|>)?json)?\s*(<\|message\|>)?\s*")
    # The end of a call ends the output, so there is one.
    written = Written(f"{opening}{{name}} <|constrain|>json<|message|>{{arguments}}", None)

    @classmethod
    def grammar(
        cls, tools: Sequence[Tool], *, many: bool, spell: Callable[[str], str], text: bool = False
    ) -> str:
        calls = super().grammar(tools, many=many, spell=spell)
        if not text:
            return calls
        calls_grammar = calls.replace("start:", "calls:", 1)
        return f"start: calls | answer\n{calls_grammar}\nanswer: {harmony.final(spell)} /(?s:.*)/"


class LlamaParser(BareParser):
    """Llama 3.x: {"name": …, "parameters": {…}}, or several of these."""

    name = "llama3_json"
    opening = "<|python_tag|>"
    before, end, in_lists = "[", "]", False
    between, starts, mark = ";,", "{", "{"
    reader = CallReader
    written = Written('{"name": "{name}", "parameters": {arguments}}', "; ")


class PythonicParser(BareParser):
    """Llama 3.2 and 4, ToolACE: a list of calls in Python, [NAME(KEY=VALUE, …), …]."""

    name = "pythonic"
    opening, closing = "<|python_start|>", "<|python_end|>"
    mark = before = "["
    between, end, starts = ",", "]", string.ascii_letters + "_"
    reader = PythonReader
    written = Written(
        "{name}({arguments})", ", ", begin="[", end="]",
        pair="{key}={value}", between_pairs=", ", keys=r"[A-Za-z_][A-Za-z0-9_]*",
    )  # fmt: skip


class Lfm2Parser(MarkedParser):
    """LFM 2: a list of calls in Python between special tokens. Asked for JSON, it writes a list of that."""

    name = "lfm2"
    mark = opening = "<|tool_call_start|>"
    closing = "<|tool_call_end|>"
    specials = (opening, closing)
    before_closing = ",]"
    written = replace(PythonicParser.written, begin=f"{opening}[", end=f"]{closing}")

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        super().__init__(tools)
        self._follows = False  # a comma has ended a call

    def _reader(self, opening: str) -> Reader:
        return PythonReader(opening, self._tools)

    def _take(self, character: str) -> Iterator[Part]:
        call = self._call
        if character == "{" and isinstance(call, PythonReader) and call.is_empty:
            self._call = CallReader(call.raw, self._tools)
        yield from super()._take(character)

    def _take_outside(self, character: str) -> Iterator[Part]:
        if self._closing and self._follows and (character == "{" or character.isidentifier()):
            self._call = self._reader("")
            yield from self._take(character)
            return
        self._follows = self._closing and (character == "," or (self._follows and character in SPACE))
        yield from super()._take_outside(character)


class Gemma4Parser(MarkedParser):
    """Gemma 4: call:NAME{KEY:VALUE,…} between special tokens. Strings are between special tokens, too."""

    name = "gemma4"
    mark = opening = "<|tool_call>"
    closing = "<tool_call|>"
    specials = (opening, closing, QUOTE)
    written = Written(
        f"{opening}call:{{name}}{{{{arguments}}}}{closing}", "",
        pair="{key}:{value}", between_pairs=",", value_begin=QUOTE, value_end=QUOTE, keys=r"[^:,{}<>\"\s]+",
    )  # fmt: skip

    def _reader(self, opening: str) -> Reader:
        return GemmaReader(opening, self._tools, (self.closing, self.opening))


FORMATS: dict[str, type[ToolParser]] = {
    parser.name: parser
    for parser in (
        HermesParser, LlamaParser, MistralParser, QwenCoderParser, SeedOssParser, Glm45Parser, Glm47Parser,
        DeepSeekV3Parser, DeepSeekV31Parser, DeepSeekV32Parser, DeepSeekV4Parser, KimiParser, MiniMaxM2Parser,
        HarmonyParser, PythonicParser, Lfm2Parser, Gemma4Parser,
    )
}  # fmt: skip
"""The formats of tool calls, by name."""
_MARKS: tuple[tuple[type[ToolParser] | str, tuple[str, ...]], ...] = (
    (SeedOssParser, (SeedOssParser.opening,)),
    (MiniMaxM2Parser, (MiniMaxM2Parser.mark,)),
    (DeepSeekV32Parser, ("｜DSML｜", "function_calls")),
    (DeepSeekV4Parser, ("｜DSML｜",)),
    ("MiniMax M3", ("]<]minimax[>[",)),
    (Gemma4Parser, (Gemma4Parser.opening,)),
    ("FunctionGemma", ("<start_function_call>",)),
    ("Granite 3 or Phi-4 mini", ("<|tool_call|>",)),
    ("Hunyuan", ("<tool_sep>",)),
    ("Hunyuan, Jamba, MiniMax M1 or Apriel", ("<tool_calls>",)),
    ("MiniCPM 5", ("<function name=",)),
    ("OLMo 3", ("<function_calls>",)),
    ("Command", ("<|START_ACTION|>",)),
    ("MiniCPM 3", ("<|thought_start|>",)),
    (Lfm2Parser, (Lfm2Parser.opening,)),
    (Lfm2Parser, ("<|tool_list_start|>",)),
    ("Nemotron Nano 2", ("<TOOLCALL>",)),
    ("Step 3", ("<steptml:",)),
    ("LongCat", ("<longcat_tool_call>",)),
    ("Apertus", ("<|tools_prefix|>",)),
    ("InternLM 2", ("<|action_start|>",)),
    (QwenCoderParser, ("<function=", "<parameter=")),
    (QwenCoderParser, ("<tool_call>\n<function=",)),
    (QwenCoderParser, ("<tool_call>\\n<function=",)),
    ("Functionary", ("<function=",)),
    ("Functionary", (">>>all",)),
    ("Functionary", ("<|recipient|>",)),
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
"""Formats, or the models that have a format which no parser reads, and texts that are in their chat
templates. The first match counts."""


def format_of(template: str) -> type[ToolParser] | str | None:
    """Returns the format that this chat template uses, or the models with it if no parser reads it. None: it
    knows no tools."""
    return next(
        (tool_format for tool_format, marks in _MARKS if all(mark in template for mark in marks)), None
    )
