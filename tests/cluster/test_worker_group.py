"""A group of workers: real processes that speak the ready protocol, under the process that starts them."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

import baton.cluster.supervision.worker_group
from baton.cluster.options.engine import EngineOptions, ModelOptions
from baton.cluster.options.roles import RoleOptions, WorkerOptions, WorkerRole
from baton.cluster.supervision.worker_group import WorkerGroup, command_of, run
from baton.processes.tree import StopSignals
from tests.within import eventually, within

from .conftest import FAKE, gone

SECRET = b"x" * 32


def given(**engine: Any) -> WorkerRole:
    options = EngineOptions(engine="vllm", device="cpu", data_parallel_size=2)
    return WorkerRole(ModelOptions(), replace(options, **engine))


class Group:
    def __init__(self, environment: dict[str, str], **of_rank_1: str) -> None:
        self.signals = StopSignals()
        self._told, told = os.pipe()
        os.set_blocking(self._told, False)
        options = replace(given(), process=RoleOptions(ready_fd=told))
        commands = [command_of("prefill", options, rank, FAKE) for rank in range(2)]
        group = WorkerGroup("prefill", options, SECRET, self.signals)
        paths = {"PYTHONPATH": environment["PYTHONPATH"]}
        self.running = asyncio.create_task(group.run(commands, [paths, paths | of_rank_1]))
        self._text = ""
        self._ends = (self._told, told)

    def said(self, what: str) -> Any:
        """The first message of this kind that the group has reported; None: there is none."""
        with contextlib.suppress(BlockingIOError):
            self._text += os.read(self._told, 1 << 20).decode()
        return next((m[what] for line in self._text.splitlines() if what in (m := json.loads(line))), None)

    async def ready(self) -> Mapping[str, Any]:
        await eventually(lambda: self.said("ready") is not None or self.running.done())
        assert not self.running.done(), self.running.result()
        return self.said("ready")

    @property
    def pids(self) -> list[int]:
        return [int(address.partition(":")[2]) for address in self.said("ready")["addresses"]]

    async def close(self) -> None:
        self.signals.stop.set()
        self.signals.hurry.set()
        await within(self.running)
        for end in self._ends:
            os.close(end)


@pytest.fixture
async def groups(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """Starts groups. Nothing asks the workers whether they live."""

    async def forever(*_: object) -> str:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(baton.cluster.supervision.worker_group, "until_silent", forever)
    started = list[Group]()

    def start(**of_rank_1: str) -> Group:
        started.append(Group(environment, **of_rank_1))
        return started[-1]

    yield start
    for group in started:
        await group.close()


def test_each_worker_has_a_number_and_ports_of_its_own() -> None:
    options = replace(
        given(), process=RoleOptions(index=3, ready_fd=7), network=WorkerOptions(port=7000, kv_port=7100)
    )
    lines = [" ".join(command_of("decode", options, rank, ("baton",))) for rank in range(2)]
    for rank, line in enumerate(lines):
        assert line.startswith("baton decode ")
        assert f"--index {6 + rank}" in line
        assert f"--port {7000 + rank}" in line
        assert f"--kv-port {7100 + rank}" in line
        assert "--data-parallel-size 2" in line
        assert "--metrics-port" not in line
        assert "--ready-fd" not in line


async def test_a_group_tells_all_addresses_and_ends_with_a_signal(groups: Any) -> None:
    group = groups()
    ready = await group.ready()
    assert group.said("stage") == "loading weights"
    assert len(set(ready["addresses"])) == 2
    assert ready["address"] == ready["addresses"][0]
    assert ready["pid"] == os.getpid(), "that of the group, which a supervisor watches"
    group.signals.first = signal.SIGTERM
    group.signals.stop.set()
    assert await within(group.running) == 0
    assert all(map(gone, group.pids))


async def test_a_worker_that_ends_ends_the_group(groups: Any) -> None:
    group = groups()
    await group.ready()
    os.kill(group.pids[1], signal.SIGTERM)  # not by the group
    assert await within(group.running) == 1
    assert group.said("error") == "prefill 1: exited with 0"
    assert all(map(gone, group.pids))


async def test_the_words_of_the_worker_that_cannot_start_are_told(groups: Any) -> None:
    group = groups(MISBEHAVIOUR="error")
    assert await within(group.running) == 1
    assert group.said("error") == "prefill 1: --dtype: int1 is not a type"
    assert group.said("ready") is None


async def test_a_worker_that_dies_while_the_group_drains_ends_it(groups: Any) -> None:
    group = groups(MISBEHAVIOUR="drains")
    await group.ready()
    group.signals.first = signal.SIGTERM
    group.signals.stop.set()
    await eventually(lambda: gone(group.pids[0]))
    assert not group.running.done(), "the other one drains"
    os.kill(group.pids[1], signal.SIGKILL)
    assert await within(group.running) == 1


async def test_a_second_signal_kills_workers_that_drain(groups: Any) -> None:
    group = groups(MISBEHAVIOUR="deaf")
    await group.ready()
    group.signals.stop.set()
    group.signals.hurry.set()
    assert await within(group.running) == 1
    assert all(map(gone, group.pids))


def test_what_a_group_cannot_have_is_refused() -> None:
    events = replace(given(), network=WorkerOptions(kv_events_endpoint="tcp://*:5557"))
    with pytest.raises(ValueError, match=r"--advanced.kv-events-endpoint: .* several workers would have it"):
        run("prefill", events, SECRET, FAKE)
