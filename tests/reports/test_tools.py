"""Tool calls and reasoning as models really write them."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.reports.replay import BURSTS, Answer, Call, ask, replaying, say

PROPERTIES = {"city": {"type": "string"}, "unit": {"type": "string"}}
FUNCTIONS: list[dict[str, Any]] = [
    {"name": "get_weather", "parameters": {"type": "object", "properties": PROPERTIES, "required": ["city"]}},
]
PARIS = Call("get_weather", {"city": "Paris"})
ASKED = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, Any] = {
    "/v1/chat/completions": {
        "messages": ASKED, "max_tokens": 500,
        "tools": [{"type": "function", "function": function} for function in FUNCTIONS],
    },
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


REPORTS: dict[tuple[str, str], dict[str, Report]] = {
    ("hermes", "none"): {
        "a call as the model should write it": Report(
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', [PARIS]
        ),
    },
}
"""By the parsers of calls and of reasoning, and by what is reported."""


@pytest.mark.parametrize("parsers", REPORTS)
async def test_reports_in_every_endpoint(parsers: tuple[str, str], tmp_path: Path):
    calls, reasoning = parsers
    async with replaying(tmp_path, tool_call_parser=calls, reasoning_parser=reasoning) as made:
        for name, report in REPORTS[parsers].items():
            finish = "tool_calls" if report.calls else "stop"
            right = Answer(report.content, report.reasoning, report.calls, finish)
            for burst in BURSTS:
                say(made, report.says, burst)
                for path, body in BODIES.items():
                    for stream in (False, True) if burst == 1 else (True,):
                        answer = await ask(made, path, stream=stream, **body)
                        assert answer == right, (name, path, stream, burst)
