"""After any changes the roster has what it would compute anew, although no change looks at all workers."""

import asyncio
import random
import sys
import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.router.policy.desk import Desk
from baton.router.policy.prefill import PrefillRequest, Ring
from baton.router.workers.checks import RefusedWorker, RouterModel
from baton.router.workers.roster import Roster
from baton.router.workers.worker import SendQueue, Worker, WorkerState
from baton.rpc import worker_pb2 as pb

POOLS = pb.POOL_PREFILL, pb.POOL_DECODE
KINDS = [("bfloat16", b"plain", 128), ("float8_e4m3fn", b"fp8", 64), ("float16", b"other", 16)]


def attach(roster: Roster, worker: Worker, pool: "pb.Pool", kind: int = 0, blocks: int = 40) -> None:
    """As `WorkerStream` does when a stream opens."""
    dtype, root, block_size = KINDS[kind]
    worker.described(
        pb.WorkerDescription(
            first_pool=pool, incarnation=1, model="m", model_fingerprint="config=a; format=b",
            layout_fingerprint="l", kv_address="h:1", block_size=block_size, num_blocks=blocks,
            max_model_len=4096, max_num_seqs=4, max_num_batched_tokens=64, dtype=dtype, vocab_size=9,
            content_root=root,
        )
    )  # fmt: skip
    try:
        roster.accept(worker)
    except RefusedWorker:
        worker.state = WorkerState.REFUSED
        roster.release(worker)
        return
    worker.report(
        pb.WorkerStatus(health="HEALTH_SERVING", pool=pool, blocks_free=blocks, prefill_tokens_per_s=9)
    )
    worker.send_queue = SendQueue(lambda: None)
    roster.availability_changed(worker)


def detach(roster: Roster, worker: Worker) -> None:
    was_attached, worker.send_queue, worker.state = worker.attached, None, WorkerState.CONNECTING
    worker.lose_all()
    roster.release(worker)
    if was_attached:
        roster.availability_changed(worker)


def made(count: int) -> tuple[Roster, list[Worker]]:
    roster = Roster(RouterModel("m", 9, ""), Desk(time.monotonic, seed=1))
    workers = [Worker(f"w{i}:1", roster.desk, lambda: None, roster.breaker_changed) for i in range(count)]
    roster.listed = {worker.address: worker for worker in workers}
    return roster, workers


def change(roster: Roster, worker: Worker, what: int, rng: random.Random) -> None:
    """One of the things that happen to a worker, if it can happen to this one now."""
    if not worker.attached:
        if not worker.retired:
            attach(roster, worker, rng.choice(POOLS), rng.randrange(3), rng.choice([0, 8, 40]) or 40)
        return
    match what:
        case 0:
            detach(roster, worker)
        case 1 | 2 | 3:
            health = rng.choice(["HEALTH_SERVING", "HEALTH_DRAINING"])
            status = pb.WorkerStatus(health=health, pool=rng.choice(POOLS), blocks_free=rng.randrange(40))
            status.requests_running = rng.randrange(7)
            roster.reported(worker, status)
        case 4:
            worker.attempt_failed()
        case 5:
            worker.breaker._open_until = 0.0
            roster.breaker_changed(worker)
        case 6:
            worker.load.sent(tokens := rng.randrange(900))
            if rng.random() < 0.5:
                worker.load.ended(tokens, full=rng.random() < 0.5)
        case 7 if not worker.retired:
            del roster.listed[worker.address]
            worker.retired = True
            roster.availability_changed(worker)


def check(roster: Roster, workers: list[Worker]) -> None:
    listed, now = roster.listed.values(), time.monotonic()
    serving: dict[int, list[Worker]] = {}
    for pool, loads in zip(POOLS, (roster.desk.prefills, roster.desk.decodes), strict=True):
        ready = [worker for worker in listed if worker.ready_in(pool)]
        closed = [worker for worker in ready if not worker.breaker.open_for(now)]
        serving[pool] = closed or ready
        found = sorted((worker.load for worker in serving[pool]), key=lambda load: (load.room, load.worker))
        assert list(loads) == found
        assert sum(load.free.slots for load in found) == loads.free.slots
        assert sum(load.free.positions for load in found) == loads.free.positions
        for tokens in (1, 100, 1000, 10_000):
            fitting = {load.worker for load in found if load.fits(tokens)}
            chosen = [loads.choose(tokens, random.Random(seed)) for seed in range(3)]
            assert {None if load is None else load.worker for load in chosen} <= (fitting or {None})
        assert {*roster.ready(pool)} == {*ready}
    described = [worker for worker in listed if worker.state is not WorkerState.REFUSED]
    known = [worker.description for worker in described if worker.description.num_blocks]
    sizes = (min(each.max_model_len, each.num_blocks * each.block_size) for each in known)
    assert roster.max_positions == min(sizes, default=None)
    roots = Counter(each.content_root for each in known)
    computing = Counter(w.description.content_root for w in roster.ready(pb.POOL_PREFILL))
    most = max(roots, key=lambda root: (computing[root], roots[root], root), default=b"")
    assert roster.content_root == most
    accepted = [worker for same in roster._accepted.values() for worker in same]
    assert Counter(accepted) == Counter(worker for worker in listed if worker.attached)
    assert {*roster.by_row.values()} == {worker for worker in workers if worker.attached}
    snapshot = roster.desk.loads.snapshot(PrefillRequest(key=5, tokens=10), now)
    prefilling = sorted(serving[pb.POOL_PREFILL], key=lambda worker: worker.address)
    assert (snapshot is not None) == bool(prefilling)
    if snapshot is not None:
        ring = Ring()
        for worker in prefilling:
            ring.add(worker.address, worker.row)
        assert snapshot.rows.tolist() == [worker.row for worker in prefilling]
        for key in (5, 1 << 63, 2**64 - 1):
            assert list(snapshot.ring.walk(key)) == list(ring.walk(key))


@pytest.mark.all
@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 7)), max_size=60), st.randoms(use_true_random=False)
)
def test_what_is_kept_is_what_would_be_computed_anew(
    changes: list[tuple[int, int]], rng: random.Random
) -> None:
    async def run() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("baton.router.workers.breaker.FAILURES", 1)
            patch.setattr("baton.router.workers.breaker.TOGETHER_S", 0.0)
            roster, workers = made(7)
            for row, what in changes:
                change(roster, workers[row], what, rng)
                check(roster, workers)

    asyncio.run(run())


@pytest.mark.parametrize("first", POOLS)
async def test_a_worker_that_moves_tells_its_new_pool_of_its_load(first: "pb.Pool") -> None:
    roster, [worker, other] = made(2)
    attach(roster, worker, first)
    attach(roster, other, first)
    for pool in (POOLS[first == POOLS[0]], first):
        worker.report(pb.WorkerStatus(health="HEALTH_SERVING", pool=pool, blocks_free=40))
        roster.availability_changed(worker)
        worker.load.sent(100)
        check(roster, [worker, other])


def calls_of_changes(count: int) -> int:
    """Calls of functions while 8 workers come, drain, flip, fail and go beside `count` others."""
    roster, workers = made(count + 8)
    for number, worker in enumerate(workers[8:]):
        attach(roster, worker, POOLS[number % 2])
    rng, calls = random.Random(0), 0

    def count_call(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count_call)
    try:
        for number, worker in enumerate(workers[:8]):
            attach(roster, worker, POOLS[number % 2])
            draining = pb.WorkerStatus(health="HEALTH_DRAINING", pool=worker.pool)
            serving = pb.WorkerStatus(health="HEALTH_SERVING", pool=POOLS[1 - number % 2], blocks_free=40)
            for status in (draining, serving):
                worker.report(status)
                roster.availability_changed(worker)
                assert roster.max_positions
                assert roster.content_root
                roster.desk.loads.snapshot(PrefillRequest(key=number, tokens=10), 1e9)
            for _ in range(3):
                worker.attempt_failed()
            worker.load.sent(100)
            assert roster.desk.decodes.choose(100, rng)
            detach(roster, worker)
    finally:
        sys.setprofile(None)
    return calls


async def test_a_change_looks_at_no_more_workers_if_there_are_more() -> None:
    assert calls_of_changes(400) < 1.2 * calls_of_changes(20)


def redescribe(roster: Roster, worker: Worker, **changes: Any) -> None:
    """The worker tells what has changed of it. New weights are in its fingerprint."""
    changed = pb.WorkerDescription()
    changed.CopyFrom(worker.description)
    changed.MergeFrom(pb.WorkerDescription(**changes))
    if "weights" in changes:
        changed.model_fingerprint += f"; version={changed.weights.version}"
    roster.redescribed(worker, changed)


def test_a_worker_that_describes_other_adapters_computes_with_the_same_weights() -> None:
    roster, workers = made(2)
    first, second = workers
    for worker in workers:
        attach(roster, worker, pb.POOL_DECODE)
    redescribe(roster, first, weights=pb.StageWeights(version="v2"))
    assert first.ready
    assert not second.ready, "it has older weights"
    sql = pb.Adapter(name="sql", fingerprint=b"s" * 16)
    for worker in workers:
        redescribe(roster, worker, index=9, adapters=[sql], adapters_revision=1)
        assert worker.description.index == 0, "a worker that runs keeps it"
    assert [*roster.adapters.served] == ["sql"]
    assert first.ready
    assert first.description.weights.version == "v2"
    assert not second.ready


def test_workers_that_wait_for_their_turn_serve_while_another_one_gets_weights_and_keeps_its_kv() -> None:
    roster, workers = made(3)
    first, second, again = workers

    def report(worker: Worker, staged: str) -> None:
        status = pb.WorkerStatus(health="HEALTH_SERVING", pool=pb.POOL_DECODE, staged_version=staged)
        roster.reported(worker, status)

    for worker in workers:
        attach(roster, worker, pb.POOL_DECODE)
    report(second, "v2")
    redescribe(roster, first, weights=pb.StageWeights(version="v2", named_at=2, rolls=True))
    assert first.ready
    assert second.ready, "its turn comes later"
    assert not again.ready, "it has started again, and its call with it"
    assert roster.rolls
    report(again, "v3")
    assert not again.ready, "others"
    report(again, "v2")
    assert again.ready, "the router was told late"
    report(again, "v2")
    report(second, "")
    assert again.ready
    assert not second.ready, "the coordinator has ended"
    report(again, "")
    assert first.ready
    assert not again.ready
    assert not roster.rolls


def test_a_request_begins_with_weights_that_both_pools_have() -> None:
    roster, workers = made(3)
    for worker, pool in zip(workers, (pb.POOL_PREFILL, pb.POOL_DECODE, pb.POOL_DECODE), strict=True):
        attach(roster, worker, pool)
        roster.reported(worker, pb.WorkerStatus(health="HEALTH_SERVING", pool=pool, staged_version="v2"))
    redescribe(roster, workers[2], weights=pb.StageWeights(version="v2", named_at=2, rolls=True))
    assert all(worker.ready for worker in workers)
    assert {roster.version_for(held) for held in (None, "", "v2") for _ in range(50)} == {""}
