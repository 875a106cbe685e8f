"""A test run that leaves processes or files of Baton behind fails. It names them, and ends or removes them.

A leftover process started during the run and works in this checkout. Init has adopted it, or it is still a
child of pytest. Processes that a user started beside the run have another parent.

All processes of a run have its directory for temporary files, where a leftover file is one with Baton's name.
A killed vLLM leaves sockets there, which go with the directory, and names in /dev/shm. Most of these have the
prefix of the run (`tests/vllm_worker/cheaper`). Those of its ranks on CPUs have another, so the run removes
them if they came while it ran and no process maps them.
"""

import contextlib
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from multiprocessing.util import Finalize
from pathlib import Path

import psutil
import pytest

from baton.cluster.supervision.rundir import RunDir
from tests.within import WITHIN

ROOT = Path(__file__).parents[1]
PATIENCE = WITHIN
"""Seconds. A child that dies with its parent may outlive it for a moment."""
HELPERS = ("multiprocessing", "baton tests: fork server", "baton.grammars.trials", " grammars")
"""In the command lines of children of pytest that end with it."""
SHARED_MEMORY = "vllm-of-tests-"
"""The prefix of each run begins so. Processes get it as `SHARED_MEMORY_OF_TESTS`."""
BATON = "baton"
"""Names of Baton's temporary files begin so."""
_FOUND = pytest.StashKey[list[str]]()
_DIRECTORY = pytest.StashKey[Path]()


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


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("SHARED_MEMORY_OF_TESTS", f"{SHARED_MEMORY}{os.getpid()}-")
    if hasattr(config, "workerinput"):
        return  # a process of pytest-xdist has the directory of the one that started it
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # pytest keeps its own directories
    # A short path, because sockets go there. It also removes what runs left that were killed.
    directory = RunDir.create(Path("/tmp"))
    config.stash[_DIRECTORY] = directory.path
    os.environ["TMPDIR"] = tempfile.tempdir = str(directory.path)
    # At the end of this process, after multiprocessing has removed its own directory there.
    Finalize(None, directory.remove, exitpriority=-200)


def files_left_behind(directory: Path) -> Iterator[str]:
    """Yields the temporary files that Baton left there."""
    for path in sorted(directory.iterdir()):
        if path.name.lstrip(".").startswith(BATON):
            yield " ".join(map(str, (path, *sorted(path.rglob("*")))))


def unmapped(entries: Iterable[os.DirEntry[str]]) -> list[os.DirEntry[str]]:
    """Those names in /dev/shm whose memory no process maps."""
    mapped, entries = set(), [*entries]
    for maps in Path("/proc").glob("[0-9]*/maps") if entries else ():
        with contextlib.suppress(OSError):  # the process has ended
            mapped |= {int(line.split()[4]) for line in maps.read_text().splitlines() if "/dev/shm/" in line}
    return [entry for entry in entries if entry.inode() not in mapped]


def is_of_ranks(entry: os.DirEntry[str]) -> bool:
    """Whether ranks of vLLM on CPUs made this name in /dev/shm. Before 0.32 it began with a process id."""
    return re.fullmatch(r"(vllm_dist_|\d+-tp:).*cpushm.*", entry.name) is not None


def remove_shared_memory(since: float) -> None:
    """Of this run. A run within a test has the prefix of the outer one, which removes the names."""
    prefix = os.environ["SHARED_MEMORY_OF_TESTS"]
    if prefix == f"{SHARED_MEMORY}{os.getpid()}-":
        names = [*os.scandir("/dev/shm")]
        of_ranks = (entry for entry in names if is_of_ranks(entry) and entry.stat().st_mtime > since)
        for entry in (*unmapped(of_ranks), *(entry for entry in names if entry.name.startswith(prefix))):
            Path(entry.path).unlink(missing_ok=True)


@pytest.hookimpl(trylast=True)  # after pytest-xdist has ended its processes
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        return  # a process of pytest-xdist: the one that started it looks
    since = psutil.Process().create_time()
    processes = end(list(left_behind(since)))
    files = files_left_behind(session.config.stash[_DIRECTORY])
    session.config.stash[_FOUND] = [*processes, *files]
    remove_shared_memory(since)
    if session.config.stash[_FOUND]:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if found := config.stash.get(_FOUND, []):
        terminalreporter.section("left behind by tests (ended or removed)", red=True)
        for line in found:
            terminalreporter.write_line(line)
