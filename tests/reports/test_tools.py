# ruff: noqa: E501
"""Tool calls and reasoning as models really write them."""

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from baton.router.api.messages import Tool
from baton.router.tools.formats import FORMATS
from tests.reports.replay import BURSTS, TEMPLATE, Answer, Call, ask, parse, replaying, say, splits

PROPERTIES = {"city": {"type": "string"}, "unit": {"type": "string"}}
FILE = {"path": {"type": "string"}, "content": {"type": "string"}}
FUNCTIONS: list[dict[str, Any]] = [
    {"name": "get_weather", "parameters": {"type": "object", "properties": PROPERTIES, "required": ["city"]}},
    {"name": "edit_file", "parameters": {"type": "object", "properties": FILE, "required": ["path", "content"]}},
    {"name": "get_time", "parameters": {"type": "object", "properties": {}}},
]  # fmt: skip
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
PARSED = [Tool.model_validate(tool) for tool in TOOLS]
ASKED = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, Any] = {
    "/v1/chat/completions": {"messages": ASKED, "max_tokens": 500, "tools": TOOLS},
    "/v1/responses": {
        "input": "Hi", "max_output_tokens": 500,
        "tools": [{"type": "function", "strict": False, **function} for function in FUNCTIONS],
    },
    "/v1/messages": {
        "messages": ASKED, "max_tokens": 500,
        "tools": [{"name": f["name"], "input_schema": f["parameters"]} for f in FUNCTIONS],
    },
}  # fmt: skip


class Report(NamedTuple):
    says: str
    """What the model writes."""
    calls: list[Call]
    content: str = ""
    reasoning: str = ""


PARIS, TIME = Call("get_weather", {"city": "Paris"}), Call("get_time", {})
LINES = Call("edit_file", {"path": "a", "content": "line1\nline2\tx"})
TEXT = r'"{\"city\": \"Paris\"}"'
OBJECT = '{"city": "Paris"}'
RAW = '{"path": "a", "content": "line1\nline2\tx"}'
V3 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>"
)
CODER = "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>"
GLM = "get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
ANALYSIS = "<|channel|>analysis<|message|>I look.<|end|>"
HERMES = f'<tool_call>\n{{"name": "get_weather", "arguments": {OBJECT}}}\n</tool_call>'

REPORTS: dict[tuple[str, str], dict[str, Report]] = {
    ("hermes", "none"): {
        "arguments as text": Report(f'<tool_call>{{"name": "get_weather", "arguments": {TEXT}}}</tool_call>', [PARIS]),
        "no arguments": Report('<tool_call>\n{"name": "get_time"}\n</tool_call>', [TIME]),
        "arguments that are null": Report('<tool_call>{"name": "get_time", "arguments": null}</tool_call>', [TIME]),
        "line breaks in a text": Report(f'<tool_call>{{"name": "edit_file", "arguments": {RAW}}}</tool_call>', [LINES]),
    },
    ("hermes", "qwen3"): {
        "a call in the reasoning": Report(f"I look.\n{HERMES}\n</think>\n\n", [PARIS], "", "I look."),
        "a call that ends there": Report(f"I look.\n{HERMES}", [PARIS], "", "I look."),
        "a mark without a call": Report(
            f"In <tool_call> I call.\n</think>\n{HERMES}", [PARIS], "", "In <tool_call> I call.\n"
        ),
    },
    ("llama3_json", "none"): {
        "no arguments": Report('{"name": "get_time"}', [TIME]),
        "arguments that are null": Report('{"name": "get_time", "parameters": null}', [TIME]),
        "arguments as text": Report(f'{{"name": "get_weather", "parameters": {TEXT}}}', [PARIS]),
        "line breaks in a text": Report(f'{{"name": "edit_file", "parameters": {RAW}}}', [LINES]),
        "text before a call": Report(f'I look.\n{{"name": "get_weather", "parameters": {OBJECT}}}', [PARIS], "I look."),
    },
    ("mistral", "none"): {
        "arguments as text": Report(f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {TEXT}}}]', [PARIS]),
        "no arguments in a list": Report('[TOOL_CALLS][{"name": "get_time"}]', [TIME]),
        "no arguments": Report("[TOOL_CALLS]get_time", [TIME]),
        "arguments that are null": Report("[TOOL_CALLS]get_time[ARGS]null", [TIME]),
        "line breaks in a text": Report(f"[TOOL_CALLS]edit_file[ARGS]{RAW}", [LINES]),
        "an id before the arguments": Report(f"[TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{OBJECT}", [PARIS]),
        "a call without a list": Report(f'[TOOL_CALLS] {{"name": "get_weather", "arguments": {OBJECT}}}', [PARIS]),
        "the mark twice": Report(f"[TOOL_CALLS][TOOL_CALLS]get_weather[ARGS]{OBJECT}", [PARIS]),
    },
    ("qwen3_coder", "none"): {
        "no mark before the call": Report(f"I look.\n\n{CODER}\n</tool_call>", [PARIS], "I look."),
        "two calls without marks": Report(f"{CODER}\n{CODER.replace('Paris', 'Tokyo')}", [PARIS, Call("get_weather", {"city": "Tokyo"})]),
        "the call ends the value": Report("<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</function>\n</tool_call>", [PARIS]),
        "the end of the text ends the value": Report("<tool_call><function=get_weather>\n<parameter=city>\nParis\n", [PARIS]),
        "a mark ends the value": Report("<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</tool_call>", [PARIS]),
        "a key ends the value": Report(
            "<tool_call><function=get_weather>\n<parameter=city>\nParis\n<parameter=unit>\nC\n</parameter>\n</function>",
            [Call("get_weather", {"city": "Paris", "unit": "C"})],
        ),
        "no end of the function": Report("<tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n</tool_call>", [PARIS]),
        "tags in a text": Report(
            "<tool_call>\n<function=edit_file>\n<parameter=path>\na\n</parameter>\n<parameter=content>\n<function=f>\n"
            "<parameter=x>\n</function> and </tool_call>\n<parameter=path>\n</parameter>\n</function>\n</tool_call>",
            [Call("edit_file", {"path": "a", "content": "<function=f>\n<parameter=x>\n</function> and </tool_call>\n<parameter=path>"})],
        ),
    },
    ("qwen3_coder", "qwen3"): {
        "a call in the reasoning": Report(f"I look.\n<tool_call>\n{CODER}\n</tool_call>", [PARIS], "", "I look."),
        "without its mark": Report(f"I look.\n{CODER}\n</tool_call>\n</think>", [PARIS], "", "I look."),
        "the mark in the call": Report(
            "I look.\n<tool_call><function=get_weather><parameter=city></think></parameter></function></tool_call>",
            [Call("get_weather", {"city": "</think>"})], "", "I look.",
        ),
    },
    ("seed_oss", "none"): {
        "a call": Report(f"I look.\n<seed:tool_call>\n{CODER}\n</seed:tool_call>", [PARIS], "I look."),
    },
    ("minimax_m2", "qwen3"): {
        "a call in the reasoning": Report(
            'I look.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
            '</invoke>\n<invoke name="get_time">\n</invoke>\n</minimax:tool_call>', [PARIS, TIME], "", "I look.",
        ),
        "other quotes": Report(
            "</think><minimax:tool_call><invoke name='get_weather'><parameter name=city>Paris</parameter></invoke>"
            "</minimax:tool_call>", [PARIS],
        ),
        "the call ends the value": Report(
            '</think><minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</invoke>\n'
            "</minimax:tool_call>", [PARIS],
        ),
    },
    ("deepseek_v32", "deepseek_v3"): {
        "parameters of each kind": Report(
            'I look.</think>\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="edit_file">\n<｜DSML｜parameter name="path" '
            'string="true">5</｜DSML｜parameter>\n<｜DSML｜parameter name="lines" string="false">[1, "a"]</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="note" string="false">"b"</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
            '<｜DSML｜invoke name="get_time">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
            [Call("edit_file", {"path": "5", "lines": [1, "a"], "note": "b"}), TIME], "", "I look.",
        ),
        "a call in the reasoning": Report(
            'I look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" '
            'string="true">Paris</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>', [PARIS], "", "I look.",
        ),
    },
    ("deepseek_v4", "none"): {
        "no attribute and no end": Report(
            '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city">Paris</｜DSML｜invoke>\n'
            "</｜DSML｜tool_calls>", [PARIS],
        ),
    },
    ("glm45", "glm45"): {
        "a call in the reasoning": Report(f"I look.\n<tool_call>{GLM}</tool_call>", [PARIS], "", "I look."),
        "the call ends the value": Report(
            "</think><tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</tool_call>", [PARIS]
        ),
        "a word in the mark": Report("So.</think><tool_call>...</tool_call>", [], "<tool_call>...</tool_call>", "So."),
    },
    ("deepseek_v3", "none"): {
        "no arguments": Report(V3.format("function<｜tool▁sep｜>get_time\n```json\n```"), [TIME]),
        "line breaks in a text": Report(V3.format(f"function<｜tool▁sep｜>edit_file\n```json\n{RAW}\n```"), [LINES]),
        "arguments as text": Report(V3.format(f"function<｜tool▁sep｜>get_weather\n```json\n{TEXT}\n```"), [PARIS]),
    },
    ("deepseek_v31", "deepseek_v3"): {
        "a call in the reasoning": Report(f"I look.{V3.format('get_weather<｜tool▁sep｜>' + OBJECT)}", [PARIS], "", "I look."),
        "no arguments": Report("</think>" + V3.format("get_time<｜tool▁sep｜>"), [TIME]),
        "arguments that are null": Report("</think>" + V3.format("get_time<｜tool▁sep｜>null"), [TIME]),
    },
    ("kimi_k2", "kimi_k2"): {
        "a call in the reasoning": Report("I look." + KIMI.format("functions.get_weather:0", OBJECT), [PARIS], "", "I look."),
        "underscores in the id": Report("</think>" + KIMI.format("functions_get_weather_1", OBJECT), [PARIS]),
        "a counter as the id": Report("</think>" + KIMI.format("call00003", OBJECT), [PARIS]),
        "a foreign id": Report("</think>" + KIMI.format("call_abc123def456", OBJECT), [PARIS]),
        "an id of no tool": Report("</think>" + KIMI.format("call_1", '{"x": 1}'), [], 'call_1{"x": 1}'),
        "no arguments": Report("</think>" + KIMI.format("functions.get_time:0", ""), [TIME]),
    },
    ("openai", "none"): {
        "no arguments": Report("<|channel|>commentary to=functions.get_time <|constrain|>json<|message|><|call|>", [TIME]),
        "line breaks in a text": Report(f"<|channel|>commentary to=functions.edit_file json<|message|>{RAW}<|call|>", [LINES]),
    },
    ("openai", "openai_gptoss"): {
        "no message": Report(f"{ANALYSIS}<|start|>assistant<|channel|>commentary to=functions.get_time json<|call|>", [TIME], "", "I look."),
        "no message and no end": Report(f"{ANALYSIS}<|start|>assistant to=functions.get_time<|channel|>commentary", [TIME], "", "I look."),
        "the function before the channel": Report(f"{ANALYSIS}<|start|>assistant to=functions.get_time<|channel|>commentary<|call|>", [TIME], "", "I look."),
    },
    ("pythonic", "none"): {
        "text before a call": Report('I look. [get_weather(city="Paris")]', [PARIS], "I look."),
        "line breaks in a text": Report('[edit_file(path="a", content="line1\nline2\tx")]', [LINES]),
        "the text ends": Report('[get_weather(city="Paris"', [PARIS]),
    },
}  # fmt: skip
"""By the parsers of calls and of reasoning, and by what is reported."""


def right(report: Report) -> Answer:
    finish = "tool_calls" if report.calls else "stop"
    return Answer(report.content, report.reasoning, report.calls, finish)


@pytest.mark.cases(1)
@pytest.mark.parametrize("parsers", REPORTS)
async def test_reports_in_all_endpoints(parsers: tuple[str, str], tmp_path: Path):
    calls, reasoning = parsers
    template = TEMPLATE if reasoning == "none" else TEMPLATE.replace("assistant\n", "assistant\n<think>\n")
    async with replaying(
        tmp_path, template=template, tool_call_parser=calls, reasoning_parser=reasoning
    ) as made:
        for number, (name, report) in enumerate(REPORTS[parsers].items()):
            paths = [*BODIES] if not number else [[*BODIES][number % len(BODIES)]]  # the others in turn
            for path, burst in itertools.product(paths, BURSTS):
                say(made, report.says, burst)
                for stream in (False, True) if burst == 1 else (True,):
                    answer = await ask(made, path, stream=stream, **BODIES[path])
                    assert answer == right(report), (name, path, stream, burst)


@pytest.mark.parametrize(
    ("parsers", "name"), [(parsers, name) for parsers, reports in REPORTS.items() for name in reports]
)
def test_reports_in_pieces_of_every_size(parsers: tuple[str, str], name: str):
    report = REPORTS[parsers][name]
    for pieces in splits(report.says):
        assert parse(parsers, pieces, PARSED) == right(report), pieces


UNKNOWN = {
    "<seed:tool_call>\n<function=NAME>\n<parameter=KEY>VALUE</parameter></function></seed:tool_call>": "seed_oss",
    '<function=NAME>{"KEY": "VALUE"}</function>': "Functionary",
    "<|thought_start|>\n<|thought_end|>\n<|tool_call_start|>\n```python\nNAME(KEY=VALUE)\n```\n<|tool_call_end|>": "MiniCPM 3",
    "<start_function_call>call:NAME{KEY:VALUE}<end_function_call>": "FunctionGemma",
}


@pytest.mark.parametrize("call", UNKNOWN)
async def test_no_format_is_taken_for_another_one(call: str, tmp_path: Path):
    says = f"<seed:tool_call>\n{CODER}\n</seed:tool_call>"
    async with replaying(tmp_path, says, "Call so: " + call + TEMPLATE) as made:
        for path, body in BODIES.items():
            if UNKNOWN[call] in FORMATS:
                assert (await ask(made, path, stream=False, **body)).calls == [PARIS]
                continue
            status, refused = await made.post(path, model="fake", **body)
            assert status == 400
            assert UNKNOWN[call] in refused["error"]["message"]
            assert "--tool-call-parser" in refused["error"]["message"]
