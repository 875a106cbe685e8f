"""A child process: its tie to the parent, what it gets, and its end."""

import asyncio
import os
import signal
import subprocess
import sys

import psutil
import pytest

from baton.processes import tree
from baton.processes.children import Child, describe_exit
from baton.processes.spawn import environment, spawn
from tests.within import WITHIN, within

# A parent process that spawns a child and prints the pid of the child. The child ties itself to the parent.
_PARENT = """
import os, time
from baton.processes.spawn import spawn
child = spawn("-m", "tests.processes.tied_child", given=str(%s).encode())
print(child.pid, flush=True)
time.sleep(60)
"""


def start_parent(parent_pid: str) -> tuple[subprocess.Popen[str], psutil.Process]:
    parent = subprocess.Popen([sys.executable, "-c", _PARENT % parent_pid], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    return parent, psutil.Process(int(parent.stdout.readline()))


@pytest.mark.all
def test_a_child_dies_when_its_parent_is_killed() -> None:
    parent, child = start_parent("os.getpid()")
    assert parent.stdout is not None
    assert parent.stdout.readline() == "tied\n"
    assert child.cmdline()[0] == "baton: tied child"
    parent.kill()
    parent.wait()
    child.wait(WITHIN)


@pytest.mark.all
def test_a_child_whose_parent_is_already_dead_does_not_start() -> None:
    parent, child = start_parent("os.getpid() + 1")
    assert parent.stdout is not None
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        pass
    parent.kill()
    assert parent.stdout.read() == ""
    parent.wait()


@pytest.mark.all
def test_a_child_ignores_sigint_and_sigterm() -> None:
    parent, child = start_parent("os.getpid()")
    assert parent.stdout is not None
    assert parent.stdout.readline() == "tied\n"
    for number in (signal.SIGINT, signal.SIGTERM):
        assert _ignored(child.pid, number)
    parent.kill()
    parent.wait()
    child.wait(WITHIN)


def _ignored(pid: int, number: signal.Signals) -> bool:
    with open(f"/proc/{pid}/status") as file:
        mask = next(int(line.split()[1], 16) for line in file if line.startswith("SigIgn"))
    return bool(mask >> (number - 1) & 1)


def test_the_environment_of_a_child_has_no_cluster_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CLUSTER_SECRET", "secret")
    child = spawn("-m", "tests.processes.tied_child", given=str(os.getpid()).encode())
    process = psutil.Process(child.pid)
    assert "BATON_CLUSTER_SECRET" not in process.environ()
    child.kill()
    child.wait()


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "60"])


async def test_every_waiting_task_gets_the_exit_code() -> None:
    child = Child("sleeper", sleeper())
    waiting = [asyncio.create_task(child.wait()) for _ in range(2)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    child.kill()
    assert await within(asyncio.gather(*waiting)) == [-9, -9]
    child.kill()
    assert await child.end(1) == -9


async def test_a_child_that_does_not_end_in_time_is_killed_even_when_stopped() -> None:
    popen = sleeper()
    popen.send_signal(signal.SIGSTOP)
    assert await Child("sleeper", popen).end(0.05) == -signal.SIGKILL


@pytest.mark.parametrize(("code", "text"), [(3, "exited with 3"), (-9, "was killed by SIGKILL")])
def test_an_exit_code_is_described_in_words(code: int, text: str) -> None:
    assert describe_exit(code) == text


def test_what_a_child_is_given_may_be_large_and_is_read_once() -> None:
    """The child leaves nothing of it in /proc."""
    code = "import os; from baton.processes.spawn import take_given as take; "
    code += "print(len(take()), len(take()), os.fstat(0).st_size)"
    with os.fdopen(os.memfd_create("given"), "w+b") as file:
        file.write(bytes(1 << 20))
        file.seek(0)
        ran = subprocess.run(
            [sys.executable, "-c", code], stdin=file, env=environment(), stdout=subprocess.PIPE
        )
    assert ran.stdout.split() == [b"1048576", b"0", b"0"]


def test_a_child_that_another_thread_has_reaped_is_no_orphan(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was there when the children were listed."""
    ended = subprocess.Popen(["true"])
    child = psutil.Process(ended.pid)
    ended.wait()
    monkeypatch.setattr(psutil.Process, "children", lambda self: [child])
    tree._reap_orphans()
