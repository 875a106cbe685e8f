"""Fields of vLLM that change the prompt, the text or the names of tokens."""

import re
from pathlib import Path
from typing import Any

import pytest

from baton.router.api import responses
from baton.router.text.tokenizer import ModelTokenizer
from baton.rpc.token_ids import unpacked_ids

from .conftest import TEXT, Cluster, make_cluster

CHAT = [{"role": "user", "content": "Hi"}]


@pytest.mark.all
async def test_a_prompt_is_truncated(cluster: Cluster):
    ids = list(range(100, 400))
    text = cluster.tokenizer.encode(TEXT)
    long = TEXT * 3_000
    for prompt, more, expected in (
        (ids, {"truncate_prompt_tokens": 3}, ids[-3:]),
        (ids, {"truncate_prompt_tokens": 3, "truncation_side": "right"}, ids[:3]),
        (ids, {"truncate_prompt_tokens": 999}, ids),
        (TEXT, {"truncate_prompt_tokens": 5}, text[-5:]),
        (long, {"truncate_prompt_tokens": -1}, cluster.tokenizer.encode(long)[-(8192 - 1) :]),
    ):
        result = await cluster.complete(prompt=prompt, max_tokens=4, **more)
        assert list(unpacked_ids(cluster.sent.prompt_ids)) == expected, more
        assert result["usage"]["prompt_tokens"] == len(expected)
    body: dict[str, Any] = {"messages": CHAT, "max_tokens": 4, "truncate_prompt_tokens": 2}
    status, _ = await cluster.post("/v1/chat/completions", **body)
    assert status == 200
    assert len(unpacked_ids(cluster.sent.prompt_ids)) == 2


async def test_a_stop_string_is_part_of_the_output_if_asked(cluster: Cluster):
    for include, expected in ((False, "The capital of"), (True, "The capital of Fran")):
        body = {"prompt": "Hi", "max_tokens": 50, "stop": " Fran", "include_stop_str_in_output": include}
        result = await cluster.complete(**body)
        events = await cluster.events("/v1/completions", **body)
        assert result["choices"][0]["text"] == "".join(e["choices"][0]["text"] for e in events) == expected
        assert result["choices"][0]["stop_reason"] == " Fran"


async def test_tokens_are_named_by_their_ids(cluster: Cluster):
    ids = cluster.tokenizer.encode(TEXT)[:3]
    names = [f"token_id:{token_id}" for token_id in ids]
    more = {"max_tokens": 3, "return_tokens_as_token_ids": True}
    plain = await cluster.complete(max_tokens=3, logprobs=2)
    result = await cluster.complete(logprobs=2, **more)
    named, spelled = result["choices"][0]["logprobs"], plain["choices"][0]["logprobs"]
    assert named["tokens"] == names
    assert named["text_offset"] == spelled["text_offset"]
    assert all(name.startswith("token_id:") for top in named["top_logprobs"] for name in top)
    _, chat = await cluster.post("/v1/chat/completions", messages=CHAT, logprobs=True, top_logprobs=1, **more)
    content = chat["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == names
    assert content[0]["top_logprobs"][0]["token"].startswith("token_id:")


async def test_a_cache_salt_separates_prefixes(cluster: Cluster):
    salts = []
    for more in ({}, {"cache_salt": "a"}, {"cache_salt": "a"}, {"cache_salt": "b"}):
        await cluster.complete(max_tokens=2, **more)
        salts.append(cluster.sent.cache_salt)
    assert salts[0] == b""
    assert salts[1] == salts[2] != salts[3]
    assert {(len(salt), salt[:16]) for salt in salts[1:]} == {(64, bytes(16))}, "of a key without a salt"


async def test_workers_get_allowed_tokens_and_bad_words(cluster: Cluster):
    await cluster.complete(max_tokens=2, allowed_token_ids=[5, 6], bad_words=["Paris", " New York"])
    sampling = cluster.sent.sampling
    assert list(sampling.allowed_token_ids) == [5, 6]
    words = [cluster.tokenizer.decode(list(word.token_ids)) for word in sampling.bad_words]
    assert words == ["Paris", " Paris", "New York", " New York"]
    status, result = await cluster.post("/v1/completions", prompt="x", allowed_token_ids=[99_999])
    assert (status, result["error"]["param"]) == (400, "allowed_token_ids")


async def test_tokens_are_named_for_logprobs(cluster: Cluster):
    await cluster.complete(max_tokens=2, logprobs=1, logprob_token_ids=[6, 5])
    assert list(cluster.sent.sampling.logprob_token_ids) == [6, 5]
    body: dict[str, Any] = {"messages": CHAT, "logprob_token_ids": [6]}
    more = {"max_tokens": 1, "logprobs": True, "return_tokens_as_token_ids": True}
    status, result = await cluster.post("/v1/chat/completions", **body, **more)
    assert status == 200
    [entry] = result["choices"][0]["logprobs"]["content"]
    named = [(each["token"], each["logprob"]) for each in entry["top_logprobs"]]
    assert named == [(entry["token"], entry["logprob"]), ("token_id:6", 0.0)], "and the token itself"
    for more in (
        {},
        {"logprobs": True, "logprob_token_ids": [6, 6]},
        {"logprobs": True, "logprob_token_ids": [99_999]},
    ):
        status, result = await cluster.post("/v1/chat/completions", **{**body, **more})
        assert (status, result["error"]["param"]) == (400, "logprob_token_ids")


async def test_a_request_is_told_how_long_its_parts_took(tokenizer: ModelTokenizer, tmp_path: Path):
    chat = {"messages": CHAT, "max_tokens": 4}
    async with make_cluster(tokenizer, tmp_path, enable_per_request_metrics=True) as told:
        _, whole = await told.post("/v1/chat/completions", **chat)
        usage = {"stream_options": {"include_usage": True}}
        events = await told.events("/v1/completions", prompt="Hi", max_tokens=4, **usage)
        assert [event for event in events if "metrics" in event] == [events[-1]]
        for metrics in (whole["metrics"], events[-1]["metrics"]):
            assert responses.Timing.model_validate(metrics)
            assert metrics["generation_time_ms"] == pytest.approx(3 * metrics["mean_itl_ms"])
            assert metrics["time_to_first_token_ms"] >= metrics["queue_time_ms"] >= 0
        _, one = await told.post("/v1/chat/completions", messages=CHAT, max_tokens=1)
        assert "mean_itl_ms" not in one["metrics"]
        _, two = await told.post("/v1/chat/completions", **chat, n=2)
        assert "metrics" not in two
    async with make_cluster(tokenizer, tmp_path) as silent:
        _, whole = await silent.post("/v1/chat/completions", **chat)
        assert "metrics" not in whole


async def test_options_of_the_router_hold_for_each_request(tokenizer: ModelTokenizer, tmp_path: Path):
    options = {"enable_force_include_usage": True, "return_tokens_as_token_ids": True}
    async with make_cluster(tokenizer, tmp_path, **options) as cluster:
        events = await cluster.events("/v1/completions", prompt="Hi", max_tokens=4, logprobs=0)
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert (len(counts), counts[-1]) == (5, 4)
        assert counts == sorted(counts)
        names = [event["choices"][0]["logprobs"]["tokens"][0] for event in events[:-1]]
        assert all(re.fullmatch(r"token_id:\d+", name) for name in names)
