from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from baton.bench.load.measurement.server_stages import (
    Snapshot,
    between,
    pages,
    parse,
    scrape,
)
from baton.bench.load.target.request import new_http_session
from baton.cluster.tools.histograms import Histogram
from tests.bench.mock_server import Behavior, MockServer, _histogram

QUEUE = "vllm:request_queue_time_seconds"


def _snapshot(*pages: str) -> dict[str, Histogram]:
    found: dict[str, Histogram] = {}
    for page in pages:
        parse(page, found)
    return found


def test_stages_are_what_was_added_during_the_run() -> None:
    before = _snapshot(_histogram(QUEUE, [9.0] * 5))
    view = between(before, _snapshot(_histogram(QUEUE, [9.0] * 5 + [0.003] * 90 + [0.1] * 10)))
    (stage,) = view["stages"]
    assert (stage["name"], stage["metric"], stage["count"]) == ("prefill_queue", QUEUE, 100)
    assert stage["mean"] == pytest.approx(0.0127)
    assert 0.002 < stage["p50"] <= 0.004, "within its bucket"
    assert stage["p99"] is not None
    assert 0.064 < stage["p99"] <= 0.128
    assert not stage["beyond"]


def test_quantiles_in_the_last_bucket_are_marked() -> None:
    """A histogram does not know how large they are."""
    (stage,) = between({}, _snapshot(_histogram(QUEUE, [0.003] * 95 + [1e6] * 5)))["stages"]
    assert stage["beyond"] == ["p99"]
    (stage,) = between({}, _snapshot(_histogram(QUEUE, [0.003] * 9 + [1e6] * 10)))["stages"]
    assert (stage["p99"], stage["beyond"]) == (None, ["p50", "p99"]), "too few samples"


def test_waiting_in_the_router_is_not_the_prefill_queue() -> None:
    pages = [_histogram("baton:router_queue_seconds", [0.5] * 2), _histogram(QUEUE, [0.25] * 2)]
    stages = between({}, _snapshot(*pages))["stages"]
    assert [(s["name"], s["mean"]) for s in stages] == [("router_queue", 0.5), ("prefill_queue", 0.25)]
    (stage,) = between({}, _snapshot(_histogram("sglang:queue_time_seconds", [0.25])))["stages"]
    assert (stage["name"], stage["metric"]) == ("prefill_queue", "sglang:queue_time_seconds")


def test_workers_and_labels_are_summed() -> None:
    labelled = _histogram("baton:kv_exposed_seconds", [0.01] * 3).replace('{le="', '{worker="1",le="')
    view = between({}, _snapshot(labelled, _histogram("baton:kv_exposed_seconds", [0.03])))
    (stage,) = view["stages"]
    assert (stage["name"], stage["count"]) == ("exposed_transfer", 4)
    assert stage["mean"] == pytest.approx(0.015)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("http://x/metrics answered 404", {}, "404"),
        ({}, "no answer", "no answer"),
        ({}, {}, "none of the histograms"),
        (_snapshot(_histogram(QUEUE, [1.0] * 5)), _snapshot(_histogram(QUEUE, [1.0])), "restarted"),
    ],
)
def test_missing_stages_have_a_reason(before: Snapshot, after: Snapshot, said: str) -> None:
    view = between(before, after)
    assert view["stages"] == []
    assert said in view["statement"]


@pytest.mark.parametrize(
    ("status", "workers"),
    [
        ({"workers": [{"description": {"metrics_address": a}} for a in ("h:1", "h:2")]}, ["h:1", "h:2"]),
        ({"workers": [{}]}, []),
        (["something", "else"], []),
        (None, []),
    ],
)
async def test_the_pages_of_baton_workers_are_found(status: Any, workers: list[str]) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response(status) if status is not None else web.Response(status=404)

    app = web.Application()
    app.router.add_get("/status", answer)
    async with TestServer(app) as server, new_http_session(5.0) as http:
        url = f"http://{server.host}:{server.port}"
        found = await pages(http, url, {})
    assert found == [f"{url}/metrics", *(f"http://{worker}/metrics" for worker in workers)]


async def test_unusable_pages_have_a_reason() -> None:
    async with MockServer(Behavior(metrics=False)) as server, new_http_session(5.0) as http:
        assert "404" in await scrape(http, [f"{server.url}/metrics"], {})
        assert "not in Prometheus" in await scrape(http, [f"{server.url}/v1/models"], {})
        assert "127.0.0.1:1" in await scrape(http, ["http://127.0.0.1:1/metrics"], {})


async def test_a_page_in_several_pieces_is_read_to_its_end() -> None:
    async def page(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        whole = _histogram(QUEUE, [0.003] * 5).encode()
        await response.write(whole[:40])
        await asked.wait()
        await response.write(whole[40:])
        return response

    asked = asyncio.Event()
    app = web.Application()
    app.router.add_get("/metrics", page)
    async with TestServer(app) as server, aiohttp.ClientSession() as http:
        reading = asyncio.create_task(scrape(http, [str(server.make_url("/metrics"))], {}))
        asyncio.get_running_loop().call_later(0.05, asked.set)
        found = await reading
    assert isinstance(found, dict)
    assert found[QUEUE].count == 5
