"""What workers cannot enforce of a schema: refused under `strict`, else named in a response header."""

import json
from typing import Any

import pytest

from baton.router.endpoints.frontend import unenforced_header
from baton.rpc import inference_pb2 as ipb
from baton.rpc.stubs import InferenceStub

from .conftest import Cluster

HEADER = "x-baton-unenforced"
CHAT = [{"role": "user", "content": "Hi"}]
TAGS = {"type": "array", "items": {"type": "string", "description": "x"}, "uniqueItems": True}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"t": TAGS}, "required": ["t"]}


def form(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **more}}


def chat_tool(schema: Any, name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


OTHER = chat_tool({"type": "object", "properties": {"x": {"type": "array", "contains": {"const": 1}}}}, "g")
NAMED = {"type": "function", "function": {"name": "f"}}
CHATS = "/v1/chat/completions"


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        (CHATS, {"messages": CHAT, "response_format": form(SCHEMA)}, "/response_format/json_schema/schema"),
        (
            CHATS,
            {"messages": CHAT, "tools": [OTHER, chat_tool(SCHEMA)], "tool_choice": NAMED},
            "/tools/1/function/parameters",
        ),
        (
            "/v1/completions",
            {"prompt": "x", "response_format": form(SCHEMA)},
            "/response_format/json_schema/schema",
        ),
        (
            "/v1/completions",
            {"prompt": "x", "structured_outputs": {"json": json.dumps(SCHEMA)}},
            "/structured_outputs/json",
        ),
        (
            "/v1/responses",
            {"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
            "/text/format/schema",
        ),
        (
            "/v1/responses",
            {
                "input": "x",
                "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
                "tool_choice": "required",
            },
            "/tools/0/parameters",
        ),
        (
            "/v1/messages",
            {
                "messages": CHAT,
                "max_tokens": 9,
                "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
            },
            "/output_config/format/schema",
        ),
        (
            "/v1/messages",
            {
                "messages": CHAT,
                "max_tokens": 9,
                "tools": [{"name": "f", "input_schema": SCHEMA}],
                "tool_choice": {"type": "any"},
            },
            "/tools/0/input_schema",
        ),
        (
            CHATS,
            {
                "messages": CHAT,
                "functions": [{"name": "f", "parameters": SCHEMA}],
                "function_call": {"name": "f"},
            },
            "/functions/0/parameters",
        ),
        (
            "/v1/responses",
            {
                "input": "x",
                "tools": [
                    {"type": "web_search"},
                    {
                        "type": "namespace",
                        "name": "n",
                        "tools": [{"type": "mcp"}, {"type": "function", "name": "f", "parameters": SCHEMA}],
                    },
                ],
                "tool_choice": "required",
            },
            "/tools/1/tools/1/parameters",
        ),
        (
            "/v1/responses",
            {
                "input": [
                    {"type": "web_search_call", "id": "w"},
                    {
                        "type": "additional_tools",
                        "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
                    },
                ],
                "tool_choice": "required",
            },
            "/input/1/tools/0/parameters",
        ),
        (
            "/v1/messages",
            {
                "messages": [
                    *CHAT,
                    {
                        "role": "system",
                        "content": [
                            {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "f"}}
                        ],
                    },
                ],
                "max_tokens": 9,
                "tools": [
                    {"type": "web_search_20250305", "name": "web_search"},
                    {"name": "g", "input_schema": {"type": "object"}},
                    {"name": "f", "input_schema": SCHEMA, "defer_loading": True},
                ],
                "tool_choice": {"type": "any"},
            },
            "/tools/2/input_schema",
        ),
        (
            "/v1/messages",
            {
                "messages": [
                    *CHAT,
                    {
                        "role": "system",
                        "content": [
                            {
                                "type": "tool_addition",
                                "tool": {
                                    "type": "tool_definition",
                                    "definition": {"name": "f", "input_schema": SCHEMA},
                                },
                            }
                        ],
                    },
                ],
                "max_tokens": 9,
                "tool_choice": {"type": "any"},
            },
            "/messages/1/content/0/tool/definition/input_schema",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_header_names_what_is_left_to_the_model(
    cluster: Cluster, path: str, body: dict[str, Any], place: str, stream: bool
):
    async with cluster.http.post(cluster.url + path, json=body | {"stream": stream}) as response:
        assert response.status == 200, await response.text()
        assert response.headers[HEADER] == f"{place}/properties/t/uniqueItems"
        await response.read()
    sent = cluster.prefills[0].submitted[0].prefill.request.sampling.structured_output
    text = sent.grammar or sent.json_schema
    assert '"required": ["t"]' in text
    assert "uniqueItems" not in text
    assert "contains" not in text


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (
            CHATS,
            {"messages": CHAT, "response_format": form(SCHEMA, strict=True)},
            "response_format.json_schema.schema",
        ),
        (
            CHATS,
            {"messages": CHAT, "tools": [chat_tool(SCHEMA, strict=True)], "tool_choice": "required"},
            "tools[0].function.parameters",
        ),
        (
            "/v1/responses",
            {
                "input": "x",
                "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}},
            },
            "text.format",
        ),
        (
            "/v1/messages",
            {
                "messages": CHAT,
                "max_tokens": 9,
                "tools": [{"name": "f", "input_schema": SCHEMA, "strict": True}],
                "tool_choice": {"type": "any"},
            },
            "tools[0].input_schema",
        ),
    ],
)
async def test_strict_refuses_it_by_keyword_and_path(
    cluster: Cluster, path: str, body: dict[str, Any], param: str
):
    status, result = await cluster.post(path, **body)
    message = result["error"]["message"]
    assert status == 400
    assert message.startswith(f"{param}: 'uniqueItems' at /properties/t cannot be enforced")


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"r": {"type": "object", "propertyNames": {"type": "string"}}}},
        {"properties": {"t": {"type": "array", "uniqueItems": False}}},
        {"properties": {"d": {"not": {}}}},
        {"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
         "$defs": {name: {"type": "object", "properties": {"kind": {"const": name}}, "required": ["kind"]}
                   for name in "AB"}},
        {"properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
        {"properties": {"a": {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}}},
        {"$defs": {"unused": {"contains": {"const": 1}}}},
        {"properties": {"a": {"type": "string", "format": "path", "deprecated": True}}},
    ],
)  # fmt: skip
@pytest.mark.parametrize("way", ["format", "call"])
async def test_what_has_no_effect_or_another_form_is_enforced(cluster: Cluster, schema: Any, way: str):
    """Also under `strict`."""
    whole = {"type": "object", **schema}
    body: dict[str, Any] = {"response_format": form(whole, strict=True)}
    if way == "call":
        body = {"tools": [chat_tool(whole, strict=True)], "tool_choice": "required"}
    async with cluster.http.post(cluster.url + CHATS, json={"messages": CHAT, **body}) as response:
        assert response.status == 200, await response.text()
        assert HEADER not in response.headers


async def test_a_tool_that_cannot_be_called_is_not_compiled(cluster: Cluster):
    broken = chat_tool({"type": "object", "properties": {"a": {"type": "strin"}}}, "g")
    body = {"messages": CHAT, "tools": [chat_tool({"type": "object"}), broken]}
    status, result = await cluster.post(CHATS, **body, tool_choice=NAMED)
    assert status == 200, result
    status, result = await cluster.post(CHATS, **body, tool_choice="required")
    assert (status, result["error"]["param"]) == (400, "tools[1].function.parameters")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (
            "/v1/responses",
            {
                "input": "x",
                "tools": [
                    {"type": "web_search"},
                    {"type": "function", "name": "f", "parameters": {"type": "array"}},
                ],
            },
            "tools[1].parameters",
        ),
        ("/v1/responses", {"input": [{"type": "web_search_call"}, {"type": "x"}]}, "input[1]"),
        (
            "/v1/messages",
            {
                "messages": CHAT,
                "max_tokens": 9,
                "tools": [
                    {"type": "web_search_20250305", "name": "w"},
                    {"name": "f", "input_schema": {"type": "array"}},
                ],
            },
            "tools[1].input_schema",
        ),
        (
            "/v1/messages",
            {
                "messages": CHAT,
                "max_tokens": 9,
                "tools": [
                    {"type": "web_search_20250305"},
                    {"name": "f", "input_schema": SCHEMA, "strict": True},
                ],
                "tool_choice": {"type": "any"},
            },
            "tools[1].input_schema",
        ),
    ],
)
async def test_errors_count_the_entries_that_have_no_effect(
    cluster: Cluster, path: str, body: dict[str, Any], param: str
):
    status, result = await cluster.post(path, **body)
    assert (status, result["error"].get("param", param)) == (400, param)
    assert result["error"]["message"].startswith(f"{param}: ")


async def test_a_gRPC_client_finds_it_in_the_trailing_metadata(cluster: Cluster):
    async with cluster.channel() as channel:
        structure = ipb.StructuredOutputs(json=json.dumps(SCHEMA))
        request = ipb.GenerateRequest(text="Hi", max_tokens=5, structured_outputs=structure)
        call = InferenceStub(channel).Generate(request)
        assert [message async for message in call]
        trailing = dict(await call.trailing_metadata() or ())
    assert trailing[HEADER] == "/structured_outputs/json/properties/t/uniqueItems"


def test_a_long_header_is_cut_between_entries():
    pointers = [f"/properties/é,{i}/x" for i in range(1000)]
    value = unenforced_header(pointers)
    *shown, last = value.split(",")
    assert len(value) < 4100
    assert value.isascii()
    assert shown[0] == "/properties/%C3%A9%2C0/x"
    assert last == f"+{len(pointers) - len(shown)}"
    assert unenforced_header(pointers[:1]) == shown[0]
