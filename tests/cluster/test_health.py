"""A role that hangs: real gRPC and HTTP servers that stop answering."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.cluster.supervision import calls
from baton.cluster.supervision.calls import until_silent
from baton.cluster.supervision.role_process import RoleProcess
from baton.processes import liveness
from baton.processes.restarts import RestartPolicy
from baton.rpc.channel import check_health, cluster_pems, create_server
from baton.rpc.tls import TlsFiles, add_port
from tests.conftest import Certificates
from tests.within import WITHIN, within

from .conftest import FAKE, until, until_ready

SECRET = b"x" * 32


@pytest.fixture
def interval_passes(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A check comes at once after the one before. While it has no answer, an interval passes with each call
    of the result."""
    passed = asyncio.Semaphore(0)

    async def wait(checking: Iterable[Awaitable[object]], timeout: float) -> None:
        passes = asyncio.ensure_future(passed.acquire())
        await asyncio.wait([*map(asyncio.ensure_future, checking), passes], return_when="FIRST_COMPLETED")
        passes.cancel()

    for module, name, waits in (
        (calls, "sleep", lambda seconds: asyncio.sleep(0)),
        (liveness, "wait", wait),
    ):
        monkeypatch.setattr(module, "asyncio", SimpleNamespace(**vars(asyncio) | {name: waits}))
    monkeypatch.setattr(calls, "ANSWER_WITHIN", WITHIN)
    return passed.release


async def silent(ready: Mapping[str, Any], tls: TlsFiles | None = None) -> str:
    """After three intervals without an answer."""
    return await until_silent(ready, SECRET, tls, interval=1.0, patience=3.0)


@pytest.mark.parametrize("with_tls", [False, True])
async def test_a_worker_is_silent_once_it_stops(
    with_tls: bool,
    certificates: Certificates,
    monkeypatch: pytest.MonkeyPatch,
    interval_passes: Callable[[], None],
) -> None:
    tls = TlsFiles(*certificates.worker, certificates.ca) if with_tls else None
    answers = asyncio.Semaphore(0)

    async def check(channel: Any, timeout: float) -> None:
        await check_health(channel, timeout)
        answers.release()

    monkeypatch.setattr(calls, "check_health", check)
    server = create_server(SECRET, tls)
    port = add_port(server, "127.0.0.1", 0, cluster_pems(SECRET, tls))
    await server.start()
    watching = asyncio.create_task(silent({"address": f"127.0.0.1:{port}"}, tls))
    async with asyncio.timeout(WITHIN):
        for _ in range(6):
            await answers.acquire()
        assert not watching.done(), "it answers"
        await server.stop(None)
        assert await watching == "gave no answer for 3 s"


async def test_a_router_is_silent_once_it_hangs(tmp_path: Path, interval_passes: Callable[[], None]) -> None:
    """It takes connections and says nothing."""
    path, hangs, asked, held = tmp_path / "admin", False, asyncio.Semaphore(0), asyncio.Event()
    connected: set[asyncio.StreamWriter] = set()  # from Python 3.13 on, one that nothing names is closed

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if hangs:
            connected.add(writer)
            held.set()
            return
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n")
        writer.close()
        asked.release()

    server = await asyncio.start_unix_server(answer, path)
    # Clients may have filled its port, and it may ask for certificates.
    watching = asyncio.create_task(silent({"url": "https://127.0.0.1:1", "admin_socket": str(path)}))
    async with asyncio.timeout(WITHIN):
        for _ in range(6):
            await asked.acquire()
        assert not watching.done(), "it answers"
        hangs = True
        await held.wait()
        for _ in range(3):
            assert not watching.done(), "it may still answer"
            interval_passes()
            for _ in range(10):
                await asyncio.sleep(0)
        assert await watching == "gave no answer for 3 s"
    server.close()
    for writer in connected:
        writer.close()


@pytest.mark.all
async def test_a_pause_of_the_supervisor_is_no_silence_of_a_role(tmp_path: Path) -> None:
    """It was stopped, or its machine was, while a role had to answer. The role answers in this event loop, so
    on a slow machine no more intervals pass meanwhile."""
    asked, answered = asyncio.Event(), asyncio.Semaphore(0)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        await asyncio.sleep(0.1)
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n")
        writer.close()
        answered.release()

    path = tmp_path / "admin"
    server = await asyncio.start_unix_server(answer, path)
    ready = {"url": "http://127.0.0.1:1", "admin_socket": str(path)}
    watching = asyncio.create_task(until_silent(ready, SECRET, interval=0.02, patience=0.8))
    await asked.wait()
    time.sleep(1.0)  # noqa: ASYNC251  the pause
    for _ in range(4):
        await within(answered.acquire())
    assert not watching.done()
    watching.cancel()
    server.close()


async def test_a_hung_role_is_killed_and_started_again(
    tmp_path: Path, environment: dict[str, str], stopping: Callable[[RoleProcess], None]
) -> None:
    hung = asyncio.Event()

    async def watch(ready: Mapping[str, Any]) -> str:
        await hung.wait()
        return "gave no answer"

    process = RoleProcess([*FAKE, "decode"], environment, tmp_path / "log", RestartPolicy(0.01), watch)
    stopping(process)
    process.launch()
    first = await until_ready(process)
    os.kill(first.pid, signal.SIGSTOP)  # which no other signal than SIGKILL ends
    hung.set()
    await until(process, lambda state: state.pid != first.pid)
    hung.clear()
    second = await until_ready(process)
    assert second.state.error == "gave no answer"
    assert second.pid != first.pid


async def test_a_role_that_drains_is_not_killed_for_its_silence(
    tmp_path: Path, environment: dict[str, str], stopping: Callable[[RoleProcess], None]
) -> None:
    """A router that drains does not listen any more."""
    silent, watched = asyncio.Event(), asyncio.Event()

    async def watch(ready: Mapping[str, Any]) -> str:
        try:
            await silent.wait()
        finally:
            watched.set()
        return "gave no answer"

    environment = environment | {"MISBEHAVIOUR": "drains"}
    process = RoleProcess([*FAKE, "router"], environment, tmp_path / "log", RestartPolicy(0.01), watch)
    stopping(process)
    process.launch()
    role = await until_ready(process)
    drained = asyncio.create_task(process.stop(signal.SIGTERM, WITHIN))
    await asyncio.sleep(0)  # the signal is sent
    silent.set()
    await watched.wait()
    os.kill(role.pid, signal.SIGUSR1)
    await drained
    assert (process.state.phase, process.state.error) == ("stopped", "")
