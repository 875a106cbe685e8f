"""Supervision of a real process that speaks the ready protocol."""

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from baton.cluster.supervision.role_process import RoleProcess
from baton.processes import children
from baton.processes.restarts import RestartPolicy
from tests.loop_clock import Clock
from tests.within import WITHIN, eventually, within

from .conftest import FAKE, forever, gone, until, until_ready

Start = Callable[..., RoleProcess]


@pytest.fixture
def start(tmp_path: Path, environment: dict[str, str], stopping: Callable[[RoleProcess], None]) -> Start:
    """Starts a role with these variables in its environment."""

    def begin(first_delay: float = 0.01, **more: str) -> RoleProcess:
        policy = RestartPolicy(first_delay, max_delay=3600.0)
        process = RoleProcess([*FAKE, "prefill"], environment | more, tmp_path / "log", policy, forever)
        stopping(process)
        process.launch()
        return process

    return begin


async def test_reports_stages_and_then_what_the_role_said(start: Start) -> None:
    process = start(MISBEHAVIOUR="slow")
    stage = await until(process, lambda s: s.stage == "loading weights")
    assert (stage.phase, stage.fraction) == ("starting", 0.5)
    assert stage.pid is not None
    os.kill(stage.pid, signal.SIGUSR1)
    state = await until_ready(process)
    assert state.said["pid"] == state.pid
    assert state.state.restarts == 0
    assert state.state.seconds_to_ready is not None


async def test_only_the_owner_can_read_the_log(start: Start, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch(0o644)
    await until_ready(start())
    assert log.stat().st_mode & 0o777 == 0o600


async def test_a_killed_role_comes_back_as_a_new_incarnation(start: Start) -> None:
    process = start()
    first = await until_ready(process)
    os.kill(first.pid, signal.SIGKILL)
    lost = await until(process, lambda s: s.phase != "ready")
    assert lost.ready is None
    second = await until_ready(process)
    assert second.state.restarts == 1
    assert second.state.error == "was killed by SIGKILL"
    assert second.said["incarnation"] != first.said["incarnation"]


async def test_the_roles_own_words_say_why_it_cannot_start(start: Start) -> None:
    process = start(MISBEHAVIOUR="error")
    state = await until(process, lambda s: s.phase == "waiting")
    assert state.error == "--dtype: int1 is not a type"


async def test_a_role_that_crashed_waits_before_its_next_start(start: Start, clock: Clock) -> None:
    process = start(first_delay=3600.0, MISBEHAVIOUR="crash")
    await until(process, lambda s: s.phase == "waiting")
    await clock.forward(1800.0)
    assert process.state.phase == "waiting"
    await clock.forward(1800.0)
    await until(process, lambda s: s.phase == "starting")


async def test_a_crash_at_start_is_no_crash_loop(start: Start, tmp_path: Path) -> None:
    process = start(MISBEHAVIOUR="crash", GOOD_AFTER=str(tmp_path / "mark"))
    state = (await until_ready(process)).state
    assert state.restarts == 1
    assert not state.crash_loop


async def test_an_invalid_line_on_the_ready_pipe_ends_only_the_role(start: Start) -> None:
    process = start(MISBEHAVIOUR="garbage")
    state = await until(process, lambda s: s.phase == "waiting")
    assert "invalid line to its ready pipe" in state.error


@pytest.mark.parametrize(("stage", "error"), [("ready", "was killed by SIGABRT"), ("loading weights", "")])
async def test_a_role_that_fails_to_stop_cleanly_is_told(start: Start, stage: str, error: str) -> None:
    """Any signal may kill one that still starts."""
    process = start(MISBEHAVIOUR="" if stage == "ready" else "slow")
    await until(process, lambda s: s.stage == stage)
    await process.stop(signal.SIGABRT, WITHIN)
    assert process.state.phase == "stopped"
    assert process.state.error == error


async def test_stop_kills_a_role_that_ignores_the_signal(start: Start) -> None:
    process = start(MISBEHAVIOUR="deaf")
    state = await until_ready(process)
    patient = asyncio.create_task(process.stop(signal.SIGTERM, WITHIN))
    await asyncio.sleep(0)
    await process.stop(signal.SIGKILL, 0)  # the second Ctrl-C
    await patient
    assert gone(state.pid)


async def test_children_of_a_dead_role_die_with_it(start: Start) -> None:
    process = start(MISBEHAVIOUR="child")
    state = await until_ready(process)
    os.kill(state.pid, signal.SIGKILL)
    await eventually(lambda: gone(state.said["child"]))


async def test_signals_that_the_supervisor_blocks_reach_the_role(start: Start) -> None:
    old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # as Ray does
    try:
        process = start()
        state = await until_ready(process)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)
    assert signal.SIGINT not in state.said["blocked"]


SUPERVISOR = """
import asyncio, os, pathlib, sys
from baton.processes.restarts import RestartPolicy
from baton.cluster.supervision.role_process import RoleProcess

async def main():
    log, endless = pathlib.Path(sys.argv[1]), lambda ready: asyncio.Event().wait()
    process = RoleProcess(sys.argv[2:], os.environ, log, RestartPolicy(), endless)
    process.launch()
    state = process.state
    while state.phase != "ready":
        state = await process.changed(state.token)
    print(state.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_role_dies_with_a_killed_supervisor(tmp_path: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, "-c", SUPERVISOR, str(tmp_path / "log"), *FAKE, "decode"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        pid = int(supervisor.stdout.readline())
        supervisor.kill()
    asyncio.run(eventually(lambda: gone(pid)))


async def test_a_restart_is_a_new_incarnation_at_once_and_no_crash(start: Start) -> None:
    process = start()
    first = await until_ready(process)
    await process.restart(signal.SIGTERM, WITHIN)
    second = await until_ready(process)
    assert second.said["incarnation"] != first.said["incarnation"]
    assert (second.state.restarts, second.state.error, second.state.crash_loop) == (0, "", False)
    assert gone(first.pid)


async def test_restart_kills_a_role_that_does_not_end_in_time(start: Start) -> None:
    process = start(MISBEHAVIOUR="deaf")
    first = await until_ready(process)
    await process.restart(signal.SIGTERM, 0.05)
    assert (await until_ready(process)).pid != first.pid


async def test_a_restart_of_a_crashed_role_waits_for_its_next_run(start: Start) -> None:
    process = start()
    first = await until_ready(process)
    os.kill(first.pid, signal.SIGKILL)
    await process.restart(signal.SIGTERM, WITHIN)
    assert (await until_ready(process)).pid != first.pid


async def test_a_stop_ends_a_restart(start: Start) -> None:
    process = start(MISBEHAVIOUR="deaf")
    await until_ready(process)
    restarting = asyncio.create_task(process.restart(signal.SIGTERM, WITHIN))
    await asyncio.sleep(0)
    await process.stop(signal.SIGKILL, 0.0)
    await within(restarting)
    assert process.state.phase == "stopped"


async def test_a_role_that_cannot_be_started_is_tried_again(
    tmp_path: Path,
    environment: dict[str, str],
    stopping: Callable[[RoleProcess], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, make = set[int](), os.pipe

    def pipe() -> tuple[int, int]:
        ends = make()
        made.add(os.fstat(ends[0]).st_ino)
        return ends

    monkeypatch.setattr(os, "pipe", pipe)
    program = tmp_path / "python"
    policy = RestartPolicy(first_delay=0.01, max_delay=0.01)
    process = RoleProcess(
        [str(program), *FAKE[1:], "prefill"], environment, tmp_path / "log", policy, forever
    )
    stopping(process)
    process.launch()
    state = await until(process, lambda s: s.crash_loop)
    assert (state.phase, state.pid) == ("waiting", None)
    assert state.error.startswith("cannot be started: [Errno 2]")
    assert len(made) >= 5
    assert made.isdisjoint(open_inodes()), "no pipe is left open"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    program.chmod(0o700)
    assert (await until_ready(process)).state.restarts >= 5


def open_inodes() -> Iterator[int]:
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing
            yield os.fstat(int(fd)).st_ino


async def test_a_role_that_cannot_be_watched_is_ended_and_tried_again(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with too many open files."""
    tried, ended = list[int](), children.process_end

    async def process_end(pid: int) -> None:
        tried.append(pid)
        if len(tried) == 1:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        await ended(pid)

    monkeypatch.setattr(children, "process_end", process_end)
    state = await until_ready(start())
    assert state.state.error == "cannot be started: [Errno 24] Too many open files"
    assert gone(tried[0])


async def test_a_defect_of_the_watch_shows_at_once(tmp_path: Path, environment: dict[str, str]) -> None:
    async def watch(ready: Mapping[str, Any]) -> str:
        raise TypeError("no watch")

    process = RoleProcess([*FAKE, "prefill"], environment, tmp_path / "log", RestartPolicy(), watch)
    process.launch()
    ready = await until_ready(process)
    lost = await within(process.changed(ready.state.token))
    assert (lost.phase, lost.ready) == ("waiting", None)
    assert lost.error == "it is supervised no more (TypeError: no watch)"
    assert gone(ready.pid)
    with pytest.raises(TypeError, match="no watch"):
        await within(process.changed(lost.token))
    with pytest.raises(TypeError, match="no watch"):
        await process.stop(signal.SIGTERM, 0.0)
