"""The HTTP endpoint of a real router over fake workers: responses, streams, errors."""

import asyncio
import gzip
import json
import logging
import shutil
import socket
import zlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import StreamReader

from baton.router.admission.keys import ApiKey
from baton.router.api import responses
from baton.router.text.tokenizer import ModelTokenizer, load_tokenizer
from baton.rpc import worker_pb2 as pb
from baton.rpc.token_ids import unpacked_ids
from tests.within import WITHIN

from .conftest import TEXT, Cluster, encode_chat, make_cluster

CHAT = [{"role": "user", "content": "Hi"}]


# ---------------------------------------------------------------- responses


async def test_completion(cluster: Cluster):
    result = await cluster.complete()
    assert result["object"] == "text_completion"
    assert result["model"] == "fake"
    assert result["choices"][0]["text"] == TEXT
    assert result["choices"][0]["finish_reason"] == "stop"
    tokens = len(cluster.output_ids)
    assert result["usage"] == {
        "prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1,
        "prompt_tokens_details": {"cached_tokens": 3},
    }  # fmt: skip


async def test_chat(cluster: Cluster):
    status, result = await cluster.post("/v1/chat/completions", messages=CHAT)
    assert status == 200
    assert result["object"] == "chat.completion"
    nulls = {"refusal": None, "reasoning": None, "reasoning_content": None}
    assert result["choices"][0]["message"] == {"role": "assistant", "content": TEXT, **nulls}
    prompt = cluster.prefills[0].submitted[0].prefill.request
    assert list(unpacked_ids(prompt.prompt_ids)) == encode_chat(cluster.tokenizer, CHAT)
    assert prompt.sampling.max_tokens == 8192 - len(unpacked_ids(prompt.prompt_ids))


async def test_prefill_and_decode_get_the_same_request(cluster: Cluster):
    await cluster.complete(
        seed=11, temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, presence_penalty=1, frequency_penalty=-1,
        repetition_penalty=1.5, min_tokens=2, stop_token_ids=[9], logit_bias={"5": 2.5}, logprobs=2,
        max_tokens=20, priority=-3,
    )  # fmt: skip
    [prefill], [decode] = (w.submitted for w in (cluster.prefills[0], cluster.decodes[0]))
    assert prefill.prefill.handover
    assert decode.decode.source.prefill_id == prefill.prefill.prefill_id
    assert decode.decode.source.incarnation == cluster.prefills[0].incarnation
    first, second = prefill.prefill.request, decode.decode.request
    assert 0 < second.timeout_ms <= 600_000
    first.timeout_ms = second.timeout_ms
    assert first.first_token_within > 0
    assert 0 < first.waited <= second.waited
    second.waited = first.waited
    assert second.first_token_within == 0, "decode computes no prompt"
    first.first_token_within = 0
    assert first == second
    expected = pb.SamplingParams(
        seed=11, temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, presence_penalty=1, frequency_penalty=-1,
        repetition_penalty=1.5, min_tokens=2, stop_token_ids=[9], logit_bias={5: 2.5}, logprobs=2,
        max_tokens=20,
    )  # fmt: skip
    assert first.sampling == expected


async def test_a_request_for_one_token_needs_no_decode_worker(cluster: Cluster):
    result = await cluster.complete(max_tokens=1)
    assert result["choices"][0]["finish_reason"] == "length"
    assert result["usage"]["completion_tokens"] == 1
    assert not cluster.prefills[0].submitted[0].prefill.handover
    assert not cluster.decodes[0].submitted


async def test_eos_as_first_token_ends_the_request_and_cancels_decode(cluster: Cluster):
    cluster.prefills[0].output_ids = cluster.decodes[0].output_ids = [2]
    result = await cluster.complete()
    assert result["choices"][0]["text"] == ""
    assert result["choices"][0]["finish_reason"] == "stop"
    await cluster.decodes[0].until(lambda w: w.cancelled == [w.submitted[0].decode.decode_id])


async def test_the_first_token_is_sent_before_decode_has_one(cluster: Cluster):
    cluster.decodes[0].steps = asyncio.Semaphore(0)
    body = {"prompt": "Hello", "stream": True, "max_tokens": 30}
    async with cluster.http.post(cluster.url + "/v1/completions", json=body) as response:
        first = json.loads((await response.content.readline()).removeprefix(b"data: "))
        assert first["choices"][0]["text"] == "The"
        cluster.decodes[0].steps.release()
        for _ in range(100):
            cluster.decodes[0].steps.release()
        assert b"[DONE]" in await response.read()


async def test_each_choice_is_a_request_with_its_own_seed(cluster: Cluster):
    result = await cluster.complete(prompt=["Hi", "Ho"], n=2, seed=2**64 - 1)
    assert [choice["index"] for choice in result["choices"]] == [0, 1, 2, 3]
    requests = [m.prefill.request for m in cluster.prefills[0].submitted]
    assert sorted(r.sampling.seed for r in requests) == [0, 0, 2**64 - 1, 2**64 - 1]
    assert len({r.request_id for r in requests}) == 4
    assert result["usage"]["prompt_tokens"] == 2
    assert result["usage"]["completion_tokens"] == 4 * len(cluster.output_ids)
    assert result["usage"]["prompt_tokens_details"] == {"cached_tokens": 6}, "3 of each prompt"
    assert 'vllm:prompt_tokens_total{model_name="fake",role="router"} 2.0' in await cluster.metrics()


async def test_a_request_without_a_seed_gets_a_random_one(cluster: Cluster):
    for _ in range(2):
        await cluster.complete(max_tokens=1)
    seeds = {m.prefill.request.sampling.seed for m in cluster.prefills[0].submitted}
    assert len(seeds) == 2


async def test_the_error_about_logit_bias_names_all_wrong_keys(cluster: Cluster):
    keys = ["x", "9" * 5000, "\u00b2", "-1"]  # Python makes no integer of 5000 digits
    status, result = await cluster.post(
        "/v1/completions", prompt="x", logit_bias=dict.fromkeys(["5", *keys], 1.0)
    )
    assert (status, result["error"]["param"]) == (400, "logit_bias")
    assert result["error"]["message"].startswith(f"logit_bias: x, {'9' * 20}, \u00b2, -1: a key must be")


async def test_logprobs_of_both_kinds(cluster: Cluster):
    result = await cluster.complete(logprobs=2, max_tokens=3)
    logprobs = result["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["The", " capital", " of"]
    assert logprobs["token_logprobs"] == [-0.5, -1.0, -1.5]
    assert logprobs["text_offset"] == [0, 3, 11]
    for token, logprob, top in zip(
        *(logprobs[k] for k in ("tokens", "token_logprobs", "top_logprobs")), strict=True
    ):
        assert next(iter(top.items())) == (token, logprob), "the token itself, even if it is unlikely"
        assert len(top) == 3
    body = {"messages": CHAT, "logprobs": True, "top_logprobs": 2, "max_tokens": 2}
    _, result = await cluster.post("/v1/chat/completions", **body)
    first, second = result["choices"][0]["logprobs"]["content"]
    assert (first["token"], first["logprob"], bytes(first["bytes"])) == ("The", -0.5, b"The")
    assert (second["token"], [t["logprob"] for t in second["top_logprobs"]]) == (" capital", [0.0, -1.0])


@pytest.mark.parametrize("burst", [1, 4])
async def test_a_stop_string_ends_the_request_on_the_workers_too(cluster: Cluster, burst: int):
    """With four tokens in a message, it ends in the middle of one."""
    cluster.decodes[0].step_seconds = 0.01
    cluster.decodes[0].burst = burst
    result = await cluster.complete(stop=["France is", "Paris"])
    assert result["choices"][0]["text"] == "The capital of "
    assert result["choices"][0]["finish_reason"] == "stop"
    assert result["choices"][0]["stop_reason"] == result["choices"][0]["matched_stop"] == "France is"
    assert result["usage"]["completion_tokens"] == 5
    await cluster.decodes[0].until(lambda w: w.cancelled == [w.submitted[0].decode.decode_id])


async def test_echo_and_token_ids(cluster: Cluster):
    ids = cluster.tokenizer.encode("Say:")
    result = await cluster.complete(prompt=ids, echo=True, max_tokens=2, return_token_ids=True)
    choice = result["choices"][0]
    assert choice["text"] == "Say:The capital"
    assert choice["prompt_token_ids"] == ids
    assert choice["token_ids"] == cluster.output_ids[:2]


async def test_a_streamed_chat_has_the_prompt_token_ids_once_for_each_choice(cluster: Cluster):
    body = {"messages": CHAT, "max_tokens": 3, "n": 2, "return_token_ids": True}
    events = await cluster.events("/v1/chat/completions", **body)
    firsts = [event for event in events if "role" in event["choices"][0]["delta"]]
    assert [event for event in events if "prompt_token_ids" in event] == firsts
    assert [event["prompt_token_ids"] for event in firsts] == 2 * [encode_chat(cluster.tokenizer, CHAT)]


async def test_the_client_chooses_the_end_of_the_prompt(cluster: Cluster):
    """/tokenize and chats give the same token ids."""
    said = [*CHAT, {"role": "assistant", "content": "Ho"}]
    start = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo"
    for fields, text in (
        ({}, f"{start}<|im_end|>\n<|im_start|>assistant\n"),
        ({"add_generation_prompt": False}, f"{start}<|im_end|>\n"),
        ({"continue_final_message": True}, start),
        ({"continue_final_message": True, "add_generation_prompt": False}, start),
    ):
        status, tokens = await cluster.post("/tokenize", messages=said, **fields)
        assert status == 200, tokens
        shown = cluster.tokenizer.decode(tokens["tokens"], skip_special_tokens=False)
        assert shown.endswith(text), fields
        await cluster.post("/v1/chat/completions", messages=said, max_tokens=1, **fields)
        prompt = unpacked_ids(cluster.prefills[0].submitted[-1].prefill.request.prompt_ids)
        assert list(prompt) == tokens["tokens"]


async def test_add_special_tokens_of_each_endpoint(small_directory: Path, tmp_path: Path):
    shutil.copytree(small_directory, tmp_path / "model")
    described = json.loads((small_directory / "tokenizer.json").read_text())
    [end] = described["added_tokens"]
    name, bos = end["content"], end["id"]
    start = [{"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    described["post_processor"] = {
        "type": "TemplateProcessing", "single": start, "pair": start,
        "special_tokens": {name: {"id": name, "ids": [bos], "tokens": [name]}},
    }  # fmt: skip
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(described))
    async with make_cluster(load_tokenizer(str(tmp_path / "model")), tmp_path) as made:
        for path, body, default in (
            ("/v1/completions", {"prompt": "Hi"}, True),
            ("/v1/chat/completions", {"messages": CHAT}, False),
        ):
            for fields in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
                _, shown = await made.post("/tokenize", **body, **fields)
                added = shown["tokens"][0] == bos
                assert added == fields.get("add_special_tokens", default), (path, fields)
                await made.post(path, **body, **fields, max_tokens=1)
                prompt = unpacked_ids(made.prefills[0].submitted[-1].prefill.request.prompt_ids)
                assert list(prompt) == shown["tokens"]


async def test_a_session_stays_on_one_prefill_worker(pair: Cluster):
    for session in range(25):
        for _ in range(2):
            await pair.complete(prompt=[100 + session], user=f"session {session}", max_tokens=1)
    seen = [
        {unpacked_ids(m.prefill.request.prompt_ids)[0] for m in worker.submitted} for worker in pair.prefills
    ]
    assert not seen[0] & seen[1]
    assert all(seen)


# ---------------------------------------------------------------- clients that disconnect


@pytest.mark.parametrize("stream", [True, False])
async def test_a_disconnect_cancels_the_request_on_both_workers(cluster: Cluster, stream: bool):
    prefill, decode = cluster.prefills[0], cluster.decodes[0]
    prefill.steps, decode.steps = asyncio.Semaphore(int(stream)), asyncio.Semaphore(0)
    body = {"prompt": "Hello", "max_tokens": 50, "stream": stream}
    request = asyncio.create_task(cluster.http.post(cluster.url + "/v1/completions", json=body))
    await decode.until(lambda w: w.submitted)
    await prefill.until(lambda w: w.submitted)
    if stream:
        response = await request
        await response.content.readline()
        response.close()
    else:
        request.cancel()
    await prefill.until(lambda w: w.cancelled == [w.submitted[0].prefill.prefill_id])
    await decode.until(lambda w: w.cancelled == [w.submitted[0].decode.decode_id])
    await cluster.idle()
    assert (
        'vllm:request_success_total{finished_reason="abort",model_name="fake",role="router"} 1.0'
        in await cluster.metrics()
    )


# ---------------------------------------------------------------- errors


async def test_errors_have_openais_shape(cluster: Cluster):
    cases = [
        ("/v1/completions", {"prompt": "x", "model": "gpt-17"}, 404, "model"),
        ("/v1/completions", {"prompt": ""}, 400, "prompt"),
        ("/v1/completions", {"prompt": [999_999]}, 400, "prompt"),
        ("/v1/completions", {"prompt": ["x"] * 65, "n": 2}, 400, "n"),
        ("/v1/completions", {"prompt": [5] * 9000}, 400, "prompt"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 5, "min_tokens": 6}, 400, "min_tokens"),
        ("/v1/completions", {"prompt": "x", "logit_bias": {"x": 1}}, 400, "logit_bias"),
        ("/v1/completions", {"prompt": "x", "stop_token_ids": [60_000]}, 400, "stop_token_ids"),
        ("/v1/completions", {"prompt": "\ud800"}, 400, None),
        ("/tokenize", {}, 400, "prompt"),
        ("/detokenize", {"tokens": [999_999]}, 400, "tokens"),
        ("/v1/embeddings", {}, 404, None),
    ]
    for path, body, expected, param in cases:
        status, result = await cluster.post(path, **body)
        assert status == expected, (path, body, result)
        assert set(result["error"]) == {"message", "type", "param", "code"}
        if param:
            assert result["error"]["param"] == param, (path, body, result)
    async with cluster.http.get(cluster.url + "/v1/completions") as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"
    status, result = await cluster.post("/v1/images", input="x")
    assert (status, result["error"]["message"]) == (404, "there is no POST /v1/images")
    _, result = await cluster.post("/v1/embeddings", input="x")
    assert "send it to a vLLM server" in result["error"]["message"]
    assert not cluster.prefills[0].submitted


async def test_request_ids(cluster: Cluster):
    sent = {"x-request-id": "my-request-7"}
    async with cluster.http.post(
        cluster.url + "/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=sent
    ) as response:
        assert response.headers["x-request-id"] == "my-request-7"
        assert (await response.json())["id"] == "cmpl-my-request-7"
    for bad in ("a b", "x" * 200, "ü"):
        async with cluster.http.post(
            cluster.url + "/v1/completions", json={"prompt": ""}, headers={"x-request-id": bad}
        ) as response:
            assert response.status == 400
            assert len(response.headers["x-request-id"]) == 32


# ---------------------------------------------------------------- the rest


async def test_models_tokenize_version_metrics_status(cluster: Cluster):
    models = await cluster.get("/v1/models")
    assert [m["id"] for m in models["data"]] == ["fake"]
    assert (await cluster.get("/v1/models/fake"))["max_model_len"] == 8192
    assert "version" in await cluster.get("/version")
    _, tokens = await cluster.post("/tokenize", prompt="Größe 🙂")
    assert tokens["count"] == len(tokens["tokens"])
    _, text = await cluster.post("/detokenize", tokens=tokens["tokens"])
    assert text == {"prompt": "Größe 🙂"}
    _, tokens = await cluster.post("/tokenize", messages=CHAT)
    assert tokens["tokens"] == encode_chat(cluster.tokenizer, CHAT)

    await cluster.complete()
    exposed = await cluster.metrics()
    for name, label, value in (
        ("vllm:time_to_first_token_seconds_count", "", 1),
        ("vllm:inter_token_latency_seconds_count", "", len(cluster.output_ids) - 1),
        ("vllm:e2e_request_latency_seconds_count", "", 1),
        ("vllm:prompt_tokens_total", "", 1),
        ("vllm:generation_tokens_total", "", len(cluster.output_ids)),
        ("vllm:request_success_total", 'finished_reason="stop",', 1),
        ("vllm:num_requests_running", "", 0),
        ("vllm:num_requests_waiting", "", 0),
        ("vllm:kv_cache_usage_perc", "", 0),
        ("baton:handover_gap_seconds_count", "", 1),
        ("baton:tokens_waiting", "", 0),
        ("baton:tokens_waiting_for_turn", "", 0),
        ("baton:requests_waiting_for_turn", "", 0),
        ("baton:requests_waiting_for_room", "", 0),
        ("baton:requests_waiting_for_retry", "", 0),
        ("baton:requests_waiting_for_worker", "", 0),
        ("baton:retries_total", 'cause="lost",', 0),
    ):
        line = f'{name}{{{label}model_name="fake",role="router"}} {value:.1f}'
        assert line in exposed
    await cluster.rooms({cluster.decodes[0]: 128})
    assert 'vllm:kv_cache_usage_perc{model_name="fake",role="router"} 0.75' in await cluster.metrics()
    assert 'baton:workers{model_name="fake",pool="decode",role="router",state="ready"} 1.0' in exposed
    assert 'baton:workers_left_out{model_name="fake",pool="prefill",role="router"} 0.0' in exposed
    _, refused = await cluster.post("/v1/completions", prompt=[5] * 9000)
    code = refused["error"]["code"]
    assert (
        f'baton:request_errors_total{{code="{code}",model_name="fake",role="router"}} 1.0'
        in await cluster.metrics()
    )

    assert await cluster.get("/metrics/targets") == [
        {"targets": ["127.0.0.1:2"], "labels": {"worker": name}} for name in ("prefill 0", "decode 0")
    ]
    status = await cluster.get("/status")
    assert [(w["role"], w["index"], w["state"]) for w in status["workers"]] == [
        ("prefill", 0, "ready"),
        ("decode", 0, "ready"),
    ]
    assert status["workers"][1]["status"]["blocks_free"] == 128
    assert status["workers"][0]["incarnation"] == f"{cluster.prefills[0].incarnation:016x}"


async def raw(
    cluster: Cluster, sent: bytes, body: bytes = b""
) -> tuple[int, dict[str, str], responses.ErrorDetail]:
    """Returns status, headers and error of the response to these bytes.

    `body` is sent when a handler waits for it, if `sent` ends with the header `Expect`."""
    host, _, port = cluster.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port), family=socket.AF_INET)
    try:
        async with asyncio.timeout(WITHIN):
            writer.write(sent)
            if body:
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
                writer.write(body)
            [status, *headers] = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()[:-1]
            named = dict(header.split(": ", 1) for header in headers)
            body = await reader.readexactly(int(named["Content-Length"]))
    finally:
        writer.close()
    return int(status.split()[1]), named, responses.ErrorResponse.model_validate_json(body).error


POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


async def test_invalid_http_gets_an_error_in_openais_shape(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
):
    """Its bytes are not logged, because they may hold a key or a prompt."""
    for sent, reason in (
        (b"\x16\x03\x01 garbage\r\n\r\n", "HTTPS"),
        (b"BREW /health HTTP/1.1\r\n\r\n", "Invalid method"),
        (b"GET /health HTTP/9.9\r\n\r\n", "Bad status line"),
        (b"GET /health HTTP/1.1\r\n\r\n", "Host"),
        (b"GET / HTTP/1.1\r\nAuthorization: Bearer SECRET\0\r\n\r\n", "Invalid header value"),
        (POST + b"Transfer-Encoding: bad\r\n\r\nSECRET", "Transfer-Encoding"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\nSECRET\r\n", "chunk size"),
        (POST + b"Content-Length: SECRET\r\n\r\n", "Content-Length"),
        (POST + b"Cookie: " + b"SECRET" * 2000 + b"\r\n\r\n", "more than 8190 bytes"),
    ):
        with caplog.at_level(logging.DEBUG):
            status, headers, error = await raw(cluster, sent)
        assert (status, error.type, error.code) == (400, "invalid_request_error", "invalid_value")
        assert "not valid HTTP" in error.message
        assert reason in error.message
        assert "\n" not in error.message
        assert headers["Content-Type"].startswith("application/json")
        assert len(headers["x-request-id"]) == 32
    status, headers, error = await raw(cluster, POST + b"Expect: 200-maybe\r\nContent-Length: 9\r\n\r\n")
    assert (status, error.type, headers["Connection"]) == (400, "invalid_request_error", "close")
    assert "Expect must be 100-continue, not '200-maybe'" in error.message
    assert "SECRET" not in caplog.text
    assert not [record for record in caplog.records if record.exc_info]
    counted = 'baton:request_errors_total{code="invalid_value",model_name="fake",role="router"} 10.0'
    assert counted in await cluster.metrics()


async def test_a_wrong_chunk_is_refused_when_the_body_is_late(
    tokenizer: ModelTokenizer, tmp_path: Path
) -> None:
    """aiohttp tells no handler of it, so the body has no end."""
    keys = {"admin_key": ApiKey.of("admin", "trainer")}
    async with make_cluster(tokenizer, tmp_path, client_timeout=0.1, **keys) as cluster:
        for path in (b"/v1/completions", b"/update_weights_from_disk"):
            head = POST.replace(b"/v1/completions", path) + b"Authorization: Bearer trainer\r\n"
            head += b"Transfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n"
            for body in (b"SECRET\r\n", b"2\r\n{}SECRET\r\n"):
                status, _, error = await raw(cluster, head, body)
                assert status == 408
                assert "SECRET" not in error.message


async def test_a_compressed_body(cluster: Cluster):
    body = b'{"prompt": "", "user": "%b"}' % (b"x" * 400_000)  # more than a piece
    packed = gzip.compress(body)
    encoded = POST + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n"
    bare = zlib.compressobj(wbits=-15)
    for encoding, sent in (
        (b"gzip", packed),
        (b"deflate", zlib.compress(body)),
        (b"deflate", bare.compress(body) + bare.flush()),
    ):
        _, _, error = await raw(cluster, (encoded % len(sent)).replace(b"gzip", encoding) + sent)
        assert error.param == "prompt", "the body was decoded"
    for broken in (b"{}", packed[:-12] + b"x" * 12, packed[:-1], packed + b"x", packed + packed):
        status, _, error = await raw(cluster, encoded % len(broken) + broken)
        assert (status, error.type) == (400, "invalid_request_error")
        assert "the body cannot be read" in error.message
        assert "gzip" in error.message
    for unknown in (b"br", b"zstd", b"secret", b"gzip, gzip"):
        status, _, error = await raw(cluster, (encoded % 2).replace(b"gzip", unknown) + b"{}")
        assert (status, error.code) == (415, "unsupported_media_type")
        assert "gzip or deflate" in error.message


class Turns:
    """How many turns of the event loop have passed."""

    passed = 0

    async def count(self) -> None:
        while True:
            self.passed += 1
            await asyncio.sleep(0)


@pytest.fixture
async def turns() -> AsyncIterator[Turns]:
    made = Turns()
    counting = asyncio.create_task(made.count())
    yield made
    counting.cancel()


async def test_other_tasks_run_while_a_body_is_decompressed(
    cluster: Cluster, turns: Turns, monkeypatch: pytest.MonkeyPatch
):
    """A body that nothing reads is not decompressed."""
    turns_of_parts, inflate = list[int](), zlib.decompressobj

    class Noted:
        def __init__(self, *given: Any, **named: Any) -> None:
            self._inflate = inflate(*given, **named)

        def decompress(self, *given: Any) -> bytes:
            turns_of_parts.append(turns.passed)
            return self._inflate.decompress(*given)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inflate, name)

    monkeypatch.setattr(zlib, "decompressobj", Noted)
    bomb = gzip.compress(bytes(20 << 20))
    head = POST + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(bomb)
    for unread in (head.replace(b"completions", b"nowhere"), head.replace(b"application/json", b"text/xml")):
        status, _, _ = await raw(cluster, unread + bomb)
        assert status in (404, 415)
    assert not turns_of_parts
    status, _, _ = await raw(cluster, head + bomb)
    assert status == 413
    assert len(turns_of_parts) > 10
    assert len({*turns_of_parts}) >= len(turns_of_parts) - 1  # the second one follows the first one


@pytest.mark.parametrize("path", [b"/v1/completions", b"/nowhere"])
async def test_other_tasks_run_while_small_chunks_are_parsed(
    cluster: Cluster, turns: Turns, monkeypatch: pytest.MonkeyPatch, path: bytes
):
    """Also those of a body that nothing reads."""
    turns_of_chunks: Counter[int] = Counter()
    parsed, end = asyncio.Event(), StreamReader.end_http_chunk_receiving
    body = b'{"prompt": "", "user": "%b"}' % (b"x" * 30_000)

    def noted(content: StreamReader) -> None:
        turns_of_chunks[turns.passed] += 1
        end(content)
        if turns_of_chunks.total() == len(body):
            parsed.set()

    monkeypatch.setattr(StreamReader, "end_http_chunk_receiving", noted)
    head = POST.replace(b"/v1/completions", path) + b"Transfer-Encoding: chunked\r\n\r\n"
    host, _, port = cluster.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port), family=socket.AF_INET)
    async with asyncio.timeout(WITHIN):
        writer.write(head + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 40")
        await parsed.wait()
    writer.close()
    assert max(turns_of_chunks.values()) < 2_000


async def test_a_body_must_have_the_type_json(cluster: Cluster):
    """As in vLLM. A browser sends other types for a page of another origin, without asking first."""
    bodies = {
        "/v1/completions": {"prompt": "x", "max_tokens": 1},
        "/v1/chat/completions": {"messages": CHAT, "max_tokens": 1},
        "/tokenize": {"prompt": "x"},
        "/detokenize": {"tokens": [5]},
    }
    for path, body in bodies.items():
        text = json.dumps(body).encode()
        plain = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n".encode()
        for sent, told in (
            (b"Content-Type: application/x-www-form-urlencoded\r\n", "x-www-form-urlencoded"),  # curl -d
            (b"Content-Type: text/plain\r\n", "text/plain"),
            (b"Content-Type: application/jsonl\r\n", "application/jsonl"),
            (b"", "none"),
        ):
            status, _, error = await raw(cluster, plain + sent + b"\r\n" + text)
            assert (status, error.code) == (415, "unsupported_media_type")
            assert told in error.message
            assert "-H 'Content-Type: application/json'" in error.message
        for sent in ("application/json; charset=utf-8", "Application/JSON"):
            headers = {"Content-Type": sent}
            async with cluster.http.post(cluster.url + path, data=text, headers=headers) as response:
                assert response.status == 200


async def test_the_error_of_a_long_prompt_names_the_context(cluster: Cluster) -> None:
    for connection in cluster.pool.connections:
        connection.description.max_model_len = 100
        cluster.pool.availability_changed(connection)
    status, result = await cluster.post("/v1/completions", prompt=[5] * 100)
    assert (status, result["error"]["code"]) == (400, "context_length_exceeded")
    for told in (
        "prompt is too long: 100 tokens > 99 maximum",
        "maximum context length is 100 tokens",
        "it is longer than the model's context length",  # SGLang's words
    ):
        assert told in result["error"]["message"]


async def test_an_error_repeats_only_the_beginning_of_what_the_client_sent(cluster: Cluster):
    status, result = await cluster.post("/v1/completions", prompt="x", model="é" * 100_000)
    assert status == 404
    assert len(result["error"]["message"]) == 2001
    status, result = await cluster.post("/v1/completions", prompt="x", logit_bias={"é" * 100_000: "1"})
    assert (status, result["error"]["param"]) == (400, f"logit_bias.{'é' * 77}...")
    assert result["error"]["message"].endswith("...: input should be a valid number, not '1'")


@pytest.mark.parametrize("number", [b"1e400", b"-1e400"])
@pytest.mark.parametrize("field", ["n", "temperature", "seed"])
async def test_a_number_that_is_infinite_is_not_left_out(cluster: Cluster, field: str, number: bytes):
    body = b'{"prompt": "x", "%b": %b}' % (field.encode(), number)
    _, _, error = await raw(cluster, POST + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
    assert error.param == field
    assert "inf" in error.message
