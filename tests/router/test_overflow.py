"""Decode workers prefill what is short, what prefill workers are late with, and all when there are none."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policy import ChunkOffer, overflow
from router.text.tokenizer import ModelTokenizer
from rpc import worker_pb2 as pb

from .conftest import Cluster, make_cluster
from .test_recovery import answered_whole, decodes, prefills

# 50 tokens in a step of 15 ms instead of 10: 3,333 tokens/s beside the decodes.
OFFER = ChunkOffer(tokens=50, seconds=0.015, step_seconds=0.010)
SPEED = 20_000.0  # of a prefill worker


def decided(tokens: int, queue: int = 0, waiting: int = 0) -> str | None:
    offer = ChunkOffer(OFFER.tokens, OFFER.seconds, OFFER.step_seconds, waiting)
    return overflow(tokens, (queue + tokens) / SPEED, offer)


@pytest.mark.parametrize(
    ("tokens", "queue", "waiting", "reason"),
    [
        (40, 0, 0, None),  # prefill has it in 2 ms, and the handover is over when decode would be through
        (40, 200, 0, "short"),
        (40, 200, 30, None),  # it waits for another chunk
        (40, 800, 30, "saturated"),
        (2000, 0, 0, None),  # an idle prefill worker
        (2000, 9_000, 0, None),
        (2000, 10_000, 0, "saturated"),
        (2000, 10_000, 200, None),
    ],
)
def test_whoever_has_the_second_token_first(
    tokens: int, queue: int, waiting: int, reason: str | None
) -> None:
    assert decided(tokens, queue, waiting) == reason


def test_without_a_prefill_worker_decode_does_it() -> None:
    assert overflow(5000, None, OFFER) == "no_prefill"
    assert overflow(5000, None, ChunkOffer(0, 0.0, 0.0)) == "no_prefill", "also one that knows nothing yet"


@given(st.integers(1, 10_000), st.integers(0, 200_000), st.integers(0, 5_000), st.integers(0, 5_000))
def test_more_queue_makes_it_likelier_and_more_at_decode_less(
    tokens: int, queue: int, waiting: int, more: int
) -> None:
    if decided(tokens, queue, waiting) is not None:
        assert decided(tokens, queue + more, waiting) is not None
    else:
        assert decided(tokens, queue, waiting + more) is None


async def offering(cluster: Cluster, tokens: int = 64) -> None:
    """Decode workers report that they have this to spare, and prefill workers that they are slow."""
    for worker in cluster.workers:
        worker.status.prefill_tokens_per_s = 1.0
        if worker.role == pb.ROLE_DECODE:
            worker.status.chunk_tokens, worker.status.chunk_seconds = tokens, 0.015
            worker.status.step_seconds = 0.010
        worker.report()
    connections = cluster.router.services.pool.connections
    await cluster.until(lambda: all(c.status.prefill_tokens_per_s == 1.0 for c in connections))


async def counted(cluster: Cluster, reason: str) -> float:
    async with cluster.http.get(cluster.url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(x.split()[-1]) for x in lines if x.startswith("baton:overflow_total") and reason in x)


async def test_an_overflowed_request_asks_no_prefill_worker(cluster: Cluster) -> None:
    await offering(cluster)
    await answered_whole(cluster)
    [submit] = decodes(cluster.decodes[0])
    assert not submit.HasField("source")
    assert not prefills(cluster.prefills[0])
    assert await counted(cluster, "short") == 1


async def test_a_long_one_is_taken_where_prefill_is_late(cluster: Cluster) -> None:
    await offering(cluster)
    await cluster.complete(prompt="a long story " * 100)
    assert await counted(cluster, "saturated") == 1


async def test_one_token_needs_no_decode_worker_in_any_case(cluster: Cluster) -> None:
    await offering(cluster)
    await cluster.complete(max_tokens=1)
    assert not decodes(cluster.decodes[0])


async def test_decode_serves_alone_while_there_is_no_prefill_worker(cluster: Cluster) -> None:
    await offering(cluster)
    await cluster.prefills[0].kill()
    await cluster.until(lambda: not cluster.router.services.pool.complete)
    await answered_whole(cluster)
    assert await counted(cluster, "no_prefill") == 1


async def test_a_reservation_that_lost_the_last_prefill_worker_is_prefilled_where_it_is(
    cluster: Cluster,
) -> None:
    prefill, decode = cluster.prefills[0], cluster.decodes[0]
    prefill.steps = asyncio.Semaphore(0)
    request = asyncio.create_task(answered_whole(cluster))
    await cluster.until(lambda: bool(decodes(decode)) and bool(prefills(prefill)))
    await offering(cluster)
    await prefill.kill()
    await request
    assert [d.HasField("source") for d in decodes(decode)] == [True, False]
    assert decodes(decode)[0].decode_id in decode.cancelled


@pytest.mark.parametrize("tokens", [0, 1, 7])
async def test_a_decode_worker_lost_with_an_overflowed_request(pair: Cluster, tokens: int) -> None:
    await offering(pair)
    for worker in pair.decodes:
        worker.steps = asyncio.Semaphore(tokens)
    request = asyncio.create_task(answered_whole(pair))
    await pair.until(
        lambda: any(d.steps is not None and d.submitted and d.steps._value == 0 for d in pair.decodes)
    )
    killed = next(d for d in pair.decodes if d.submitted)
    other = next(d for d in pair.decodes if d is not killed)
    other.steps = None
    await killed.kill()
    await request
    [again] = decodes(other)
    assert not again.HasField("source")
    assert len(again.request.output_ids) <= tokens


async def test_no_room_and_handed_back_go_on_elsewhere(pair: Cluster) -> None:
    await offering(pair)
    for worker in pair.decodes:
        worker.no_room = 1
    request = asyncio.create_task(answered_whole(pair))
    await pair.until(lambda: len(pair.router.services.pool.room) == 1)
    pair.decodes[0].report()
    await request
    for worker in pair.decodes:
        worker.fail = (1, pb.FAILURE_CODE_HANDED_BACK)
    await answered_whole(pair)


async def test_off_by_a_flag(tokenizer: ModelTokenizer, tmp_path: Path) -> None:
    async with make_cluster(tokenizer, tmp_path, overflow=False) as cluster:
        await offering(cluster)
        await answered_whole(cluster)
        assert decodes(cluster.decodes[0])[0].HasField("source")
        await cluster.idle()


async def test_what_decode_has_to_spare_lets_more_requests_in(cluster: Cluster) -> None:
    pool = cluster.router.services.pool
    before = pool.window()
    await offering(cluster)
    pool._spare_at = 0.0
    assert pool.window() == pytest.approx(before * (1 + 64 / 0.015 / 1.0))
