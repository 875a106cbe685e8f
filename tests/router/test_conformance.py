"""The same request whole, as a stream and over gRPC gives the same response."""

import random
from itertools import chain
from typing import Any

import pytest

from baton.rpc import inference_pb2 as pb
from baton.rpc.stubs import InferenceStub
from tests.within import WITHIN

from .conftest import Cluster

MANY = pytest.mark.parametrize(  # of each kind
    "count",
    [6, pytest.param(60, marks=pytest.mark.all), pytest.param(1_000, marks=pytest.mark.long)],
)
CHAT = [{"role": "user", "content": "Hi"}]
STOPS = [None, None, "Paris", [" is", "🙂"], "ß", "zzz", ["and that", " know"], "🚀 and"]

STRUCTURED: list[dict[str, Any]] = [  # other tests check that workers enforce it
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"choice": ["yes", "no"]}},
    {"structured_outputs": {"regex": "[a-z]+"}},
]


def drawn(rng: random.Random, *, chat: bool) -> dict[str, Any]:
    """Returns a random valid request with every field that can change the response."""
    body: dict[str, Any] = {
        "n": rng.choice([1, 1, 1, 2, 3]),
        "max_tokens": rng.randrange(1, 40),
        "seed": rng.randrange(100),
        "stop": rng.choice(STOPS),
        "stop_token_ids": rng.choice([None, None, [7042], [28, 30]]),
        "min_tokens": rng.choice([0, 0, 1]),
        "ignore_eos": rng.random() < 0.3,
        "skip_special_tokens": rng.random() < 0.7,
    }
    if not body["ignore_eos"]:  # both together are refused
        body |= rng.choice([{}, {}, *STRUCTURED])
    if chat:
        body["messages"] = CHAT
        body |= rng.choice([{}, {"logprobs": True}, {"logprobs": True, "top_logprobs": rng.randrange(4)}])
    else:
        body["prompt"] = rng.choice(["Hi", ["a", "b"], [5, 6], [[5, 6], [7]]])
        body |= rng.choice([{}, {"logprobs": rng.randrange(4)}, {"echo": True}])
    return {name: value for name, value in body.items() if value is not None}


@MANY
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_the_sum_of_a_stream_is_the_whole_response(cluster: Cluster, path: str, count: int):
    """Text, logprobs, token ids, reasons and usage of all chunks are those of the whole response."""
    rng, chat = random.Random(2), "chat" in path
    for _ in range(count):
        body = drawn(rng, chat=chat) | {"return_token_ids": True}
        if not chat and rng.random() < 0.2:
            body |= {
                "max_tokens": rng.randrange(3),
                "min_tokens": 0,
                "echo": True,
                "logprobs": rng.randrange(4),
            }
        status, whole = await cluster.post(path, **body)
        assert status == 200, whole
        continuous = rng.random() < 0.2
        options = {"include_usage": True, "continuous_usage_stats": continuous}
        *events, last = await cluster.events(path, **body, stream_options=options)
        assert last["choices"] == []
        assert last["usage"] == whole["usage"]
        assert len({event["id"] for event in [*events, last]}) == 1
        if continuous:
            assert events[-1]["usage"] == whole["usage"]
        for choice in whole["choices"]:
            mine = [e["choices"][0] for e in events if e["choices"][0]["index"] == choice["index"]]
            assert _added_up(mine, chat=chat) == choice, body


def _added_up(chunks: list[dict[str, Any]], *, chat: bool) -> dict[str, Any]:
    """Returns one choice in the form of a whole response."""
    assert [c["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert not any("stop_reason" in c for c in chunks[:-1])
    last = chunks[-1]
    choice = {
        "index": last["index"],
        "finish_reason": last["finish_reason"],
        "stop_reason": last["stop_reason"],
        "matched_stop": last["matched_stop"],
        "token_ids": list(chain.from_iterable(c["token_ids"] for c in chunks)),
        "logprobs": _joined([c["logprobs"] for c in chunks]),
    }
    if chat:
        assert [c["delta"].get("role") for c in chunks] == ["assistant", *[None] * (len(chunks) - 1)]
        text = "".join(c["delta"]["content"] for c in chunks)
        nulls = {"refusal": None, "reasoning": None, "reasoning_content": None}
        return choice | {"message": {"role": "assistant", "content": text, **nulls}}
    choice |= {"prompt_token_ids": chunks[0]["prompt_token_ids"], "prompt_logprobs": None}
    return choice | {"text": "".join(c["text"] for c in chunks)}


def _joined(logprobs: list) -> dict | None:
    if logprobs[0] is None:
        assert set(map(str, logprobs)) == {"None"}
        return None
    return {key: list(chain.from_iterable(entry[key] for entry in logprobs)) for key in logprobs[0]}


@MANY
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_grpc_gives_the_response_of_http(cluster: Cluster, path: str, count: int):
    rng, chat = random.Random(3), "chat" in path
    async with cluster.channel() as channel:
        stub = InferenceStub(channel)
        for _ in range(count):
            body = drawn(rng, chat=chat)
            body.pop("echo", None)
            if isinstance(body.get("prompt"), list) and not isinstance(body["prompt"][0], int):
                body["prompt"] = body["prompt"][0]  # gRPC takes one prompt
            status, whole = await cluster.post(path, **body, return_token_ids=True)
            assert status == 200, whole
            *messages, last = [message async for message in stub.Generate(_as_grpc(body), timeout=WITHIN)]
            used = whole["usage"]
            assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.cached_tokens) == (
                used["prompt_tokens"],
                used["completion_tokens"],
                used["prompt_tokens_details"]["cached_tokens"],
            )
            deltas = [delta for message in messages for delta in message.deltas]
            for choice in whole["choices"]:
                mine = [delta for delta in deltas if delta.index == choice["index"]]
                text = choice["message"]["content"] if chat else choice["text"]
                assert "".join(delta.text for delta in mine) == text
                assert [delta.token_id for delta in mine] == choice["token_ids"]
                assert _finish(mine[-1]) == (choice["finish_reason"], choice["stop_reason"])
                assert not any(map(_finished, mine[:-1]))
                assert [_logprobs(d) for d in mine if d.HasField("logprobs")] == _http_logprobs(choice)


def _as_grpc(body: dict[str, Any]) -> pb.GenerateRequest:
    fields = dict(body)
    prompt, messages = fields.pop("prompt", None), fields.pop("messages", None)
    if messages is not None:
        fields["chat"] = pb.Chat(messages=[pb.ChatMessage(**message) for message in messages])
        if fields.pop("logprobs", None):
            fields["logprobs"] = fields.pop("top_logprobs", 0)
    elif isinstance(prompt, str):
        fields["text"] = prompt
    else:
        fields["token_ids"] = pb.TokenIds(ids=prompt)
    if fields.pop("response_format", None):
        fields["structured_outputs"] = pb.StructuredOutputs(json_object=True)
    elif asked := fields.pop("structured_outputs", None):
        choice = pb.Choice(texts=asked["choice"]) if "choice" in asked else None
        fields["structured_outputs"] = pb.StructuredOutputs(regex=asked.get("regex"), choice=choice)
    if isinstance(fields.get("stop"), str):
        fields["stop"] = [fields["stop"]]
    return pb.GenerateRequest(**fields)


def _finished(delta: pb.Delta) -> bool:
    return delta.finish_reason != pb.Delta.UNFINISHED


def _finish(delta: pb.Delta) -> tuple[str, str | int | None]:
    which = delta.WhichOneof("stop_reason")
    reason = pb.Delta.FinishReason.Name(delta.finish_reason).lower()
    return reason, None if which is None else getattr(delta, which)


def _logprobs(delta: pb.Delta) -> tuple[float, list[float]]:
    return delta.logprobs.logprob, sorted(top.logprob for top in delta.logprobs.top)


def _http_logprobs(choice: dict[str, Any]) -> list[tuple[float, list[float]]]:
    given = choice["logprobs"]
    if given is None:
        return []
    if "content" in given:
        return [(t["logprob"], sorted(top["logprob"] for top in t["top_logprobs"])) for t in given["content"]]
    # OpenAI's completions add the token itself to the alternatives, and gRPC does not.
    tops = [
        sorted(logprob for token, logprob in top.items() if token != itself)
        for itself, top in zip(given["tokens"], given["top_logprobs"], strict=True)
    ]
    return list(zip(given["token_logprobs"], tops, strict=True))
