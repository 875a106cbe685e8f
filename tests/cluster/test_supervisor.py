"""The registry and the routers' workers files, with real runners and processes but without Ray."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import baton.cluster.supervision.runner
import baton.cluster.supervision.supervisor
from baton.cluster.supervision.blueprint import RoleName, RoleSpec
from baton.cluster.supervision.role_process import RoleState
from baton.cluster.supervision.runner import RoleRunner
from baton.cluster.supervision.supervisor import Supervisor
from baton.processes.restarts import Phase, RestartPolicy
from tests.within import WITHIN, eventually, within

from .conftest import FAKE, AnyRole, Up, until_ready, up


def spec(role: RoleName, index: int = 0, **environment: str) -> RoleSpec:
    return RoleSpec(role, index, ("--dtype", "float32"), {"BATON_CLUSTER_SECRET": "x" * 32, **environment})


def runner(tmp_path: Path, role: RoleSpec) -> RoleRunner:
    return RoleRunner(role, tmp_path, tmp_path / "logs", policy=RestartPolicy(first_delay=0.01), program=FAKE)


class Cluster:
    def __init__(self, tmp_path: Path) -> None:
        self.specs = [spec("prefill"), spec("decode"), spec("decode", 1), spec("router")]
        self.tmp_path = tmp_path
        self.events: list[tuple[str, str]] = []
        self.supervisor = Supervisor(
            self.specs,
            self.place,
            lambda s, state: self.events.append((s.name, state.phase)),
            drain_grace=WITHIN,
        )
        self.file = tmp_path / "router-0.workers"
        self.running = asyncio.create_task(self.supervisor.run())

    def place(self, spec: RoleSpec) -> RoleRunner:
        return runner(self.tmp_path, spec)

    def report(self, name: str) -> dict[str, Any]:
        """What the router was told of one role."""
        told = json.loads((self.tmp_path / "router-0.cluster").read_text())
        return next((role for role in told["roles"] if f"{role['role']} {role['index']}" == name), {})

    def names(self) -> list[str]:
        return [s.name for s, _ in self.supervisor.states()]

    def member(self, name: str) -> Up:
        return next(up(state) for s, state in self.supervisor.states() if s.name == name)

    def listed(self) -> set[str]:
        return set(self.file.read_text().split())

    async def up(self) -> None:
        await eventually(lambda: all(state.phase == "ready" for _, state in self.supervisor.states()))
        await eventually(lambda: len(self.listed()) == 3)
        await eventually((self.tmp_path / "router-0.cluster").exists)


@pytest.fixture(autouse=True)
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fakes have no health service to ask; test_health is about that."""

    async def forever(*_: object, **named: object) -> str:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(baton.cluster.supervision.runner, "until_silent", forever)


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Cluster]:
    cluster = Cluster(tmp_path)
    await cluster.up()
    yield cluster
    await cluster.supervisor.stop(signal.SIGKILL, 0)
    await cluster.running


async def test_a_dead_worker_leaves_the_file_and_comes_back_with_its_new_address(running: Cluster) -> None:
    before = running.listed()
    victim = running.member("decode 1")
    running.events.clear()
    os.kill(victim.pid, signal.SIGKILL)
    await eventually(lambda: victim.said["address"] not in running.listed())
    await eventually(lambda: len(running.listed()) == 3)
    assert len(running.listed() & before) == 2
    assert running.events[0] == ("decode 1", "waiting")
    assert {name for name, _ in running.events} == {"decode 1"}, "no other worker was touched"


async def test_roles_get_secrets_in_the_environment_and_nothing_of_ours_or_rays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopping: Callable[[RoleRunner], None]
) -> None:
    monkeypatch.setenv("BATON_PORT", "1")
    monkeypatch.setenv("RAY_JOB_ID", "2")
    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    runner_ = runner(tmp_path, spec("prefill"))
    stopping(runner_)
    await runner_.start()
    state = await until_ready(runner_)
    environment = state.said["environment"]
    assert environment["BATON_CLUSTER_SECRET"] == "x" * 32
    assert "BATON_PORT" not in environment
    assert "RAY_JOB_ID" not in environment
    assert environment["OMP_NUM_THREADS"] == "1"
    assert "x" * 32 not in Path(f"/proc/{state.pid}/cmdline").read_text()


async def test_a_role_on_ray_reads_the_secret_where_it_runs(
    tmp_path: Path, stopping: Callable[[RoleRunner], None]
) -> None:
    file = tmp_path / "secret"
    runner_ = runner(tmp_path, replace(spec("prefill"), environment={}, secret_file=str(file)))
    stopping(runner_)
    await runner_.start()
    await eventually(lambda: runner_.state.phase == "waiting")
    assert f"--cluster-secret-file {file}: cannot be read" in runner_.state.error
    file.write_text("x" * 32)
    assert (await until_ready(runner_)).said["environment"]["BATON_CLUSTER_SECRET"] == "x" * 32


@pytest.mark.all
async def test_a_crash_loop_is_told_with_its_reason_while_the_others_serve(
    tmp_path: Path, running: Cluster
) -> None:
    before = running.listed()
    running.supervisor._templates["prefill"] = spec("prefill", MISBEHAVIOUR="crash")
    running.supervisor.resize("prefill", 2)
    await eventually(lambda: running.report("prefill 1").get("crash_loop") is True)
    told = running.report("prefill 1")
    assert told["restarts"] >= 4
    assert told["last_exit"] == "was killed by SIGKILL"
    assert told["node"] == socket.gethostname()
    assert running.listed() == before
    running.supervisor.resize("prefill", 1)
    await eventually(lambda: running.names() == ["prefill 0", "decode 0", "decode 1", "router 0"])
    assert running.listed() == before, "a worker that does not serve goes first"


async def test_a_leaving_worker_is_off_the_list_before_it_is_stopped(tmp_path: Path) -> None:
    asked: list[str] = []
    router, worker = spec("router"), spec("decode")
    supervisor = Supervisor(
        [router, worker, spec("decode", 1)],
        lambda s: Watched(tmp_path, s, s.name, asked),
        drain_grace=WITHIN,
    )
    running = asyncio.create_task(supervisor.run())
    await eventually(lambda: all(state.phase == "ready" for _, state in supervisor.states()))
    await eventually(lambda: len((tmp_path / "router-0.workers").read_text().split()) == 2)
    asked.clear()
    supervisor.resize("decode", 1)
    await eventually(lambda: "decode 1 forgotten" in asked)
    of_interest = [what for what in asked if what != "router 0 told"]
    assert of_interest == ["decode 1 stops", "decode 1 stopped", "decode 1 forgotten"]
    assert asked[0] == "router 0 told"
    assert (tmp_path / "router-0.workers").read_text().split() == list(supervisor.worker_addresses())
    await supervisor.stop(signal.SIGKILL, 0)
    await running


class Watched(RoleRunner):
    """The real handle of a role, with a note of what it was asked, and a way to break it."""

    def __init__(self, tmp_path: Path, spec: RoleSpec, name: str, asked: list[str]) -> None:
        super().__init__(spec, tmp_path, policy=RestartPolicy(first_delay=0.01), program=FAKE)
        self._name, self._asked = name, asked
        self.broken: Exception | None = None

    async def start(self) -> RoleState:
        if self.broken is not None:
            raise self.broken
        return await super().start()

    async def changed(self, token: str) -> RoleState:
        if self.broken is not None:
            raise self.broken
        return await super().changed(token)

    def poke(self) -> None:
        self._set()

    async def set_workers(self, addresses: Mapping[str, str | None], report: str) -> None:
        self._asked.append(f"{self._name} told")
        await super().set_workers(addresses, report)

    async def stop(self, signum: int, grace: float) -> None:
        self._asked.append(f"{self._name} stops")
        if isinstance(self.broken, ArithmeticError):
            raise self.broken
        await super().stop(signum, grace)
        self._asked.append(f"{self._name} stopped")

    def forget(self) -> None:
        self._asked.append(f"{self._name} forgotten")


class Unplaced(AnyRole):
    """A handle to an actor that Ray has no room for: it answers nothing, until it is ended."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def changed(self, token: str) -> RoleState:
        await self.ended.wait()
        raise ConnectionError("lost its actor")

    async def stop(self, signum: int, grace: float) -> None:
        await self.changed("")

    def forget(self) -> None:
        self.ended.set()


@pytest.mark.cases(1)
@pytest.mark.parametrize("end", ["shrink", "stop"])
async def test_a_worker_that_ray_has_not_placed_can_be_stopped(
    tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(baton.cluster.supervision.supervisor, "_PLACED_WITHIN", 0.1)
    unplaced = Unplaced()
    supervisor = Supervisor(
        [spec("decode"), spec("router")],
        lambda s: unplaced if s.name == "decode 1" else runner(tmp_path, s),
    )
    running = asyncio.create_task(supervisor.run())
    await eventually(lambda: all(state.phase == "ready" for _, state in supervisor.states()))
    supervisor.resize("decode", 2)
    assert len(supervisor.states()) == 3
    if end == "shrink":
        supervisor.resize("decode", 1)
        await eventually(lambda: len(supervisor.states()) == 2)
        assert supervisor.worker_addresses(), "the one that serves stays"
    await supervisor.stop(signal.SIGTERM, WITHIN)
    await within(running)
    assert unplaced.ended.is_set()


async def test_routers_stop_before_workers(tmp_path: Path) -> None:
    asked: list[str] = []
    specs = [spec("prefill"), spec("decode"), spec("router")]
    supervisor = Supervisor(specs, lambda s: Watched(tmp_path, s, s.role, asked))
    running = asyncio.create_task(supervisor.run())
    await eventually(lambda: all(state.phase == "ready" for _, state in supervisor.states()))
    asked.clear()
    await supervisor.stop(signal.SIGTERM, WITHIN)
    await within(running)
    stopped = [what for what in asked if what.endswith("stopped")]
    assert stopped[0] == "router stopped"
    assert set(stopped[1:]) == {"prefill stopped", "decode stopped"}


async def test_a_lost_actor_is_asked_until_it_is_back_and_its_router_told_again(tmp_path: Path) -> None:
    asked: list[str] = []
    worker, router = spec("decode"), spec("router")
    handle = Watched(tmp_path, router, "router", asked)
    supervisor = Supervisor([worker, router], lambda s: handle if s is router else runner(tmp_path, worker))
    running = asyncio.create_task(supervisor.run())

    def ready() -> bool:
        return all(state.phase == "ready" for _, state in supervisor.states())

    await eventually(ready)
    handle.broken = ConnectionError("lost its actor")
    os.kill(up(supervisor.states()[1][1]).pid, signal.SIGKILL)  # ends the long poll; the next one fails
    await eventually(lambda: supervisor.states()[1][1].error == "lost its actor")
    asked.clear()
    handle.broken = None
    await eventually(ready)
    await eventually(lambda: "router told" in asked)
    await supervisor.stop(signal.SIGKILL, 0)
    await running


async def test_a_defect_while_a_role_is_followed_does_not_end_the_cluster(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its process serves on and stays on the list. The report and the log say why it is not followed."""
    handles = dict[str, Watched]()

    def place(spec: RoleSpec) -> Watched:
        return handles.setdefault(spec.name, Watched(tmp_path, spec, spec.name, []))

    supervisor = Supervisor([spec("decode"), spec("router")], place)
    running = asyncio.create_task(supervisor.run())

    def ready(count: int) -> bool:
        states = supervisor.states()
        return len(states) == count and all(state.phase == "ready" for _, state in states)

    def told() -> str:
        report = tmp_path / "router-0.cluster"  # written soon after the router is ready
        return str(json.loads(report.read_text())["roles"][0]["last_exit"]) if report.exists() else ""

    await eventually(lambda: ready(2))
    before, listed = up(supervisor.states()[0][1]), supervisor.worker_addresses()
    handles["decode 0"].broken = KeyError("a defect")
    handles["decode 0"].poke()  # ends the long poll; the next one fails
    await eventually(lambda: "it cannot be followed (KeyError: 'a defect')" in told())
    assert supervisor.worker_addresses() == listed
    handles["decode 0"].broken = None
    os.kill(before.pid, signal.SIGKILL)
    await eventually(lambda: ready(2) and up(supervisor.states()[0][1]).pid != before.pid)
    assert caplog.text.count("decode 0: it cannot be followed") == 1
    supervisor.resize("decode", 2)
    await eventually(lambda: ready(3))
    handles["decode 1"].broken = ZeroDivisionError("it cannot be told to stop")
    supervisor.resize("decode", 1)
    await eventually(lambda: ready(2))
    assert "decode 1 could not be ended" in caplog.text
    assert not running.done()
    handles["decode 1"].broken = None
    await asyncio.gather(*(handle.stop(signal.SIGKILL, 0) for handle in handles.values()))
    await supervisor.stop(signal.SIGKILL, 0)
    await running


async def test_a_defect_at_the_start_of_a_role_is_told_once_and_tried_again(tmp_path: Path) -> None:
    """`baton serve` ends with these words while the cluster starts."""
    handle = Watched(tmp_path, spec("decode"), "decode 0", [])
    handle.broken = RuntimeError("a defect")
    seen = list[tuple[Phase, str]]()
    supervisor = Supervisor(
        [spec("decode")], lambda _: handle, lambda _, state: seen.append((state.phase, state.error))
    )
    running = asyncio.create_task(supervisor.run())
    await eventually(lambda: bool(seen))
    assert seen == [("waiting", "it cannot be followed (RuntimeError: a defect)")]
    handle.broken = None
    await eventually(lambda: supervisor.states()[0][1].phase == "ready")
    assert [phase for phase, _ in seen].count("waiting") == 1
    await supervisor.stop(signal.SIGKILL, 0)
    await running


async def test_a_rolling_restart_leaves_out_one_worker_at_a_time(running: Cluster) -> None:
    before = {
        name: running.member(name).said["incarnation"] for name in ("prefill 0", "decode 0", "decode 1")
    }
    router = running.member("router 0").pid
    running.events.clear()
    await running.supervisor.restart_workers()
    after = {name: running.member(name).said["incarnation"] for name in before}
    assert all(after[name] != before[name] for name in before)
    assert running.member("router 0").pid == router
    await eventually(lambda: running.listed() == set(running.supervisor.worker_addresses()))
    away: set[str] = set()
    for name, phase in running.events:
        (away.discard if phase == "ready" else away.add)(name)
        assert len(away) <= 1, running.events


async def test_a_rolling_restart_begins_with_flipped_workers_which_are_in_their_first_pool_again(
    running: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: only decode 0 in the decode pool. It restarts when decode 1 is there again."""
    flipped = running.member("decode 1").said["address"]

    async def ask(addresses: Sequence[str], *_: object) -> dict[str, str]:
        assert set(addresses) == running.listed()
        return {flipped: "prefill"}

    monkeypatch.setattr(baton.cluster.supervision.supervisor, "ask_pools", ask)
    running.events.clear()
    restarting = asyncio.create_task(running.supervisor.restart_workers())
    await eventually(lambda: bool(running.events))
    await restarting
    order = [name for name, phase in running.events if phase == "ready"]
    assert order == ["decode 1", "prefill 0", "decode 0"]
    assert len(running.supervisor.pool("decode")) == 2


class Late(AnyRole):
    """A worker whose states come when the test says so, like those of an actor on another machine."""

    def __init__(self, name: str) -> None:
        self.name, self.restarts = name, 0
        self.states: asyncio.Queue[RoleState] = asyncio.Queue()

    def says(self, phase: Phase, pid: int = 0) -> None:
        ready = {"address": f"{self.name}:{pid}"} if phase == "ready" else None
        self.states.put_nowait(RoleState(token=f"{phase} {pid}", phase=phase, pid=pid, ready=ready))

    async def start(self) -> RoleState:
        return RoleState(token="", phase="starting")

    async def changed(self, token: str) -> RoleState:
        return await self.states.get()

    async def restart(self, signum: int, grace: float) -> None:
        self.restarts += 1

    async def stop(self, signum: int, grace: float) -> None:
        self.says("stopped")


@pytest.fixture
async def late(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Supervisor, Late, Late]]:
    async def ask(*_: object) -> dict[str, str]:
        return {}

    monkeypatch.setattr(baton.cluster.supervision.supervisor, "ask_pools", ask)
    workers = {each.name: Late(each.name) for each in (spec("decode"), spec("decode", 1))}
    supervisor = Supervisor([spec("decode"), spec("decode", 1)], lambda each: workers[each.name])
    running = asyncio.create_task(supervisor.run())
    yield supervisor, workers["decode 0"], workers["decode 1"]
    await supervisor.stop(signal.SIGTERM, 0)
    await within(running)


async def test_the_next_worker_restarts_when_the_new_address_of_the_one_before_is_known(
    late: tuple[Supervisor, Late, Late],
) -> None:
    supervisor, first, second = late
    for worker in (first, second):
        worker.says("ready", 1)
    await eventually(lambda: len(supervisor.worker_addresses()) == 2)
    restarting = asyncio.create_task(supervisor.restart_workers())
    await eventually(lambda: first.restarts == 1)
    for _ in range(20):
        await asyncio.sleep(0)
    assert second.restarts == 0
    first.says("ready", 2)
    await eventually(lambda: second.restarts == 1)
    second.says("ready", 2)
    await within(restarting)


async def test_a_smaller_pool_drops_what_is_not_ready_before_the_highest_number(
    late: tuple[Supervisor, Late, Late],
) -> None:
    supervisor, _, second = late
    second.says("ready", 1)
    await eventually(lambda: len(supervisor.worker_addresses()) == 1)
    supervisor.resize("decode", 1)
    assert [state.phase for state in supervisor.pool("decode")] == ["ready"]


async def test_a_stop_ends_a_rolling_restart(running: Cluster) -> None:
    running.events.clear()
    restarting = asyncio.create_task(running.supervisor.restart_workers())
    await eventually(lambda: any(phase == "starting" for _, phase in running.events))
    await running.supervisor.stop(signal.SIGKILL, 0)
    await within(restarting)


async def test_all_workers_of_a_group_are_listed_and_reported() -> None:
    addresses = ["127.0.0.1:7000", "127.0.0.1:7001"]
    ready = {"address": addresses[0], "addresses": addresses}
    told = list[Mapping[str, str | None]]()

    class Ready(AnyRole):
        async def start(self) -> RoleState:
            return RoleState(token="1", phase="starting")

        async def changed(self, token: str) -> RoleState:
            if token == "2":
                await asyncio.Event().wait()
            return RoleState(token="2", phase="ready", ready=ready)

        async def set_workers(self, addresses: Mapping[str, str | None], report: str) -> None:
            told.append(addresses)

    group = replace(spec("decode", 3), workers=2)
    supervisor = Supervisor([group, replace(spec("router"), workers=2)], lambda _: Ready())
    running = asyncio.create_task(supervisor.run())
    await eventually(lambda: {"decode 6": addresses[0], "decode 7": addresses[1]} in told)
    assert supervisor.worker_addresses() == tuple(addresses)
    workers = [role for role in json.loads(supervisor.report())["roles"] if role["role"] == "decode"]
    assert [(role["index"], role["address"]) for role in workers] == [(6, addresses[0]), (7, addresses[1])]
    running.cancel()
