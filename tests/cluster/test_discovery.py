"""What every discovery owes a router, whatever its source: one suite for the file that a supervisor writes,
for the registry of a Ray cluster and for Kubernetes."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from baton.cluster.discovery import kubernetes_discovery
from baton.cluster.discovery.kubernetes_discovery import KubernetesDiscovery
from baton.cluster.supervision.blueprint import RoleSpec
from baton.cluster.supervision.role_process import RoleState
from baton.cluster.supervision.runner import RoleRunner, write_atomically
from baton.cluster.supervision.supervisor import RoleHandle, Supervisor
from baton.router import discovery
from baton.router.discovery import FileDiscovery
from tests.fake_kubernetes import FakeKubernetes, endpoint
from tests.within import eventually

from .conftest import FAKE, AnyRole
from .followed import Follower

A, B, C = "10.0.0.1:7001", "10.0.0.2:7001", "10.0.0.3:7001"


class File:
    """Written by a supervisor that is lost together with its file."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "workers"
        self._workers: list[str] = []
        self._there = True
        self.discovery = FileDiscovery(str(self._path))

    async def join(self, address: str) -> None:
        self._workers.append(address)
        self._write()

    async def leave(self, address: str) -> None:
        self._workers.remove(address)
        self._write()

    async def lose(self) -> None:
        self._there = False
        self._path.unlink()

    async def recover(self) -> None:
        self._there = True
        self._write()

    def _write(self) -> None:
        if self._there:
            write_atomically(self._path, "\n".join(self._workers))


class Worker(AnyRole):
    """Its role is ready when the test says so.

    Attributes:
        silent: it cannot be asked for its state.
    """

    def __init__(self) -> None:
        self.silent = False
        self._state = RoleState(token="0", phase="starting")
        self._changed = asyncio.Condition()

    async def become(self, address: str | None) -> None:
        async with self._changed:
            self._state = RoleState(
                token=str(int(self._state.token) + 1),
                phase="ready" if address else "waiting",
                ready={"address": address} if address else None,
            )
            self._changed.notify_all()

    async def start(self) -> RoleState:
        async with self._changed:
            await self._changed.wait_for(lambda: not self.silent)
            return self._state

    async def changed(self, token: str) -> RoleState:
        async with self._changed:
            await self._changed.wait_for(lambda: self._state.token != token)
            return self._state

    async def speak(self) -> None:
        async with self._changed:
            self.silent = False
            self._changed.notify_all()


class Registry:
    """A Ray cluster's: the supervisor follows its roles and tells the router's actor. It is lost with the
    supervisor, and is back with the next one, which finds the roles as they are."""

    def __init__(self, directory: Path) -> None:
        secret = {"BATON_CLUSTER_SECRET": "x" * 32}
        spec = RoleSpec("router", 0, (), secret)
        self.router = RoleRunner(spec, directory, program=FAKE)
        self.workers = {address: Worker() for address in (A, B, C)}
        self._handles: dict[str, RoleHandle] = {
            f"decode {i}": worker for i, worker in enumerate(self.workers.values())
        }
        self._roles = [*(RoleSpec("decode", i, (), secret) for i in range(len(self._handles))), spec]
        self._handles["router 0"] = self.router
        self._supervising = self._supervise()
        self.discovery = FileDiscovery(str(directory / "router-0.workers"))

    def _supervise(self) -> asyncio.Task[None]:
        return asyncio.create_task(Supervisor(self._roles, lambda role: self._handles[role.name]).run())

    async def join(self, address: str) -> None:
        await self.workers[address].become(address)

    async def leave(self, address: str) -> None:
        await self.workers[address].become(None)

    async def lose(self) -> None:
        self._supervising.cancel()
        await asyncio.gather(self._supervising, return_exceptions=True)

    async def recover(self) -> None:
        self._supervising = self._supervise()

    async def stop(self) -> None:
        await self.lose()
        await self.router.stop(signal.SIGKILL, 0)


class Kubernetes:
    """The endpoints of a Service, one slice for each worker."""

    def __init__(self, server: FakeKubernetes) -> None:
        self._server = server
        self.discovery = KubernetesDiscovery(["baton-decode"], "grpc")

    async def join(self, address: str) -> None:
        self._server.put(address, "baton-decode", [endpoint(address.partition(":")[0])])

    async def leave(self, address: str) -> None:
        self._server.put(address, "baton-decode", [endpoint(address.partition(":")[0], ready=False)])

    async def lose(self) -> None:
        await self._server.stop()

    async def recover(self) -> None:
        await self._server.start()


Source = File | Registry | Kubernetes
"""Where a discovery learns of workers. Nothing is there at first. After `lose` the discovery cannot reach it;
workers come and go all the same."""


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(kubernetes_discovery, "FIRST_BACKOFF", 0.02)


@pytest.fixture(params=["file", "registry", "kubernetes"])
async def source(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Source]:
    async with contextlib.AsyncExitStack() as stack:
        if request.param == "file":
            yield File(tmp_path)
        elif request.param == "registry":
            registry = Registry(tmp_path)
            stack.push_async_callback(registry.stop)
            yield registry
        else:
            server = FakeKubernetes()
            await server.start()
            stack.push_async_callback(server.stop)
            monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path / "kubeconfig")))
            yield Kubernetes(server)


async def test_after_fast_changes_the_last_state_of_a_worker_holds(source: Source) -> None:
    await source.join(B)
    async with Follower(source.discovery) as router:
        await router.until(B)
        for _ in range(10):
            await source.join(A)
            await source.leave(A)
        await source.join(A)
        await router.until(A, B)
        assert all(B in heard for heard in router.heard if heard), "no other worker is touched"
        assert len(set(router.heard)) <= 3


async def test_an_unchanged_list_is_reported_once(source: Source) -> None:
    async with Follower(source.discovery) as router:
        await source.join(A)
        await router.until(A)
        await source.join(B)
        await router.until(A, B)
        assert all(one != next_ for one, next_ in zip(router.heard, router.heard[1:], strict=False))


async def test_the_last_list_stays_until_a_lost_source_is_back(source: Source) -> None:
    await source.join(A)
    await source.join(B)
    async with Follower(source.discovery) as router:
        await router.until(A, B)
        before = len(router.heard)
        await source.lose()
        await source.leave(A)
        await source.join(C)
        await source.recover()
        await router.until(B, C)
        assert all(B in heard for heard in router.heard[before:]), "B never went"


async def test_the_source_may_be_lost_again_and_again(source: Source) -> None:
    await source.join(A)
    async with Follower(source.discovery) as router:
        await router.until(A)
        for there in (False, True, False, True):
            await source.lose()
            await (source.join if there else source.leave)(A)
            await source.recover()
            await router.until(*([A] if there else []))


async def test_a_static_list_is_reported_once() -> None:
    assert [said async for said in FileDiscovery(None, (A, B)).watch()] == [frozenset({A, B})]


async def test_static_workers_stay_beside_those_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "workers"
    async with Follower(FileDiscovery(str(path), (C,))) as router:
        await router.until(C)
        write_atomically(path, f"{A}  # a comment\n\n# no worker\n")
        await router.until(A, C)


async def test_a_workers_file_that_cannot_be_used_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(discovery, "POLL_SECONDS", 0.001)
    path = tmp_path / "workers"
    async with Follower(FileDiscovery(str(path), (C,))) as router:
        await eventually(lambda: "cannot be read (No such file or directory)" in caplog.text)
        write_atomically(
            path, f"{A}\nhost\n10.0.0.2:70001\nhttp://10.0.0.2:7001\nfd00::2:7001\n[fd00::3]:7001"
        )
        await router.until(A, C, "[fd00::3]:7001")
        path.unlink()
        path.mkdir()
        await eventually(lambda: "cannot be read (Is a directory)" in caplog.text)
    said = [record.getMessage().removeprefix(f"workers file {path}") for record in caplog.records]
    assert said == [
        " cannot be read (No such file or directory): the router keeps the last list",
        ": 'host' is left out, since it is not HOST:PORT or [IPV6]:PORT",
        ": '10.0.0.2:70001' is left out, since it is not HOST:PORT or [IPV6]:PORT",
        ": 'http://10.0.0.2:7001' is left out, since it is not HOST:PORT or [IPV6]:PORT",
        ": 'fd00::2:7001' is left out, since it is not HOST:PORT or [IPV6]:PORT",
        said[5],
    ]


async def test_a_worker_that_has_not_answered_a_new_supervisor_keeps_its_address(tmp_path: Path) -> None:
    """However long that takes. What other workers answer counts at once."""
    registry = Registry(tmp_path)
    registry.workers[C].silent = True  # as an actor that Ray has not placed yet
    try:
        async with Follower(registry.discovery) as router:
            await registry.join(A)
            await registry.join(B)
            await router.until(A, B)
            await registry.lose()
            slow = registry.workers[B]
            slow.silent = True
            await registry.recover()
            await registry.leave(A)
            await router.until(B)
            await registry.join(A)
            await router.until(A, B)
            await slow.become(None)
            await slow.speak()
            await router.until(A)
    finally:
        await registry.stop()
