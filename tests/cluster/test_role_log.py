"""Logs of roles stay small, and nothing that is written for people ends a role or a cluster."""

import asyncio
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.cluster.supervision.blueprint import RoleSpec
from baton.cluster.supervision.role_log import end_of, keep_bounded, open_log
from baton.cluster.supervision.role_process import RoleProcess
from baton.cluster.supervision.runner import RoleRunner, write_atomically
from baton.processes.restarts import RestartPolicy
from tests.within import eventually

from .conftest import FAKE, forever, until_ready


async def test_a_log_is_rotated_while_its_role_writes(tmp_path: Path) -> None:
    path, before = tmp_path / "log", tmp_path / "log.1"
    keeping = asyncio.create_task(keep_bounded(path, most=1000, interval=0.001))
    with open_log(path) as log:
        for text in (b"first", b"second"):
            log.write(text * 300)
            log.flush()
            await eventually(lambda: path.stat().st_size == 0)
            assert before.read_bytes() == text * 300
        log.write(b"third")
        log.flush()
        assert path.read_bytes() == b"third", "the role goes on at the beginning of its file"
    assert before.stat().st_mode & 0o777 == 0o600
    assert not keeping.done()
    keeping.cancel()


async def test_a_role_without_a_log_runs(
    tmp_path: Path, environment: dict[str, str], stopping: Callable[[RoleProcess], None]
) -> None:
    log = tmp_path / "missing" / "log"
    process = RoleProcess([*FAKE, "decode"], environment, log, RestartPolicy(), forever)
    stopping(process)
    process.launch()
    await until_ready(process)


@pytest.fixture
def router(tmp_path: Path, stopping: Callable[[RoleRunner], None]) -> RoleRunner:
    spec = RoleSpec("router", 0, (), {"BATON_CLUSTER_SECRET": "x" * 32})
    runner = RoleRunner(spec, tmp_path, program=FAKE)
    stopping(runner)
    return runner


async def test_a_router_gets_its_workers_when_the_disk_has_room_again(
    tmp_path: Path, router: RoleRunner, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.cluster.supervision.runner.RETRY_SECONDS", 0.001)
    full = tmp_path / "router-0.new"
    full.symlink_to("/dev/full")
    await router.set_workers({"decode 0": "127.0.0.1:1"}, "{}")
    await router.set_workers({"decode 0": "127.0.0.1:2"}, "{}")
    assert (tmp_path / "router-0.workers").read_text() == "", "it keeps the list that it has"
    wanted = [
        f"{tmp_path}/router-0.{name}: No space left on device; the router keeps the one before"
        for name in ("workers", "cluster")
    ]
    await eventually(
        lambda: [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == wanted
    )
    full.unlink()
    await eventually((tmp_path / "router-0.cluster").exists)
    assert (tmp_path / "router-0.workers").read_text() == "127.0.0.1:2\n"


async def test_a_report_that_does_not_fit_holds_no_list_of_workers_back(
    tmp_path: Path, router: RoleRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_room_for_reports(path: Path, text: str) -> None:
        if path.suffix == ".cluster":
            path = Path("/dev/full")
            path.write_text(text)
        write_atomically(path, text)

    monkeypatch.setattr("baton.cluster.supervision.runner.write_atomically", without_room_for_reports)
    await router.set_workers({"decode 0": "127.0.0.1:1"}, "{}")
    assert (tmp_path / "router-0.workers").read_text() == "127.0.0.1:1\n"


@pytest.mark.cases(1)
@pytest.mark.parametrize("output", ["a full disk", "a pipe without a reader"])
def test_output_that_cannot_be_written_ends_nothing(output: str) -> None:
    script = """
from baton.cluster.supervision.display import Display
display = Display()
with display:
    display.stage("router 0", "starting", 0.0)
display.line("a line")
display.error("an error")
print("alive", file=__import__("sys").stderr)
__import__("os")._exit(0)
"""
    with subprocess.Popen(["true"], stdin=subprocess.PIPE) as closed, open("/dev/full", "w") as full:
        closed.wait()
        done = subprocess.run(
            [sys.executable, "-c", script],
            stdout=full if output == "a full disk" else closed.stdin,
            stderr=subprocess.PIPE,
            text=True,
            check=True,
        )
    assert done.stderr == "alive\n"


def test_errors_above_the_end_of_a_log_are_told(tmp_path: Path) -> None:
    """The engine core of vLLM says why it does not start, and the process that waits for it says long after
    that it failed."""
    log = tmp_path / "prefill-0.log"
    cause, echo = "ValueError: use --dtype float32\n", "RuntimeError: see above\n"
    log.write_text("starting\n" + cause + "  File\n" * 30 + cause + "  File\n" * 19 + echo)
    assert end_of(log) == (
        f"Errors above the end of prefill-0.log:\n  {cause}"
        "The end of prefill-0.log:\n" + "    File\n" * 19 + f"  {echo}"
    )
    log.write_text("starting\n" + echo)
    assert end_of(log) == f"The end of prefill-0.log:\n  starting\n  {echo}"
    assert end_of(tmp_path / "missing.log") == ""
