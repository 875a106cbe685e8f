"""Other commands of a user find the secret of a local cluster, and nothing else does."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.cluster.supervision.announcement import NAME, Announcement, secret_of, send
from baton.cluster.supervision.rundir import RunDir
from tests.within import WITHIN

SECRET = "a secret of some bytes"
URL = "http://127.0.0.1:8123"


@pytest.fixture
def parent() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="an") as path:
        yield Path(path)


@pytest.fixture
def run_dir(parent: Path) -> Iterator[RunDir]:
    """Of a cluster with the ports 8123 and 9123, whose process is this one."""
    run_dir = RunDir.create(parent)
    Announcement(os.getpid(), (8123, 9123), SECRET).announce(run_dir.path)
    yield run_dir
    if run_dir.path.exists():
        run_dir.remove()


def test_only_the_user_can_read_it_and_it_goes_away(run_dir: RunDir, parent: Path) -> None:
    assert (run_dir.path / NAME).stat().st_mode & 0o777 == 0o600
    assert secret_of(URL, parent) == SECRET.encode()
    run_dir.remove()
    assert secret_of(URL, parent) is None


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("http://localhost:8123/v1", True),
        ("https://[::1]:9123", True),
        ("http://127.0.0.1:8124", False),
        ("http://127.0.0.1", False),
        ("http://192.0.2.1:8123", False),  # an address for documents
        ("http://host.invalid:8123", False),
    ],
)
def test_the_url_names_the_cluster(run_dir: RunDir, parent: Path, url: str, found: bool) -> None:
    assert run_dir.path.exists()
    assert (secret_of(url, parent) is not None) == found


def test_a_directory_whose_owner_is_dead_tells_nothing(parent: Path) -> None:
    dead = parent / "baton.dead"
    dead.mkdir(0o700)
    Announcement(os.getpid(), (8123,), SECRET).announce(dead)
    assert secret_of(URL, parent) is None
    assert not send(URL, parent, signal.SIGUSR1), "it would end this process"


def test_a_directory_of_another_user_tells_nothing(
    run_dir: RunDir, parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else that user would choose the secret with which this one proves itself."""
    monkeypatch.setattr(os, "getuid", lambda: run_dir.path.stat().st_uid + 1)
    assert run_dir.path.exists()
    assert secret_of(URL, parent) is None


OWNER = """
import os, signal, sys
from pathlib import Path
from baton.cluster.supervision.announcement import Announcement
from baton.cluster.supervision.rundir import RunDir

run_dir = RunDir.create(Path(sys.argv[1]))
signal.signal(signal.SIGUSR1, lambda *_: print("told", flush=True))
Announcement(os.getpid(), (8123,), "a secret of some bytes").announce(run_dir.path)
print("ready", flush=True)
sys.stdin.read()
run_dir.remove()
"""


def test_its_process_gets_the_signal(parent: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "ready\n"
        assert send(URL, parent, signal.SIGUSR1)
        assert owner.stdout.readline() == "told\n"
        owner.communicate("", timeout=WITHIN)
    assert owner.returncode == 0


def test_a_secret_is_in_no_text_of_it() -> None:
    announced = Announcement(1, (8123,), SECRET)
    assert SECRET not in repr(announced)
    known = {"pid": 1, "ports": [8123], "secret": SECRET}
    assert Announcement.parse(json.dumps(known).encode()) == announced
