"""Random requests over HTTP and gRPC get a response or a client's error: no internal error, and no hang."""

import collections
import contextlib
import json
import random
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.message import DecodeError

from baton.router.api.anthropic.body import MessagesBody
from baton.router.api.openai_responses.body import ResponsesBody
from baton.rpc import inference_pb2 as pb
from baton.rpc.stubs import InferenceStub
from tests.within import WITHIN

from .conftest import Cluster

MANY = pytest.mark.parametrize("count", [200, pytest.param(5_000, marks=pytest.mark.long)])
CHAT = pb.Chat(messages=[pb.ChatMessage(role="user", content="Hi")])
Code = grpc.StatusCode
OVER_GRPC: dict[str, list[Any]] = {
    "model": ["", "fake", "\x00", "ü" * 999],
    "text": ["", "x", "\x00", "🙂" * 999],
    "token_ids": [pb.TokenIds(), pb.TokenIds(ids=[0, 2**32 - 1]), pb.TokenIds(ids=[5] * 8191)],
    "chat": [CHAT, pb.Chat(), pb.Chat(messages=[pb.ChatMessage(role="\x00")])],
    "n": [0, 1, 3, 2**32 - 1],
    "max_tokens": [0, 1, 5, 2**31, 2**32 - 1],
    "min_tokens": [1, 5, 2**32 - 1],
    **{
        name: [0.0, -0.0, 1.0, -1.0, 1e-320, 1e308, float("nan"), float("inf"), float("-inf")]
        for name in (
            "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"
        )
    },
    "top_k": [-(2**31), -2, -1, 0, 1, 2**31 - 1],
    "seed": [0, 2**64 - 1],
    "stop": [[""], ["x"] * 65, ["x" * 1025], ["\x00", "🙂"]],
    "stop_token_ids": [[0], [2**32 - 1], [1] * 1025],
    "logit_bias": [{0: 1.0}, {2**32 - 1: 1.0}, {5: float("nan")}, dict.fromkeys(range(1025), 0.0)],
    "logprobs": [0, 1, 20, 21, 2**32 - 1],
    "ignore_eos": [True],
    "skip_special_tokens": [True, False],
    "priority": [-(2**31), 2**31 - 1],
    "user": ["\x00", "x" * 9999],
    "structured_outputs": [
        pb.StructuredOutputs(),
        *(pb.StructuredOutputs(json=x) for x in ("", "\x00", "{}", "[" * 999, '{"type": "strin"}')),
        *(pb.StructuredOutputs(regex=x) for x in ("", "(", "a+", "(a{1,999}){1,999}", "x" * 99_999)),
        *(pb.StructuredOutputs(choice=pb.Choice(texts=x)) for x in ([], [""], ["a", "a"], ["é"] * 2_000)),
        *(pb.StructuredOutputs(grammar=x) for x in ("", "root ::= root", "start: start", "x" * 99_999)),
        *(pb.StructuredOutputs(json_object=x) for x in (True, False)),
    ],
}  # fmt: skip


async def call(stub: InferenceStub, request: pb.GenerateRequest) -> grpc.StatusCode:
    result = stub.Generate(request, timeout=WITHIN)
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for _ in result:
            pass
    return await result.code()


@pytest.mark.all
@MANY
async def test_extreme_values_over_grpc(cluster: Cluster, caplog: pytest.LogCaptureFixture, count: int):
    rng, codes = random.Random(5), collections.Counter()
    async with cluster.channel() as channel:
        stub = InferenceStub(channel)
        for _ in range(count):
            names = rng.sample(sorted(OVER_GRPC), rng.choice([1, 2, 3]))
            fields: dict[str, Any] = {"text": "x"} | {name: rng.choice(OVER_GRPC[name]) for name in names}
            codes[await call(stub, pb.GenerateRequest(**fields))] += 1
    assert set(codes) == {Code.OK, Code.INVALID_ARGUMENT, Code.NOT_FOUND}, codes
    assert min(codes.values()) > 3, codes
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.all
@MANY
async def test_mutated_messages_over_grpc(cluster: Cluster, caplog: pytest.LogCaptureFixture, count: int):
    """Valid messages with a few changed bytes, if they can still be parsed."""
    rng, codes = random.Random(6), collections.Counter()
    whole = pb.GenerateRequest(
        text="Hello", n=2, max_tokens=5, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, seed=3, stop=["zz"],
        stop_token_ids=[9], logit_bias={5: 2.5}, logprobs=2, priority=-3, user="u", min_tokens=1,
        structured_outputs=pb.StructuredOutputs(regex="[a-z]+"),
    ).SerializeToString()  # fmt: skip
    async with cluster.channel() as channel:
        stub = InferenceStub(channel)
        while codes.total() < count:
            changed = bytearray(whole)
            for _ in range(rng.randrange(1, 5)):
                at = rng.randrange(len(changed))
                changed[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
            with contextlib.suppress(DecodeError):
                codes[await call(stub, pb.GenerateRequest.FromString(bytes(changed)))] += 1
    assert set(codes) <= {Code.OK, Code.INVALID_ARGUMENT, Code.NOT_FOUND}, codes
    assert min(codes[Code.OK], codes[Code.INVALID_ARGUMENT]) > 3, codes
    assert not [record for record in caplog.records if record.exc_info]


ANYTHING: list[Any] = [
    None, True, 0, -1, 1, 3, 0.5, -0.0, 1e308, 1e-320, 2**31, 2**64, -(2**63) - 1, 10**40, "", "x", "\x00",
    "\ud800", "🙂" * 99, [], [[]], [None], ["x"], [5], [[5], [6]], [-1], [2**32], {}, {"5": 1.0},
    {"type": "x"}, [{}], {"": {}},
]  # fmt: skip
"""Values for any field."""
TOOL = {"type": "function", "function": {"name": "now"}}
SPECIAL: dict[str, list[Any]] = {
    "prompt": ["Hi", ["a", "b"], [5, 6], [[5, 6], [7]], ["a"] * 99],
    "messages": [
        [{"role": "user", "content": [{"type": "text", "text": "x"}]}], [{"role": "tool", "content": "x"}],
        [{"role": "assistant", "tool_calls": [{}]}], [{"role": "\x00", "content": 5}],
    ],
    "tools": [[TOOL], [TOOL] * 200, [{"type": "function", "function": {"name": "x y"}}], [{"type": "web"}],
              [{"type": "function", "function": {"name": "f", "parameters": {"type": 5}}}]],
    "tool_choice": ["auto", "none", "required", "some", TOOL, {"type": "function", "function": {}}],
    "response_format": [
        {"type": "json_object"}, {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "n"}},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": {"$ref": "#"}}},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": {"allOf": [{"$ref": "#/allOf/0"}]}}},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "string", "pattern": "("}}},
    ],
    "structured_outputs": [
        {"regex": "a+"}, {"regex": "("}, {"regex": "(a{1,999}){1,999}"}, {"choice": ["a", "a"]},
        {"choice": []}, {"json": "{"}, {"json": {"type": "integer"}}, {"grammar": "root ::= root"},
        {"regex": "a", "choice": ["a"]},
    ],
    "stream_options": [{"include_usage": True}, {"include_usage": 5}, {"continuous_usage_stats": True}],
    "timeout": [0, 1e-9, 0.01, 86_400, 86_401],
    "temperature": [0.0, 2.0, 2.1],
}  # fmt: skip
FIELDS = [
    "model", "n", "max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_p", "top_k",
    "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "stop",
    "stop_token_ids", "logit_bias", "logprobs", "top_logprobs", "prompt_logprobs", "echo", "ignore_eos",
    "skip_special_tokens", "priority", "user", "stream_options", "structured_outputs",
    "response_format", "tools", "tool_choice", "parallel_tool_calls", "timeout", "return_token_ids",
    "best_of", "suffix", "chat_template", "chat_template_kwargs", "add_generation_prompt",
    "continue_final_message", "reasoning_effort", "add_special_tokens", "kv_transfer_params", "vllm_xargs",
]  # fmt: skip


def drawn(rng: random.Random) -> dict[str, Any]:
    def value(name: str) -> Any:
        return rng.choice(SPECIAL.get(name, []) * 3 + ANYTHING)

    first = "prompt" if rng.random() < 0.5 else "messages"
    hello = {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}]}[first]
    body = {first: value(first) if rng.random() < 0.2 else hello}
    names = rng.sample(FIELDS, rng.choice([0, 1, 1, 1, 2, 3]))
    return body | {name: value(name) for name in names} | {"stream": rng.random() < 0.3}


@pytest.mark.all
@MANY
async def test_extreme_values_over_http(cluster: Cluster, caplog: pytest.LogCaptureFixture, count: int):
    rng, statuses = random.Random(7), collections.Counter()
    for _ in range(2 * count):
        body = drawn(rng)
        path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        async with cluster.http.post(cluster.url + path, json=body) as response:
            said = await response.read()
            statuses[response.status] += 1
            if body["stream"] and response.status == 200:
                assert said.endswith(b"data: [DONE]\n\n"), body
            else:
                assert ("choices" if response.status == 200 else "error") in json.loads(said), body
            assert response.status in (200, 400, 404) or (response.status == 504 and "timeout" in body), (
                said,
                body,
            )
    assert min(statuses[200], statuses[400]) > 50, statuses
    assert not [record for record in caplog.records if record.exc_info]


PARTS: list[Any] = [
    {"type": "text", "text": "x"}, {"type": "input_text", "text": "x"}, {"type": "image"}, {"text": "x"},
    {"type": "thinking", "thinking": "x"}, {"type": "reasoning", "content": [{"type": "reasoning_text"}]},
    {"type": "tool_use", "id": "a", "name": "f", "input": {}}, {"type": "tool_result", "tool_use_id": "a"},
    {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": "x"}, {"type": "message", "role": "user"},
    {"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}, {"type": ["x"]}, {"type": 5},
]  # fmt: skip
"""Items of an input, or blocks of content."""
OTHER_FORMS: dict[str, list[Any]] = SPECIAL | {
    "tools": [[{"type": "function", "name": "f"}], [{"name": "f", "input_schema": {}}], [{"type": "web"}]],
    "tool_choice": ["auto", "required", {"type": "function", "name": "f"}, {"type": "any"}, {"type": "tool"}],
    "thinking": [{"type": "enabled", "budget_tokens": 5}, {"type": "disabled"}, {"type": "adaptive"}],
    "output_config": [{"effort": "low"}, {"format": {"type": "json_schema", "schema": {"$ref": "#"}}}],
    "text": [{"format": {"type": "json_object"}}, {"format": {"type": "json_schema", "schema": {}}}],
    "reasoning": [{"effort": "low"}, {"effort": "x"}, {"summary": "auto"}],
    "include": [["message.output_text.logprobs"], ["x"]],
    "previous_response_id": ["resp_x"],
    "background": [False],
}


def drawn_of(kind: type[ResponsesBody | MessagesBody], rng: random.Random) -> dict[str, Any]:
    parts = [rng.choice([*PARTS, *ANYTHING]) for _ in range(rng.randrange(3))]
    content = "Hi" if rng.random() < 0.7 else rng.choice([parts, *ANYTHING])
    role = rng.choice(["user"] * 5 + ["assistant", "system", "x"])
    body: dict[str, Any] = {"messages": [{"role": role, "content": content}], "max_tokens": 5}
    if kind is ResponsesBody:
        body = {"input": content}
    names = rng.sample(sorted(kind.model_fields.keys() - body.keys()), rng.choice([0, 1, 1, 2]))
    body |= {name: rng.choice(OTHER_FORMS.get(name, []) * 3 + ANYTHING) for name in names}
    return body | {"stream": rng.random() < 0.3}


@pytest.mark.cases(1)
@MANY
@pytest.mark.parametrize(("path", "kind"), [("/v1/responses", ResponsesBody), ("/v1/messages", MessagesBody)])
async def test_extreme_values_in_other_forms(
    cluster: Cluster,
    caplog: pytest.LogCaptureFixture,
    path: str,
    kind: type[ResponsesBody | MessagesBody],
    count: int,
):
    rng, statuses = random.Random(8), collections.Counter()
    for _ in range(count):
        body = drawn_of(kind, rng)
        async with cluster.http.post(cluster.url + path, json=body) as response:
            said = await response.read()
            statuses[response.status] += 1
            assert response.status in (200, 400, 404) or (response.status == 504 and "timeout" in body), (
                said,
                body,
            )
            if response.status != 200:
                assert json.loads(said)["error"]["message"], body
            elif body["stream"]:
                last = json.loads(said.rstrip().rpartition(b"data: ")[2])["type"]
                assert last in ("message_stop", "error") or last.startswith("response."), body
            else:
                assert json.loads(said)["id"], body
    assert min(statuses[200], statuses[400]) > count // 8, statuses
    assert not [record for record in caplog.records if record.exc_info]
