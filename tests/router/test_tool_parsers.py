"""Parsers find tool calls for every split of a text, and lose no other text."""

import itertools
import json
import random
import re
from typing import Any, get_args, get_type_hints

import jsonschema
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from baton.cluster.options.roles import FrontOptions
from baton.router.api.messages import Tool
from baton.router.errors import InvalidRequest
from baton.router.tools.bare import BareParser
from baton.router.tools.formats import FORMATS, HarmonyParser, format_of
from baton.router.tools.json_text import Arguments, JsonText
from baton.router.tools.marked import MarkedParser
from baton.router.tools.parser import Part
from baton.router.tools.readers import NamedCallReader

from .conftest import accepts, compiled
from .work import work

NOTHING: dict[str, Any] = {"type": "object", "maxProperties": 0}
WEATHER = {"city": 'Paris "} </tool_call> [TOOL_CALLS] é\\', "days": [1, {"x": "]"}], "deep": {"a": {}}}
W = json.dumps(WEATHER, ensure_ascii=False)
CALL = f'{{"name": "get_weather", "arguments": {W}}}'


def tool(name: str, parameters: dict | None) -> Tool:
    return Tool.model_validate({"type": "function", "function": {"name": name, "parameters": parameters}})


TOOLS = [
    tool("get_weather", {"type": "object", "properties": {"city": {"$ref": "#/$defs/city"}},
                         "required": ["city"], "additionalProperties": False,
                         "$defs": {"city": {"enum": ["Paris", "Rome"]}}}),
    tool("now", None),
    tool("edit", {"properties": {
        "path": {"type": "string", "pattern": "^/[a-z/]{1,5}$"}, "text": {"type": "string", "maxLength": 9},
        "line": {"type": "integer", "minimum": 0, "maximum": 99}, "share": {"enum": [1, 2.5]}, "force": {"type": ["boolean", "null"]},  # noqa: E501
        "lines": {"type": "array", "items": {"type": "integer"}}, "any": {"type": ["array", "boolean"], "items": {"type": "integer"}},  # noqa: E501
        "note": {"type": ["string", "null"], "maxLength": 4},
    }, "required": ["path", "line"]}),
]  # fmt: skip


PARAMETERS = {each.function.name: each.function.parameters or NOTHING for each in TOOLS}


def read(parts: list[Part]) -> tuple[str, list[tuple[str, str]]]:
    """Returns the content, and name and arguments of each call."""
    content, calls = "", []
    for part in parts:
        if part.kind == "content":
            assert part.name is None
            content += part.text
            continue
        if part.name is not None:
            assert part.call == len(calls)
            calls.append((part.name, ""))
        assert part.call == len(calls) - 1
        calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
    return content, calls


def parse(name: str, chunks: list[str]) -> tuple[str, list[tuple[str, str]]]:
    parser = FORMATS[name](TOOLS)
    found = read([part for chunk in chunks for part in parser.push(chunk)] + parser.finish())
    assert parser.num_calls == len(found[1])
    return found


ONE, OTHER = ("get_weather", W), ("now", "{}")
CASES = [
    ("hermes", "Just text, a < b and <tool.", "Just text, a < b and <tool.", []),
    ("hermes", "Text that ends in a space \n", "Text that ends in a space \n", []),
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", [ONE]),
    ("hermes", f"Let me see.\n\n<tool_call>{CALL}</tool_call>\n", "Let me see.", [ONE]),
    ("hermes", f'<tool_call>{CALL}</tool_call>\n<tool_call>{{"arguments": {{}}, "name":"now"}}</tool_call> K',
     " K", [ONE, OTHER]),
    ("hermes", f'<tool_call>{{"id": [1], "name": "get_weather", "parameters": {W}, "x": "y"}}</tool_call>',
     "", [ONE]),
    ("hermes", f"<tool_call>{CALL}", "", [ONE]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "b', "", [("now", '{"a": "b')]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}</tool_call>', "", [OTHER]),
    ("hermes", 'a <tool_call>{"name": "no', 'a <tool_call>{"name": "no', []),
    ("hermes", "a <tool_call> no JSON </tool_call> b", "a <tool_call> no JSON </tool_call> b", []),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
     '<tool_call>{"name": 5, "arguments": {}}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>', "", [OTHER]),
    ("hermes", '<tool_call>{"name": "now", "arguments": 5}</tool_call>',
     '<tool_call>{"name": "now", "arguments": 5}</tool_call>', []),
    ("hermes", "<tool_", "<tool_", []),
    ("hermes", f"<tool_call>{CALL} The tag is missing.", "The tag is missing.", [ONE]),
    ("hermes", f"<tool_call>{CALL}}}\n<tool_call>{CALL}</tool_call>", "", [ONE, ONE]),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}',
     '<tool_call>{"name": "\\ud800", "arguments": {}}', []),
    ("llama3_json", f'{{"name": "get_weather", "parameters": {W}}}', "", [ONE]),
    ("llama3_json", f'\n{{"name": "get_weather", "parameters": {W}}}; {{"name": "now", "parameters": {{}}}} ',
     "", [ONE, OTHER]),
    ("llama3_json", 'Sure: {"name": "now", "parameters": {}}', "Sure:", [OTHER]),
    ("llama3_json", 'Sure: {"name": "f", "parameters": {}}', 'Sure: {"name": "f", "parameters": {}}', []),
    ("llama3_json", ' {"answer": 42} and text', ' {"answer": 42} and text', []),
    ("llama3_json", '{"answer": 4', '{"answer": 4', []),
    ("llama3_json", '{"name": "now", "parameters": {}} Done.', " Done.", [OTHER]),
    ("llama3_json", "  ", "  ", []),
    ("llama3_json", '{"name": "now", "parameters": {}<b>', "<b>", [OTHER]),
    ("mistral", "Only text [TOOL", "Only text [TOOL", []),
    ("mistral", f"[TOOL_CALLS] [{CALL}]", "", [ONE]),
    ("mistral", f'Look.[TOOL_CALLS][{CALL}, {{"name": "now", "arguments": {{}}}}]', "Look.", [ONE, OTHER]),
    ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{W}[TOOL_CALLS]now{{}}", "", [ONE, OTHER]),
    ("mistral", f"[TOOL_CALLS]get_weather{W[:-1]}", "", [("get_weather", W[:-1])]),
    ("mistral", "[TOOL_CALLS] what", " what", []),
    ("mistral", "[TOOL_CALLS]now{}[TOOL_CALLS] what", " what", [OTHER]),
    ("mistral", "[TOOL_CALLS]I think [TOOL_CALLS]now{}", "I think", [OTHER]),
    ("mistral", f"[TOOL_CALLS][{CALL}, and so on", ", and so on", [ONE]),
    ("mistral", '[TOOL_CALLS][{"name": 1}]', '[{"name": 1}]', []),
    ("mistral", "[TOOL_CALLS][ARGS]{}", "{}", []),
    ("mistral", "[TOOL_CALLS][[TOOL_CALLS]now{}", "[", [OTHER]),
    ("qwen3_coder", "Sure!\n\n<tool_call>\n<function=edit>\n<parameter=path>\n/a\n</parameter>\n<parameter=line>\n"  # noqa: E501
     "2\n</parameter>\n</function>\n</tool_call>", "Sure!", [("edit", '{"path": "/a", "line": 2}')]),
    # MiMo-V2-Flash writes values without line breaks around them. Step-3.7 has those of Qwen3-Coder.
    ("qwen3_coder", "<tool_call>\n<function=edit>\n<parameter=path>/a && b</parameter>\n<parameter=line>2</parameter>\n"  # noqa: E501
     "</function>\n</tool_call>", "", [("edit", '{"path": "/a && b", "line": 2}')]),
    ("qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n"  # noqa: E501
     "</tool_call>", "", [OTHER, OTHER]),
    ("qwen3_coder", '<tool_call><function=edit><parameter=text>\n  "<p> </par> é\\\n\n</parameter>\n<parameter=any>'  # noqa: E501
     "[1,\n 2]</parameter></function></tool_call>", "",
     [("edit", '{"text": "  \\"<p> </par> é\\\\\\n", "any": [1,\n 2]}')]),
    ("qwen3_coder", "<tool_call><function=edit><parameter=line>two</parameter><parameter=share>1</parameter>"
     "<parameter=force>True</parameter><parameter=lines>[1, 'x']</parameter><parameter=note>null</parameter>"
     "<parameter=other>7</parameter></function></tool_call>", "",
     [("edit", '{"line": "two", "share": 1, "force": true, "lines": [1, "x"], "note": null, "other": 7}')]),
    ("qwen3_coder", "<tool_call><function=edit><parameter=force>None</parameter><parameter=note>5</parameter>"
     "<parameter=line>NaN</parameter></function>", "", [("edit", '{"force": null, "note": "5", "line": "NaN"}')]),  # noqa: E501
    ("qwen3_coder", "<tool_call><function=edit><parameter=text>cut o", "", [("edit", '{"text": "cut o')]),
    ("qwen3_coder", "<tool_call><function=edit><parameter=line>1", "", [("edit", '{"line": 1')]),
    ("qwen3_coder", "<tool_call><function=edit><parameter=li", "", [("edit", '{"li')]),
    ("qwen3_coder", "<tool_call><function=unknown><parameter=x>{</parameter> and so on", "and so on",
     [("unknown", '{"x": "{"}')]),
    ("qwen3_coder", "<tool_call><tool_call><function=now></function></tool_call>", "<tool_call>", [OTHER]),
    ("qwen3_coder", "<tool_call><function=a b></function>", "<tool_call><function=a b></function>", []),
    ("glm45", "I will look.<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Dallas</arg_value>\n"
     "</tool_call>\n<tool_call>now\n</tool_call>", "I will look.", [("get_weather", '{"city": "Dallas"}'), OTHER]),  # noqa: E501
    ("glm45", "<tool_call>edit<arg_key>text</arg_key><arg_value>\n a </arg_value><arg_key>line</arg_key>"
     "<arg_value> 3 </arg_value></tool_call> K", " K", [("edit", '{"text": "\\n a ", "line": 3}')]),
    ("glm45", "<tool_call>a thing that is no call", "<tool_call>a thing that is no call", []),
    ("deepseek_v3", "Look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n" + W  # noqa: E501
     + "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"  # noqa: E501
     "<｜tool▁calls▁end｜>", "Look.", [ONE, OTHER]),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁calls▁end｜>",
     "functionnow\n```json\n{}\n```", []),
    ("deepseek_v31", f"A<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{W}<｜tool▁call▁end｜>"  # noqa: E501
     "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "A", [ONE, OTHER]),
    ("deepseek_v31", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>no JSON", "nowno JSON", []),
    ("kimi_k2", "I'll check. <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0 "
     f"<|tool_call_argument_begin|>{W} <|tool_call_end|><|tool_call_begin|>now:1<|tool_call_argument_begin|>{{}}"  # noqa: E501
     "<|tool_call_end|><|tool_calls_section_end|>", "I'll check.", [ONE, OTHER]),
    ("kimi_k2", "<|tool_call_begin|>functions.now.0<|tool_call_argument_begin|>{}<|tool_call_end|>", "",
     [OTHER]),
    ("kimi_k2", '<|tool_call_begin|>call_1<|tool_call_argument_begin|>{"city": 5}<|tool_call_end|> b',
     'call_1{"city": 5} b', []),
    ("openai", f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{W}<|call|>", "", [ONE]),  # noqa: E501
    ("openai", "Hi<|channel|>commentary to=functions.now<|message|>{}", "Hi", [OTHER]),
    ("pythonic", "[get_weather(city='San Francisco', metric=\"c\"), now()]", "",
     [("get_weather", '{"city": "San Francisco", "metric": "c"}'), OTHER]),
    ("pythonic", " [edit(age=-37, a={'b': [1.5, None]}, c=true, d='it\\'s \\u00e9 ]), ')] Done", " Done",
     [("edit", '{"age": -37, "a": {"b": [1.5, null]}, "c": true, "d": "it\'s \\u00e9 ]), "}')]),
    ("pythonic", "Hello [now()]", "Hello", [OTHER]),
    ("pythonic", "Hello [f()]", "Hello [f()]", []),
    ("pythonic", "<|python_start|>[now()]<|python_end|>", "", [OTHER]),
    ("pythonic", "I look.<|python_start|>[now(), now()]<|python_end|> <|python_start|>[now()]<|python_end|>",
     "I look.", [OTHER, OTHER, OTHER]),
    ("pythonic", "<|python_start|>[now()]<|python_end|>Done <|python_end|>", "Done <|python_end|>", [OTHER]),
    ("pythonic", "<|python_start|>now()<|python_end|>", "<|python_start|>now()<|python_end|>", []),
    ("pythonic", "a <b> <|python_st [now()]", "a <b> <|python_st", [OTHER]),
    ("llama3_json", f"<|python_tag|>{CALL}", "", [ONE]),
    ("pythonic", "now()", "now()", []),
    ("pythonic", "[now(a=b'x')]", "[now(a=b'x')]", []),
    ("pythonic", "[now(1)]", "[now(1)]", []),
    ("pythonic", "[now(a=open('x'))]", "[now(a=open('x'))]", []),
    ("pythonic", "[now(a=[-1E999, 0.5])]", "", [("now", f'{{"a": [-{10**400}, 0.5]}}')]),
    ("pythonic", "[now(a='", "[now(a='", []),
    ("pythonic", "[edit(from='a=b', class={'in': 1}, x_=2)]", "",
     [("edit", '{"from": "a=b", "class": {"in": 1}, "x_": 2}')]),
    ("lfm2", "Look.<|tool_call_start|>[get_weather(city='San <|Francisco'), now()]<|tool_call_end|>Done",
     "Look.Done", [("get_weather", '{"city": "San <|Francisco"}'), OTHER]),
    ("lfm2", f'<|tool_call_start|>[{CALL}, {{"name": "now", "arguments": {{}}}}]<|tool_call_end|>', "",
     [ONE, OTHER]),
    ("lfm2", "<|tool_call_start|>now()<|tool_call_end|><|tool_call_start|>[now()]<|tool_call_end|>", "",
     [OTHER, OTHER]),
    ("lfm2", "[now()]", "[now()]", []),
    ("gemma4", 'Look.<|tool_call>call:edit{path:<|"|>a "b"\\n<c|><|"|>,n:-1.5,all:true,'
     'in:{x:[<|"|>y<|"|>,2]}}<tool_call|>'
     "<|tool_call>call:now{}<tool_call|>", "Look.",
     [("edit", '{"path":"a \\"b\\"\\\\n<c|>","n":-1.5,"all":true,"in":{"x":["y",2]}}'), OTHER]),
    ("gemma4", f"<|tool_call>call:get_weather{W}<tool_call|>", "", [ONE]),
    ("gemma4", "<|tool_call>call:now{}", "", [OTHER]),
    ("gemma4", "<|tool_call>no call<tool_call|>", "no call", []),
    ("lfm2", "<|tool_call_start|>[now()] later(): x", "later(): x", [OTHER]),
    ("lfm2", "<|tool_call_start|>[now(1)]<|tool_call_end|>", "[now(1)]", []),
    ("lfm2", "<|tool_call_start|>no list<|tool_call_end|>", "no list", []),
    ("lfm2", "<|tool_call_start|>[edit(text='cut", "[edit(text='cut", []),
]  # fmt: skip


@pytest.mark.cases(1)
@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_every_split_of_a_text_gives_the_same_result(
    name: str, text: str, content: str, calls: list[tuple[str, str]]
):
    expected = (content, calls)
    assert parse(name, [text]) == expected
    assert parse(name, list(text)) == expected
    for i in range(len(text)):
        assert parse(name, [text[:i], text[i:]]) == expected
    if len(text) < 40:
        for i, j in itertools.combinations(range(len(text)), 2):
            assert parse(name, [text[:i], text[i:j], text[j:]]) == expected


CALL_OF_F = '{"name": "f", "arguments": {}}'
PARTS = [
    "<tool_call>f<arg_key>a</arg_key><arg_value>",
    "<tool_call><function=edit><parameter=text>",
    "<parameter=line>",
    "</parameter>",
    "</function>",
    "<arg_key>line</arg_key><arg_value>",
    "</arg_value>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{",
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{",
    "<｜tool▁call▁end｜>",
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{",
    "<|tool_call_end|>",
    "<|channel|>commentary to=functions.f<|message|>{",
    "<|call|>",
    '<invoke name="edit">',
    '<parameter name="text">',
    "</invoke>",
    '<｜DSML｜invoke name="edit">',
    '<｜DSML｜parameter name="text" string="false">',
    "</｜DSML｜parameter>",
    "```json",
    "[f(a=",
    ")",
    "'",
    CALL_OF_F,
    "<tool_call>" + CALL_OF_F,
    "[TOOL_CALLS]f[ARGS]{}",
    "[TOOL_CALLS][",
    '{"name": "\\ud800", "arguments": {}}',
    '{"name": "f", "arguments": ',
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    '"name": ',
    '"f"',
    "{",
    "}",
    "[",
    "]",
    '"',
    "\\",
    " ",
    "\n",
    "text",
    ";",
    ",",
    ":",
    "<",
    "5",
    "é",
    "\0",
]
HOSTILE = st.lists(st.sampled_from(PARTS) | st.text(max_size=3), max_size=16).map("".join)


def has_in_order(text: str, part: str) -> bool:
    characters = iter(text)
    return all(character in characters for character in part)


def test_a_bracket_of_the_wrong_kind_stays_what_it_is():
    assert parse("llama3_json", ["{] THE END"]) == ("{] THE END", [])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda values: st.lists(values) | st.dictionaries(st.text(), values),
    max_leaves=8,
)
SCRAPS = [*"{}[],:\"'\\a5 \n<", "\\u12", "tr", "None"]


def as_arguments(text: str) -> str:
    reader = Arguments()
    return "".join(reader.take(each) for each in text if not reader.done) + reader.finish()


@pytest.mark.all
@settings(max_examples=40)
@given(st.dictionaries(st.text(), JSON), st.booleans(), st.sampled_from([None, 1]))
def test_json_stays_what_it_is(value: dict[str, Any], escaped: bool, indent: int | None):
    text = json.dumps(value, ensure_ascii=escaped, indent=indent)
    assert as_arguments(text) == text
    for more in ("", " {}"):
        assert json.loads(as_arguments(json.dumps(text + more))) == value, "as text"


@settings(max_examples=200)
@given(st.lists(st.sampled_from(SCRAPS), max_size=20).map("".join))
def test_arguments_are_always_json(text: str):
    for said in ("{" + text, json.dumps("{" + text)):
        assert isinstance(json.loads(as_arguments(said)), dict)


@pytest.mark.all
@settings(max_examples=200)
@given(st.sampled_from(sorted(FORMATS)), HOSTILE, st.data())
def test_hostile_output_gives_no_error_and_loses_and_doubles_no_text(
    name: str, text: str, data: st.DataObject
):
    text += " THE END"
    content, calls = whole = parse(name, [text])
    assert whole == parse(name, list(text))
    cut = data.draw(st.integers(0, len(text)))
    assert whole == parse(name, [text[:cut], text[cut:]])
    assert has_in_order(text, content)
    said = [content, *(part for call in calls for part in call)]
    assert sum(part.count("THE END") for part in said) == 1
    assert calls or content == re.sub("|".join(map(re.escape, FORMATS[name].specials)) or "(?!)", "", text)
    msgspec.json.encode(calls)


@pytest.mark.all
@settings(max_examples=200)
@given(st.sampled_from(sorted(FORMATS)), HOSTILE)
def test_arguments_of_an_output_that_the_model_ended_are_json(name: str, text: str):
    parser = FORMATS[name](TOOLS)
    for _, arguments in read(parser.push(text) + parser.finish(ended=True))[1]:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", ""),
        ("hermes", "<tool_call>"),
        ("hermes", '<tool_call>{"'),
        ("hermes", "<tool_call>{"),
        ("hermes", f"<tool_call>{CALL_OF_F}"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "'),
        ("hermes", '<tool_call>{"arguments": {"a": "'),
        ("llama3_json", ""),
        ("llama3_json", '{"'),
        ("llama3_json", "{"),
        ("llama3_json", CALL_OF_F),
        ("llama3_json", CALL_OF_F[:-2] + '"a": "'),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS]["),
        ("mistral", '[TOOL_CALLS][{"'),
        ("mistral", f"[TOOL_CALLS][{CALL_OF_F}"),
        ("mistral", "[TOOL_CALLS]f[ARGS]{"),
        ("qwen3_coder", "<tool_call>"),
        ("qwen3_coder", "<tool_call><function=edit><parameter=text>"),
        ("qwen3_coder", "<tool_call><function=edit><parameter=any>"),
        ("qwen3_coder", "<tool_call><function=edit><parameter=any>1</parameter>"),
        ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>"),
        ("deepseek_v31", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>"),
        ("pythonic", "["),
        ("pythonic", "[f(a='"),
        ("pythonic", "Text [f(a='"),
        ("lfm2", "<|tool_call_start|>["),
        ("gemma4", "<|tool_call>call:"),
        ("gemma4", '<|tool_call>call:f{a:<|"|>'),
        ("lfm2", "<|tool_call_start|>[f(a='"),
        ("lfm2", "<|tool_call_start|>[now(),"),
        ("llama3_json", "Text ```"),
        ("llama3_json", 'Text {"a": "'),
        ("mistral", '[TOOL_CALLS]f[ARGS]"'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1,'),
        ("qwen3_coder", "<tool_call><function=edit><parameter=text></function>"),
        ("qwen3_coder", "<tool_call><function=edit><parameter=text>a</parameter>b"),
        ("glm45", "<tool_call>edit<arg_key>line</arg_key><arg_value></tool_call>"),
        ("kimi_k2", "<|tool_call_begin|>x<|tool_call_argument_begin|>{"),
        ("kimi_k2", '<|tool_call_begin|>x<|tool_call_argument_begin|>{"a": "'),
        ("minimax_m2", "<minimax:tool_call>"),
        ("minimax_m2", '<invoke name="edit"><parameter name="text"><parameter name="'),
    ],
)
def test_a_character_takes_as_much_work_behind_a_long_output(name: str, text: str):
    """So does the end, for each of those that are held back."""
    for filler in " x":
        parser = FORMATS[name](TOOLS)
        parser.push(text + filler * 1_000)
        early = work(lambda: parser.push(filler * 20))  # noqa: B023
        parser.push(filler * 10_000)
        assert work(lambda: parser.push(filler * 20)) < 2 * early + 20_000, filler  # noqa: B023
        ends = []
        for length in (50, 500):
            parser = FORMATS[name](TOOLS)
            parser.push(text + filler * length)
            ends.append(work(parser.finish))
        assert ends[1] < 15 * ends[0] + 20_000, filler


PIECES = (*" {}[]()<>\"'\\,:;`=|_\n", '{"', '{"a":', "[]", "</", "<|", "```", "f(", "f(a=1),", "True")
"""Pieces that an output may repeat: beginnings and ends of what the formats know."""


def of_format(name: str) -> list[str]:
    """Texts with which a call of a format begins or goes on."""
    form = FORMATS[name]
    begin: str = form.opening if issubclass(form, MarkedParser) else form.mark
    if (pairs := getattr(form, "pairs", None)) is not None:
        key = f'{pairs.before_key}"any">' if "name=" in pairs.before_key else f"{pairs.before_key}any>"
        head = f"{begin}<function=edit>" if pairs.before_key == "<parameter=" else f'{begin}"edit">'
        head = f"{begin}edit" if name.startswith("glm") else head
        key = "<arg_key>any</arg_key><arg_value>" if name.startswith("glm") else key
        return ["", begin, head, head + pairs.before_key, head + key, f"{head}{key}1{pairs.value_end}"]
    json_call = '{"name": "edit", "arguments": {"any": '
    heads = {
        "mistral": ["[", "f[ARGS]{", 'f[ARGS]"', f"[{json_call}"], "kimi_k2": ["x{", 'x"'],
        "pythonic": ["[f(a=", "[f(a='"], "lfm2": ["[", "[f(a=", "[f(a='", json_call],
        "gemma4": ["call:f{a:", 'call:f{a:<|"|>'], "openai": ["f<|message|>{", 'f<|message|>"'],
    }.get(name, ['{"', json_call, '{"name": "edit", "arguments": "'] if "json" in name or name == "hermes"
          else ["f{", 'f"'])  # fmt: skip
    return ["", begin, *(begin + head for head in heads)]


def grows(name: str, text: str, piece: str) -> bool:
    """Whether a piece takes more work behind a long output than behind a short one."""
    parser = FORMATS[name](TOOLS)
    parser.push(text + piece * 300)
    early = work(lambda: parser.push(piece * 10))
    for _ in range(2):  # a list may get more memory in one of them
        parser.push(piece * 4_000)
        if work(lambda: parser.push(piece * 10)) < 2 * early + 2_000:
            return False
    return True


@pytest.mark.long
@pytest.mark.parametrize("name", FORMATS)
def test_no_piece_takes_more_work_behind_a_long_output(name: str):
    pieces = [*PIECES, *of_format(name)[1:], *FORMATS[name].specials]
    cases = [(text, piece) for text in of_format(name) for piece in pieces]
    assert not [case for case in cases if grows(name, *case)]


@pytest.mark.parametrize(
    ("name", "text", "piece"),
    [
        ("lfm2", "<|tool_call_start|>[f(a=", "{"),
        ("lfm2", "<|tool_call_start|>[f(a='", "{"),
        ("mistral", '[TOOL_CALLS]f[ARGS]"', "["),
        ("mistral", '[TOOL_CALLS]f[ARGS]"[', "{"),
        ("hermes", '<tool_call>{"name": "f", "arguments": "[', "["),
        ("hermes", '<tool_call>{"name": "f", "arguments": ', "["),
    ],
)
def test_an_opening_bracket_takes_as_much_work_behind_many_others(name: str, text: str, piece: str):
    assert not grows(name, text, piece)


def test_a_mark_in_a_text_of_gemma_does_not_read_the_rest_of_the_text(monkeypatch: pytest.MonkeyPatch):
    """Each would take as much work as the text behind it is long."""
    read, looked_at = NamedCallReader.take_plain, []

    def counting(self: NamedCallReader, text: str, at: int) -> str:
        found = read(self, text, at)
        looked_at.append(len(found))
        return found

    monkeypatch.setattr(NamedCallReader, "take_plain", counting)
    parser = FORMATS["gemma4"](TOOLS)
    parser.push('<|tool_call>call:f{a:<|"|>' + "<tool_call|>" * 2_000)
    assert sum(looked_at) < 2 * 12 * 2_000


def test_a_closing_bracket_of_the_wrong_kind_is_not_looked_for():
    class Bracket(str):
        """Counts how often it is compared."""

        compared = 0

        def __eq__(self, other: object) -> bool:
            Bracket.compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    value = JsonText()
    for _ in range(1_000):
        value.take("[")
    for _ in range(1_000):
        value.take(Bracket("}"))
    assert Bracket.compared < 20_000


@pytest.mark.all
def test_what_a_call_looks_up_takes_no_longer_with_many_tools():
    """Nor with large schemas, of which no part is looked at twice."""

    def work_of(name: str, count: int, text: str) -> int:
        values = {"enum": [f"value {number}" for number in range(count)]}
        properties = {f"key{number}": {"$ref": "#/$defs/values"} for number in range(count)}
        tools = [tool("f", {"properties": properties, "$defs": {"values": values}})]
        tools += [tool(f"f{number}", None) for number in range(count)]
        parser = FORMATS[name](tools)
        parser.push(text * 3)
        return work(lambda: parser.push(text * 10))

    call = "<tool_call><function=f><parameter=key1>a<parameter=kex<parameter=key2>b</function></tool_call>"
    for name, text in (
        ("qwen3_coder", call),
        ("llama3_json", 'Text {"name": "no", "x": 1} '),
        ("hermes", CALL),
    ):
        # Eight bytes a key are copied for each call.
        assert work_of(name, 1_000, text) < 1.6 * work_of(name, 20, text), name


def next_bytes(matcher: LLMatcher, least: int) -> list[int]:
    """Those from `least` on that the grammar allows next, without 0xFF."""
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return (least + np.unpackbits(mask, bitorder="little")[least:0xFF].nonzero()[0]).tolist()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("many", [False, True])
def test_a_parser_reads_every_output_of_its_grammar(name: str, many: bool):
    """The output is a random walk through the grammar, in bytes."""
    grammar = LLMatcher.grammar_from_lark(FORMATS[name].grammar(TOOLS, many=many, spell=json.dumps))
    rng = random.Random(name)
    several = many and FORMATS[name].written.separator is not None
    numbers = set()
    for walk in range(100):
        if walk >= 20 and (max(numbers) > 1 or not several):
            break
        matcher = compiled(grammar).deep_copy()
        assert not matcher.is_error(), matcher.get_error()
        said = bytearray()
        while len(said) < 5_000 and not (
            matcher.is_accepting() and (matcher.is_stopped() or rng.random() < 0.5)
        ):
            known = next_bytes(matcher, 0x09)
            allowed = [b for b in known if b < 0x7F and rng.random() < 0.8] or known
            printable = [byte for byte in allowed if byte > 0x20] or allowed
            said.append(rng.choice(printable))
            assert matcher.consume_token(said[-1])
        content, calls = parse(name, [said.decode()])
        assert content == ""
        for called, arguments in calls:
            given = json.loads(arguments)
            assert jsonschema.Draft202012Validator(PARAMETERS[called]).is_valid(given), (said, given)
        numbers.add(len(calls))
    assert min(numbers) == 1
    assert (max(numbers) > 1) == several, "a call of gpt-oss ends its output"


@pytest.mark.parametrize("combined", ["anyOf", "oneOf", "allOf"])
def test_a_schema_that_refers_to_itself_is_looked_at_once(combined: str):
    itself = [{"$ref": "#/$defs/a"}] * 7
    hostile = tool(
        "f", {"properties": {"a": itself[0]}, "$defs": {"a": {combined: [{"type": "null"}, *itself]}}}
    )
    parser = FORMATS["qwen3_coder"]([hostile])
    said = "<tool_call><function=f><parameter=a>null</parameter></function></tool_call>"
    assert read(parser.push(said) + parser.finish()) == ("", [("f", '{"a": null}')])
    assert FORMATS["qwen3_coder"].grammar([hostile], many=False, spell=json.dumps).startswith("start: ")


@pytest.mark.parametrize(
    ("index", "written"),
    [("0", "1"), ("1", '"1"'), ("00", "1"), ("2", "1"), ("x", "1"), ("9" * 5_000, "1")],
    ids=["first", "second", "no index", "none", "no number", "longer than Python reads"],
)
def test_a_reference_into_a_list_is_followed_or_means_any_value(index: str, written: str):
    schema = {"$ref": f"#/$defs/a/anyOf/{index}"}
    options = {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    parser = FORMATS["qwen3_coder"]([tool("f", {"properties": {"a": schema}, "$defs": {"a": options}})])
    said = "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>"
    assert read(parser.push(said) + parser.finish()) == ("", [("f", f'{{"a": {written}}}')])


def test_definitions_are_repeated_only_where_they_are_used_and_not_without_end():
    definitions = {f"d{i}": {"type": "integer", "maximum": i} for i in range(500)}
    used = {"a": {"$ref": "#/$defs/d7"}, **{f"b{i}": {"type": "integer"} for i in range(200)}}
    one = tool("f", {"properties": used, "$defs": definitions})
    assert FORMATS["glm45"].grammar([one], many=False, spell=json.dumps).count('"$defs"') == 1
    often = {f"a{i}": {"type": "array", "items": {"$ref": "#/$defs/d7"}} for i in range(200)}
    with pytest.raises(InvalidRequest, match="too long for tool_choice"):
        FORMATS["glm45"].grammar(
            [tool("f", {"properties": often, "$defs": definitions})], many=False, spell=json.dumps
        )


@pytest.mark.parametrize("name", FORMATS)
def test_strict_calls_are_enforced_behind_any_text(name: str):
    """The grammar takes a text that holds no call, and behind a text the calls that the schemas allow."""
    grammar, forced = (
        LLMatcher.grammar_from_lark(FORMATS[name].grammar(TOOLS, many=True, spell=json.dumps, text=text))
        for text in (True, False)
    )
    assert not compiled(grammar).is_error(), compiled(grammar).get_error()

    form = FORMATS[name]
    final = "<|channel|>final<|message|>" if issubclass(form, HarmonyParser) else ""
    before = "I look <b> at <tool"
    if final or issubclass(form, BareParser):  # without marks a call begins the answer, as behind </think>
        before = "" if final else "\n\n"
    rng = random.Random(name)
    assert accepts(grammar, f"{final}Just é text < {{[ <tool_")
    for _ in range(5):
        matcher = compiled(forced).deep_copy()
        said = bytearray()
        while not matcher.is_accepting():
            said.append(rng.choice(next_bytes(matcher, 0x20) or [0x0A]))
            assert matcher.consume_token(said[-1])
        call = said.decode()
        assert accepts(grammar, before + call), call
        wrong = call.replace("get_weather", "other").replace("now", "x").replace("edit", "y")
        assert not accepts(grammar, before + wrong)


UNREAD = {
    "<function=example_function_name>{{ arguments }}</function>": "Functionary",
    "{{ '>>>all\\n' + message.content }}": "Functionary",
    "<|tool_call|>{{ calls | tojson }}": "Granite 3 or Phi-4 mini",
    "]<]minimax[>[<tool_call>]<]minimax[>[<invoke name=": "MiniMax M3",
    "<tool_calls><tool_call>{{ name }}<tool_sep><arg_key>": "Hunyuan",
    "<tool_calls>[<tool_call>": "Hunyuan, Jamba, MiniMax M1 or Apriel",
}


@pytest.mark.parametrize("template", UNREAD)
def test_a_format_without_a_parser_is_not_taken_for_another_one(template: str):
    assert format_of(template) == UNREAD[template]


@pytest.mark.parametrize("name", FORMATS)
def test_a_parser_reads_calls_as_a_model_writes_them(name: str):
    written = FORMATS[name].written
    called = [("edit", {"path": "/{key} b", "line": 3, "force": True, "any": [1, None]}), ("now", {})]
    calls = called if written.separator is not None else called[:1]
    content, found = parse(name, [written.text(calls)])
    assert (content, [(said, json.loads(arguments)) for said, arguments in found]) == ("", calls)


def test_the_option_names_all_formats() -> None:
    choices = get_type_hints(FrontOptions)["tool_call_parser"]
    assert {each for kind in get_args(choices) for each in get_args(kind)} == {*FORMATS}


def test_the_format_is_found_in_the_chat_template():
    assert format_of("… within <tool_call></tool_call> XML tags …") is FORMATS["hermes"]
    assert format_of('{"name": function name, "parameters": dictionary') is FORMATS["llama3_json"]
    assert format_of("{{- '[TOOL_CALLS][' }}") is FORMATS["mistral"]
    assert format_of("{{ messages }}{{ tools }}") is None
    assert format_of('{{- "<|tool_call_start|>[" + (calls | join(", ")) + "]" -}}') is FORMATS["lfm2"]
    for name, marks in {
        "qwen3_coder": "<tool_call>\n<function=' + tool_call.name + '>",
        "glm45": "<tool_call>{{ tc.name }}<arg_key>{{ k }}</arg_key>",
        "glm47": "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>",
        "deepseek_v3": "'<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + '\\n' + '```json'",
        "deepseek_v31": "'<｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>'",
        "deepseek_v32": "{% set dsml_token = '｜DSML｜' %}<{{ dsml_token }}function_calls>",
        "deepseek_v4": "{% set dsml_token = '｜DSML｜' %}<{{ dsml_token }}tool_calls>",
        "seed_oss": "<seed:tool_call>\n<function=f>\n<parameter=p>1</parameter></function>, no <tool_call>",
        "minimax_m2": "'<minimax:tool_call>' <invoke name=\"tool-name-1\">",
        "kimi_k2": "<|tool_call_begin|>{{ formatted_id }}<|tool_call_argument_begin|>",
        "openai": "{{- '<|constrain|>json<|message|>' }}{{- '<|call|>' }}",
        "lfm2": "List of tools: <|tool_list_start|>[{{ tools }}",
        "gemma4": "{{- '<|tool_call>call:' + function['name'] + '{' -}}",
        "pythonic": "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]",  # noqa: E501
    }.items():
        assert format_of(marks) is FORMATS[name], name
