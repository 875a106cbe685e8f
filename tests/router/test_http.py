"""The HTTP face of a real router over fake workers: answers, streams, errors, limits."""

import asyncio
import gzip
import json
import socket
from pathlib import Path

import aiohttp
import pytest

from router.admission.keys import ApiKey, api_keys
from router.text.tokenizer import ModelTokenizer
from rpc import worker_pb2 as pb

from .conftest import TEXT, Cluster, make_cluster

CHAT = [{"role": "user", "content": "Hi"}]


# ---------------------------------------------------------------- answers


async def test_completion(cluster: Cluster):
    answer = await cluster.complete()
    assert answer["object"] == "text_completion"
    assert answer["model"] == "fake"
    assert answer["choices"][0]["text"] == TEXT
    assert answer["choices"][0]["finish_reason"] == "stop"
    tokens = len(cluster.answer)
    assert answer["usage"] == {
        "prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1,
        "prompt_tokens_details": {"cached_tokens": 3},
    }  # fmt: skip


async def test_chat(cluster: Cluster):
    status, answer = await cluster.post("/v1/chat/completions", messages=CHAT)
    assert status == 200
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    prompt = cluster.prefills[0].submitted[0].prefill.request
    assert list(prompt.prompt_ids) == cluster.tokenizer.encode_chat(CHAT)
    assert prompt.sampling.max_tokens == 8192 - len(prompt.prompt_ids)


async def test_prefill_and_decode_are_asked_with_the_same_request(cluster: Cluster):
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
    assert 0 < second.timeout_ms <= 60_000
    first.timeout_ms = second.timeout_ms
    assert first == second
    expected = pb.SamplingParams(
        seed=11, temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, presence_penalty=1, frequency_penalty=-1,
        repetition_penalty=1.5, min_tokens=2, stop_token_ids=[9], logit_bias={5: 2.5}, logprobs=2,
        max_tokens=20,
    )  # fmt: skip
    assert first.sampling == expected


async def test_one_token_needs_no_decode(cluster: Cluster):
    answer = await cluster.complete(max_tokens=1)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 1
    assert not cluster.prefills[0].submitted[0].prefill.handover
    assert not cluster.decodes[0].submitted


async def test_eos_as_first_token_ends_it_and_cancels_decode(cluster: Cluster):
    cluster.prefills[0].answer = cluster.decodes[0].answer = [2]
    answer = await cluster.complete()
    assert answer["choices"][0]["text"] == ""
    assert answer["choices"][0]["finish_reason"] == "stop"
    await cluster.decodes[0].until(lambda w: w.cancelled == [w.submitted[0].decode.decode_id])


async def test_the_first_token_is_there_before_decode_has_any(cluster: Cluster):
    cluster.decodes[0].steps = asyncio.Semaphore(0)
    body = {"prompt": "Hello", "stream": True, "max_tokens": 30}
    async with cluster.http.post(cluster.url + "/v1/completions", json=body) as response:
        first = json.loads((await response.content.readline()).removeprefix(b"data: "))
        assert first["choices"][0]["text"] == "The"
        cluster.decodes[0].steps.release()
        for _ in range(100):
            cluster.decodes[0].steps.release()
        assert b"[DONE]" in await response.read()


async def test_choices_are_seeded_requests_of_their_own(cluster: Cluster):
    answer = await cluster.complete(prompt=["Hi", "Ho"], n=2, seed=2**64 - 1)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    requests = [m.prefill.request for m in cluster.prefills[0].submitted]
    assert sorted(r.sampling.seed for r in requests) == [0, 0, 2**64 - 1, 2**64 - 1]
    assert len({r.request_id for r in requests}) == 4
    assert answer["usage"]["prompt_tokens"] == 2
    assert answer["usage"]["completion_tokens"] == 4 * len(cluster.answer)


async def test_a_seed_is_drawn_when_none_is_given(cluster: Cluster):
    for _ in range(2):
        await cluster.complete(max_tokens=1)
    seeds = {m.prefill.request.sampling.seed for m in cluster.prefills[0].submitted}
    assert len(seeds) == 2


async def test_logprobs_of_both_kinds(cluster: Cluster):
    answer = await cluster.complete(logprobs=2, max_tokens=3)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["The", " capital", " of"]
    assert logprobs["token_logprobs"] == [-0.5, -1.0, -1.5]
    assert logprobs["text_offset"] == [0, 3, 11]
    assert [len(top) for top in logprobs["top_logprobs"]] == [2, 2, 2]
    body = {"messages": CHAT, "logprobs": True, "top_logprobs": 2, "max_tokens": 2}
    _, answer = await cluster.post("/v1/chat/completions", **body)
    first, second = answer["choices"][0]["logprobs"]["content"]
    assert (first["token"], first["logprob"], bytes(first["bytes"])) == ("The", -0.5, b"The")
    assert (second["token"], [t["logprob"] for t in second["top_logprobs"]]) == (" capital", [0.0, -1.0])


async def test_a_stop_string_ends_it_on_the_workers_too(cluster: Cluster):
    cluster.decodes[0].step_seconds = 0.01
    answer = await cluster.complete(stop=["France is", "Paris"])
    assert answer["choices"][0]["text"] == "The capital of "
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["stop_reason"] == "France is"
    assert answer["usage"]["completion_tokens"] == 5
    await cluster.decodes[0].until(lambda w: w.cancelled == [w.submitted[0].decode.decode_id])


async def test_echo_and_token_ids(cluster: Cluster):
    ids = cluster.tokenizer.encode("Say:")
    answer = await cluster.complete(prompt=ids, echo=True, max_tokens=2, return_token_ids=True)
    choice = answer["choices"][0]
    assert choice["text"] == "Say:The capital"
    assert choice["prompt_token_ids"] == ids
    assert choice["token_ids"] == cluster.answer[:2]


async def test_sessions_stick_to_a_prefill_worker(pair: Cluster):
    for session in range(25):
        for _ in range(2):
            await pair.complete(prompt=[100 + session], user=f"session {session}", max_tokens=1)
    seen = [{m.prefill.request.prompt_ids[0] for m in worker.submitted} for worker in pair.prefills]
    assert not seen[0] & seen[1]
    assert all(seen)


# ---------------------------------------------------------------- clients that go, and limits


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_cancels_both_workers(cluster: Cluster, stream: bool):
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
        in await metrics(cluster)
    )


async def metrics(cluster: Cluster) -> str:
    async with cluster.http.get(cluster.url + "/metrics") as response:
        return await response.text()


async def test_what_waits_at_the_door_is_bounded(tokenizer: ModelTokenizer, tmp_path: Path):
    async with make_cluster(tokenizer, tmp_path, max_waiting_tokens=100) as cluster:
        cluster.prefills[0].steps = asyncio.Semaphore(0)
        first = asyncio.create_task(cluster.complete(prompt=[5] * 80))
        await cluster.prefills[0].until(lambda w: w.submitted)
        async with cluster.http.post(
            cluster.url + "/v1/completions", json={"prompt": [5] * 80, "max_tokens": 1}
        ) as response:
            assert response.status == 429
            assert int(response.headers["Retry-After"]) >= 1
            assert (await response.json())["error"]["code"] == "overloaded"
        cluster.prefills[0].steps.release()
        await first
        await cluster.idle()


async def test_a_body_that_is_too_large(tokenizer: ModelTokenizer, tmp_path: Path):
    async with make_cluster(tokenizer, tmp_path, max_body_bytes=1000) as cluster:
        status, answer = await cluster.post("/v1/completions", prompt="x" * 2000)
        assert status == 413
        assert "1000 bytes" in answer["error"]["message"]
        bomb = gzip.compress(bytes(50_000_000))
        async with cluster.http.post(
            cluster.url + "/v1/completions", data=bomb, headers={"Content-Encoding": "gzip"}
        ) as response:
            assert response.status == 413


async def test_api_keys(tokenizer: ModelTokenizer, tmp_path: Path, caplog):
    async with make_cluster(tokenizer, tmp_path, api_keys=api_keys(["key-one", "key-two"], None)) as cluster:
        for header, expected in (
            ({}, 401),
            ({"Authorization": "Bearer wrong"}, 401),
            ({"Authorization": "Basic key-one"}, 401),
            ({"Authorization": "Bearer key-one"}, 200),
            ({"Authorization": "Bearer key-two"}, 200),
        ):
            for path in ("/v1/models", "/status"):
                async with cluster.http.get(cluster.url + path, headers=header) as response:
                    assert response.status == expected
                    if expected == 401:
                        assert (await response.json())["error"]["code"] == "invalid_api_key"
        for path in ("/health", "/ready", "/metrics", "/version"):
            async with cluster.http.get(cluster.url + path) as response:
                assert response.status == 200
    assert "key-one" not in caplog.text


# ---------------------------------------------------------------- errors


async def test_errors_have_openais_shape(cluster: Cluster):
    cases = [
        ("/v1/completions", {"prompt": "x", "model": "gpt-17"}, 404, "model"),
        ("/v1/completions", {"prompt": ""}, 400, "prompt"),
        ("/v1/completions", {"prompt": [999_999]}, 400, "prompt"),
        ("/v1/completions", {"prompt": ["x"] * 65, "n": 2}, 400, "n"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 100_000}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": [5] * 9000}, 400, "prompt"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 5, "min_tokens": 6}, 400, "min_tokens"),
        ("/v1/completions", {"prompt": "x", "logit_bias": {"x": 1}}, 400, "logit_bias"),
        ("/v1/completions", {"prompt": "x", "stop_token_ids": [60_000]}, 400, "stop_token_ids"),
        ("/v1/completions", {"prompt": "\ud800"}, 400, None),
        (
            "/v1/chat/completions",
            {"messages": CHAT, "max_completion_tokens": 9000},
            400,
            "max_completion_tokens",
        ),
        ("/tokenize", {}, 400, "prompt"),
        ("/detokenize", {"tokens": [999_999]}, 400, "tokens"),
        ("/v1/embeddings", {}, 404, None),
    ]
    for path, body, expected, param in cases:
        status, answer = await cluster.post(path, **body)
        assert status == expected, (path, body, answer)
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        if param:
            assert answer["error"]["param"] == param, (path, body, answer)
    async with cluster.http.get(cluster.url + "/v1/completions") as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"
    assert not cluster.prefills[0].submitted


async def test_a_request_never_runs_past_its_deadline(tokenizer: ModelTokenizer, tmp_path: Path):
    async with make_cluster(tokenizer, tmp_path, request_timeout=0.5) as cluster:
        prefill, decode = cluster.prefills[0], cluster.decodes[0]
        decode.steps = asyncio.Semaphore(0)
        status, answer = await cluster.post("/v1/completions", prompt="x")
        assert status == 504
        assert answer["error"]["code"] == "timeout"
        await decode.until(lambda w: w.cancelled)
        await prefill.until(lambda w: w.cancelled)
        events = await cluster.events("/v1/completions", prompt="x")
        assert events[0]["choices"][0]["text"] == "The"
        assert events[-1]["error"]["code"] == "timeout"
        await cluster.idle()


async def test_a_client_says_how_long_it_waits(cluster: Cluster):
    """In the body or in a header; the shortest wins, and workers are told."""
    prefill, decode = cluster.prefills[0], cluster.decodes[0]
    prefill.steps = asyncio.Semaphore(0)
    url = cluster.url + "/v1/completions"
    for body, header in (({"timeout": 0.3}, {}), ({"timeout": 60}, {"x-request-timeout": "0.3"})):
        async with cluster.http.post(url, json={"prompt": "x", **body}, headers=header) as response:
            assert response.status == 504
            assert "within 0.3 s" in (await response.json())["error"]["message"]
    assert all(m.prefill.request.timeout_ms <= 300 for m in prefill.submitted)
    await decode.until(lambda w: len(w.cancelled) == 2)
    await prefill.until(lambda w: len(w.cancelled) == 2)
    for wrong in ("0", "-1", "nan", "1e9", "soon"):
        sent = {"x-request-timeout": wrong}
        async with cluster.http.post(url, json={"prompt": "x"}, headers=sent) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == "x-request-timeout"
    status, answer = await cluster.post("/v1/completions", prompt="x", timeout=0)
    assert (status, answer["error"]["param"]) == (400, "timeout")


async def test_a_deadline_counts_while_it_waits_for_its_turn(cluster: Cluster):
    """Behind a window of prompts that the workers have not computed."""
    prefill = cluster.prefills[0]
    prefill.steps = asyncio.Semaphore(0)
    big = asyncio.create_task(cluster.complete(prompt=[5] * 7000))
    await prefill.until(lambda w: w.submitted)
    status, answer = await cluster.post("/v1/completions", prompt="x", timeout=0.3)
    assert (status, answer["error"]["code"]) == (504, "timeout")
    gone = asyncio.create_task(cluster.post("/v1/completions", prompt="y"))
    queue = cluster.router.services.admission.queue
    await cluster.until(lambda: len(queue) == 1)
    gone.cancel()
    await cluster.until(lambda: len(queue) == 0)
    assert len(prefill.submitted) == 1, "neither reached a worker"
    waits = asyncio.create_task(cluster.complete(prompt="z"))
    await cluster.until(lambda: len(queue) == 1)
    for _ in range(2):
        prefill.steps.release()
    assert (await big)["choices"][0]["text"] == (await waits)["choices"][0]["text"] == TEXT


async def test_nobody_waits_for_a_turn_while_a_role_has_no_worker(tokenizer: ModelTokenizer, tmp_path: Path):
    """All are refused after `worker_wait`, not one window of them after the other."""
    async with make_cluster(tokenizer, tmp_path, decode=0, worker_wait=0.5) as cluster:
        asked = [
            asyncio.create_task(cluster.post("/v1/completions", prompt=[7] * 4000, max_tokens=2))
            for _ in range(4)
        ]
        services = cluster.router.services
        await cluster.until(lambda: len(services.pool.waiters) == 4)
        assert len(services.admission.queue) == 0
        assert {(await answer)[0] for answer in asked} == {503}


async def test_a_flood_of_one_key_does_not_starve_another(tokenizer: ModelTokenizer, tmp_path: Path):
    keys = (ApiKey.of("flood", "k1"), ApiKey.of("other", "k2"))
    async with make_cluster(tokenizer, tmp_path, api_keys=keys) as cluster:
        prefill = cluster.prefills[0]
        prefill.steps = asyncio.Semaphore(0)

        async def ask(key: str, token: int) -> int:
            body = {"prompt": [token] * 1000, "max_tokens": 2}
            header = {"Authorization": f"Bearer {key}"}
            async with cluster.http.post(
                cluster.url + "/v1/completions", json=body, headers=header
            ) as response:
                return response.status

        queue = cluster.router.services.admission.queue
        flood = [asyncio.create_task(ask("k1", 100 + i)) for i in range(20)]
        await cluster.until(lambda: len(queue) == 15)
        other = asyncio.create_task(ask("k2", 99))
        await cluster.until(lambda: len(queue) == 16)
        for _ in range(21):
            prefill.steps.release()
        assert {await asked for asked in (*flood, other)} == {200}
        order = [m.prefill.request.prompt_ids[0] for m in prefill.submitted]
        assert order.index(99) <= 6, "the five that were at the workers came before"
        await cluster.idle()


async def test_limits_and_salts_of_keys(tokenizer: ModelTokenizer, tmp_path: Path):
    keys = (
        ApiKey.of("one", "k1", max_requests=1, cache_salt=b"a"),
        ApiKey.of("few", "k2", tokens_per_minute=10),
    )
    async with make_cluster(tokenizer, tmp_path, api_keys=keys) as cluster:
        prefill = cluster.prefills[0]
        prefill.steps = asyncio.Semaphore(0)

        async def ask(key: str) -> tuple[int, str | None]:
            async with cluster.http.post(
                cluster.url + "/v1/completions",
                json={"prompt": [7] * 12, "max_tokens": 2},
                headers={"Authorization": f"Bearer {key}"},
            ) as response:
                return response.status, response.headers.get("Retry-After")

        first = asyncio.create_task(ask("k1"))
        await prefill.until(lambda w: w.submitted)
        assert await ask("k1") == (429, "1")
        for _ in range(9):
            prefill.steps.release()
        assert (await first)[0] == 200
        await cluster.idle()
        assert [(await ask(key))[0] for key in ("k1", "k2")] == [200, 200]
        status, retry_after = await ask("k2")
        assert status == 429
        assert retry_after is not None
        assert 1 <= int(retry_after) <= 60
        salts = [m.prefill.request.cache_salt for m in prefill.submitted]
        assert salts == [b"a", b"a", b""]
        await cluster.idle()


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
    async def get(path: str):
        async with cluster.http.get(cluster.url + path) as response:
            assert response.status == 200
            return await response.json()

    models = await get("/v1/models")
    assert [m["id"] for m in models["data"]] == ["fake"]
    assert (await get("/v1/models/fake"))["max_model_len"] == 8192
    assert "version" in await get("/version")
    _, tokens = await cluster.post("/tokenize", prompt="Größe 🙂")
    assert tokens["count"] == len(tokens["tokens"])
    _, text = await cluster.post("/detokenize", tokens=tokens["tokens"])
    assert text == {"prompt": "Größe 🙂"}
    _, tokens = await cluster.post("/tokenize", messages=CHAT)
    assert tokens["tokens"] == cluster.tokenizer.encode_chat(CHAT)

    await cluster.complete()
    exposed = await metrics(cluster)
    for name, label, value in (
        ("vllm:time_to_first_token_seconds_count", "", 1),
        ("vllm:inter_token_latency_seconds_count", "", len(cluster.answer) - 1),
        ("vllm:e2e_request_latency_seconds_count", "", 1),
        ("vllm:prompt_tokens_total", "", 1),
        ("vllm:generation_tokens_total", "", len(cluster.answer)),
        ("vllm:request_success_total", 'finished_reason="stop",', 1),
        ("vllm:num_requests_running", "", 0),
        ("vllm:num_requests_waiting", "", 0),
        ("baton:handover_gap_seconds_count", "", 1),
        ("baton:tokens_waiting", "", 0),
        ("baton:tokens_waiting_for_turn", "", 0),
        ("baton:requests_waiting_for_turn", "", 0),
        ("baton:requests_waiting_for_room", "", 0),
        ("baton:requests_waiting_for_worker", "", 0),
        ("baton:retries_total", 'cause="lost",', 0),
    ):
        line = f'{name}{{{label}model_name="fake",role="router"}} {value:.1f}'
        assert line in exposed
    assert 'baton:workers{model_name="fake",role="router",state="ready",worker_role="decode"} 1.0' in exposed
    assert 'baton:workers_left_out{model_name="fake",role="router",worker_role="prefill"} 0.0' in exposed
    _, refused = await cluster.post("/v1/completions", prompt="Hello", max_tokens=10**6)
    code = refused["error"]["code"]
    assert (
        f'baton:request_errors_total{{code="{code}",model_name="fake",role="router"}} 1.0'
        in await metrics(cluster)
    )

    assert await get("/metrics/targets") == [
        {"targets": ["127.0.0.1:2"], "labels": {"worker": name}} for name in ("prefill 0", "decode 0")
    ]
    status = await get("/status")
    assert [(w["role"], w["index"], w["state"]) for w in status["workers"]] == [
        ("prefill", 0, "ready"),
        ("decode", 0, "ready"),
    ]
    assert status["workers"][0]["status"]["blocks_free"] == 512
    assert status["workers"][0]["incarnation"] == f"{cluster.prefills[0].incarnation:016x}"


async def test_a_client_that_sends_garbage_gets_an_answer(cluster: Cluster):
    host, _, port = cluster.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port), family=socket.AF_INET)
    writer.write(b"\x16\x03\x01 garbage\r\n\r\n")
    assert b"400" in await asyncio.wait_for(reader.readline(), 5)
    writer.close()
    async with aiohttp.ClientSession() as other, other.get(cluster.url + "/health") as response:
        assert response.status == 200
