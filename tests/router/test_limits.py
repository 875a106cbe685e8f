"""Limits of a router: expected waits, body size, API keys and their shares, deadlines."""

import asyncio
import gzip
from pathlib import Path
from typing import Any

import pytest

from baton.router.admission.keys import ApiKey, api_keys
from baton.router.admission.queue import OUTPUT_WEIGHT
from baton.router.api.structured import Structure
from baton.router.policy import desk
from baton.router.preparation.demand import Demand, GrammarChecker
from baton.router.text.tokenizer import ModelTokenizer
from baton.rpc import worker_pb2 as pb

from .conftest import TEXT, Cluster, make_cluster, prefills_at

CHAT = [{"role": "user", "content": "Hi"}]


async def test_a_request_that_would_wait_too_long_is_refused_at_once(
    tokenizer: ModelTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """At the router's bound, at that of a header, or at the deadline, in the form of each API."""
    monkeypatch.setattr(desk, "WINDOW_SECONDS", 0.0)
    chat = {"messages": CHAT, "max_tokens": 1}
    paths: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "x"},
        "/v1/chat/completions": chat,
        "/v1/messages": chat,
        "/v1/responses": {"input": "x"},
        "/invocations": {"prompt": "x"},
    }
    async with make_cluster(tokenizer, tmp_path, max_wait=41.0) as cluster:
        prefill, url = cluster.prefills[0], cluster.url
        small = pb.StepModel(rows=[1], decode_seconds=[1], tokens=[5], prompt_seconds=[9], overlap=1)
        small.decode_factor = small.prompt_factor = 1
        prefill.status.step_model.CopyFrom(small)
        await prefills_at(cluster, 2.0)
        assert cluster.pool.desk.window().tokens_per_s == 0, "a step of few tokens shows no speed"
        prefill.status.step_model.tokens[:] = [2048]
        prefill.report()
        await cluster.until(lambda: cluster.pool.desk.window().tokens_per_s == 2.0)
        prefill.steps = asyncio.Semaphore(0)
        first = asyncio.create_task(cluster.complete(prompt=[5] * 80))
        await prefill.until(lambda w: w.submitted)
        for path, body in paths.items():
            for header in ("x-max-wait", "x-request-timeout"):
                async with cluster.http.post(url + path, json=body, headers={header: "39.5"}) as response:
                    assert (response.status, response.headers["Retry-After"]) == (429, "40"), path
                    error = (await response.json())["error"]
                    assert "would wait about 40 s, and may wait 39.5 s" in error["message"]
                    assert "overloaded" in (error.get("code"), error["type"]) or path == "/v1/messages"
            status, result = await cluster.post(path, {"x-max-wait": "soon"}, **body)
            assert (status, "x-max-wait" in result["error"]["message"]) == (400, True)
        queued = asyncio.create_task(cluster.complete(prompt=[5] * 10))
        await cluster.until(lambda: cluster.router.services.admission.waiting_tokens == 90)
        status, result = await cluster.post("/v1/completions", {"x-max-wait": "100"}, prompt="x")
        assert (status, result["error"]["code"]) == (429, "overloaded"), "45 s are more than --max-wait"
        assert "baton:expected_wait_seconds{" in await cluster.metrics()
        for _ in range(2):
            prefill.steps.release()
        await asyncio.gather(first, queued)


async def test_a_body_that_is_too_large_is_refused_is_refused(tokenizer: ModelTokenizer, tmp_path: Path):
    async with make_cluster(tokenizer, tmp_path, max_body_bytes=1000) as cluster:
        status, result = await cluster.post("/v1/completions", prompt="x" * 2000)
        assert status == 413
        assert "1000 bytes" in result["error"]["message"]
        bomb = gzip.compress(bytes(50_000_000))
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        async with cluster.http.post(cluster.url + "/v1/completions", data=bomb, headers=headers) as response:
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
            await cluster.get(path)
    assert "key-one" not in caplog.text


async def test_a_request_never_runs_past_its_deadline(tokenizer: ModelTokenizer, tmp_path: Path):
    async with make_cluster(tokenizer, tmp_path, request_timeout=0.5) as cluster:
        cluster.decodes[0].steps = asyncio.Semaphore(0)
        status, result = await cluster.post("/v1/completions", prompt="x")
        assert status == 504
        assert result["error"]["code"] == "timeout"


async def test_a_request_past_its_deadline_is_cancelled_on_its_workers(cluster: Cluster):
    prefill, decode = cluster.prefills[0], cluster.decodes[0]
    decode.steps = asyncio.Semaphore(0)
    asked = asyncio.create_task(cluster.post("/v1/completions", prompt="x"))
    await cluster.expire()
    status, result = await asked
    assert status == 504
    assert result["error"]["code"] == "timeout"
    await decode.until(lambda w: w.cancelled)
    await prefill.until(lambda w: w.cancelled)
    reading = asyncio.create_task(cluster.events("/v1/completions", prompt="x"))
    await cluster.expire()
    events = await reading
    assert events[0]["choices"][0]["text"] == "The"
    assert events[-1]["error"]["code"] == "timeout"


async def test_the_client_sets_a_timeout(cluster: Cluster):
    """In the body or in a header. The shortest timeout counts, and workers get it."""
    prefill, decode = cluster.prefills[0], cluster.decodes[0]
    prefill.steps = asyncio.Semaphore(0)
    path = "/v1/completions"
    for submitted, (timeout, header) in enumerate(((300, {}), (500, {"x-request-timeout": "300"})), 1):
        asked = asyncio.create_task(cluster.post(path, header, prompt="x", timeout=timeout))
        await prefill.until(lambda w, n=submitted: len(w.submitted) == n)
        await cluster.expire(tokens=0)
        status, result = await asked
        assert (status, result["error"]["code"]) == (504, "timeout")
        assert "was not finished within 300 s" in result["error"]["message"]
    assert all(m.prefill.request.timeout_ms <= 300_000 for m in prefill.submitted)
    await decode.until(lambda w: len(w.cancelled) == len(w.submitted) > 0)
    await prefill.until(lambda w: len(w.cancelled) == len(w.submitted))
    for wrong in ("0", "-1", "nan", "1e9", "soon"):
        status, result = await cluster.post(path, {"x-request-timeout": wrong}, prompt="x")
        assert (status, result["error"]["param"]) == (400, "x-request-timeout")
    status, result = await cluster.post(path, prompt="x", timeout=0)
    assert (status, result["error"]["param"]) == (400, "timeout")


async def test_a_deadline_ends_the_wait_for_a_grammar(cluster: Cluster, monkeypatch: pytest.MonkeyPatch):
    async def hangs(checker: GrammarChecker, demand: Demand, key: str) -> Structure:
        return await asyncio.Future()

    monkeypatch.setattr(GrammarChecker, "check", hangs)
    body = {"messages": CHAT, "response_format": {"type": "json_object"}, "timeout": 0.3}
    status, answer = await cluster.post("/v1/chat/completions", **body)
    assert (status, answer["error"]["code"]) == (504, "timeout")
    assert "within 0.3 s" in answer["error"]["message"]


@pytest.mark.all
async def test_a_deadline_counts_while_a_request_waits_for_its_turn(cluster: Cluster):
    """The window is full of prompts that the workers have not computed."""
    prefill = cluster.prefills[0]
    prefill.steps = asyncio.Semaphore(0)
    big = [asyncio.create_task(cluster.complete(prompt=[5 + i] * 7000)) for i in range(2)]  # a step each
    await prefill.until(lambda w: len(w.submitted) == 2)
    status, result = await cluster.post("/v1/completions", prompt="x", timeout=0.3)
    assert (status, result["error"]["code"]) == (504, "timeout")
    gone = asyncio.create_task(cluster.post("/v1/completions", prompt="y"))
    queue = cluster.router.services.admission.queue
    await cluster.until(lambda: len(queue) == 1)
    gone.cancel()
    await cluster.until(lambda: len(queue) == 0)
    assert len(prefill.submitted) == 2, "no later request reached a worker"
    waits = asyncio.create_task(cluster.complete(prompt="z"))
    await cluster.until(lambda: len(queue) == 1)
    for _ in range(3 * len(cluster.output_ids)):  # it may also decode
        prefill.steps.release()
    assert {result["choices"][0]["text"] for result in await asyncio.gather(*big, waits)} == {TEXT}


async def test_no_request_waits_for_a_turn_while_a_role_has_no_worker(
    tokenizer: ModelTokenizer, tmp_path: Path
):
    """All are refused after `worker_wait`, not one window after the other."""
    async with make_cluster(tokenizer, tmp_path, decode=0, worker_wait=0.5) as cluster:
        asked = [
            asyncio.create_task(cluster.post("/v1/completions", prompt=[7] * 4000, max_tokens=2))
            for _ in range(4)
        ]
        services = cluster.router.services
        await cluster.until(lambda: len(services.parked.without_worker) == 4)
        assert len(services.admission.queue) == 0
        assert {(await result)[0] for result in asked} == {503}


async def test_a_key_is_charged_for_the_tokens_that_are_computed(cluster: Cluster):
    """The workers say that they had three tokens of each prompt. The estimate before is the whole prompt."""
    admission, account = cluster.router.services.admission, cluster.router.frontend.authorize("")
    charged = 0.0
    for full in (cluster.prefills, cluster.decodes):  # a handover, then one worker
        await cluster.complete(prompt=[7] * 50, max_tokens=3)
        charged += 50 - 3 + 3 * OUTPUT_WEIGHT
        assert admission.queue.served[account] == charged
        await cluster.full(*full)


async def test_limits_salts_and_priorities_of_keys(tokenizer: ModelTokenizer, tmp_path: Path):
    keys = (
        ApiKey.of("one", "k1", max_requests=1, cache_salt=b"a", min_priority=-2),
        ApiKey.of("few", "k2", tokens_per_minute=10),
    )
    async with make_cluster(tokenizer, tmp_path, api_keys=keys) as cluster:
        prefill = cluster.prefills[0]
        prefill.steps = asyncio.Semaphore(0)

        async def ask(key: str) -> tuple[int, str | None]:
            async with cluster.http.post(
                cluster.url + "/v1/completions",
                json={"prompt": [7] * 12, "max_tokens": 2, "priority": -3},
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
        priorities = [m.prefill.request.priority for m in prefill.submitted]
        assert priorities == [-2, -2, 0], "workers get what counts beside other keys"
