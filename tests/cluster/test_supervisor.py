"""The registry and the routers' workers files, with real runners and processes but without Ray."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from cluster.backoff import RestartPolicy
from cluster.plan import RoleSpec
from cluster.runner import RoleRunner
from cluster.supervisor import Supervisor

from .conftest import FAKE, eventually


def spec(role: str, index: int = 0, **environment: str) -> RoleSpec:
    return RoleSpec(role, index, ("--dtype", "float32"), {"BATON_CLUSTER_SECRET": "x" * 32, **environment})


def runner(tmp_path: Path, role: RoleSpec) -> RoleRunner:
    return RoleRunner(
        role, tmp_path, tmp_path / "logs", policy=RestartPolicy(first_delay=0.01), program=FAKE
    )


class Cluster:
    def __init__(self, tmp_path: Path) -> None:
        self.specs = [spec("prefill"), spec("decode"), spec("decode", 1), spec("router")]
        self.runners = {s.name: runner(tmp_path, s) for s in self.specs}
        self.events: list[tuple[str, str]] = []
        self.supervisor = Supervisor(
            [(s, self.runners[s.name]) for s in self.specs],
            lambda s, state: self.events.append((s.name, state.phase)),
        )
        self.file = tmp_path / "router-0.workers"
        self.running = asyncio.create_task(self.supervisor.run())

    def listed(self) -> set[str]:
        return set(self.file.read_text().split())

    async def up(self) -> None:
        await eventually(lambda: all(state.phase == "ready" for _, state in self.supervisor.states()))
        await eventually(lambda: len(self.listed()) == 3)


@pytest.fixture
async def running(tmp_path):
    cluster = Cluster(tmp_path)
    await cluster.up()
    yield cluster
    await cluster.supervisor.stop(signal.SIGKILL, 0)
    await cluster.running


async def test_the_router_is_told_of_every_ready_worker(running: Cluster) -> None:
    assert running.listed() == set(running.supervisor.worker_addresses())


async def test_a_dead_worker_leaves_the_file_and_comes_back_with_its_new_address(running: Cluster) -> None:
    before = running.listed()
    victim = next(state for s, state in running.supervisor.states() if s.name == "decode 1")
    running.events.clear()
    os.kill(victim.pid, signal.SIGKILL)
    await eventually(lambda: victim.ready["address"] not in running.listed())
    await eventually(lambda: len(running.listed()) == 3)
    assert len(running.listed() & before) == 2
    assert [event for event in running.events if event[0] == "decode 1"][0] == ("decode 1", "waiting")
    assert {name for name, _ in running.events} == {"decode 1"}, "nobody else was touched"


async def test_roles_get_secrets_in_the_environment_and_nothing_of_ours_or_rays(
    tmp_path, monkeypatch, stopping
) -> None:
    monkeypatch.setenv("BATON_PORT", "1")
    monkeypatch.setenv("RAY_JOB_ID", "2")
    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    runner_ = runner(tmp_path, spec("prefill"))
    stopping(runner_)
    await runner_.start()
    from .conftest import ready, until

    state = await until(runner_, ready)
    environment = state.ready["environment"]
    assert environment["BATON_CLUSTER_SECRET"] == "x" * 32
    assert "BATON_PORT" not in environment
    assert "RAY_JOB_ID" not in environment
    assert environment["OMP_NUM_THREADS"] == "1"
    assert "x" * 32 not in Path(f"/proc/{state.pid}/cmdline").read_text()


class Recording:
    """A handle that only notes when it was stopped."""

    def __init__(self, inner: RoleRunner, name: str, order: list[str]) -> None:
        self._inner, self._name, self._order = inner, name, order

    def __getattr__(self, attribute: str):
        return getattr(self._inner, attribute)

    async def stop(self, signum: int, grace: float) -> None:
        await self._inner.stop(signum, grace)
        self._order.append(self._name)


async def test_routers_stop_before_workers(tmp_path) -> None:
    order: list[str] = []
    specs = [spec("prefill"), spec("decode"), spec("router")]
    supervisor = Supervisor([(s, Recording(runner(tmp_path, s), s.role, order)) for s in specs])
    running = asyncio.create_task(supervisor.run())
    await eventually(lambda: all(state.phase == "ready" for _, state in supervisor.states()))
    await supervisor.stop(signal.SIGTERM, 10)
    await asyncio.wait_for(running, 10)
    assert order[0] == "router"
    assert set(order[1:]) == {"prefill", "decode"}


async def test_a_lost_actor_is_asked_until_it_is_back_and_its_router_told_again(tmp_path) -> None:
    class Flaky(Recording):
        lost = False

        async def changed(self, token: str):
            if Flaky.lost:
                raise ConnectionError("lost its actor")
            return await self._inner.changed(token)

        async def set_workers(self, addresses) -> None:
            self._order.append("told")
            await self._inner.set_workers(addresses)

    order: list[str] = []
    worker, router = spec("decode"), spec("router")
    inner = runner(tmp_path, router)
    decode = runner(tmp_path, worker)
    supervisor = Supervisor([(worker, decode), (router, Flaky(inner, "router", order))])
    running = asyncio.create_task(supervisor.run())
    await eventually(lambda: all(state.phase == "ready" for _, state in supervisor.states()))
    Flaky.lost = True
    os.kill(supervisor.states()[1][1].pid, signal.SIGKILL)  # so that the long poll returns, and the next one fails
    await eventually(lambda: supervisor.states()[1][1].error == "lost its actor")
    told = order.count("told")
    Flaky.lost = False
    await eventually(lambda: all(state.phase == "ready" for _, state in supervisor.states()))
    await eventually(lambda: order.count("told") > told)
    await supervisor.stop(signal.SIGKILL, 0)
    await running
