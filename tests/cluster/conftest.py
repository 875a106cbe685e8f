import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
import typer.testing

from baton.cluster.supervision.role_process import RoleProcess, RoleState
from baton.system.python_path import PACKAGES
from baton.worker import WorkerConfig
from tests.within import within

FAKE = (sys.executable, str(Path(__file__).with_name("fake_role.py")))


@pytest.fixture(scope="package", autouse=True)
def commands_are_made_once() -> Iterator[None]:
    """By default each call of `CliRunner` makes all commands of its app, which takes a tenth of a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.testing, "_get_command", cache(typer.main.get_command))
        yield


async def until(changing: RoleProcess, condition: Callable[[RoleState], bool]) -> RoleState:
    """The next state, from now on, that meets the condition."""

    async def wait() -> RoleState:
        state = await changing.changed("")
        while not condition(state):
            state = await changing.changed(state.token)
        return state

    return await within(wait())


class AnyRole:
    """A `RoleHandle` whose role starts and says nothing. Tests override what they need."""

    async def start(self) -> RoleState:
        return await self.changed("")

    async def changed(self, token: str) -> RoleState:
        raise AssertionError("not asked")

    async def set_workers(self, addresses: Mapping[str, str | None], report: str) -> None:
        raise AssertionError("only routers are told")

    async def tokens_held(self) -> int:
        raise AssertionError("only routers hold something")

    async def restart(self, signum: int, grace: float) -> None:
        raise AssertionError("not asked")

    async def stop(self, signum: int, grace: float) -> None: ...

    def forget(self) -> None: ...


@dataclass(frozen=True)
class Up:
    """A ready role: its pid and what it said."""

    pid: int
    said: Mapping[str, Any]
    state: RoleState


def up(state: RoleState) -> Up:
    assert state.pid is not None
    assert state.ready is not None
    return Up(state.pid, state.ready, state)


async def until_ready(changing: RoleProcess) -> Up:
    return up(await until(changing, lambda state: state.phase == "ready"))


def gone(pid: int) -> bool:
    """Whether a process is dead; a zombie is."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def forever(ready: Mapping[str, Any]) -> str:
    """The watch over a role that is never silent."""
    await asyncio.Event().wait()
    raise AssertionError("nothing sets this event")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[WorkerConfig]:
    """Configurations of the workers that commands would run."""
    configs: list[WorkerConfig] = []
    monkeypatch.setattr(
        "baton.worker.service_process.service.run", lambda config: configs.append(config) or 0
    )
    monkeypatch.setenv("BATON_CLUSTER_SECRET", "s" * 32)
    return configs


@pytest.fixture
def environment() -> dict[str, str]:
    return dict(os.environ) | {"PYTHONPATH": PACKAGES}


@pytest.fixture
async def stopping() -> AsyncIterator[Callable[[RoleProcess], None]]:
    """Gives a function that registers what to stop after the test."""
    started: list[RoleProcess] = []
    yield started.append
    for each in started:
        await each.stop(9, 0)
