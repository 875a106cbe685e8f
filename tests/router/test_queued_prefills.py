"""A prompt that queues at its prefill worker holds no decode memory until the worker starts to compute it.

The fake worker computes 2,048 tokens in a step, and prompts have 1,500: the third has more than a step ahead.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from baton.router.policy.prefill import PrefillRequest
from baton.router.text.tokenizer import ModelTokenizer
from baton.rpc import worker_pb2 as pb
from baton.rpc.token_ids import unpacked_ids
from tests.fake_worker import FakeWorker

from .conftest import Cluster, make_cluster
from .test_flips import flipped, hold, no_attempt_was_replaced, release
from .test_recovery import decodes, prefills

TOKENS = 1500


async def answered(cluster: Cluster, first: int) -> None:
    """A completion of a prompt that shares no prefix with the other prompts."""
    result = await cluster.complete(prompt=[first] * TOKENS, return_token_ids=True)
    assert result["choices"][0]["token_ids"] == cluster.output_ids


def start(worker: FakeWorker, prompts: int) -> None:
    assert worker.starts is not None
    for _ in range(prompts):
        worker.starts.release()


async def filled(cluster: Cluster, worker: FakeWorker) -> list[asyncio.Task[None]]:
    """Sends three prompts to a prefill worker that starts none of them."""
    worker.starts = asyncio.Semaphore(0)
    requests = []
    for number in range(1, 4):
        requests.append(asyncio.create_task(answered(cluster, number)))
        await worker.until(lambda w: len(prefills(w)) == number)  # noqa: B023
    return requests


def reserved(cluster: Cluster) -> int:
    """Decodes that the router has submitted, whether or not they have arrived."""
    return sum(load.router_requests for load in cluster.pool.desk.decodes)


@pytest.fixture
async def queue(cluster: Cluster) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Three prompts at the prefill worker. The third one queues."""
    [prefill] = cluster.prefills
    hold(prefill)
    requests = await filled(cluster, prefill)
    yield requests
    start(prefill, 10)
    release(prefill)
    await asyncio.gather(*requests, return_exceptions=True)


async def test_the_decode_is_submitted_when_the_prefill_starts(
    cluster: Cluster, queue: list[asyncio.Task[None]]
) -> None:
    [prefill], [decode] = cluster.prefills, cluster.decodes
    assert reserved(cluster) == 2
    start(prefill, 3)
    await decode.until(lambda w: len(decodes(w)) == 3)  # no prefill has sent its token
    assert decodes(decode)[2].source.prefill_id == prefills(prefill)[2].prefill_id
    release(prefill)
    await asyncio.gather(*queue)
    assert await no_attempt_was_replaced(cluster)


async def test_of_the_prompts_that_wait_in_the_router_the_one_that_is_cached_is_next(
    cluster: Cluster, queue: list[asyncio.Task[None]]
) -> None:
    [prefill] = cluster.prefills
    for number, waiting in ((9, 1), (1, 2)):  # the worker has, or computes, the second one
        queue.append(asyncio.create_task(answered(cluster, number)))
        await cluster.until(lambda: len(cluster.router.services.admission.queue) == waiting)  # noqa: B023
    start(prefill, 1)
    release(prefill)
    await prefill.until(lambda w: len(prefills(w)) == 4)
    assert unpacked_ids(prefills(prefill)[3].request.prompt_ids)[0] == 1


async def test_prompts_of_other_routers_are_ahead_too(cluster: Cluster) -> None:
    [prefill], [decode] = cluster.prefills, cluster.decodes
    prefill.starts = asyncio.Semaphore(0)
    prefill.status.tokens_waiting, prefill.status.prefill_tokens_per_s = 10_000, 1000.0
    prefill.report()
    connection = cluster.connection(prefill)
    await cluster.until(lambda: connection.status.tokens_waiting == 10_000)
    request = asyncio.create_task(answered(cluster, 1))
    await prefill.until(prefills)
    assert reserved(cluster) == 0
    start(prefill, 1)
    await request
    assert len(decodes(decode)) == 1


async def test_a_cancelled_request_submits_no_decode(
    cluster: Cluster, queue: list[asyncio.Task[None]]
) -> None:
    [prefill], [decode] = cluster.prefills, cluster.decodes
    queue[2].cancel()
    await prefill.until(lambda w: prefills(w)[2].prefill_id in w.cancelled)
    start(prefill, 3)
    release(prefill)
    await asyncio.gather(*queue[:2])
    assert len(decodes(decode)) == 2


async def test_the_decode_of_a_queued_prompt_finds_room(
    cluster: Cluster, queue: list[asyncio.Task[None]]
) -> None:
    """A later request does not take it, but waits before its prefill."""
    [prefill], [decode] = cluster.prefills, cluster.decodes
    [load], wanted, fleet = cluster.pool.desk.decodes, PrefillRequest(0, TOKENS), cluster.pool.desk
    decode.status.blocks_free = TOKENS // 16 + 10
    decode.report()
    await cluster.until(lambda: load.blocks_free == TOKENS // 16 + 10)
    assert not fleet.choose_decode(wanted, TOKENS + 1)
    assert fleet.choose_decode(wanted, TOKENS + 1, promised=True)
    start(prefill, 3)
    await decode.until(lambda w: len(decodes(w)) == 3)
    decode.status.blocks_free = TOKENS // 16 + 10
    decode.report()
    await cluster.until(lambda: load.blocks_free == TOKENS // 16 + 10)
    assert fleet.choose_decode(wanted, TOKENS + 1), "the promise was kept"


async def test_the_end_of_a_queued_prompt_ends_its_promise(
    cluster: Cluster, queue: list[asyncio.Task[None]]
) -> None:
    [decode], [load] = cluster.decodes, cluster.pool.desk.decodes
    wanted, fleet = PrefillRequest(0, TOKENS), cluster.pool.desk
    decode.status.blocks_free = TOKENS // 16 + 10
    decode.report()
    await cluster.until(lambda: load.blocks_free == TOKENS // 16 + 10)
    assert not fleet.choose_decode(wanted, TOKENS + 1)
    queue[2].cancel()
    await cluster.until(lambda: bool(fleet.choose_decode(wanted, TOKENS + 1)))


@pytest.mark.parametrize("dropped", [False, True], ids=["held", "dropped"])
async def test_a_started_prefill_waits_for_decode_capacity(
    cluster: Cluster, queue: list[asyncio.Task[None]], dropped: bool
) -> None:
    """Its worker holds the KV, and may drop it. Then it is computed again when a decode has its blocks."""
    [prefill], [decode] = cluster.prefills, cluster.decodes
    admission = cluster.router.services.admission
    hold(decode)
    [load] = cluster.pool.desk.decodes
    decode.status.blocks_free = 0
    decode.report()
    await cluster.until(lambda: load.blocks_free <= 0)
    third = prefills(prefill)[2].prefill_id
    prefill.transfer = cluster.heard
    start(prefill, 4)
    release(prefill)
    await cluster.until(lambda: admission.waiting_for_decode == 1)
    await cluster.heard(third)
    if dropped:
        prefill.drop(third)
        await cluster.until(lambda: cluster.connection(prefill).attempts.get(third) is None)
        assert len(prefills(prefill)) == 3
    decode.status.blocks_free = 512
    decode.report()
    await decode.until(lambda w: len(decodes(w)) == 3)
    release(decode)
    await asyncio.gather(*queue)
    assert len(prefills(prefill)) == 3 + dropped
    assert decodes(decode)[2].source.prefill_id == prefills(prefill)[-1].prefill_id


@pytest.mark.parametrize("lost", [False, True], ids=["flipped", "lost"])
async def test_the_worker_of_a_queued_prefill_leaves_the_pool(
    tokenizer: ModelTokenizer, tmp_path: Path, lost: bool
) -> None:
    async with make_cluster(tokenizer, tmp_path, prefill=2, overflow=False) as cluster:
        first, second = cluster.prefills
        await flipped(cluster, second, pb.POOL_DECODE)
        requests = await filled(cluster, first)
        await flipped(cluster, second, pb.POOL_PREFILL)
        if lost:
            await first.kill()
        else:
            await flipped(cluster, first, pb.POOL_DECODE)
            start(first, 3)
        await asyncio.gather(*requests)
        assert len(prefills(second)) == (3 if lost else 0)
