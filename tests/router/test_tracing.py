"""One request is one trace: the spans of a router over HTTP and gRPC, and when workers fail."""

import os
from collections.abc import Iterator
from pathlib import Path

import grpc.aio
import pytest

from baton.router.text.tokenizer import ModelTokenizer
from baton.rpc import inference_pb2 as pb
from baton.rpc import worker_pb2
from baton.rpc.stubs import InferenceStub
from tests.otlp import Receiver, Span

from .conftest import Cluster, make_cluster


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


def named(spans: list[Span], name: str) -> list[Span]:
    return [span for span in spans if span.name == name]


async def complete(cluster: Cluster, trace_id: str) -> str:
    """Returns the client's own span id."""
    parent = os.urandom(8).hex()
    headers = {"traceparent": f"00-{trace_id}-{parent}-01", "x-request-id": "mine"}
    body = {"prompt": "Hello", "max_tokens": 7, "temperature": 0}
    async with cluster.http.post(cluster.url + "/v1/completions", json=body, headers=headers) as response:
        assert response.status == 200
    return parent


async def test_a_request_and_its_attempts(tokenizer: ModelTokenizer, tmp_path: Path, receiver: Receiver):
    trace_id = os.urandom(16).hex()
    async with make_cluster(tokenizer, tmp_path, otlp_endpoint=receiver.endpoint) as cluster:
        parent = await complete(cluster, trace_id)
        asked = [w.submitted[0] for w in cluster.workers]
    spans = receiver.trace(trace_id, 3)  # sent at the latest when the router ends
    request, prefill, decode = spans
    assert [span.name for span in spans] == ["request", "prefill attempt", "decode attempt"]
    assert {span.process for span in spans} == {"baton-router 0"}
    assert request.parent == parent
    assert prefill.parent == decode.parent == request.id
    assert request.attributes["gen_ai.request.id"] == "mine"
    assert request.attributes["gen_ai.request.max_tokens"] == 7
    assert request.attributes["gen_ai.usage.completion_tokens"] == 7
    assert (
        0
        < request.attributes["gen_ai.latency.time_to_first_token"]
        < request.attributes["gen_ai.latency.e2e"]
    )
    for span in spans:
        assert (span.attributes["baton.place"], span.attributes["baton.cost_s.handover"] > 0) == (
            "handover",
            True,
        )
    for span in (prefill, decode):
        assert request.start <= span.start <= span.end <= request.end
        assert span.error is None
    # Workers are told under which span to put theirs, and what the client calls the request.
    for attempt, submitted in ((prefill, asked[0].prefill), (decode, asked[1].decode)):
        assert submitted.request.traceparent == f"00-{trace_id}-{attempt.id}-01"
        assert submitted.request.name == "mine"


async def test_a_retry_is_a_second_attempt(tokenizer: ModelTokenizer, tmp_path: Path, receiver: Receiver):
    trace_id = os.urandom(16).hex()
    more = {"prefill": 2, "otlp_endpoint": receiver.endpoint}
    async with make_cluster(tokenizer, tmp_path, **more) as cluster:
        for worker in cluster.prefills:
            worker.fail = (1, worker_pb2.FAILURE_CODE_ENGINE)
        await complete(cluster, trace_id)
    prefills = named(receiver.trace(trace_id, 5), "prefill attempt")
    *failed, good = prefills
    assert failed
    assert all(span.error for span in failed), "by the prefill, or first by the decode that waited for it"
    assert good.error is None
    assert len({span.attributes["baton.worker"] for span in prefills}) == 2
    [request] = named(receiver.trace(trace_id, 5), "request")
    assert {span.parent for span in prefills} == {request.id}
    assert request.error is None


async def test_a_grpc_request_that_times_out(tokenizer: ModelTokenizer, tmp_path: Path, receiver: Receiver):
    trace_id, parent = os.urandom(16).hex(), os.urandom(8).hex()
    async with make_cluster(tokenizer, tmp_path, otlp_endpoint=receiver.endpoint) as cluster:
        cluster.decodes[0].holds_kv = cluster.prefills[0].holds_kv = True
        async with cluster.channel() as channel:
            call = InferenceStub(channel).Generate(
                pb.GenerateRequest(text="Hello", max_tokens=5),
                metadata=(("traceparent", f"00-{trace_id}-{parent}-01"),),
            )
            await cluster.expire()
            with pytest.raises(grpc.aio.AioRpcError, match="not finished within"):
                async for _ in call:
                    pass
    [request] = named(receiver.trace(trace_id, 3), "request")
    assert request.parent == parent
    assert "was not finished within" in str(request.error)


async def test_without_tracing_workers_get_the_clients_trace(cluster: Cluster):
    trace_id = os.urandom(16).hex()
    parent = await complete(cluster, trace_id)
    for submitted in (cluster.prefills[0].submitted[0].prefill, cluster.decodes[0].submitted[0].decode):
        assert submitted.request.traceparent == f"00-{trace_id}-{parent}-01"
