"""Requests of today's clients, served by vLLM workers: the first of each recording, and schemas of tools.

The model reasons, with random weights: only a budget ends its reasoning.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from tests.clients.catalog import CHAT, CLIENTS, MESSAGES, RESPONSES
from tests.clients.model import TEMPLATE
from tests.clients.report import recording
from tests.clients.shape import events, replayed
from tests.clients.test_replays import check_order
from tests.within import WITHIN

from .served import VLLMCluster, save_model, serving

pytestmark = pytest.mark.long

TOKENS = 100
LIMITS = {CHAT: "max_tokens", RESPONSES: "max_output_tokens", MESSAGES: "max_tokens"}
MARKS = {"<292>": "<tool_call>", "<293>": "</tool_call>", "<294>": "<think>", "<295>": "</think>"}
BUDGET = 3
CLOSING = {2: 100, 93: 90, 61: 80, 95: -100, 96: -100}
"""What ends texts, objects and lists in this order is likely, and white space is not, so a structure ends."""
ENUM = {"enum": ["red", "green"]}
POINT = {"type": "object", "properties": {"kind": {"const": "point"}}, "required": ["kind"]}
LINE = {"type": "object", "properties": {"kind": {"const": "line"}}, "required": ["kind"]}
BRANCHES = {"oneOf": [{"$ref": "#/$defs/point"}, {"$ref": "#/$defs/line"}]}
SCHEMAS: dict[str, dict[str, Any]] = {
    "a record": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}},
    "a record of an enum": {
        "type": "object",
        "propertyNames": ENUM,
        "additionalProperties": {"type": "integer"},
    },
    "a property that is never there": {"type": "object", "properties": {"a": {"not": {}}, "b": {}}},
    "items that may be equal": {
        "type": "object",
        "properties": {"a": {"type": "array", "items": ENUM, "uniqueItems": False}},
    },
    "a tagged union": {
        "type": "object",
        "properties": {"shape": BRANCHES},
        "required": ["shape"],
        "$defs": {"point": POINT, "line": LINE},
    },
    "a property that needs another": {
        "type": "object",
        "properties": {"a": {}, "b": {}},
        "dependentRequired": {"a": ["b"]},
    },
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMCluster]:
    model = save_model(tmp_path_factory.mktemp("model"), max_position_embeddings=1 << 16)
    tokenizer, about = model / "tokenizer.json", model / "tokenizer_config.json"
    text = tokenizer.read_text()
    for token, mark in MARKS.items():
        text = text.replace(f'"{token}"', f'"{mark}"')
    tokenizer.write_text(text)
    template = TEMPLATE.read_text().replace("<|im_start|>assistant\\n", "<|im_start|>assistant\\n<think>\\n")
    about.write_text(json.dumps(json.loads(about.read_text()) | {"chat_template": template}))
    flags = "--max-model-len", str(1 << 16), "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"
    with serving(model, tmp_path_factory.mktemp("served"), *flags) as served:
        yield served
        served.assert_whole()


def post(cluster: VLLMCluster, path: str, body: dict[str, Any], headers: dict[str, str]) -> str:
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        body.pop(name, None)
    body |= {"model": "tiny", LIMITS[path.partition("?")[0]]: TOKENS}
    request = urllib.request.Request(
        cluster.url + path, json.dumps(body).encode(), headers | {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=WITHIN) as response:
            return response.read().decode()
    except urllib.error.HTTPError as error:
        pytest.fail(f"{error.code}: {error.read().decode()}")


@pytest.mark.parametrize("name", CLIENTS)
def test_first_requests_of_clients(name: str, cluster: VLLMCluster) -> None:
    file = recording(name)
    assert file is not None
    requests = json.loads(file.read_text())
    body, path = replayed(requests, 0, []), requests[0]["path"]
    answer = post(cluster, path, body, requests[0]["headers"])
    check_order(path.partition("?")[0], events(answer), stream=body.get("stream", False))


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=[name.replace(" ", "_") for name in SCHEMAS])
def test_schemas_of_tools(schema: dict[str, Any], cluster: VLLMCluster) -> None:
    chat = {"messages": [{"role": "user", "content": "Go."}], "temperature": 0}
    chat |= {"thinking_token_budget": BUDGET, "logit_bias": CLOSING}
    tool = {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    post(cluster, CHAT, chat | tool, {})
    forced = said(post(cluster, CHAT, chat | tool | {"tool_choice": "required"}, {}))
    formed = said(post(cluster, CHAT, chat | {"response_format": form}, {}))
    [call] = forced["tool_calls"]
    assert call["function"]["name"] == "f"
    for text in (call["function"]["arguments"], formed["content"]):
        jsonschema.validate(json.loads(text), schema)
    assert [message["reasoning"] for message in (forced, formed)] == ['"' * BUDGET] * 2


def said(answer: str) -> dict[str, Any]:
    [choice] = json.loads(answer)["choices"]
    assert choice["finish_reason"] in ("stop", "tool_calls"), choice
    return choice["message"]
