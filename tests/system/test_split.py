"""Prompts that several workers compute at once, through a router: the tokens are those of one worker."""

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Callable, Iterator

import aiohttp
import pytest

from baton.bench.lab.harness.cluster import LocalCluster, Worker, leaks_when_idle, status
from baton.bench.lab.harness.streams import Case, Stream, cases, expected, new_session, read
from baton.bench.lab.harness.workers import metric
from baton.system import cpu_engines
from tests.within import WITHIN

from .recovery import PATIENT, UNHURRIED, Broken, each_has

pytestmark = pytest.mark.all

FLAGS = (
    "--device", "cpu", "--dtype", "float32", "--advanced.num-threads", "1", "--advanced.num-blocks", "600",
    "--max-num-batched-tokens", "256", *UNHURRIED, "--failure-timeout", "20", "--drain-timeout", "1",
    "--no-enable-prefix-caching",
)  # fmt: skip
"""Tests let engines hang."""
AT_ONCE = cases(9, 8, repeat=8)[1:]
"""Some are of a few tokens, others of some hundred."""
ASKED = cases(6, 8, repeat=14)[2::3]
"""Prompts of some hundred tokens."""
ENDING = cases(6, 48, repeat=50)[5:]
"""A prompt and an answer that last while a worker ends."""


CONNECTORS = "auto", "tcp", "nixl"


@pytest.fixture(
    scope="module", params=[pytest.param(x, marks=[pytest.mark.long] * (x != "auto")) for x in CONNECTORS]
)
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, shallow_model: list[str]
) -> Iterator[LocalCluster]:
    one, other, *_ = sorted(os.sched_getaffinity(0))
    with LocalCluster(
        tmp_path_factory.mktemp("split"), prefill=2, decode=1, cpus=[{one}, {other}, {other}],
        worker_flags=[*FLAGS, *shallow_model, "--kv-connector", request.param],
        router_flags=[*PATIENT, *shallow_model],
    ) as started:  # fmt: skip
        yield started


@pytest.fixture(scope="module")
def right(broken: Broken) -> dict[Case, list[int]]:
    """Of a cluster that splits no prompt. The cases of long tests are added there."""
    broken.all_back()
    return asyncio.run(expected(broken.cluster.url, [*ASKED, *AT_ONCE]))


@pytest.fixture
async def whole(cluster: LocalCluster, right: dict[Case, list[int]]) -> AsyncIterator[Broken]:
    """All workers are there again afterwards, and all pools are whole."""
    whole = Broken(cluster, right)
    yield whole
    await whole.settled()


async def test_the_tokens_are_those_of_one_worker(whole: Broken) -> None:
    cluster = whole.cluster
    split = functools.partial(metric, cluster.url, "baton:split_prompts_total")
    before = split()
    async with new_session() as http:
        turns = splits = 0
        while turns < 2 or not splits:  # a report may be old: the prompt then has one worker
            for number, case in enumerate(ASKED):
                shared, name = split(), f"turn-{turns}-{number}"
                stream = await read(http, cluster.url, case, name=name)
                assert not stream.failed, stream.error
                assert stream.token_ids == whole.right[case]
                if split() > shared:
                    await shows_all_workers(http, cluster.url, name)
            turns, splits = turns + 1, split() - before
    # It asks each worker for its status, which the worker's metrics follow.
    assert not await asyncio.to_thread(leaks_when_idle, cluster.url, WITHIN)
    parts = [worker.metric("baton:prompt_parts_total") for worker in cluster.workers]
    assert sum(parts) >= 2 * splits
    assert not any(worker.metric("baton:prompt_parts_failed_total") for worker in cluster.workers)


def test_engines_say_how_many_threads_they_have(cluster: LocalCluster) -> None:
    """So a worker that is started later leaves them their CPUs."""
    threads = {each.pid: each.threads for each in cpu_engines.other_engines()}
    assert [threads.get(worker.processes()["engine"]) for worker in cluster.workers] == [1, 1, 1]


async def shows_all_workers(http: aiohttp.ClientSession, url: str, name: str) -> None:
    """The timeline of a split prompt has the prefill of each worker that computed a part."""
    async with http.get(f"{url}/status/requests/{name}") as response:
        timeline = await response.json()
    [planned] = [event for event in timeline["events"] if event["what"] == "planned: split"]
    computed = {
        worker
        for worker, phases in timeline["phases"].items()
        if any(phase["kind"] == "prefill" for phase in phases)
    }
    assert len(computed) > 1, timeline
    assert computed <= {*planned["worker"].split(", ")}


ENDS: dict[str, Callable[[Worker], None]] = {
    "kill -9 of the engine": lambda worker: worker.kill("engine"),
    "kill -9 of the transfer process": lambda worker: worker.kill("transfer"),
    "stop": lambda worker: worker.hang("engine"),
    "drain": lambda worker: worker.terminate(),
}
STAGES = "it has its part", "KV is under way", "the first token is there"


@pytest.mark.long
@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("number", range(3), ids=["first worker", "second worker", "decode worker"])
async def test_a_worker_ends_while_it_computes_its_part(
    broken: Broken, whole: Broken, number: int, how: str, request: pytest.FixtureRequest
) -> None:
    """The stages take turns, so that all transports together have each of them with each worker and end."""
    if not whole.right.keys() >= {*ENDING}:
        whole.right |= await expected(broken.cluster.url, ENDING)
    workers = whole.cluster.workers
    turn = number + [*ENDS].index(how) + CONNECTORS.index(request.node.callspec.params["cluster"])
    stage = STAGES[turn % len(STAGES)]

    def parts() -> float:
        status(whole.cluster.url)  # a scrape shows the last report, and this makes one
        return sum(worker.metric("baton:prompt_parts_total") for worker in workers)

    before, shared = parts(), False

    def reached(streams: list[Stream]) -> bool:
        nonlocal shared
        if stage == STAGES[2]:
            return each_has(1)(streams)
        shared = shared or parts() > before  # asked no more than needed: the moment may be short
        return shared and (stage == STAGES[0] or whole.transferring(streams))

    lives = len(workers[number].lives)
    # A report may be old, and the prompt then has one worker.
    await whole.ride(ENDING, (reached, lambda: ENDS[how](workers[number])))
    await asyncio.to_thread(workers[number].wait_life, lives + 1)


async def test_many_prompts_at_once(whole: Broken) -> None:
    """Plans meet on the same workers, and some parts are refused."""
    for _ in range(2):
        await whole.ride(AT_ONCE)


async def test_a_client_leaves(whole: Broken) -> None:
    async with new_session() as http:
        for delay in (0.0, 0.02, 0.1):
            asking = asyncio.create_task(read(http, whole.cluster.url, ASKED[-1]))
            await asyncio.sleep(delay)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
