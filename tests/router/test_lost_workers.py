"""A request survives lost workers, up to a limit."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from baton.router.generation import failures
from baton.router.text.tokenizer import ModelTokenizer

from .conftest import Cluster, make_cluster


@pytest.fixture
async def cluster(tokenizer: ModelTokenizer, tmp_path: Path) -> AsyncIterator[Cluster]:
    """With overflow, the prefill worker would decode while the decode worker is away."""
    async with make_cluster(tokenizer, tmp_path, overflow=False) as made:
        yield made


async def lose_decode(cluster: Cluster, times: int) -> None:
    """Kills and restarts the decode worker, each time before it sent a token."""
    decode = cluster.decodes[0]
    port = int(decode.address.rpartition(":")[2])
    for i in range(times):
        await decode.until(lambda w: len(w.submitted) > i)  # noqa: B023
        await decode.kill()
        await decode.start(port)


async def ask(cluster: Cluster, **body: Any) -> tuple[int, dict[str, Any]]:
    return await cluster.post("/v1/completions", prompt="Hello", max_tokens=200, **body)


@pytest.mark.all
async def test_lost_workers_do_not_count_as_failures(cluster: Cluster) -> None:
    decode = cluster.decodes[0]
    decode.steps = asyncio.Semaphore(0)
    request = asyncio.create_task(ask(cluster, return_token_ids=True))
    await lose_decode(cluster, failures.MAX_FAILURES + 2)
    await decode.until(lambda w: len(w.submitted) > failures.MAX_FAILURES + 2)
    for _ in cluster.output_ids:
        decode.steps.release()
    status, result = await request
    assert status == 200
    assert result["choices"][0]["token_ids"] == cluster.output_ids


async def test_a_request_that_loses_many_workers_in_a_row_is_given_up(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "MAX_LOSSES", 4)
    cluster.decodes[0].steps = asyncio.Semaphore(0)
    request = asyncio.create_task(ask(cluster))
    prefill = cluster.prefills[0]
    await prefill.until(lambda w: w.submitted)
    await cluster.heard(prefill.submitted[0].prefill.prefill_id)  # a new token resets the count
    await lose_decode(cluster, 4)
    status, result = await request
    assert status == 500
    assert "failed 4 times without a new token" in result["error"]["message"]
