"""Roles as children of `baton serve`, and the GPUs that they share."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from baton.cluster.supervision.blueprint import RoleSpec
from baton.cluster.supervision.runner import Gpus, LocalRole, RoleRunner
from tests.within import WITHIN, within

from .conftest import FAKE, until, until_ready

Place = Callable[..., LocalRole]


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    """Makes decode worker `index`, which needs `count` of three GPUs, with more variables."""
    gpus, made = Gpus(["0", "1", "2"]), list[LocalRole]()

    def make(index: int, count: int, **more: str) -> LocalRole:
        spec = RoleSpec("decode", index, (), {"BATON_CLUSTER_SECRET": "x" * 32, **more}, gpus=count)
        made.append(LocalRole(spec, tmp_path, tmp_path / "logs", gpus, FAKE))
        return made[-1]

    yield make
    for role in made:
        await role.stop(signal.SIGKILL, 0)


async def devices(role: RoleRunner) -> str:
    return (await until_ready(role)).said["environment"]["CUDA_VISIBLE_DEVICES"]


async def test_a_role_sees_its_own_gpus_only(place: Place) -> None:
    first, second, without = place(0, 2), place(1, 1), place(2, 0)
    await asyncio.gather(first.start(), second.start(), without.start())
    assert await asyncio.gather(*map(devices, (first, second, without))) == ["0,1", "2", ""]


async def test_groups_get_neighbouring_gpus(tmp_path: Path) -> None:
    gpus = Gpus(["0", "1", "2", "3"])
    assert [await gpus.take(name, 2) for name in ("decode 0", "decode 1")] == [["0", "1"], ["2", "3"]]


async def test_a_worker_waits_for_the_gpus_of_a_draining_worker(place: Place) -> None:
    leaving, next_one = place(0, 3, MISBEHAVIOUR="drains"), place(1, 2)
    await leaving.start()
    pid = (await until_ready(leaving)).pid
    waiting = asyncio.create_task(next_one.start())
    stopping = asyncio.create_task(leaving.stop(signal.SIGTERM, WITHIN))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not waiting.done()
    os.kill(pid, signal.SIGUSR1)
    await stopping
    await within(waiting)
    assert await devices(next_one) == "0,1"


async def test_a_worker_that_waits_for_gpus_can_be_stopped(place: Place) -> None:
    await place(0, 3).start()
    role = place(1, 1)
    waiting = asyncio.create_task(role.start())
    await asyncio.sleep(0)
    await role.stop(signal.SIGTERM, WITHIN)
    await within(waiting)
    assert (await until(role, lambda state: state.phase == "stopped")).pid is None
