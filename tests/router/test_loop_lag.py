"""The event loop's lag: how long a stall delays everything else."""

import asyncio
import gc
import time
from contextlib import nullcontext

import pytest

from baton.router import server
from baton.router.generation.context import ActiveRequests
from baton.router.server import observe_lag
from tests.within import WITHIN

from .conftest import Cluster

STALL = 0.2


@pytest.mark.all
@pytest.mark.parametrize("first_tokens", [True, False])
async def test_a_request_leaves_no_garbage(cluster: Cluster, first_tokens: bool) -> None:
    """The collector would pass all objects of all requests, and stall them."""
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 99}
    text = {"prompt": "Hello", "max_tokens": 99}
    asked = [
        ("/v1/chat/completions", chat | {"stream": True}),
        ("/v1/chat/completions", chat),
        ("/v1/completions", text | {"stream": True, "n": 2, "stop": ["never"], "logprobs": 2}),
        ("/v1/completions", text),
        ("/v1/messages", chat | {"stream": True}),
        ("/v1/responses", {"input": "Hello", "stream": True, "store": False}),
    ]
    background = ("/v1/responses", {"input": "Hello", "background": True})
    [prefill], [decode] = cluster.prefills, cluster.decodes

    async def ask() -> None:
        for path, body in asked:
            async with cluster.http.post(cluster.url + path, json=body) as response:
                assert response.status == 200, await response.text()
                await response.read()
        decode.steps = asyncio.Semaphore(0)  # the first token comes, and no other
        prefill.steps = None if first_tokens else asyncio.Semaphore(0)
        for path, body in [*asked, background]:
            begun = body.get("stream") or body.get("background")
            late = {"x-request-timeout": "0.1"}
            async with cluster.http.post(cluster.url + path, json=body, headers=late) as response:
                # On a busy machine a stream, too, may have no token in time.
                assert response.status in ((200, 504) if begun else (504,)), await response.text()
                await response.read()
        await cluster.idle()
        decode.steps = prefill.steps = None

    await ask()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        await ask()
        gc.collect()
        left = {type(each).__name__ for each in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    names = {"ActiveRequest", "Generation", "Turn", "Attempt", "TokenQueue", "StopStrings", "TimedOut"}
    assert not left & names


async def test_a_collection_does_not_pass_some_of_each_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python alone would collect no garbage here, since as many objects are freed as are made."""
    monkeypatch.setattr(server, "YOUNG_PERIOD", 1e-6)
    monkeypatch.setattr(server, "FEW_REQUESTS", 0)
    collecting = asyncio.create_task(server.collect_garbage(ActiveRequests()))
    streams: list[list[int]] = [[] for _ in range(50_000)]
    gc.collect()
    most = 0
    for first in range(0, len(streams), 500):
        streams[first : first + 500] = [[] for _ in range(500)]
        most = max(most, len(gc.get_objects(generation=0)))
        await asyncio.sleep(0.001)
    collecting.cancel()
    assert most < 5_000


async def test_an_idle_router_rests_between_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "YOUNG_PERIOD", 1e-6)
    monkeypatch.setattr(server, "FEW_PERIOD", WITHIN)
    collections: list[int] = []
    monkeypatch.setattr(gc, "collect", collections.append)
    collecting = asyncio.create_task(server.collect_garbage(ActiveRequests()))
    await asyncio.sleep(0.01)
    collecting.cancel()
    assert not collections


async def test_a_stall_of_the_event_loop_is_measured() -> None:
    observed: asyncio.Queue[float] = asyncio.Queue()
    own: list[float] = []
    measuring = asyncio.create_task(observe_lag(observed.put_nowait, own.append))
    await observed.get()
    time.sleep(STALL)  # noqa: ASYNC251 - the stall
    assert await observed.get() >= STALL / 2
    measuring.cancel()
    assert max(own) >= STALL / 2


async def test_the_wait_for_a_cpu_is_no_lag_of_the_router_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    observed: asyncio.Queue[float] = asyncio.Queue()
    own: list[float] = []
    waits = iter([0.0, 0.0, STALL / 2])
    waited = nullcontext(lambda: next(waits, STALL / 2))
    monkeypatch.setattr(server, "waits_for_cpu", lambda of: waited)
    measuring = asyncio.create_task(observe_lag(observed.put_nowait, own.append))
    await observed.get()
    time.sleep(STALL)  # noqa: ASYNC251 - half of it without a CPU
    lag = await observed.get()
    measuring.cancel()
    assert own[1] == pytest.approx(lag - STALL / 2 + server.LAG_PERIOD)
