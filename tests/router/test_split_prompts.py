"""The router submits the parts of a prompt that several workers compute, and does without when one fails."""

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from baton.kv_names import prompt_hints
from baton.router.text.tokenizer import ModelTokenizer
from baton.rpc import worker_pb2 as pb
from baton.rpc.token_ids import unpacked_ids
from tests.fake_worker import FakeWorker

from .conftest import Cluster, make_cluster
from .test_recovery import decodes, prefills

PROMPT = [5 + i % 90 for i in range(3000)]


@pytest.fixture
def flags() -> dict[str, Any]:
    return {}


@pytest.fixture
async def cluster(
    tokenizer: ModelTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any]
) -> AsyncIterator[Cluster]:
    """Two prefill workers and one that decodes. Each computes 1,000 tokens of a prompt in a second."""
    monkeypatch.setattr(FakeWorker, "attention_doubles_at", 30_000)
    monkeypatch.setattr(FakeWorker, "num_layers", 32)
    monkeypatch.setattr(FakeWorker, "kv_token_bytes", 1000)
    async with make_cluster(tokenizer, tmp_path, prefill=2, **flags) as made:
        for worker in made.workers:
            worker.status.prefill_tokens_per_s, worker.status.fastest_step_seconds = 1000.0, 0.01
            worker.report()
        await made.until(lambda: all(c.status.prefill_tokens_per_s == 1000.0 for c in made.pool.connections))
        yield made


async def answered(cluster: Cluster, **body: Any) -> dict[str, Any]:
    """Returns the usage, if the body asks for it."""
    events = await cluster.events(
        "/v1/completions", prompt=PROMPT, max_tokens=200, return_token_ids=True, **body
    )
    assert "error" not in events[-1], events[-1]
    tokens = [token for event in events for each in event["choices"] for token in each["token_ids"]]
    assert tokens == cluster.output_ids
    return events[-1].get("usage") or {}


async def splits(cluster: Cluster) -> float:
    lines = (await cluster.metrics()).splitlines()
    return sum(float(x.split()[-1]) for x in lines if x.startswith("baton:split_prompts_total"))


async def test_each_worker_gets_the_plan_and_its_part_of_the_prompt(cluster: Cluster) -> None:
    await answered(cluster, temperature=1.0, seed=7)
    assert await splits(cluster) == 1
    parts = {worker: submit for worker in cluster.workers for submit in prefills(worker)}
    assert len(parts) == 3
    [plan] = {tuple(map(repr, submit.plan)) for submit in parts.values()}
    ranges = next(iter(parts.values())).plan
    assert (ranges[0].start, ranges[-1].stop, len(plan)) == (0, len(PROMPT), len(ranges))
    assert all(a.stop == b.start and not a.stop % 64 for a, b in pairwise(ranges))
    for worker, submit in parts.items():
        own = [of for of in ranges if of.prefill_id == submit.prefill_id]
        described = cluster.connection(worker).description
        assert {(of.kv_address, of.incarnation) for of in own} == {
            (described.kv_address, described.incarnation)
        }
        assert list(unpacked_ids(submit.request.prompt_ids)) == PROMPT[: own[-1].stop]
        assert submit.handover
    # An idle decode worker has the last range, and goes on with it.
    [last] = prefills(cluster.decodes[0])
    [decode] = decodes(cluster.decodes[0])
    assert ranges[-1].prefill_id == last.prefill_id == decode.source.prefill_id
    assert last.request.sampling.seed == 7
    assert all(submit.request.sampling.max_tokens == 1 for submit in parts.values() if submit is not last)


@pytest.mark.parametrize("flags", [{"overflow": False}])
async def test_without_overflow_no_decode_worker_takes_part(cluster: Cluster) -> None:
    await answered(cluster)
    assert await splits(cluster) == 1
    assert not prefills(cluster.decodes[0])
    assert [len(prefills(worker)) for worker in cluster.prefills] == [1, 1]


@pytest.mark.parametrize("flags", [{"overflow": False}])
async def test_a_worker_that_computed_later_positions_gets_as_much(cluster: Cluster) -> None:
    """There each token costs twice as much."""
    second = cluster.prefills[1]
    second.status.prefill_tokens_per_s, second.status.prefill_position = 500.0, 30_000.0
    second.report()
    await cluster.until(lambda: cluster.connection(second).status.prefill_position == 30_000.0)
    await answered(cluster)
    first, last = next(submit for worker in cluster.prefills for submit in prefills(worker)).plan
    assert last.stop - last.start == pytest.approx(first.stop, rel=0.15)


async def test_a_worker_that_decodes_takes_no_part(cluster: Cluster) -> None:
    [decode] = cluster.decodes
    decode.status.requests_decoding = decode.status.requests_running = 3
    decode.report()
    await cluster.until(lambda: cluster.connection(decode).status.requests_decoding == 3)
    await answered(cluster)
    assert await splits(cluster) == 1
    assert not prefills(decode)
    assert [len(prefills(worker)) for worker in cluster.prefills] == [1, 1]


@pytest.mark.parametrize("flags", [{"overflow": False}])
@pytest.mark.parametrize(("to", "workers"), [("decode", 1), ("prefill", 1), (None, 2)])
async def test_a_prompt_is_not_split_over_a_link_that_brings_its_kv_too_late(
    cluster: Cluster, to: str | None, workers: int
) -> None:
    """Neither that between its workers, nor that to the decode worker."""
    receivers = {"decode": cluster.decodes, "prefill": cluster.prefills, None: []}[to]
    for worker in receivers:
        for each in cluster.prefills:
            worker.status.kv_links.add(incarnation=each.incarnation, bytes_per_s=250 * each.kv_token_bytes)
        worker.report()
        await cluster.until(lambda worker=worker: bool(cluster.connection(worker).status.kv_links))
    await answered(cluster)
    assert await splits(cluster) == workers - 1
    assert sum(len(prefills(worker)) for worker in cluster.prefills) == workers


async def test_a_prompt_that_a_shared_store_has_is_not_split(cluster: Cluster) -> None:
    """A worker that computes a part reads nothing from the store."""
    chunks = prompt_hints(PROMPT, b"", b"")
    cluster.pool.desk.loads.index.apply(0, pb.CacheEvents(stored=chunks[:20]))
    await answered(cluster)
    assert await splits(cluster) == 1, "these workers have no store"
    for worker in cluster.workers:
        worker.status.store = "open"
        worker.report()
    await cluster.until(lambda: all(c.status.store == "open" for c in cluster.pool.connections))
    await answered(cluster)
    assert await splits(cluster) == 1
    cluster.pool.desk.loads.index.apply(0, pb.CacheEvents(not_stored=chunks[:20]))
    await answered(cluster)
    assert await splits(cluster) == 2


async def test_a_prompt_that_a_decode_worker_computes_sooner_is_not_split(cluster: Cluster) -> None:
    [decode] = cluster.decodes
    status = decode.status
    status.requests_decoding = status.requests_running = 3
    status.step_seconds, status.prefill_tokens_per_s, status.gap_target_seconds = 0.005, 5000.0, 0.1
    decode.report()
    await cluster.until(lambda: cluster.connection(decode).status.requests_decoding == 3)
    await answered(cluster)
    assert await splits(cluster) == 0
    assert len(decodes(decode)) == 1
    assert not any(prefills(worker) for worker in cluster.workers)


async def test_workers_of_one_machine_that_share_its_cpus_share_no_prompt(cluster: Cluster) -> None:
    for worker in cluster.workers:
        cluster.connection(worker).description.computes_on[:] = ["machine cpu 0", "machine cpu 1"]
    await answered(cluster)
    assert await splits(cluster) == 0
    cluster.connection(cluster.prefills[1]).description.computes_on[:] = ["machine cpu 2"]
    await answered(cluster)
    assert await splits(cluster) == 1


@pytest.mark.parametrize("flags", [{"split_prompts": False}])
async def test_a_flag_turns_it_off(cluster: Cluster) -> None:
    await answered(cluster)
    assert await splits(cluster) == 0
    assert not any(submit.plan for worker in cluster.workers for submit in prefills(worker))


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (1, pb.FAILURE_CODE_DROPPED),
        (1, pb.FAILURE_CODE_INVALID),  # this worker computes no parts, but any worker can serve the request
        (2, pb.FAILURE_CODE_DROPPED),
    ],
)
async def test_a_failed_part_ends_the_plan(
    cluster: Cluster, number: int, code: "pb.FailureCode", caplog: pytest.LogCaptureFixture
) -> None:
    """Of a prefill worker, and of the decode worker."""
    worker = cluster.workers[number]
    worker.failure = "KV of layer 3 below position 1024 did not come from another worker in time"
    worker.fail = 1, code
    for each in cluster.workers:  # what was computed of the parts is cached
        each.change = lambda event: setattr(event, "cached_tokens", 2752)
    [last] = cluster.decodes
    last.steps = asyncio.Semaphore(0)  # its token would show that it has all of the KV
    asking = asyncio.create_task(answered(cluster, stream_options={"include_usage": True}))
    await cluster.workers[0].until(lambda first: first.cancelled)
    last.steps.release()
    last.steps = None
    usage = await asking
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0, "it was never seen before"
    assert await splits(cluster) == 1
    again = [submit for of in cluster.workers for submit in prefills(of) if not submit.plan]
    overflow = [submit for of in cluster.workers for submit in decodes(of) if not submit.HasField("source")]
    assert len(again) + len(overflow) == 1, (
        "one worker computes the prompt then, and the plan is not tried again"
    )
    shared = [(of, submit) for of in cluster.workers for submit in prefills(of) if submit.plan]
    for of, submit in shared:
        assert submit.prefill_id in of.cancelled or of is worker
    if code == pb.FAILURE_CODE_DROPPED:  # no failure of the request, but its client has waited for it
        name, message = str(cluster.connection(worker)), worker.failure
        [failure] = (await cluster.get("/status"))["router"]["failures"]
        assert [failure[of] for of in ("code", "worker", "message")] == ["part_failed", name, message]
        assert "--advanced.no-split-prompts" in failure["remedy"]
        [line] = [record.getMessage() for record in caplog.records if message in record.getMessage()]
        assert name in line


@pytest.mark.parametrize("number", [0, 1, 2], ids=["first worker", "second worker", "decode worker"])
async def test_neighbours_compute_the_ranges_of_a_worker_without_room(cluster: Cluster, number: int) -> None:
    full = cluster.workers[number]
    full.fail = 1, pb.FAILURE_CODE_NO_ROOM
    [last] = cluster.decodes
    last.steps = asyncio.Semaphore(0)  # its token would show that it has all of the KV
    asking = asyncio.create_task(answered(cluster))
    await full.until(lambda worker: prefills(worker))
    rest = [worker for worker in cluster.workers if worker is not full]
    for worker in rest:
        await worker.until(lambda worker: len(prefills(worker)) == 2)
    last.steps.release()
    last.steps = None
    await asking
    assert await splits(cluster) == 2
    assert len(prefills(full)) == 1
    for worker in rest:
        before, after = prefills(worker)
        assert before.prefill_id in worker.cancelled
        assert {of.prefill_id for of in after.plan} == {prefills(of)[1].prefill_id for of in rest}
        assert after.plan[-1].stop == len(PROMPT)


async def test_the_decode_of_a_queued_plan_is_submitted_when_its_last_part_starts(cluster: Cluster) -> None:
    """Both prefill workers compute other prompts for 5 s, so the plan takes 80 % of the time of one."""
    starts = asyncio.Semaphore(0)
    for worker in cluster.prefills:
        worker.starts = starts
        worker.status.tokens_waiting = 5000
        worker.report()
    waiting = [cluster.connection(worker) for worker in cluster.prefills]
    await cluster.until(lambda: all(found.status.tokens_waiting == 5000 for found in waiting))
    asking = asyncio.create_task(answered(cluster))
    for worker in cluster.prefills:
        await worker.until(lambda worker: prefills(worker))
    parts = [prefills(worker)[0] for worker in cluster.prefills]
    [last] = [submit for submit in parts if submit.report_start]
    assert last.plan[-1].prefill_id == last.prefill_id
    [decode] = cluster.decodes
    assert not any(load.router_requests for load in cluster.pool.desk.decodes)
    for _ in cluster.prefills:
        starts.release()
    await asking
    assert decodes(decode)[0].source.prefill_id == last.prefill_id
    assert not prefills(decode), "it would compute its part beside the decodes that come meanwhile"
    assert await splits(cluster) == 1


async def test_a_lost_worker_ends_the_plan(cluster: Cluster) -> None:
    for worker in cluster.workers:
        worker.steps = asyncio.Semaphore(0)
    asking = asyncio.create_task(answered(cluster))
    first, second = cluster.prefills
    await second.until(lambda worker: len(prefills(worker)) == 1)
    for worker in (first, *cluster.decodes):
        await worker.until(lambda worker: len(prefills(worker)) == 1)
    await second.kill()
    for worker in cluster.workers:
        worker.steps = None
    await asking
    assert await splits(cluster) == 1
