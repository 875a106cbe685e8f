"""Each process of a router of several, killed in each state: the table of what follows."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Literal

import pytest

from baton.processes.children import process_end
from tests.forked import forking
from tests.within import within

State = Literal["starting", "ready", "waiting", "draining", "stopping"]
Then = Literal["serves", "replaced", "ends", "fails"]

TABLE: dict[tuple[str, State], Then] = {
    # `waiting`: process 1 has ended before, and the one in its place starts.
    ("process1", "starting"): "fails",  # another start would fail, too
    ("process1", "ready"): "replaced",
    ("process1", "waiting"): "replaced",
    ("process1", "draining"): "ends",
    ("process1", "stopping"): "ends",
    ("helper", "starting"): "serves",
    ("helper", "ready"): "serves",
    ("helper", "waiting"): "serves",
    ("helper", "draining"): "ends",
    ("helper", "stopping"): "ends",
    ("router", "starting"): "fails",
    ("router", "ready"): "fails",
    ("router", "waiting"): "fails",
    ("router", "draining"): "fails",
    ("router", "stopping"): "fails",
}


SHORT: list[tuple[str, State]] = [("helper", "ready"), ("process1", "draining")]
"""What no other short test causes."""
NAMES = ("process0", "process1")


class SmallRouter:
    """A `small_router`, and the gates at which its processes wait."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self.popen = popen
        self.pids: dict[str, int] = {}
        self._gates: dict[tuple[str, str], asyncio.Queue[asyncio.StreamWriter]] = {}

    def _gate(self, name: str, state: str) -> asyncio.Queue[asyncio.StreamWriter]:
        return self._gates.setdefault((name, state), asyncio.Queue())

    async def tell(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := (await reader.readline()).decode().split():
            name, pid, state = line
            self.pids[name] = int(pid)
            self._gate(name, state).put_nowait(writer)

    async def reach(self, name: str, state: str) -> asyncio.StreamWriter:
        """Waits until a process has this state. Returns its gate."""
        return await within(self._gate(name, state).get())

    async def start(self, gates: Iterable[asyncio.StreamWriter]) -> None:
        """Opens these gates, and waits until all processes are ready."""
        for gate in gates:
            gate.write(b"x")
        assert self.popen.stdout is not None
        assert b'"ready"' in await asyncio.to_thread(self.popen.stdout.readline)

    def kill(self, name: str) -> None:
        os.kill(self.pids[name], signal.SIGKILL)

    async def exit_code(self) -> int:
        return await within(asyncio.to_thread(self.popen.wait))


@pytest.fixture(scope="module")
def forked_routers() -> Iterator[None]:
    with forking():
        yield


@asynccontextmanager
async def small_router(path: Path) -> AsyncIterator[SmallRouter]:
    command = [sys.executable, "-m", "tests.router.small_router", str(path)]
    routers = list[SmallRouter]()
    server = await asyncio.start_unix_server(lambda r, w: routers[0].tell(r, w), path)
    routers.append(SmallRouter(subprocess.Popen(command, stdout=subprocess.PIPE)))  # noqa: ASYNC220
    try:
        await routers[0].reach("router", "started")
        yield routers[0]
    finally:
        routers[0].popen.kill()
        routers[0].popen.communicate()
        server.close()


async def bring_to(router: SmallRouter, state: State) -> list[asyncio.StreamWriter]:
    """Returns the gates of the processes, as far as they wait at one."""
    gates = [await router.reach(name, "starting") for name in NAMES]
    if state == "starting":
        return gates
    await router.start(gates)
    if state == "ready":
        return []
    if state == "waiting":
        router.kill("process1")
        return [await router.reach("process1", "starting")]
    router.popen.send_signal(signal.SIGTERM if state == "draining" else signal.SIGINT)
    return [await router.reach(name, state) for name in NAMES]


async def follow(router: SmallRouter, gates: list[asyncio.StreamWriter], state: State, then: Then) -> None:
    """Checks what the table says. Then the router has ended."""
    if then == "fails":
        assert await router.exit_code() in (1, -signal.SIGKILL)
    elif then == "ends":
        for gate in gates:
            gate.write(b"x")
        assert await router.exit_code() == 0
    elif then == "replaced":
        await router.reach("process1", "starting")
        router.popen.send_signal(signal.SIGINT)  # which kills a process that starts
        (await router.reach("process0", "stopping")).write(b"x")
        assert await router.exit_code() == 0
    else:  # until a process has to be replaced
        if state == "starting":
            await router.start(gates)
        router.kill("process0")
        assert await router.exit_code() == 1
    for pid in router.pids.values():
        with suppress(ProcessLookupError):
            await within(process_end(pid))


@pytest.mark.all
@pytest.mark.usefixtures("forked_routers")
@pytest.mark.parametrize(
    "rows", [SHORT, pytest.param([*TABLE.keys() - SHORT], marks=pytest.mark.long)], ids=["short", "others"]
)
async def test_each_process_may_be_killed_in_each_state(
    tmp_path: Path, rows: list[tuple[str, State]]
) -> None:
    async def walk(number: int, killed: str, state: State) -> None:
        async with small_router(tmp_path / str(number)) as router:  # the path of a socket is short
            gates = await bring_to(router, state)
            router.kill(killed)
            await follow(router, gates, state, TABLE[killed, state])

    await asyncio.gather(*(walk(number, *row) for number, row in enumerate(rows)))
