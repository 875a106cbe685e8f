"""A real prefill worker reports the contents of its prefix cache to routers."""

import asyncio
import random
from pathlib import Path

import pytest

from baton.rpc import worker_pb2 as pb
from tests.cluster_helpers import (
    WorkerStream,
    assert_whole,
    attached,
    metrics,
    request,
    sampling,
    start_worker,
    tiny_model,
)
from tests.engine.checkpoints import edit_json
from tests.within import WITHIN, within
from tests.worker.test_states import HYBRID

ONE = sampling(max_tokens=1)


def text(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(500), k=length)


async def compute(stream: WorkerStream, prompt: list[int]) -> tuple[pb.CacheEvents, int]:
    """Returns the cache events before the token, merged, and the number of cached tokens of the prompt."""
    prefill_id = await stream.submit_prefill(request(prompt, ONE), handover=False)
    [(token, _)] = await stream.tokens(prefill_id)
    merged = pb.CacheEvents()
    while not stream.caches.empty():
        events = stream.caches.get_nowait()
        for kind in ("added", "evicted", "device", "host", "disk"):
            getattr(merged, kind).extend(getattr(events, kind))
    return merged, token.cached_tokens


@pytest.fixture
def worker(tmp_path: Path, request: pytest.FixtureRequest):
    engine = {"load_format": "dummy", "num_blocks": 40, "enable_prefix_caching": True, "block_size": 16}
    engine |= {"disk_cache_dir": str(tmp_path), **getattr(request, "param", {})}
    started = start_worker("prefill", tiny_model(tmp_path / "model"), tmp_path, engine=engine).wait_ready()
    yield started
    assert started.stop() == 0


@pytest.mark.all
@pytest.mark.parametrize("tier", ["host", "disk"])
async def test_copies_of_states_come_back_from_a_tier_on_all_ranks(tier: str, tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    edit_json(model / "config.json", **HYBRID)
    engine = {"load_format": "dummy", "num_blocks": 160, "enable_prefix_caching": True, "block_size": 16}
    engine |= {f"{tier}_cache_size": 1 << 25, "disk_cache_dir": str(tmp_path), "tensor_parallel_size": 2}
    worker = start_worker("prefill", model, tmp_path, engine=engine).wait_ready()
    prompts = [text(600, seed) for seed in (0, 1, 2, 3, 4, 0)]
    first = list[int]()
    async with attached(worker) as stream:
        for number, prompt in enumerate(prompts):
            # 37 full blocks each. A tier has those of the 40 that would be evicted next which are not free.
            async with asyncio.timeout(WITHIN):
                while await saved(worker, stream, tier) < 37 * number - 120:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            prefill_id = await stream.submit_prefill(request(prompt, ONE), handover=False)
            [(token, _)] = await stream.tokens(prefill_id)
            first.append(token.token_id)
            assert token.cached_tokens == (592 if number == 5 else 0)
        await stream.stub.GetStatus(pb.StatusRequest())  # the metrics follow it
    assert first[0] == first[5]
    assert metrics(worker)[f'baton:offload_loaded_tokens_total{{tier="{tier}"}}'] == 592
    await assert_whole(worker)
    assert await asyncio.to_thread(worker.stop) == 0


async def test_every_router_gets_a_snapshot_and_the_changes_after_it(worker):
    first, second = [1] * 200, [2] * 600
    async with attached(worker) as stream, attached(worker) as other:
        assert await within(stream.caches.get()) == pb.CacheEvents(reset=True)
        events, _ = await compute(stream, first)
        assert ([*events.added], [*events.evicted]) == (await stream.hints(first), [])
        assert await compute(stream, first) == (pb.CacheEvents(), 192)
        events, _ = await compute(stream, second)  # needs 38 of 40 blocks, which evicts the first prompt
        assert {*events.added} == {*await stream.hints(second)}
        assert {*events.evicted} == {*await stream.hints(first)}
        async with asyncio.timeout(WITHIN):
            received = [await other.caches.get() for _ in range(3)]
        assert [events.reset for events in received] == [True, False, False]
        assert {*received[-1].added} == {*await stream.hints(second)}
    async with attached(worker) as late:
        snapshot = await within(late.caches.get())
        assert (snapshot.reset, {*snapshot.added}) == (True, {*await late.hints(second)})


async def saved(worker, stream: WorkerStream, tier: str) -> float:
    """Blocks that the worker has copied to the tier."""
    await stream.stub.GetStatus(pb.StatusRequest())  # the metrics follow it
    return metrics(worker)[f'baton:offload_saved_blocks_total{{tier="{tier}"}}']


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("worker", "tier"),
    [
        ({"host_cache_size": 1 << 20, "tensor_parallel_size": 2}, "host"),
        ({"disk_cache_size": 1 << 20, "tensor_parallel_size": 2}, "disk"),
    ],
    indirect=["worker"],
)
async def test_what_a_tier_below_the_device_keeps_counts_as_cached(worker, tier):
    # Of 7 blocks each, 6 of them cached. The worker copies at least the 8 blocks that the pool evicts next.
    prompts = [text(100, seed) for seed in range(8)]
    offloaded: list[int] = []
    async with attached(worker) as stream:
        [chunk] = await stream.hints(prompts[0])
        for number, prompt in enumerate(prompts):
            async with asyncio.timeout(WITHIN):
                while await saved(worker, stream, tier) < 6 * number + 8 - 40:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            events, _ = await compute(stream, prompt)
            assert {*events.added} == {*await stream.hints(prompt)}
            assert not events.evicted
            offloaded += getattr(events, tier)
        assert offloaded[0] == chunk
        events, cached = await compute(stream, prompts[0])
        assert (cached, [*events.device], [*events.added]) == (96, [chunk], [])
        await assert_whole(worker)
    assert metrics(worker)[f'baton:offload_loaded_tokens_total{{tier="{tier}"}}'] == 96
