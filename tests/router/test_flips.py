"""Workers move between the pools while requests run: no request fails, and new work follows the pool."""

import asyncio
from pathlib import Path

import pytest

from baton.router.policy.plan import Plan
from baton.router.policy.planner import NOTHING, plan
from baton.router.policy.prefill import PrefillRequest
from baton.router.text.tokenizer import ModelTokenizer
from baton.router.workers import breaker
from baton.rpc import worker_pb2 as pb
from baton.rpc.channel import connect
from baton.rpc.stubs import WorkerStub
from tests.fake_worker import SECRET, FakeWorker

from .conftest import Cluster, make_cluster
from .test_recovery import answered_whole, decodes, prefills, retargets

PREFILL, DECODE = pb.POOL_PREFILL, pb.POOL_DECODE


async def flipped(cluster: Cluster, worker: FakeWorker, pool: "pb.Pool") -> None:
    """Moves the worker with its own RPC, and waits until the router knows."""
    async with connect(worker.address, SECRET) as channel:
        status = await WorkerStub(channel).SetPool(pb.SetPoolRequest(pool=pool))
    assert status.pool == pool
    connection = cluster.connection(worker)
    await cluster.until(lambda: connection.pool == pool)


def hold(*workers: FakeWorker) -> None:
    """They send no token until `release`."""
    for worker in workers:
        worker.steps = asyncio.Semaphore(0)


def release(*workers: FakeWorker) -> None:
    for worker in workers:
        assert worker.steps is not None
        for _ in range(1000):
            worker.steps.release()


async def no_attempt_was_replaced(cluster: Cluster) -> bool:
    lines = [line for line in (await cluster.metrics()).splitlines() if line.startswith("baton:retries")]
    assert lines
    return all(line.endswith(" 0.0") for line in lines)


async def test_what_runs_goes_on_and_new_work_follows_the_pool(pair: Cluster) -> None:
    """All four workers change places while prefills are held and decodes run."""
    (p0, p1), (d0, d1) = pair.prefills, pair.decodes
    hold(d0, d1)
    p0.holds_kv = p1.holds_kv = True
    running = [asyncio.create_task(answered_whole(pair)) for _ in range(8)]
    await pair.until(lambda: len([*decodes(d0), *decodes(d1)]) == len([*prefills(p0), *prefills(p1)]) == 8)
    sent = {worker: (len(prefills(worker)), len(decodes(worker))) for worker in pair.workers}
    for worker in (p0, p1):
        await flipped(pair, worker, DECODE)
        await flipped(pair, d0 if worker is p0 else d1, PREFILL)
    p0.holds_kv = p1.holds_kv = False

    release(d0, d1)  # as prefill workers they still have to decode
    await asyncio.gather(*[answered_whole(pair) for _ in range(8)])
    for worker in (p0, p1):
        assert (len(prefills(worker)), len(decodes(worker)) > sent[worker][1]) == (sent[worker][0], True)
    for worker in (d0, d1):
        assert len(decodes(worker)) == sent[worker][1]
    assert len(prefills(d0)) + len(prefills(d1)) == 8

    for submit in [*prefills(p0), *prefills(p1)]:
        pair.lanes.of(submit.prefill_id).settle(True)
    await asyncio.gather(*running)
    assert await no_attempt_was_replaced(pair)
    assert [worker.described for worker in pair.workers] == [1] * 4, "no stream was opened again"


async def test_a_lost_prefill_is_replaced_in_its_new_pool(pair: Cluster) -> None:
    """A decode worker keeps its reservation while it serves in the prefill pool. Retargets still reach it."""
    (p0, p1), (d0, d1) = pair.prefills, pair.decodes
    hold(p0, p1)
    await flipped(pair, d1, PREFILL)
    await flipped(pair, d1, DECODE)
    request = asyncio.create_task(answered_whole(pair))
    await pair.until(lambda: any(map(prefills, (p0, p1))) and any(map(decodes, (d0, d1))))
    used, decode = (next(w for w in ws if w.submitted) for ws in ((p0, p1), (d0, d1)))
    await flipped(pair, decode, PREFILL)
    release(p1 if used is p0 else p0)
    await used.kill()
    await request
    [retarget], [submit] = retargets(decode), decodes(decode)
    assert not prefills(decode), "its own reservation is never fed by itself while another worker can"
    assert (submit.source.attempt, retarget.source.attempt) == (1, 2)


async def test_the_last_prefill_worker_leaves_and_comes_back(cluster: Cluster) -> None:
    [prefill], [decode] = cluster.prefills, cluster.decodes
    await flipped(cluster, prefill, DECODE)
    await cluster.get("/ready", 503)
    status = await cluster.get("/status")
    assert not status["router"]["failures"], "a probe is no request of a client"
    workers = status["workers"]
    assert [(w["role"], w["index"], w["status"]["pool"]) for w in workers] == [
        ("prefill", 0, "pool_decode"), ("decode", 0, "pool_decode"),
    ]  # fmt: skip
    assert 'baton:workers{model_name="fake",pool="decode",role="router",state="ready"} 2.0' in (
        await cluster.metrics()
    )
    await asyncio.gather(*[answered_whole(cluster) for _ in range(6)])
    assert not prefills(prefill)
    assert {d.HasField("source") for d in (*decodes(prefill), *decodes(decode))} == {False}

    await flipped(cluster, prefill, PREFILL)
    before = len(decodes(prefill))
    await answered_whole(cluster)
    assert (len(prefills(prefill)), len(decodes(prefill))) == (1, before)
    assert await no_attempt_was_replaced(cluster)


async def test_requests_wait_for_a_pool_without_workers(tokenizer: ModelTokenizer, tmp_path: Path) -> None:
    async with make_cluster(tokenizer, tmp_path, overflow=False) as cluster:
        [worker], parked = cluster.prefills, cluster.router.services.parked
        await flipped(cluster, worker, DECODE)
        request = asyncio.create_task(answered_whole(cluster))
        await cluster.until(lambda: len(parked.without_worker) == 1)
        await flipped(cluster, worker, PREFILL)
        await request


async def test_a_worker_keeps_its_known_cache_in_both_pools(
    tokenizer: ModelTokenizer, tmp_path: Path
) -> None:
    async with make_cluster(tokenizer, tmp_path, prefill=2, wait=False) as cluster:
        worker, pool = cluster.prefills[0], cluster.pool
        chunks = list(range(100, 110))
        worker.cache = set(chunks)
        await cluster.until(lambda: len(pool.ready(PREFILL)) == 2 and pool.complete)
        connection = cluster.connection(worker)

        def cached(pool_of: "pb.Pool") -> int:
            """Cached tokens of the prompt at the worker, as the choice in that pool sees it."""
            if pool_of == PREFILL:
                found = plan(PrefillRequest(0, 641, chunks, one_token=True), NOTHING, pool.desk)
                assert isinstance(found, Plan)
                return found.cached if found.ranges[0].worker == connection.row else 0
            return pool.desk.nearest(connection.load, PrefillRequest(0, 641, chunks))[1]

        await cluster.until(lambda: cached(PREFILL) == 640)
        await flipped(cluster, worker, DECODE)
        assert (cached(PREFILL), cached(DECODE)) == (0, 640)
        worker.change_cache([], chunks[5:])
        await cluster.until(lambda: cached(DECODE) == 320)
        await flipped(cluster, worker, PREFILL)
        assert cached(PREFILL) == 320


async def test_a_worker_with_an_open_breaker_serves_when_the_others_leave_its_pool(
    pair: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breaker, "TOGETHER_S", 0.0)
    (p0, p1), pool = pair.prefills, pair.pool

    def chosen() -> set[str]:
        asked = [PrefillRequest(key << 60, 10, one_token=True) for key in range(16)]
        plans = [plan(request, NOTHING, pool.desk) for request in asked]
        return {pool.by_row[found.ranges[0].worker].address for found in plans if isinstance(found, Plan)}

    for _ in range(3):
        pair.connection(p0).attempt_failed()
    assert chosen() == {p1.address}
    await flipped(pair, p1, DECODE)
    assert chosen() == {p0.address}


@pytest.mark.parametrize("change", ["drains", "leaves the pool"])
async def test_a_status_that_takes_a_worker_away_starts_nothing_there(
    tokenizer: ModelTokenizer, tmp_path: Path, change: str
) -> None:
    """The same status reports free blocks, for which a request waits in the queue."""
    async with make_cluster(tokenizer, tmp_path, overflow=False) as cluster:
        [decode], admission = cluster.decodes, cluster.router.services.admission
        await cluster.full()
        request = asyncio.create_task(answered_whole(cluster))
        await cluster.until(lambda: admission.waiting_for_decode == 1)
        decode.status.blocks_free = 512
        if change == "drains":
            decode.status.health = pb.WorkerStatus.HEALTH_DRAINING
        else:
            decode.status.pool = PREFILL
        decode.report()
        await cluster.until(lambda: len(cluster.router.services.parked.without_worker) == 1)
        assert not decode.submitted
        decode.status.health, decode.status.pool = pb.WorkerStatus.HEALTH_SERVING, DECODE
        decode.report()
        await request
        assert decode.described == 1, "the stream was never closed"


# ---------------------------------------------------------------- one worker for both


async def test_a_held_prefill_goes_on_where_it_is_if_no_other_worker_decodes(cluster: Cluster) -> None:
    [prefill], [decode] = cluster.prefills, cluster.decodes
    prefill.holds_kv = True
    request = asyncio.create_task(answered_whole(cluster))
    await cluster.until(lambda: bool(decodes(decode)) and bool(prefills(prefill)))
    await cluster.heard(prefills(prefill)[0].prefill_id)
    await flipped(cluster, prefill, DECODE)
    cluster.lanes.of(prefills(prefill)[0].prefill_id).settle(True)
    await decode.kill()
    await request
    [submit] = decodes(prefill)
    assert submit.source.prefill_id == prefills(prefill)[0].prefill_id
    assert submit.source.attempt == 2


async def test_a_prefill_that_has_not_run_is_computed_by_the_decode(cluster: Cluster) -> None:
    [prefill], [decode] = cluster.prefills, cluster.decodes
    hold(prefill)
    request = asyncio.create_task(answered_whole(cluster))
    await cluster.until(lambda: bool(decodes(decode)) and bool(prefills(prefill)))
    await flipped(cluster, prefill, DECODE)
    await decode.kill()
    await prefill.until(decodes)
    release(prefill)
    await request
    [submit] = decodes(prefill)
    assert not submit.HasField("source"), "a worker does not fetch from itself"
    assert prefill.cancelled == [prefills(prefill)[0].prefill_id]


@pytest.mark.parametrize("others", [0, 1], ids=["alone", "another decodes"])
async def test_a_reservation_is_not_fed_by_its_own_worker(
    tokenizer: ModelTokenizer, tmp_path: Path, others: int
) -> None:
    async with make_cluster(tokenizer, tmp_path, decode=1 + others) as cluster:
        [prefill], workers = cluster.prefills, cluster.decodes
        hold(prefill)
        request = asyncio.create_task(answered_whole(cluster))
        await cluster.until(lambda: bool(prefills(prefill)) and any(map(decodes, workers)))
        used = next(worker for worker in workers if worker.submitted)
        await flipped(cluster, used, PREFILL)
        await prefill.kill()
        await request
        own = {submit.prefill_id for submit in prefills(used)}
        assert not own & {retarget.source.prefill_id for retarget in retargets(used)}
        if others:
            [other] = [worker for worker in workers if worker is not used]
            assert {submit.source.prefill_id for submit in decodes(other)} == own
        else:
            assert [s.HasField("source") for s in decodes(used)] == [True, False]
