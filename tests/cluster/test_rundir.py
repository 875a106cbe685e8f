import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.cluster.supervision import rundir
from baton.cluster.supervision.rundir import Janitor, RunDir
from baton.system.python_path import PACKAGES
from tests.within import within

OWNER = """
import sys
from pathlib import Path
from baton.cluster.supervision.rundir import RunDir

run_dir = RunDir.create(Path(sys.argv[1]))
print(run_dir.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def parent() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rd") as path:  # pytest's own are too long for sockets
        yield Path(path)


def test_it_is_private_and_goes_away(parent: Path) -> None:
    run_dir = RunDir.create(parent)
    assert run_dir.path.stat().st_mode & 0o777 == 0o700
    run_dir.remove()
    assert list(parent.iterdir()) == []


def test_a_place_where_no_directory_can_be_made_is_named(parent: Path) -> None:
    (parent / "file").touch()
    with pytest.raises(ValueError, match=r"--advanced.run-dir .*file: File exists; name a directory"):
        RunDir.create(parent / "file")


def test_a_workers_socket_fits(parent: Path) -> None:
    longest = parent / ("x" * (rundir.MAX_PARENT - len(f"{parent}/")))
    longest.mkdir()
    directory = RunDir.create(longest).path / "baton-XXXXXXXX"
    directory.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "engine"))
    with pytest.raises(ValueError, match=r"--advanced.run-dir.*too long"):
        RunDir.create(Path(f"{longest}x"))


def test_only_run_directories_of_dead_owners_are_removed(parent: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, parent],
        env={"PYTHONPATH": PACKAGES},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    path = Path(owner.stdout.readline().strip())
    (path / "file").touch()
    living = RunDir.create(parent)
    assert path.exists(), "its owner lives"
    owner.kill()
    owner.communicate()
    assert path.exists()
    another = RunDir.create(parent)
    assert not path.exists()
    assert living.path.exists()
    living.remove()
    another.remove()


def test_a_janitor_that_hangs_is_dismissed(parent: Path) -> None:
    """Else `baton serve` would never end."""
    run_dir = RunDir.create(parent)
    janitor = Janitor(run_dir.path, "a janitor")
    os.kill(janitor._process.pid, signal.SIGSTOP)
    janitor.dismiss()
    assert run_dir.path.exists(), "its owner lives"
    run_dir.remove()


async def test_a_janitor_that_died_is_started_again(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the run directory goes away when its owner is killed later. A start may fail at first."""
    monkeypatch.setattr(rundir, "RESTART_SECONDS", 0.01)
    run_dir = RunDir.create(parent)
    janitor = Janitor(run_dir.path, "a janitor")
    start, started = janitor._start, asyncio.Event()
    failures = iter([OSError("no process is left")])

    def starts() -> subprocess.Popen[bytes]:
        if (failure := next(failures, None)) is not None:
            raise failure
        started.set()
        return start()

    monkeypatch.setattr(janitor, "_start", starts)
    keeping = asyncio.create_task(janitor.keep())
    janitor._process.kill()
    await within(started.wait())
    await asyncio.sleep(0)
    keeping.cancel()
    os.close(run_dir._lock)  # as the kernel does when the owner is killed
    janitor._process.communicate()
    assert list(parent.iterdir()) == []
