"""A worker with a real Mooncake Store: KV outlives the worker, and nothing wrong is ever used."""

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster_helpers import (
    WorkerProcess,
    WorkerStream,
    assert_whole,
    attached,
    request,
    sampling,
    start_worker,
    tiny_model,
)
from tests.kv_transfer.conftest import until
from tests.mooncake import Mooncake, libraries, mooncake

ENGINE = {"load_format": "dummy", "num_blocks": 80, "block_size": 16, "enable_prefix_caching": True}
PROMPT = random.Random(1).choices(range(500), k=500)
CHUNKS = 448  # tokens of its full chunks


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mooncake]:
    monkeypatch.setenv("LD_LIBRARY_PATH", libraries(tmp_path / "lib"))
    with mooncake(tmp_path) as running:
        yield running


@contextmanager
def worker(model: Path, directory: Path, store: Mooncake, **settings: Any) -> Iterator[WorkerProcess]:
    engine = ENGINE | settings.pop("engine", {})
    started = start_worker("prefill", model, directory, engine=engine, kv_store=store.url, **settings)
    try:
        started.wait_ready()
        until(lambda: " is open" in started.log.read_text(), "the store to be open")
        yield started
    finally:
        started.popen.kill()
        started.popen.wait()


async def generate(stream: WorkerStream, prompt: list[int]) -> tuple[list[int], int]:
    """The tokens, and how many tokens of the prompt were cached."""
    decode_id = await stream.submit_decode(request(prompt, sampling(max_tokens=8, ignore_eos=True)))
    await stream.reserved(decode_id)
    tokens = [token for token, _ in await stream.tokens(decode_id)]
    return [token.token_id for token in tokens], tokens[0].cached_tokens


async def test_a_restarted_worker_finds_its_kv_in_the_store(store: Mooncake, tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    with worker(model, tmp_path / "1", store) as first:
        async with attached(first) as stream:
            expected, cached = await generate(stream, PROMPT)
            assert cached == 0
        await assert_whole(first)
        assert await asyncio.to_thread(first.stop) == 0, "it writes all before it ends"
    with worker(model, tmp_path / "2", store, engine={"block_size": 128}) as second:
        async with attached(second) as stream:
            found, cached = await generate(stream, PROMPT)
            assert (found, cached) == (expected, 384), "in its own blocks"
        await assert_whole(second)
        assert await asyncio.to_thread(second.stop) == 0
