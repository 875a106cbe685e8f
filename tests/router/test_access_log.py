"""The access log: one line for each request, over HTTP and gRPC, without text of clients and without keys."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from baton.router.admission.keys import ApiKey
from baton.router.text.tokenizer import ModelTokenizer
from baton.rpc import inference_pb2
from baton.rpc.stubs import InferenceStub

from .conftest import Cluster, make_cluster

SECRET, PROMPT = "sk-do-not-log-me", "a private prompt"
KEY = {"Authorization": f"Bearer {SECRET}"}


@pytest.fixture(autouse=True)
def info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "baton")


def lines(caplog: pytest.LogCaptureFixture) -> dict[str, logging.LogRecord]:
    """By request id."""
    records = [record for record in caplog.records if record.name == "baton.router.access_log"]
    found = {vars(record)["request_id"]: record for record in records}
    assert len(found) == len(records), "one line a request"
    return found


def keyed(tokenizer: ModelTokenizer, tmp_path: Path, **config: Any) -> Any:
    return make_cluster(tokenizer, tmp_path, api_keys=(ApiKey.of("team-a", SECRET),), **config)


@pytest.mark.all
async def test_each_request_has_one_line(
    tokenizer: ModelTokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with keyed(tokenizer, tmp_path) as cluster:
        key = "team-a"
        body = {"prompt": PROMPT, "max_tokens": 3, "ignore_eos": True}
        for name, headers, path, fields in (
            ("whole", KEY, "/v1/completions", body),
            ("stream", KEY, "/v1/completions", body | {"stream": True}),
            ("two", KEY, "/v1/completions", body | {"n": 2}),
            ("tokens", KEY, "/tokenize", {"prompt": PROMPT}),
            ("wrong", KEY, "/v1/completions", body | {"temperature": -1}),
            ("nobody", {}, "/v1/completions", body),
            ("lost", KEY, f"/v1/{PROMPT}%0Aforged", body),
        ):
            sent = headers | {"x-request-id": name}
            async with cluster.http.post(cluster.url + path, headers=sent, json=fields) as response:
                await response.read()
        async with cluster.channel() as channel:
            for name, text in (("grpc", PROMPT), ("grpc-wrong", "")):
                metadata = (("x-request-id", name), ("authorization", f"Bearer {SECRET}"))
                message = inference_pb2.GenerateRequest(text=text, max_tokens=3, ignore_eos=True)
                call = InferenceStub(channel).Generate(message, metadata=metadata)
                try:
                    async for _ in call:
                        pass
                except grpc.aio.AioRpcError:
                    assert name == "grpc-wrong"
        for probe in ("/health", "/ready", "/metrics"):
            async with cluster.http.get(cluster.url + probe) as response:
                await response.read()
    found = lines(caplog)
    told = {
        name: tuple(
            vars(record).get(of) for of in ("route", "status", "key", "output_tokens", "finish_reason")
        )
        for name, record in found.items()
    }
    assert told == {
        "whole": ("POST /v1/completions", 200, key, 3, "length"),
        "stream": ("POST /v1/completions", 200, key, 3, "length"),
        "two": ("POST /v1/completions", 200, key, 6, "length"),
        "tokens": ("POST /tokenize", 200, key, None, None),
        "wrong": ("POST /v1/completions", 400, key, None, None),
        "nobody": ("POST /v1/completions", 401, None, None, None),
        "lost": ("(unknown)", 404, key, None, None),
        "grpc": ("gRPC Generate", 200, key, 3, "length"),
        "grpc-wrong": ("gRPC Generate", 400, key, None, None),
    }
    whole = found["whole"].getMessage()
    tokens = len(tokenizer.encode(PROMPT))
    begin = f"request whole: POST /v1/completions 200, key team-a, {tokens} + 3 tokens, 3 cached, length, "
    assert whole.startswith(begin + "queued 0.")
    assert "prefill 0 at" in whole
    for record in caplog.records:
        text = record.getMessage()
        assert not any(secret in text for secret in (SECRET, PROMPT, "forged")), text


@pytest.mark.all
async def test_a_client_that_leaves_has_a_line(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    for worker in cluster.workers:
        worker.steps = asyncio.Semaphore(0)
    headers = {"x-request-id": "left"}
    asking = asyncio.create_task(cluster.post("/v1/completions", headers, prompt="Hello", max_tokens=9))
    await cluster.until(lambda: len(cluster.router.services.active) == 1)
    asking.cancel()
    await cluster.until(lambda: "left" in lines(caplog))
    record = vars(lines(caplog)["left"])
    assert (record["status"], record["finish_reason"]) == (499, "abort")


async def test_a_response_from_the_background_has_a_line_of_its_own(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    await cluster.post("/v1/responses", {}, input="Hi", background=True)

    def routes() -> list[str]:
        return sorted(vars(record)["route"] for record in access(caplog))

    await cluster.until(lambda: routes() == ["POST /v1/responses", "background responses"])
    [generated] = [vars(record) for record in access(caplog) if vars(record).get("output_tokens")]
    assert generated["route"] == "background responses"


def access(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "baton.router.access_log"]


async def test_a_flag_turns_it_off(
    tokenizer: ModelTokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with make_cluster(tokenizer, tmp_path, access_log=False) as cluster:
        await cluster.complete(prompt="Hello", max_tokens=2)
    assert not access(caplog)
