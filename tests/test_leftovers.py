"""Leftover processes of a test run are found."""

from __future__ import annotations

import math
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from baton.kv_transfer.wait import wait
from tests import leftovers
from tests.system.machine import Machine
from tests.within import WITHIN

SLEEP = "import time; time.sleep(3600)"
ORPHAN = f"import os; print(os.getpid(), flush=True); os.close(1); {SLEEP}"
"""It says itself that it runs: before that, its command line may be empty."""
STARTER = f"import subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', {ORPHAN!r}])"


def test_an_orphan_of_the_run_is_found_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "PATIENCE", 0.0)
    started = subprocess.run([sys.executable, "-S", "-c", STARTER], stdout=subprocess.PIPE, check=True)
    orphan = psutil.Process(int(started.stdout))
    line = f"{orphan.pid}: {' '.join(orphan.cmdline())}"
    assert orphan in leftovers.left_behind(psutil.Process().create_time())
    assert orphan not in leftovers.left_behind(orphan.create_time()), "it is older than the run"
    ended = os.pidfd_open(orphan.pid)
    assert leftovers.end([orphan]) == [line]
    assert wait([ended], WITHIN)
    os.close(ended)


def test_a_process_that_a_user_started_is_not_found() -> None:
    """Its parent is another process than pytest and init."""
    parent = "import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', sys.argv[1]])"
    with subprocess.Popen([sys.executable, "-S", "-c", parent, SLEEP]) as shell:
        user = psutil.Process(shell.pid)
        while not (children := user.children()):
            time.sleep(0.01)
        found = list(leftovers.left_behind(psutil.Process().create_time()))
        children[0].kill()
    assert children[0] not in found


def test_a_file_of_baton_is_found(tmp_path: Path) -> None:
    for name in ("baton-1", ".baton-2", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "baton-1" / "engine").touch()
    found = list(leftovers.files_left_behind(tmp_path))
    assert found == [f"{tmp_path}/.baton-2", f"{tmp_path}/baton-1 {tmp_path}/baton-1/engine"]


def test_names_in_shared_memory_of_vllm_are_no_trace_and_go_with_their_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine()
    prefixes = [*(f"{leftovers.SHARED_MEMORY}{run}-" for run in (os.getpid(), 0)), "vllm_dist_", "7-tp:0-"]
    names = [f"{prefix}{os.urandom(4).hex()}-cpushm_0" for prefix in (*prefixes, "psm_")]
    paths = ours, _, of_ranks, mapped, strange = [Path("/dev/shm", name) for name in names]
    since = psutil.Process().create_time()
    try:
        for path in paths:
            path.write_bytes(b"1")
        left = machine._left_shared_memory()
        assert strange.name in left
        assert not {*names[:4]} & {*left}
        with mapped.open("rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        monkeypatch.setenv("SHARED_MEMORY_OF_TESTS", f"{leftovers.SHARED_MEMORY}0-")
        leftovers.remove_shared_memory(since)
        assert ours.exists(), "a run within a test removes nothing"
        monkeypatch.setenv("SHARED_MEMORY_OF_TESTS", f"{leftovers.SHARED_MEMORY}{os.getpid()}-")
        leftovers.remove_shared_memory(math.inf)
        assert [path for path in paths if not path.exists()] == [ours], "others came before the run"
        leftovers.remove_shared_memory(since)
        assert [path for path in paths if not path.exists()] == [ours, of_ranks]
        memory.close()
    finally:
        for path in paths:
            path.unlink(missing_ok=True)
        machine.remove()
