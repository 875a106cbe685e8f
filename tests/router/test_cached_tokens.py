"""`cached_tokens` of a usage: what was cached when the request came, and of its choices the least."""

from collections.abc import Callable
from typing import Any

import pytest

from baton.rpc import worker_pb2 as pb
from baton.rpc.token_ids import unpacked_ids
from tests.fake_worker import FakeWorker

from .conftest import Cluster
from .test_grpc import generate

HELLO = [{"role": "user", "content": "Hi"}]


def finds(worker: FakeWorker, cached: Callable[[pb.Request], int]) -> None:
    """The worker finds so much of the prompt of a request in its cache."""

    def change(event: pb.TokenEvent) -> None:
        for message in worker.submitted:
            submit = getattr(message, message.WhichOneof("kind"))
            if event.attempt_id in (getattr(submit, "prefill_id", b""), getattr(submit, "decode_id", b"")):
                event.cached_tokens = cached(submit.request)

    worker.change = change


async def completed(cluster: Cluster, **body: Any) -> list[int]:
    _, whole = await cluster.post("/v1/completions", prompt="Hello", max_tokens=9, **body)
    return [whole["usage"]["prompt_tokens_details"]["cached_tokens"]]


async def chatted(cluster: Cluster, **body: Any) -> list[int]:
    path, options = "/v1/chat/completions", {"include_usage": True, "continuous_usage_stats": True}
    stream = await cluster.events(path, messages=HELLO, max_tokens=9, stream_options=options, **body)
    return [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in stream[-3:]]


async def responded(cluster: Cluster) -> list[int]:
    *_, last = await cluster.typed_events("/v1/responses", input="Hi", max_output_tokens=20)
    return [last["response"]["usage"]["input_tokens_details"]["cached_tokens"]]


async def messaged(cluster: Cluster) -> list[int]:
    first, *events = await cluster.typed_events("/v1/messages", messages=HELLO, max_tokens=9)
    [last] = [event for event in events if event["type"] == "message_delta"]
    return [each["usage"]["cache_read_input_tokens"] for each in (first["message"], last)]


async def generated(cluster: Cluster, **body: Any) -> list[int]:
    return [(await generate(cluster, text="Hello", max_tokens=9, **body))[-1].usage.cached_tokens]


@pytest.mark.parametrize("asked", [completed, chatted, responded, messaged, generated])
async def test_what_an_attempt_before_has_computed_does_not_count(
    cluster: Cluster, asked: Callable[..., Any]
) -> None:
    """It is in the cache when the prompt is computed again."""
    worker = cluster.prefills[0]
    finds(worker, lambda request: 2752 if request.retried else 3)
    assert set(await asked(cluster)) == {3}
    worker.fail = 1, pb.FAILURE_CODE_DROPPED
    assert set(await asked(cluster)) == {0}, "the router knew of no cache"
    assert worker.submitted[-1].prefill.request.retried


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("asked", [completed, chatted, generated])
@pytest.mark.parametrize("first", [0, 1], ids=["choice 0 computes it", "choice 1 computes it"])
async def test_what_another_choice_has_computed_does_not_count(
    cluster: Cluster, asked: Callable[..., Any], n: int, first: int
) -> None:
    finds(cluster.prefills[0], lambda request: 0 if request.sampling.seed == 5 + first else 64)
    assert set(await asked(cluster, n=n, seed=5)) == {0}


async def test_each_prompt_counts_its_own_choices(cluster: Cluster) -> None:
    found = {7: [64, 16], 8: [32, 48]}
    finds(
        cluster.prefills[0],
        lambda request: found[unpacked_ids(request.prompt_ids)[0]][request.sampling.seed - 5],
    )
    usage = (await cluster.complete(prompt=[[7], [8]], n=2, seed=5))["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 16 + 32}
