"""`GET /status` asks the workers unless they are many, and succeeds if they fail meanwhile."""

import asyncio
import math
from pathlib import Path
from typing import Any, cast

import grpc.aio
import pytest

from baton.router.admission.keys import api_keys
from baton.router.config import RouterConfig
from baton.router.text.tokenizer import ModelTokenizer
from baton.router.workers.checks import RouterModel
from baton.router.workers.pool import WorkerPool
from baton.rpc import worker_pb2 as pb
from tests.fake_worker import SECRET, FakeWorker
from tests.within import WITHIN

from .conftest import make_cluster


async def test_a_worker_that_leaves_during_the_call_is_shown_with_its_last_report(
    tokenizer: ModelTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, hangs = asyncio.Event(), asyncio.Event()

    async def get_status(
        worker: FakeWorker, request: pb.StatusRequest, context: grpc.aio.ServicerContext
    ) -> pb.WorkerStatus:
        if hangs.is_set():
            asked.set()
            await asyncio.Event().wait()
        return worker.status

    monkeypatch.setattr(FakeWorker, "GetStatus", get_status)
    async with make_cluster(tokenizer, tmp_path) as cluster:
        hangs.set()
        question = asyncio.create_task(cluster.http.get(cluster.url + "/status"))
        await asked.wait()
        (tmp_path / "workers").write_text("")  # closes its channel during the call
        async with await question as response:
            assert response.status == 200
            workers = (await response.json())["workers"]
    assert [worker["status"]["blocks_free"] for worker in workers] == [512, 512]


async def test_many_workers_are_not_asked(
    tokenizer: ModelTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_cluster(tokenizer, tmp_path, decode=2) as cluster:
        await cluster.rooms(dict.fromkeys(cluster.workers, 300))
        for worker in cluster.workers:
            worker.status.blocks_free = 200  # not reported yet
        monkeypatch.setattr("baton.router.status.ASKED", 2)
        reported = (await cluster.get("/status"))["workers"]
        monkeypatch.setattr("baton.router.status.ASKED", 3)
        asked = (await cluster.get("/status"))["workers"]
    assert [(w["role"], w["status"]["blocks_free"]) for w in reported] == [
        ("prefill", 300), ("decode", 300), ("decode", 300),
    ]  # fmt: skip
    assert [worker["status"]["blocks_free"] for worker in asked] == [200, 200, 200]


async def test_the_links_that_a_worker_has_measured_are_shown(
    tokenizer: ModelTokenizer, tmp_path: Path
) -> None:
    async with make_cluster(tokenizer, tmp_path) as cluster:
        link = pb.PrefixLink(incarnation=7, tier=pb.TIER_HOST, wait=0.5, tokens_per_s=100.0)
        cluster.decodes[0].status.prefix_links.append(link)
        cluster.decodes[0].status.kv_links.add(incarnation=7, bytes_per_s=1e9, bytes_waiting=5, used=0.5)
        [prefill, decode] = (await cluster.get("/status"))["workers"]
    assert prefill["status"]["prefix_links"] == []
    shown = {"incarnation": f"{7:016x}", "tier": "tier_host", "wait": 0.5, "tokens_per_s": 100.0}
    assert decode["status"]["prefix_links"] == [shown]
    of_kv = {"incarnation": f"{7:016x}", "bytes_per_s": 1e9, "bytes_waiting": 5, "used": 0.5}
    assert decode["status"]["kv_links"] == [of_kv]


async def test_the_model_of_steps_of_a_worker_is_shown(tokenizer: ModelTokenizer, tmp_path: Path) -> None:
    """Routers place prompts by it. One with nonsense is not used, and not shown."""
    async with make_cluster(tokenizer, tmp_path, decode=2) as cluster:
        model = pb.StepModel(
            rows=[1],
            decode_seconds=[0.5],
            tokens=[16],
            prompt_seconds=[0.25],
            decode_factor=1,
            prompt_factor=2,
        )
        cluster.decodes[0].status.step_model.CopyFrom(model)
        model.context_seconds = math.nan
        cluster.decodes[1].status.step_model.CopyFrom(model)
        shown = [each["status"]["step_model"] for each in (await cluster.get("/status"))["workers"]]
    assert shown == [
        None,
        {
            "rows": [1], "decode_seconds": [0.5], "context_seconds": 0.0, "tokens": [16],
            "prompt_seconds": [0.25], "pair_seconds": 0.0, "overlap": 0.0, "decode_factor": 1.0,
            "prompt_factor": 2.0,
        },
        None,
    ]  # fmt: skip


async def test_an_unknown_health_value_is_shown_as_a_number(
    tokenizer: ModelTokenizer, tmp_path: Path
) -> None:
    async with make_cluster(tokenizer, tmp_path) as cluster:
        cluster.decodes[0].status.health = cast("pb.WorkerStatus.Health", 99)
        workers = (await cluster.get("/status"))["workers"]
    assert [worker["status"]["health"] for worker in workers] == ["health_serving", "99"]


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
        monkeypatch.setattr("baton.router.workers.worker.STATUS_TIMEOUT", 10 * WITHIN)
        async with asyncio.timeout(WITHIN):
            await cluster.get("/ready")
        monkeypatch.setattr("baton.router.workers.worker.STATUS_TIMEOUT", 0.1)
        await cluster.rooms(dict.fromkeys(cluster.workers, 300))
        workers = (await cluster.get("/status"))["workers"]
    assert [worker["status"]["blocks_free"] for worker in workers] == [300, 300]


async def test_a_router_that_reaches_none_of_the_listed_workers_is_not_routable(
    tokenizer: ModelTokenizer, tmp_path: Path
) -> None:
    """Another router may reach them. If there are none, requests wait at any router."""
    async with make_cluster(tokenizer, tmp_path) as cluster:
        await cluster.get("/routable")
        await cluster.prefills[0].kill()
        await cluster.until(lambda: not cluster.pool.complete)
        await cluster.get("/routable")
        await cluster.decodes[0].kill()
        await cluster.until(lambda: cluster.pool.blind)
        await cluster.get("/routable", 503)
        (tmp_path / "workers").write_text("")
        await cluster.until(lambda: not cluster.pool.blind)
        await cluster.get("/routable")


def test_a_router_without_a_list_yet_is_not_routable() -> None:
    config = RouterConfig(model="fake", secret=SECRET)
    assert WorkerPool(config, RouterModel("fake", 8, "")).blind


async def test_a_key_sees_its_own_requests_and_the_admin_key_all(tokenizer: ModelTokenizer, tmp_path: Path):
    """On the port of clients, where a router of one process shows them."""
    keys, [admin] = api_keys(["one", "two"], None), api_keys(["trainer"], None)
    async with make_cluster(tokenizer, tmp_path, api_keys=keys, admin_key=admin) as cluster:

        async def seen(key: str, path: str, **body: Any) -> tuple[int, Any]:
            headers = {"Authorization": f"Bearer {key}", "x-request-id": f"of-{key}"}
            method = "POST" if body else "GET"
            url = cluster.url + path
            async with cluster.http.request(method, url, headers=headers, json=body or None) as response:
                return response.status, await response.json()

        history = cluster.router.frontend.metrics.history
        for key in ("one", "two"):
            assert (await seen(key, "/v1/completions", prompt="Hello", max_tokens=1))[0] == 200
            history.attempt_failed(f"of-{key}", "lost", "prefill 0", "it died")
        for key, ids in (("one", {"of-one"}), ("two", {"of-two"}), ("trainer", {"of-one", "of-two"})):
            _, status = await seen(key, "/status")
            assert {each["id"] for each in status["router"]["recent_requests"]} == ids
            assert {each["request_id"] for each in status["router"]["failures"]} == ids
            for id_ in ("of-one", "of-two"):
                assert (await seen(key, f"/status/requests/{id_}"))[0] == (200 if id_ in ids else 404)
        assert (await seen("trainer", "/v1/models"))[0] == 401
        assert (await seen("wrong", "/status"))[0] == 401
