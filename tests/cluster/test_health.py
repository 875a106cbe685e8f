"""A role that hangs: real gRPC and HTTP servers that stop answering."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from baton.cluster.supervision.calls import until_silent
from baton.cluster.supervision.role_process import RestartPolicy, RoleProcess
from baton.rpc.channel import cluster_pems, create_server
from baton.rpc.tls import TlsFiles, add_port
from tests.conftest import Certificates

from .conftest import FAKE, until, until_ready

SECRET = b"x" * 32


async def silent(ready: Mapping[str, Any], tls: TlsFiles | None = None) -> str:
    return await until_silent(ready, SECRET, tls, interval=0.02, patience=0.8)


async def test_a_role_is_silent_once_it_stops_answering(certificates: Certificates, tmp_path: Path) -> None:
    """Side by side. Each first answers for longer than the patience."""
    tls = TlsFiles(*certificates.worker, certificates.ca)
    await asyncio.gather(worker_stops(None), worker_stops(tls), router_hangs(tmp_path / "admin"))


async def worker_stops(tls: TlsFiles | None) -> None:
    server = create_server(SECRET, tls)
    port = add_port(server, "127.0.0.1", 0, cluster_pems(SECRET, tls))
    await server.start()
    watching = asyncio.create_task(silent({"address": f"127.0.0.1:{port}"}, tls))
    await asyncio.sleep(1.2)
    assert not watching.done(), "it answers"
    await server.stop(None)
    assert "gave no answer" in await asyncio.wait_for(watching, 10)


async def router_hangs(path: Path) -> None:
    """It takes connections and says nothing."""
    hanging = False

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if not hanging:
            writer.write(b"HTTP/1.0 200 OK\r\n\r\n")
            writer.close()

    server = await asyncio.start_unix_server(answer, path)
    # Clients may have filled its port, and it may ask for certificates.
    watching = asyncio.create_task(silent({"url": "https://127.0.0.1:1", "admin_socket": str(path)}))
    await asyncio.sleep(1.2)
    assert not watching.done(), "it answers"
    hanging = True
    assert "gave no answer" in await asyncio.wait_for(watching, 10)
    server.close()


async def test_a_pause_of_the_supervisor_is_no_silence_of_a_role(tmp_path: Path) -> None:
    """It was stopped, or its machine was, while a role had to answer."""
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
    watching = asyncio.create_task(silent({"url": "http://127.0.0.1:1", "admin_socket": str(path)}))
    await asked.wait()
    time.sleep(1.0)  # noqa: ASYNC251  the pause
    for _ in range(4):
        await asyncio.wait_for(answered.acquire(), 10)
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
    drained = asyncio.create_task(process.stop(signal.SIGTERM, 600))
    await asyncio.sleep(0)  # the signal is sent
    silent.set()
    await watched.wait()
    os.kill(role.pid, signal.SIGUSR1)
    await drained
    assert (process.state.phase, process.state.error) == ("stopped", "")
