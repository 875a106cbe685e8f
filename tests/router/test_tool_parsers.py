"""Parsers find tool calls for every split of a text, and lose no other text."""

import itertools
import json
import random
import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from baton.router.api.messages import Tool
from baton.router.tools.formats import FORMATS, format_of
from baton.router.tools.parser import Part

WEATHER = {"city": 'Paris "} </tool_call> [TOOL_CALLS] é\\', "days": [1, {"x": "]"}], "deep": {"a": {}}}
W = json.dumps(WEATHER, ensure_ascii=False)
CALL = f'{{"name": "get_weather", "arguments": {W}}}'


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
    parser = FORMATS[name]()
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
    ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>',
     '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', []),
    ("hermes", "<tool_", "<tool_", []),
    ("hermes", f"<tool_call>{CALL} The tag is missing.", "The tag is missing.", [ONE]),
    ("hermes", f"<tool_call>{CALL}}}\n<tool_call>{CALL}</tool_call>", "", [ONE, ONE]),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}',
     '<tool_call>{"name": "\\ud800", "arguments": {}}', []),
    ("llama3_json", f'{{"name": "get_weather", "parameters": {W}}}', "", [ONE]),
    ("llama3_json", f'\n{{"name": "get_weather", "parameters": {W}}}; {{"name": "now", "parameters": {{}}}} ',
     "", [ONE, OTHER]),
    ("llama3_json", 'Sure: {"name": "now", "parameters": {}}', 'Sure: {"name": "now", "parameters": {}}', []),
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
    ("mistral", "[TOOL_CALLS] what", "[TOOL_CALLS] what", []),
    ("mistral", "[TOOL_CALLS]now{}[TOOL_CALLS] what", "[TOOL_CALLS] what", [OTHER]),
    ("mistral", "[TOOL_CALLS]I think [TOOL_CALLS]now{}", "[TOOL_CALLS]I think ", [OTHER]),
    ("mistral", f"[TOOL_CALLS][{CALL}, and so on", ", and so on", [ONE]),
    ("mistral", '[TOOL_CALLS][{"name": 1}]', '[TOOL_CALLS][{"name": 1}]', []),
]  # fmt: skip


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
    assert calls or content == text
    msgspec.json.encode(calls)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", ""),
        ("hermes", "<tool_call>"),
        ("hermes", '<tool_call>{"'),
        ("hermes", "<tool_call>{"),
        ("hermes", f"<tool_call>{CALL_OF_F}"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "'),
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
    ],
)
def test_long_output_takes_time_in_proportion_to_its_length(name: str, text: str):
    def seconds(length: int, filler: str) -> float:
        parser = FORMATS[name]()
        began = time.process_time()
        parser.push(text + filler * length)
        parser.finish()
        return time.process_time() - began

    for filler in " x":
        assert seconds(100_000, filler) < 25 * min(seconds(10_000, filler) for _ in range(3)), filler


def tool(name: str, parameters: dict | None) -> Tool:
    return Tool.model_validate({"type": "function", "function": {"name": name, "parameters": parameters}})


TOOLS = [
    tool("get_weather", {"type": "object", "properties": {"city": {"$ref": "#/$defs/city"}},
                         "required": ["city"], "additionalProperties": False,
                         "$defs": {"city": {"enum": ["Paris", "Rome"]}}}),
    tool("now", None),
]  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("many", [False, True])
def test_a_parser_reads_every_output_of_its_grammar(name: str, many: bool):
    """The output is a random walk through the grammar, in bytes."""
    grammar = FORMATS[name].grammar(TOOLS, many=many, spell=json.dumps)
    alphabet = LLTokenizer("byte")
    rng = random.Random(name)
    numbers = set()
    for _ in range(20):
        matcher = LLMatcher(alphabet, LLMatcher.grammar_from_lark(grammar))
        assert not matcher.is_error(), matcher.get_error()
        said = bytearray()
        while not (matcher.is_accepting() and (matcher.is_stopped() or rng.random() < 0.3)):
            mask = matcher.compute_bitmask()
            allowed = [byte for byte in range(0x09, 0x7F) if mask[byte // 8] >> byte % 8 & 1]
            printable = [byte for byte in allowed if byte > 0x20] or allowed
            said.append(rng.choice(printable))
            assert matcher.consume_token(said[-1])
        content, calls = parse(name, [said.decode()])
        assert content == ""
        for called, arguments in calls:
            given = json.loads(arguments)
            assert given == {} if called == "now" else given["city"] in ("Paris", "Rome")
        numbers.add(len(calls))
    assert min(numbers) == 1
    assert (max(numbers) > 1) == many


def test_the_format_is_found_in_the_chat_template():
    assert format_of("… within <tool_call></tool_call> XML tags …") is FORMATS["hermes"]
    assert format_of('{"name": function name, "parameters": dictionary') is FORMATS["llama3_json"]
    assert format_of("{{- '[TOOL_CALLS][' }}") is FORMATS["mistral"]
    assert format_of("{{ messages }}{{ tools }}") is None
