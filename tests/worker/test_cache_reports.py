"""A real prefill worker tells routers what is in its prefix cache."""

import asyncio
from pathlib import Path

import pytest

from rpc import chunk_hashes
from rpc import worker_pb2 as pb
from tests.cluster_helpers import WorkerStream, attached, request, sampling, start_worker, tiny_model

ONE = sampling(max_tokens=1)


async def compute(stream: WorkerStream, prompt: list[int]) -> tuple[pb.CacheEvents, int]:
    """What was said of the cache before the token came, and how much of the prompt had been cached."""
    prefill_id = await stream.submit_prefill(request(prompt, ONE), handover=False)
    [(token, _)] = await stream.tokens(prefill_id)
    said = pb.CacheEvents()
    while not stream.caches.empty():
        events = stream.caches.get_nowait()
        said.sequence = events.sequence
        said.added.extend(events.added)
        said.evicted.extend(events.evicted)
    return said, token.cached_tokens


@pytest.fixture
def worker(tmp_path: Path):
    engine = {"load_format": "dummy", "num_blocks": 40, "enable_prefix_caching": True, "block_size": 16}
    started = start_worker("prefill", tiny_model(tmp_path / "model"), tmp_path, engine=engine).wait_ready()
    yield started
    assert started.stop() == 0


async def test_what_enters_and_leaves_the_cache_is_reported_in_order(worker):
    first, second = [1] * 200, [2] * 600
    async with attached(worker) as stream, attached(worker) as other:
        assert await asyncio.wait_for(stream.caches.get(), 10) == pb.CacheEvents(reset=True)
        said, _ = await compute(stream, first)
        assert (said.sequence, [*said.added], [*said.evicted]) == (1, chunk_hashes(first), [])
        assert await compute(stream, first) == (pb.CacheEvents(), 192)
        said, _ = await compute(stream, second)  # 38 of 40 blocks: the first prompt has to go
        assert said.sequence == 2
        assert {*said.added} == {*chunk_hashes(second)}
        assert {*said.evicted} == {*chunk_hashes(first)}
        await other.send(cache_resync=pb.CacheResync())
        async with asyncio.timeout(10):
            heard = [await other.caches.get() for _ in range(4)]
        assert [(e.sequence, e.reset) for e in heard] == [(0, True), (1, False), (2, False), (2, True)]
        assert {*heard[-1].added} == {*chunk_hashes(second)}
    async with attached(worker) as late:
        snapshot = await asyncio.wait_for(late.caches.get(), 10)
        assert (snapshot.sequence, {*snapshot.added}) == (2, {*chunk_hashes(second)})
