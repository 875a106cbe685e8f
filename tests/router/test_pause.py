"""A paused cluster: requests that wait, requests that end, and what shows the pause."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from baton.router.admission.keys import ApiKey
from baton.router.policy.placement import PrefillWindow
from baton.router.text.tokenizer import ModelTokenizer
from baton.rpc import worker_pb2 as pb
from baton.rpc.all_workers import NotDone
from baton.rpc.pause import workers_at
from tests.fake_worker import SECRET, FakeWorker

from .conftest import Cluster, make_cluster

HEADERS = {"Authorization": "Bearer trainer"}


@pytest.fixture
async def paused(tokenizer: ModelTokenizer, tmp_path: Path) -> AsyncIterator[Cluster]:
    """Nothing is paused yet."""
    async with make_cluster(tokenizer, tmp_path, admin_key=ApiKey.of("admin", "trainer")) as cluster:
        yield cluster


async def asked(cluster: Cluster, method: str, path: str) -> tuple[int, Any]:
    async with cluster.http.request(method, cluster.url + path, headers=HEADERS) as response:
        return response.status, await response.json()


async def knows(cluster: Cluster, pause: "pb.Pause") -> None:
    await cluster.until(lambda: cluster.pool.pause == pause)


def texts(lines: list[bytes]) -> list[Any]:
    return [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]


async def stream(cluster: Cluster, lines: list[bytes], **body: Any) -> None:
    asked = {"prompt": "Hello", "max_tokens": 200, "stream": True, **body}
    async with cluster.http.post(cluster.url + "/v1/completions", json=asked) as response:
        async for line in response.content:
            lines.append(line)


async def begun(cluster: Cluster) -> tuple[asyncio.Task[None], list[bytes]]:
    """A stream with two tokens at least, which waits for the next one."""
    lines: list[bytes] = []
    [decode] = cluster.decodes
    decode.steps = asyncio.Semaphore(3)
    reading = asyncio.create_task(stream(cluster, lines))
    await cluster.until(lambda: len(texts(lines)) >= 2)
    return reading, lines


def let(*workers: FakeWorker) -> None:
    """They send all tokens that are left."""
    for worker in workers:
        steps, worker.steps = worker.steps, None
        if steps is not None:
            for _ in range(1000):
                steps.release()


async def test_keep_freezes_streams_and_new_requests_wait(paused: Cluster) -> None:
    reading, lines = await begun(paused)
    [decode] = paused.decodes
    assert await asked(paused, "GET", "/is_paused") == (200, {"is_paused": False, "pause": "none"})
    done = {"status": "paused", "seconds": 60}
    assert await asked(paused, "POST", "/pause?mode=keep&seconds=60") == (200, done)
    assert not decode.paused.keep_kv
    assert await asked(paused, "POST", "/pause?mode=keep&seconds=60&clear_cache=false") == (200, done)
    assert decode.paused.keep_kv
    await knows(paused, pb.PAUSE_STEPS)
    let(decode)
    submitted = len(decode.submitted)
    new = asyncio.create_task(paused.complete())
    await paused.until(lambda: bool(paused.router.services.parked.without_worker))
    assert len(decode.submitted) == submitted, "no worker has the new request"

    assert await asked(paused, "GET", "/is_paused") == (200, {"is_paused": True, "pause": "steps"})
    assert await asked(paused, "GET", "/health") == (200, {"status": "serving", "pause": "steps"})
    assert (await asked(paused, "GET", "/status"))[1]["router"]["pause"] == "steps"
    async with paused.http.get(paused.url + "/metrics") as page:
        assert 'baton:paused{model_name="fake",role="router"} 2.0' in (await page.text()).splitlines()

    assert await asked(paused, "POST", "/resume") == (200, {"status": "resumed"})
    assert (await new)["usage"]["completion_tokens"] == len(paused.output_ids)
    await reading
    assert texts(lines)[-1]["choices"][0]["finish_reason"] == "stop"
    assert await asked(paused, "GET", "/health") == (200, {"status": "serving", "pause": "none"})


async def test_abort_ends_requests_that_run_with_a_reason(paused: Cluster) -> None:
    reading, lines = await begun(paused)
    assert (await asked(paused, "POST", "/pause"))[0] == 200
    await reading
    error = texts(lines)[-1]["error"]
    assert error["code"] == "aborted"
    assert error["message"].endswith("was aborted: the cluster was paused with mode=abort")
    assert {w.status.pause for w in paused.workers} == {pb.PAUSE_STEPS}
    let(*paused.decodes)
    await asked(paused, "POST", "/resume")
    await knows(paused, pb.PAUSE_NONE)
    await paused.complete()


async def test_wait_lets_requests_finish_and_holds_new_ones(paused: Cluster) -> None:
    reading, lines = await begun(paused)
    [decode] = paused.decodes
    pausing = asyncio.create_task(asked(paused, "POST", "/pause?mode=wait"))
    await knows(paused, pb.PAUSE_NEW)
    new = asyncio.create_task(paused.complete())
    await paused.until(lambda: bool(paused.router.services.parked.without_worker))
    let(decode)
    await reading
    assert texts(lines)[-1]["choices"][0]["finish_reason"] == "stop"
    assert not pausing.done()
    assert not new.done()
    for worker in paused.workers:
        worker.status.idle = True
    assert (await pausing)[0] == 200
    await asked(paused, "POST", "/resume")
    assert (await new)["usage"]["completion_tokens"] == len(paused.output_ids)


async def test_wait_that_lasts_too_long_pauses_nothing(paused: Cluster) -> None:
    status, answer = await asked(paused, "POST", "/pause?mode=wait&seconds=0.05")
    assert (status, answer["error"]["code"]) == (504, "timeout")
    assert {w.status.pause for w in paused.workers} == {pb.PAUSE_NONE}


async def test_a_request_that_waits_too_long_is_refused(paused: Cluster) -> None:
    assert (await asked(paused, "POST", "/pause?mode=keep"))[0] == 200
    await knows(paused, pb.PAUSE_STEPS)
    body = {"prompt": "Hello", "max_tokens": 5}
    sent = paused.http.post(paused.url + "/v1/completions", json=body, headers={"x-max-wait": "0.05"})
    async with sent as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "1"
        assert (await response.json())["error"]["code"] == "paused"


async def test_requests_that_queued_before_the_pause_wait_no_longer_than_they_may(paused: Cluster) -> None:
    """Though workers have as many prompts as they may, so that no other one would leave the queue."""
    admission = paused.router.services.admission
    admission.window = lambda: PrefillWindow(1)
    for worker in paused.workers:
        worker.steps = asyncio.Semaphore(0)
    first = asyncio.create_task(paused.complete())
    await paused.until(lambda: any(worker.submitted for worker in paused.workers))
    second = asyncio.create_task(paused.complete())
    await paused.until(lambda: len(admission.queue) == 1)
    assert (await asked(paused, "POST", "/pause?mode=keep"))[0] == 200
    await paused.until(lambda: bool(paused.router.services.parked.without_worker))
    assert not admission.queue
    let(*paused.workers)
    await asked(paused, "POST", "/resume")
    for each in (first, second):
        assert (await each)["usage"]["completion_tokens"] == len(paused.output_ids)


async def test_one_worker_that_refuses_pauses_none(paused: Cluster) -> None:
    paused.decodes[0].refuses_pause = "it cannot"
    status, answer = await asked(paused, "POST", "/pause?mode=keep")
    assert status == 500
    address = paused.decodes[0].address
    assert answer["error"]["message"] == f"decode 0 at {address}: it cannot. The cluster goes on."
    assert {w.status.pause for w in paused.workers} == {pb.PAUSE_NONE}
    for path, param in (
        ("/pause?mode=stop", "mode"),
        ("/pause?seconds=x", "seconds"),
        ("/pause?clear_cache=maybe", "clear_cache"),
    ):
        status, answer = await asked(paused, "POST", path)
        assert (status, answer["error"]["param"]) == (400, param)


async def test_a_caller_that_goes_while_it_waits_lets_workers_go_on(paused: Cluster) -> None:
    async with workers_at([w.address for w in paused.workers], SECRET, None) as workers:
        pausing = asyncio.create_task(workers.pause("wait", 60.0))
        await knows(paused, pb.PAUSE_NEW)
        pausing.cancel()
        await asyncio.wait([pausing])
    assert {w.status.pause for w in paused.workers} == {pb.PAUSE_NONE}


async def test_an_interrupted_request_goes_to_no_worker_while_no_step_is_computed(
    tokenizer: ModelTokenizer, tmp_path: Path
) -> None:
    """One that has started meanwhile does not know of the pause."""
    key = ApiKey.of("admin", "trainer")
    async with make_cluster(tokenizer, tmp_path, decode=2, admin_key=key) as cluster:
        for worker in cluster.decodes:
            worker.steps = asyncio.Semaphore(3)
        lines: list[bytes] = []
        reading = asyncio.create_task(stream(cluster, lines))
        await cluster.until(lambda: len(texts(lines)) >= 2)
        assert (await asked(cluster, "POST", "/pause?mode=keep"))[0] == 200
        await knows(cluster, pb.PAUSE_STEPS)
        [has] = [worker for worker in cluster.decodes if worker.submitted]
        [other] = [worker for worker in cluster.decodes if worker is not has]
        await has.kill()
        await cluster.until(lambda: bool(cluster.router.services.parked.without_worker))
        assert not other.submitted
        let(*cluster.decodes)
        assert (await asked(cluster, "POST", "/resume"))[0] == 200
        await reading
        assert texts(lines)[-1]["choices"][0]["finish_reason"] == "stop"


async def test_a_worker_that_takes_new_weights_just_now_goes_on_with_the_others(paused: Cluster) -> None:
    """It has ended the stream of the router for that. One that is down is left out."""
    prefill, decode = paused.workers
    assert (await asked(paused, "POST", "/pause?mode=keep"))[0] == 200
    addresses = [w.address for w in paused.workers]
    await prefill.kill()
    async with workers_at(addresses, SECRET, None, may_lack={prefill.address}) as workers:
        await workers.resume()
    assert decode.status.pause == pb.PAUSE_NONE
    for address in addresses:
        with pytest.raises(NotDone) if address == prefill.address else contextlib.nullcontext():
            async with workers_at([address], SECRET, None) as workers:
                await workers.resume()


async def test_memory_goes_and_comes_back_for_all_workers_or_the_call_says_why(paused: Cluster) -> None:
    release, resume = "/release_memory_occupation", "/resume_memory_occupation"

    async def call(path: str, *tags: str) -> tuple[int, Any]:
        async with paused.http.post(paused.url + path, json={"tags": [*tags]}, headers=HEADERS) as response:
            return response.status, await response.json()

    status, refused = await call(release)
    assert status == 400
    assert "requests are at 2 workers: call /pause?mode=abort or mode=wait first" in str(refused)
    for worker in paused.workers:
        worker.status.idle = True
    assert await asked(paused, "POST", release) == (
        200,
        {"success": True, "released": ["kv_cache", "weights"]},
    )
    await knows(paused, pb.PAUSE_STEPS)
    status, refused = await call("/resume")
    assert (status, refused["error"]["type"]) == (400, "invalid_request_error")
    assert refused["error"]["message"].count("memory is released") == len(paused.workers)
    new = asyncio.create_task(paused.complete())
    await paused.until(lambda: bool(paused.router.services.parked.without_worker))
    told = {"success": True, "released": ["kv_cache"], "lost_weights": True}
    assert await call(resume, "weights") == (200, told)
    for worker in paused.workers:
        worker.status.lost_weights = False
    told = {"success": True, "released": [], "lost_weights": False}
    assert await call(resume, "kv_cache", "kv_cache") == (200, told)
    await new
    assert (await call(release, "cuda_graph"))[0] == 400
    paused.decodes[
        0
    ].refuses_pause = "no memory can be released: start the workers with --enable-memory-saver"
    status, refused = await call(release, "kv_cache")
    assert status == 500
    assert "--enable-memory-saver. The other workers have released it" in refused["error"]["message"]
