"""Earlier and other forms of the fields of chats, many tools, and long names."""

import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

from baton.router.api.bodies import ChatBody
from baton.router.api.messages import MAX_TOOLS
from baton.router.api.validation import parse
from baton.router.errors import InvalidRequest
from baton.router.text.tokenizer import load_tokenizer
from baton.rpc.token_ids import unpacked_ids

from .conftest import Cluster, accepts, make_cluster
from .test_tools import ARGUMENTS, CHAT, ONE, TEMPLATE, TOOLS

FUNCTIONS = [tool["function"] for tool in TOOLS]
CHATS = "/v1/chat/completions"


def chat(**body: Any) -> ChatBody:
    return parse(ChatBody, json.dumps({"messages": CHAT, **body}).encode())


@pytest.mark.parametrize(
    ("function_call", "tool_choice"),
    [
        ({}, None),
        ({"function_call": "auto"}, "auto"),
        ({"function_call": "none"}, "none"),
        ({"function_call": {"name": "now"}}, {"type": "function", "function": {"name": "now"}}),
    ],
)
def test_functions_are_tools(function_call: Any, tool_choice: Any):
    body = chat(functions=FUNCTIONS, **function_call)
    newer = chat(tools=TOOLS, tool_choice=tool_choice, parallel_tool_calls=False)
    for name in ("tools", "tool_choice", "parallel_tool_calls", "must_call", "many_calls"):
        assert getattr(body, name) == getattr(newer, name), name
    again = ChatBody.model_validate_json(
        body.model_dump_json(by_alias=True, exclude_unset=True, warnings=False)
    )
    assert again == body, "as a child sends it"
    assert (body.calls_functions, newer.calls_functions) == (True, False)


@pytest.mark.parametrize(
    "body",
    [
        {"functions": FUNCTIONS, "tools": TOOLS},
        {"functions": FUNCTIONS, "function_call": {"name": "other"}},
        {"functions": FUNCTIONS, "function_call": "sometimes"},
        {"functions": "f"},
        {"functions": [{"name": "a b"}]},
    ],
)
def test_wrong_functions_are_refused(body: Any):
    with pytest.raises(InvalidRequest):
        chat(**body)


@pytest.mark.all
async def test_a_call_of_a_function_comes_back_as_one(tmp_path: Path, directory: Path):
    template = tmp_path / "tools.jinja"
    template.write_text(TEMPLATE)
    tokenizer = load_tokenizer(model=str(directory), chat_template=str(template))
    call = {"name": "get_weather", "arguments": ARGUMENTS}
    async with make_cluster(tokenizer, tmp_path, text=ONE) as made:
        status, result = await made.post(CHATS, messages=CHAT, functions=FUNCTIONS)
        assert status == 200
        [choice] = result["choices"]
        assert (choice["finish_reason"], choice["message"]["function_call"]) == ("function_call", call)
        assert "tool_calls" not in choice["message"]
        events = await made.events(CHATS, messages=CHAT, functions=FUNCTIONS)
        deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
        parts = [delta["function_call"] for delta in deltas if "function_call" in delta]
        assert parts[0]["name"] == "get_weather"
        assert "".join(part["arguments"] for part in parts) == ARGUMENTS
        assert events[-1]["choices"][0]["finish_reason"] == "function_call"
        later = [
            *CHAT,
            {"role": "assistant", "content": None, "function_call": call},
            {"role": "function", "name": "get_weather", "content": "Rain"},
        ]
        prompts = []
        for name in (None, "tools"):
            messages: list[Any] = later
            if name:
                calls = [{"id": "1", "type": "function", "function": call}]
                result = {"role": "tool", "tool_call_id": "1", "content": "Rain"}
                messages = [*CHAT, {"role": "assistant", "content": None, "tool_calls": calls}, result]
            status, _ = await made.post(CHATS, messages=messages, tools=TOOLS)
            assert status == 200
            prompts.append(list(unpacked_ids(made.sent.prompt_ids)))
        assert prompts[0] == prompts[1]


@pytest.mark.parametrize(
    ("reasoning", "fields"),
    [
        ({}, {}),
        ({"effort": "low", "summary": "auto"}, {"reasoning_effort": "low"}),
        ({"enabled": False}, {"reasoning_effort": "none"}),
        ({"max_tokens": 5, "exclude": True}, {"thinking_token_budget": 5, "include_reasoning": False}),
    ],
)
def test_reasoning_as_an_object(reasoning: Any, fields: dict[str, Any]):
    body = chat(reasoning=reasoning)
    assert {name: getattr(body, name) for name in fields} == fields
    assert body.template_settings == chat(**fields).template_settings
    assert chat(reasoning={"effort": "low"}, reasoning_effort="high").reasoning_effort == "high"


@pytest.mark.parametrize("reasoning", [{"effort": "lots"}, {"exclude": "yes"}, {"max_tokens": "1"}, 3, "low"])
def test_wrong_reasoning_is_refused(reasoning: Any):
    with pytest.raises(InvalidRequest, match=r"reasoning|thinking_token_budget"):
        chat(reasoning=reasoning)


@pytest.mark.all
async def test_hundreds_of_tools_can_be_forced(cluster: Cluster):
    """The first ones with their schemas. The header names the others."""
    tools = []
    for i in range(300):
        properties = {f"p{i}_{j}": {"type": "string", "description": 60 * "x"} for j in range(8)}
        function = {
            "name": f"mcp__{i}_" + 150 * "x" * (i % 299 == 0),
            "parameters": {"type": "object", "properties": properties},
        }
        tools.append({"type": "function", "function": function})
    body = {"messages": CHAT, "tools": tools, "tool_choice": "required"}
    async with cluster.http.post(cluster.url + CHATS, json=body) as response:
        assert response.status == 200, await response.text()
        left_out = response.headers["x-baton-unenforced"].split(",")
    sent = cluster.prefills[0].submitted[0].prefill.request.sampling.structured_output.grammar
    enforced = sent.count("%json") - 1
    assert left_out[0] == f"/tools/{enforced}/function/parameters"
    assert enforced > 100
    assert all(f"mcp__{i}_" in sent for i in range(300))
    grammar = LLMatcher.grammar_from_lark(sent)
    for i, taken in ((0, False), (299, True)):
        call = f'<tool_call>\n{{"name": "mcp__{i}_{150 * "x"}", "arguments": {{"p{i}_0": 1}}}}\n</tool_call>'
        assert accepts(grammar, call) == taken


def test_the_number_of_tools_is_bounded():
    tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(MAX_TOOLS + 1)]
    assert chat(tools=tools[1:]).tools
    with pytest.raises(InvalidRequest, match="2048"):
        chat(tools=tools)
    with pytest.raises(InvalidRequest, match="twice"):
        chat(tools=[*tools[2:], tools[2]])
