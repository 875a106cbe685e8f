"""`GET /status` shows the last reports of the workers, and asks none."""

import asyncio
from pathlib import Path
from typing import cast

import grpc.aio
import pytest

from baton.router.text.tokenizer import ModelTokenizer
from baton.rpc import worker_pb2 as pb
from tests.fake_worker import FakeWorker

from .conftest import Cluster, make_cluster


async def test_a_worker_that_answers_no_question_delays_no_probe(
    tokenizer: ModelTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def get_status(
        worker: FakeWorker, request: pb.StatusRequest, context: grpc.aio.ServicerContext
    ) -> pb.WorkerStatus:
        await asyncio.Event().wait()
        raise AssertionError

    async with make_cluster(tokenizer, tmp_path) as cluster:
        monkeypatch.setattr(FakeWorker, "GetStatus", get_status)
        await cluster.rooms(dict.fromkeys(cluster.workers, 300))
        async with asyncio.timeout(4):  # a question to a worker takes up to five seconds
            await cluster.get("/ready")
            await cluster.get("/metrics/targets")
            workers = (await cluster.get("/status"))["workers"]
    assert [worker["status"]["blocks_free"] for worker in workers] == [300, 300]


async def known(cluster: Cluster, worker: FakeWorker) -> None:
    """Waits until the router knows the status of a worker."""
    worker.report()
    [made] = [made for made in cluster.pool.connections if made.address == worker.address]
    await cluster.until(lambda: made.status == worker.status)


async def test_the_links_that_a_worker_has_measured_are_shown(
    tokenizer: ModelTokenizer, tmp_path: Path
) -> None:
    async with make_cluster(tokenizer, tmp_path) as cluster:
        link = pb.PrefixLink(incarnation=7, tier=pb.TIER_HOST, wait=0.5, tokens_per_s=100.0)
        cluster.decodes[0].status.prefix_links.append(link)
        await known(cluster, cluster.decodes[0])
        [prefill, decode] = (await cluster.get("/status"))["workers"]
    assert prefill["status"]["prefix_links"] == []
    shown = {"incarnation": f"{7:016x}", "tier": "tier_host", "wait": 0.5, "tokens_per_s": 100.0}
    assert decode["status"]["prefix_links"] == [shown]


async def test_an_unknown_health_value_is_shown_as_a_number(
    tokenizer: ModelTokenizer, tmp_path: Path
) -> None:
    async with make_cluster(tokenizer, tmp_path) as cluster:
        cluster.decodes[0].status.health = cast("pb.WorkerStatus.Health", 99)
        await known(cluster, cluster.decodes[0])
        workers = (await cluster.get("/status"))["workers"]
    assert [worker["status"]["health"] for worker in workers] == ["health_serving", "99"]
