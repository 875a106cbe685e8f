"""The gRPC endpoint of a real router over fake workers, compared with HTTP."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.router.admission.keys import ApiKey
from baton.router.endpoints import grpc_server
from baton.router.endpoints.grpc_server import MessageStream
from baton.router.policy import desk
from baton.router.text.tokenizer import ModelTokenizer
from baton.rpc import inference_pb2 as pb
from baton.rpc.stubs import InferenceStub
from baton.rpc.token_ids import unpacked_ids
from tests.within import WITHIN

from .conftest import TEXT, Cluster, encode_chat, make_cluster, prefills_at

CHAT = pb.Chat(messages=[pb.ChatMessage(role="user", content="Hi")])
Health = health_pb2.HealthCheckResponse


async def generate(
    cluster: Cluster, metadata: tuple[tuple[str, str], ...] = (), **fields: Any
) -> list[pb.GenerateResponse]:
    async with cluster.channel() as channel:
        call = InferenceStub(channel).Generate(
            pb.GenerateRequest(**fields), metadata=metadata, timeout=WITHIN
        )
        return [message async for message in call]


async def refusal(cluster: Cluster, **fields: Any) -> tuple[grpc.StatusCode, str, dict[str, Any]]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await generate(cluster, **fields)
    trailing: Any = error.value.trailing_metadata()  # the type stubs are wrong about its pairs
    return error.value.code(), error.value.details() or "", dict(trailing)


def text(messages: list[pb.GenerateResponse], index: int = 0) -> str:
    return "".join(d.text for message in messages for d in message.deltas if d.index == index)


async def test_each_kind_of_prompt_reaches_the_workers(cluster: Cluster):
    prompts: list[dict[str, Any]] = [
        {"text": "Größe"},
        {"token_ids": pb.TokenIds(ids=[7, 8])},
        {"chat": CHAT},
    ]
    for prompt in prompts:
        await generate(cluster, **prompt, max_tokens=1)
    seen = [list(unpacked_ids(m.prefill.request.prompt_ids)) for m in cluster.prefills[0].submitted]
    chat = encode_chat(cluster.tokenizer, [{"role": "user", "content": "Hi"}])
    assert seen == [cluster.tokenizer.encode("Größe"), [7, 8], chat]


async def test_sampling_parameters_are_those_of_http(cluster: Cluster):
    fields: dict[str, Any] = {
        "seed": 11, "temperature": 0.5, "top_k": -1, "top_p": 0.9, "min_p": 0.1, "presence_penalty": 1.0,
        "frequency_penalty": -1.0, "repetition_penalty": 1.5, "min_tokens": 2, "stop_token_ids": [9],
        "max_tokens": 20, "ignore_eos": True, "logprobs": 2, "priority": -3, "n": 2,
    }  # fmt: skip
    await generate(cluster, **fields, token_ids=pb.TokenIds(ids=[5]), logit_bias={5: 2.5})
    await cluster.complete(**fields, prompt=[5], logit_bias={"5": 2.5})
    requests = [m.prefill.request for m in cluster.prefills[0].submitted]
    for over_grpc, over_http in zip(requests[:2], requests[2:], strict=True):
        assert over_grpc.sampling == over_http.sampling
        assert over_grpc.priority == over_http.priority == -3


async def test_errors_are_those_of_http(cluster: Cluster):
    cases: list[tuple[dict[str, Any], dict[str, Any], grpc.StatusCode]] = [
        ({"text": ""}, {"prompt": ""}, grpc.StatusCode.INVALID_ARGUMENT),
        ({}, {}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"text": "x", "model": "m"}, {"prompt": "x", "model": "m"}, grpc.StatusCode.NOT_FOUND),
        ({"text": "x", "top_p": 2.0}, {"prompt": "x", "top_p": 2.0}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"text": "x", "n": 0}, {"prompt": "x", "n": 0}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"text": "x", "stop": [""]}, {"prompt": "x", "stop": [""]}, grpc.StatusCode.INVALID_ARGUMENT),
        (
            {"token_ids": pb.TokenIds(ids=[5] * 9000)},
            {"prompt": [5] * 9000},
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
    ]
    for over_grpc, over_http, expected in cases:
        code, details, trailing = await refusal(cluster, **over_grpc)
        status, result = await cluster.post("/v1/completions", **over_http)
        assert code == expected
        assert status in (400, 404)
        error = result["error"]
        assert (details, trailing["error-code"]) == (error["message"], error["code"])
        assert trailing.get("error-param") == error["param"]
        assert len(trailing["x-request-id"]) == 32
    code, details, _ = await refusal(cluster, text="x", temperature=float("nan"))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "temperature" in details
    code, details, _ = await refusal(
        cluster, chat=pb.Chat(messages=[pb.ChatMessage(role="tool", content="x")])
    )
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "messages[0]" in details
    assert not cluster.prefills[0].submitted


async def test_a_disconnect_cancels_the_request_on_both_workers(cluster: Cluster):
    prefill, decode = cluster.prefills[0], cluster.decodes[0]
    prefill.steps, decode.steps = asyncio.Semaphore(1), asyncio.Semaphore(0)
    async with cluster.channel() as channel:
        call = InferenceStub(channel).Generate(pb.GenerateRequest(text="x", max_tokens=50))
        first = await call.read()
        assert isinstance(first, pb.GenerateResponse)
        assert first.deltas[0].text == "The"
        call.cancel()
        await decode.until(lambda w: w.cancelled == [w.submitted[0].decode.decode_id])
        await prefill.until(lambda w: w.cancelled == [w.submitted[0].prefill.prefill_id])
        await cluster.idle()


async def test_a_client_that_reads_nothing_is_cut_off(cluster: Cluster, monkeypatch: pytest.MonkeyPatch):
    """No message leaves, as when the flow control of the call has no room. The generation ends."""
    stalled: Any = SimpleNamespace(write=lambda events: asyncio.Event().wait())
    monkeypatch.setattr(grpc_server, "MessageStream", lambda *_: MessageStream(stalled, 0.01))
    code, details, trailing = await refusal(cluster, text="x", max_tokens=50)
    assert (code, trailing["error-code"]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "request_timeout")
    assert details == "the client read nothing for 0.01 s"
    await cluster.idle()


async def test_the_deadline_of_the_call_limits_the_request(cluster: Cluster):
    prefill, decode = cluster.prefills[0], cluster.decodes[0]
    decode.steps = asyncio.Semaphore(0)
    async with cluster.channel() as channel:
        while not decode.submitted:  # a slow machine may need longer to prepare it
            call = InferenceStub(channel).Generate(pb.GenerateRequest(text="x", max_tokens=50), timeout=0.5)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                async for _ in call:
                    pass
            assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await decode.until(lambda w: w.cancelled == [w.submitted[0].decode.decode_id])
    await prefill.until(lambda w: w.cancelled == [w.submitted[0].prefill.prefill_id])
    assert decode.submitted[0].decode.request.timeout_ms <= 500


async def test_keys_deadlines_and_overload(
    tokenizer: ModelTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(desk, "WINDOW_SECONDS", 0.0)
    async with make_cluster(tokenizer, tmp_path, api_keys=(ApiKey.of("one", "key-one"),)) as cluster:
        prefill, decode = cluster.prefills[0], cluster.decodes[0]
        await prefills_at(cluster, 2.0)
        steps = prefill.steps = decode.steps = asyncio.Semaphore(0)
        code, *_ = await refusal(cluster, text="x")
        assert code == grpc.StatusCode.UNAUTHENTICATED
        key = (("authorization", "Bearer key-one"), ("x-request-id", "mine"))
        long = {"token_ids": pb.TokenIds(ids=[5] * 80), "metadata": key}
        first = asyncio.create_task(refusal(cluster, **long))
        await prefill.until(lambda w: w.submitted)
        code, why, trailing = await refusal(cluster, **long | {"metadata": (*key, ("x-max-wait", "39"))})
        assert (code, trailing["retry-after"]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "40"), why
        steps.release()
        await cluster.expire()
        code, _, trailing = await first
        assert code == grpc.StatusCode.DEADLINE_EXCEEDED
        assert trailing["error-code"] == "timeout"
        assert trailing["x-request-id"] == "mine"


@pytest.mark.all
async def test_a_message_that_is_too_large_is_refused(tokenizer: ModelTokenizer, tmp_path: Path):
    async with make_cluster(tokenizer, tmp_path, max_body_bytes=1000) as cluster:
        code, *_ = await refusal(cluster, text="x" * 2000)
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_health_follows_the_workers(cluster: Cluster):
    async with cluster.channel() as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # the type stubs lack grpc.aio
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == Health.SERVING
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="baton.v1.Inference"))
        async with asyncio.timeout(WITHIN):
            while (await watch.read()).status != Health.SERVING:
                pass
            await cluster.decodes[0].kill()
            assert (await watch.read()).status == Health.NOT_SERVING
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == Health.SERVING


async def test_reflection_shows_the_service(cluster: Cluster):
    async with cluster.channel() as channel:
        # pyrefly: ignore[bad-argument-type]  (the type stubs lack grpc.aio)
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = {service.name for service in (await call.read()).list_services_response.service}
        assert listed >= {"baton.v1.Inference", "grpc.health.v1.Health"}
        assert "baton.v1.Worker" not in listed
        symbol = "baton.v1.Inference"
        await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol))
        [described] = (await call.read()).file_descriptor_response.file_descriptor_proto
        assert b"GenerateRequest" in described
        call.cancel()


async def test_a_drain_lets_a_call_finish_and_refuses_new_ones(cluster: Cluster):
    cluster.decodes[0].steps = asyncio.Semaphore(0)
    running = asyncio.create_task(generate(cluster, text="x", max_tokens=99))
    await cluster.decodes[0].until(lambda w: w.submitted)
    cluster.router.stop_listening()
    code, _, trailing = await refusal(cluster, text="x")
    assert code == grpc.StatusCode.UNAVAILABLE
    assert trailing["retry-after"] == "1"
    async with cluster.channel() as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == Health.NOT_SERVING
    for _ in range(99):
        cluster.decodes[0].steps.release()
    assert text(await running) == TEXT
