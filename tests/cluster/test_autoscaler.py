"""The autoscaler between a real supervisor and workers that answer over gRPC; only loads are made up."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

import baton.cluster.autoscaling.autoscaler
from baton.cluster.autoscaling.autoscaler import Autoscaler
from baton.cluster.autoscaling.balancer import Balancer
from baton.cluster.options.pools import PoolOptions, PoolSize
from baton.cluster.supervision.blueprint import POOLS, Pool, RoleSpec
from baton.cluster.supervision.calls import tokens_held
from baton.cluster.supervision.role_process import RoleState
from baton.cluster.supervision.supervisor import Supervisor
from baton.rpc import worker_pb2 as pb
from tests.fake_worker import SECRET, FakeWorker, Lanes
from tests.within import WITHIN, eventually

from .conftest import AnyRole

STEPS = pb.StepModel(
    rows=[1],
    decode_seconds=[0],
    tokens=[1000],
    prompt_seconds=[1],
    overlap=1,
    decode_factor=1,
    prompt_factor=1,
)
ROLES = {"prefill": pb.POOL_PREFILL, "decode": pb.POOL_DECODE}


@dataclass
class Handle(AnyRole):
    """Its role is ready until it is stopped."""

    ready: dict[str, Any]
    stopped: asyncio.Event = field(default_factory=asyncio.Event)

    async def changed(self, token: str) -> RoleState:
        if token == "1":
            await self.stopped.wait()
            return RoleState(token="2", phase="stopped")
        return RoleState(token="1", phase="ready", ready=self.ready)

    async def stop(self, signum: int, grace: float) -> None:
        self.stopped.set()


class WorkerHandle(Handle):
    """Its role is a worker in this process, or a group of them."""

    def __init__(self, workers: Sequence[FakeWorker]) -> None:
        super().__init__({})
        self.worker, self.workers = workers[0], workers

    async def start(self) -> RoleState:
        for worker in self.workers:
            await worker.start()
        self.ready["address"] = self.worker.address
        if len(self.workers) > 1:
            self.ready["addresses"] = [worker.address for worker in self.workers]
        return await self.changed("")

    async def stop(self, signum: int, grace: float) -> None:
        for worker in self.workers:
            await worker.kill()
        await super().stop(signum, grace)


class RouterHandle(Handle):
    """A router that says what it holds back; None: it does not answer."""

    held: int | None = 0

    async def set_workers(self, addresses: Mapping[str, str | None], report: str) -> None: ...

    async def tokens_held(self) -> int:
        if self.held is None:
            raise ConnectionError("it hangs")
        return self.held


class Pools:
    def __init__(self, group: int = 1) -> None:
        self.handles: dict[str, WorkerHandle] = {}
        self.router = RouterHandle({"url": "http://127.0.0.1:1"})
        workers = [RoleSpec(role, 0, (), {}, workers=group) for role in POOLS]
        self.supervisor = Supervisor([*workers, RoleSpec("router", 0, (), {})], self.place)
        pools = PoolOptions(PoolSize(1, 3), PoolSize(1, 2), shrink_after=10.0)
        self.balancer = Balancer(pools, 1000, None, group)
        self.autoscaler = Autoscaler(self.supervisor, self.balancer, SECRET)
        self.tasks = [asyncio.create_task(self.supervisor.run()), asyncio.create_task(self.autoscaler.run())]

    def place(self, spec: RoleSpec) -> Handle:
        if spec.role == "router":
            return self.router
        workers = [FakeWorker(ROLES[spec.role], Lanes(), [1], index=index) for index in spec.indices]
        for worker in workers:
            worker.status.step_model.CopyFrom(STEPS)
        self.handles[spec.name] = handle = WorkerHandle(workers)
        return handle

    def names(self) -> list[str]:
        return sorted(spec.name for spec, _ in self.supervisor.states() if spec.role != "router")

    def load(self, role: str, **values: float) -> None:
        for name, handle in self.handles.items():
            if name.startswith(role):
                for worker, (key, value) in itertools.product(handle.workers, values.items()):
                    setattr(worker.status, key, value)


@pytest.fixture
async def pools(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> AsyncIterator[Pools]:
    """However long a poll takes, a second passes until the next one."""
    seconds = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: float(next(seconds)))
    for name, value in (("INTERVAL", 0.01), ("PATIENCE", WITHIN), ("time", clock)):
        monkeypatch.setattr(baton.cluster.autoscaling.autoscaler, name, value)
    running = Pools(getattr(request, "param", 1))
    yield running
    running.tasks[1].cancel()
    await running.supervisor.stop(9, 0)
    await running.tasks[0]


async def test_each_pool_follows_its_own_signal_and_comes_back(pools: Pools) -> None:
    await eventually(lambda: bool(pools.supervisor.pools))
    pools.load("prefill", tokens_waiting=9000, requests_waiting=9, requests_running=1)
    await eventually(lambda: pools.names() == ["decode 0", "prefill 0", "prefill 1", "prefill 2"])
    assert pools.supervisor.pools["prefill"]["needed"] > 3
    assert "queue" in pools.supervisor.pools["prefill"]["why"]
    pools.load("decode", blocks_free=10)
    await eventually(lambda: "decode 1" in pools.names())
    pools.load("prefill", tokens_waiting=0, requests_waiting=0, requests_running=0)
    pools.load("decode", blocks_free=512)
    await eventually(lambda: pools.names() == ["decode 0", "prefill 0"])


async def test_a_worker_moves_to_the_other_pool_rather_than_one_starting(pools: Pools) -> None:
    pools.load("decode", blocks_free=10)
    await eventually(lambda: "decode 1" in pools.names())
    await eventually(lambda: pools.supervisor.pools["decode"]["ready"] == 2)
    pools.handles["decode 0"].worker.status.requests_running = 5
    pools.load("decode", blocks_free=512)
    pools.load("prefill", tokens_waiting=1000, requests_waiting=9, requests_running=1)
    await eventually(lambda: pools.handles["decode 1"].worker.status.pool == pb.POOL_PREFILL)
    pools.load("prefill", tokens_waiting=0, requests_waiting=0, requests_running=0)
    await eventually(lambda: pools.supervisor.pools["prefill"]["ready"] == 2)
    assert pools.names() == ["decode 0", "decode 1", "prefill 0"], "the one with less work moved"
    assert len(pools.supervisor.pool("decode")) == 1


@pytest.mark.parametrize("pools", [2], indirect=True)
async def test_groups_grow_and_move_as_a_whole(pools: Pools) -> None:
    """Two workers with this load each need 1.8 groups. A flip that did not reach all workers of a group is
    completed."""
    await eventually(lambda: bool(pools.supervisor.pools))
    pools.load("prefill", tokens_waiting=900, requests_waiting=1)
    await eventually(lambda: "prefill group 1" in pools.names())
    assert 1.5 < pools.supervisor.pools["prefill"]["needed"] < 2
    pools.load("decode", blocks_free=10)
    await eventually(lambda: pools.supervisor.pools["decode"]["ready"] == 2)
    pools.load("decode", blocks_free=512)
    pools.handles["decode group 0"].workers[1].status.requests_running = 5
    first, second = pools.handles["decode group 1"].workers
    refused: list[pb.Pool] = []

    def refuse(pool: pb.Pool) -> None:
        refused.append(pool)
        second.flip = FakeWorker.flip.__get__(second)  # type: ignore[method-assign]
        raise ValueError("it cannot be reached")

    second.flip = refuse  # type: ignore[method-assign]
    pools.load("prefill", tokens_waiting=2000, requests_waiting=1)
    await eventually(lambda: first.status.pool == second.status.pool == pb.POOL_PREFILL)
    assert refused == [pb.POOL_PREFILL]
    assert {x.status.pool for x in pools.handles["decode group 0"].workers} == {pb.POOL_DECODE}
    assert len(pools.supervisor.pool("decode")) == 1


async def test_the_last_ready_worker_of_a_pool_does_not_move(
    pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pool has another member, which does not start."""
    starts = asyncio.Event()

    start = WorkerHandle.start

    async def late(self: WorkerHandle) -> RoleState:
        await starts.wait()
        return await start(self)

    await eventually(lambda: bool(pools.supervisor.pools))
    monkeypatch.setattr(WorkerHandle, "start", late)
    asked = pools.balancer.decide
    flips: list[int] = []

    def decide(*given: Any) -> dict[Pool, int]:
        flips.append(len(pools.supervisor.pool("decode")))
        return {"prefill": 2, "decode": 1} if flips[-1] == 2 else asked(*given)

    monkeypatch.setattr(pools.balancer, "decide", decide)
    alone = pools.handles["decode 0"].worker.status
    with contextlib.ExitStack() as at_end:
        at_end.callback(starts.set)  # the supervisor ends when all have started
        pools.load("decode", blocks_free=10)
        await eventually(lambda: flips.count(2) > 2 or alone.pool != pb.POOL_DECODE)
        assert alone.pool == pb.POOL_DECODE
    await eventually(lambda: len(pools.supervisor.pool("prefill")) == 2)


async def test_nonsense_of_a_worker_does_not_end_the_scaling_of_others(pools: Pools) -> None:
    await eventually(lambda: bool(pools.supervisor.pools))
    worker = pools.handles["decode 0"].worker
    worker.status.step_model.decode_factor = float("nan")
    pools.load("decode", blocks_total=0, blocks_free=0, requests_decoding=3)
    pools.load("prefill", prefill_position=float("inf"), tokens_waiting=9000, requests_waiting=9)
    await eventually(lambda: "decode 1" in pools.names() and "prefill 2" in pools.names())


async def test_a_defect_ends_neither_the_autoscaler_nor_the_cluster(
    pools: Pools, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In a poll, and while a router is told. The report says it, the log once, and the next poll goes on."""
    await eventually(lambda: bool(pools.supervisor.pools))
    failures: list[str] = []

    def fails(*_: object) -> None:
        failures.append("poll")
        raise KeyError("a defect")

    async def cannot_be_told(*_: object) -> None:
        failures.append("told")
        raise RuntimeError("another defect")

    with monkeypatch.context() as broken:
        broken.setattr(pools.balancer, "decide", fails)
        broken.setattr(pools.router, "set_workers", cannot_be_told)
        await eventually(lambda: failures.count("poll") > 2 and failures.count("told") > 2)
        told = pools.supervisor.pools["decode"]
        assert "the autoscaler failed (KeyError: 'a defect')" in told["why"]
        assert (told["size"], told["ready"], told["needed"]) == (1, 1, None)
    pools.load("decode", blocks_free=10)
    await eventually(lambda: "decode 1" in pools.names())
    assert "failed" not in pools.supervisor.pools["decode"]["why"]
    assert caplog.text.count("a poll of the autoscaler failed") == 1
    assert not any(task.done() for task in pools.tasks)


async def test_a_worker_that_does_not_answer_does_not_count_as_one_that_stays(pools: Pools) -> None:
    pools.load("decode", blocks_free=10)
    await eventually(lambda: pools.supervisor.pools.get("decode", {}).get("ready") == 2)
    hangs, answers = (pools.handles[f"decode {index}"].worker for index in range(2))
    hangs.status.requests_running = 5
    later = Autoscaler(pools.supervisor, Balancer(PoolOptions(), 1000, None), SECRET)
    await later.ask(hangs.address)
    await hangs.kill()
    samples = {worker.address: await later.ask(worker.address) for worker in (hangs, answers)}
    await later.flip("decode", "prefill", {address: x for address, x in samples.items() if x is not None})
    assert answers.status.pool == pb.POOL_DECODE
    await later.forget_all_but(set())


async def test_what_a_worker_did_before_its_first_answer_is_no_load(pools: Pools) -> None:
    """As after a restart of the supervisor, when a worker with long work behind it answers late."""
    await eventually(lambda: bool(pools.supervisor.pools))
    worker = pools.handles["prefill 0"].worker
    address = worker.address
    worker.status.computed_prompt_tokens, worker.status.no_room = 10_000_000, 1000
    later = Autoscaler(pools.supervisor, Balancer(PoolOptions(), 1000, None), SECRET)
    sample = await later.ask(address)
    assert sample is not None
    assert (sample.done, sample.refused) == (0, 0)
    worker.status.computed_prompt_tokens, worker.status.no_room = 10_000_500, 1001
    sample = await later.ask(address)
    assert sample is not None
    assert (sample.done, sample.refused) == (500, 1)
    await later.forget_all_but(set())


@pytest.mark.all
async def test_prefill_grows_with_the_queue_in_the_routers(pools: Pools) -> None:
    await eventually(lambda: bool(pools.supervisor.pools))
    pools.router.held = 9000
    await eventually(lambda: pools.names() == ["decode 0", "prefill 0", "prefill 1", "prefill 2"])
    await eventually(lambda: "9000 are queued" in pools.supervisor.pools["prefill"]["why"])
    pools.router.held = None
    pools.load("decode", blocks_free=10)
    await eventually(lambda: "decode 1" in pools.names())
    pools.load("decode", blocks_free=512)
    await eventually(lambda: "decode 1" not in pools.names())  # long enough for prefill to shrink too
    assert "prefill 2" in pools.names(), "a router without an answer may still hold tokens"
    pools.router.held = 0
    await eventually(lambda: "prefill 1" not in pools.names())


@pytest.mark.all
async def test_in_a_pause_pools_keep_their_size(pools: Pools) -> None:
    await eventually(lambda: bool(pools.supervisor.pools))
    pools.load("decode", blocks_free=10)
    await eventually(lambda: "decode 1" in pools.names())
    pools.load("prefill", pause=pb.PAUSE_STEPS)
    pools.load("decode", pause=pb.PAUSE_STEPS, blocks_free=512)
    polls, poll = [], pools.autoscaler.poll

    async def counted(now: float) -> dict[str, dict[str, Any]]:
        polled = await poll(now)
        polls.append(polled["decode"]["why"])
        return polled

    pools.autoscaler.poll = counted  # type: ignore[method-assign]
    pools.router.held = 9000
    await eventually(lambda: polls.count("the cluster is paused") >= 30)  # it would shrink after 10 s
    assert pools.names() == ["decode 0", "decode 1", "prefill 0"], "requests that wait make no pool grow"
    pools.router.held = 0
    pools.load("prefill", pause=pb.PAUSE_NONE)
    pools.load("decode", pause=pb.PAUSE_NONE)
    await eventually(lambda: "decode 1" not in pools.names())


async def test_tokens_held_are_read_from_the_metrics_of_a_router(tmp_path: Path) -> None:
    said = 'baton:tokens_waiting_for_turn_seconds{role="router"} 9.0\n'
    pages = {"/metrics": said + 'baton:tokens_waiting_for_turn{role="router"} 7.0\n'}

    async def page(request: web.Request) -> web.Response:
        return web.Response(text=pages[request.path])

    app = web.Application()
    app.router.add_get("/metrics", page)
    runner, path = web.AppRunner(app), str(tmp_path / "admin")
    await runner.setup()
    ready = {"url": "http://127.0.0.1:1", "admin_socket": path}
    try:
        await web.UnixSite(runner, path).start()
        assert await tokens_held(ready) == 7
        pages["/metrics"] = said
        with pytest.raises(ConnectionError, match="has no metric"):
            await tokens_held(ready)
    finally:
        await runner.cleanup()
    with pytest.raises(ConnectionError):
        await tokens_held(ready)


async def test_a_worker_that_does_not_answer_keeps_its_last_load(pools: Pools) -> None:
    """It is no idle worker. And it does not keep its pool from growing."""

    def tells(text: str) -> Callable[[], bool]:
        return lambda: text in pools.supervisor.pools.get("prefill", {}).get("why", "")

    pools.load("prefill", tokens_waiting=100, requests_waiting=9, requests_running=1)
    await eventually(tells(" 90 are queued"))
    await pools.handles["prefill 0"].worker.kill()
    pools.router.held = 700
    await eventually(tells(" 790 are queued"))
    await eventually(lambda: "prefill 1" in pools.names())


async def test_a_router_that_does_not_answer_holds_what_it_held(pools: Pools) -> None:
    pools.router.held = 700
    await eventually(lambda: "700 are queued" in pools.supervisor.pools.get("prefill", {}).get("why", ""))
    pools.router.held = None
    pools.load("prefill", tokens_waiting=9000, requests_waiting=9, requests_running=1)
    await eventually(lambda: "prefill 1" in pools.names())
