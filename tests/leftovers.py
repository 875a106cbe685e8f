"""A test run that leaves processes behind fails. It names them and ends them.

A leftover process started during the run and works in this checkout. Init has adopted it, or it is still a
child of pytest. Processes that a user started beside the run have another parent.

vLLM leaves names in /dev/shm when it is killed, as some tests do. So its processes give them the prefix of
the run (`tests/vllm_worker/cheaper`), and the run removes them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.within import WITHIN

ROOT = Path(__file__).parents[1]
PATIENCE = WITHIN
"""Seconds. A child that dies with its parent may outlive it for a moment."""
HELPERS = ("multiprocessing", "baton tests: fork server", "baton.machine.grammars", " grammars")
"""In the command lines of children of pytest that end with it."""
SHARED_MEMORY = "vllm-of-tests-"
"""The prefix of each run begins so. Processes get it as `SHARED_MEMORY_OF_TESTS`."""
_FOUND = pytest.StashKey[list[str]]()


def left_behind(since: float) -> Iterator[psutil.Process]:
    """Yields the leftover processes that started after `since` (psutil's `create_time`)."""
    for process in psutil.process_iter():
        try:
            if process.create_time() <= since or not Path(process.cwd()).is_relative_to(ROOT):
                continue
            parent = process.parent()
            if parent is None or parent.pid == 1 or parent.name() == "systemd":
                yield process
            elif parent.pid == os.getpid():
                line = " ".join(process.cmdline())
                if not any(helper in line for helper in HELPERS):
                    yield process
        except psutil.Error:
            continue  # it has ended, or it belongs to another user


def end(processes: list[psutil.Process]) -> list[str]:
    """Kills the processes that do not end by themselves soon. Returns a line for each."""
    _, alive = psutil.wait_procs(processes, PATIENCE)
    lines = []
    for process in alive:
        try:
            lines.append(f"{process.pid}: {' '.join(process.cmdline()).strip()}")
            process.kill()
        except psutil.NoSuchProcess:
            continue
    return lines


def pytest_configure() -> None:
    os.environ.setdefault("SHARED_MEMORY_OF_TESTS", f"{SHARED_MEMORY}{os.getpid()}-")


def remove_shared_memory() -> None:
    """Of this run. A run within a test has the prefix of the outer one, which removes the names."""
    prefix = os.environ["SHARED_MEMORY_OF_TESTS"]
    if prefix == f"{SHARED_MEMORY}{os.getpid()}-":
        for path in Path("/dev/shm").glob(f"{prefix}*"):
            path.unlink(missing_ok=True)


@pytest.hookimpl(trylast=True)  # after pytest-xdist has ended its processes
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        return  # a process of pytest-xdist: the one that started it looks
    since = psutil.Process().create_time()
    session.config.stash[_FOUND] = end(list(left_behind(since)))
    remove_shared_memory()
    if session.config.stash[_FOUND]:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if found := config.stash.get(_FOUND, []):
        terminalreporter.section("processes that tests left behind (killed)", red=True)
        for line in found:
            terminalreporter.write_line(line)
