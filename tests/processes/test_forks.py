"""Processes that share what their parent has loaded. The helper is no fork of pytest, which has threads."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from baton.processes import forks as forks_module
from baton.processes.children import Child
from baton.processes.forks import Forks, HelperEnded
from baton.processes.spawn import spawn
from tests.within import within

Process = subprocess.Popen[bytes]
HELPER = """
import os, socket, sys
from baton.processes import forks
def run(given, fds):
    with socket.socket(fileno=fds[0]) as sock:
        sock.send(b"%b %d" % (given, os.getppid()))
        return len(sock.recv(1))
forks.serve(socket.socket(fileno=int(sys.argv[1])), os.getppid(), "baton tests: helper", run)
"""


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def process(ends: tuple[socket.socket, socket.socket]) -> Process:
    """The helper's."""
    with ends[1] as theirs:
        return spawn("-c", HELPER, str(theirs.fileno()), given=b"", pass_fds=[theirs.fileno()])


@pytest.fixture
def helper(ends: tuple[socket.socket, socket.socket], process: Process) -> Iterator[Forks]:
    with contextlib.closing(Forks(process, ends[0])) as made:
        yield made


async def started(helper: Forks, given: bytes) -> tuple[Child, socket.socket]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with theirs:
        child = Child("a process", await within(helper.start(given, [theirs.fileno()])))
    said = await within(asyncio.get_running_loop().sock_recv(ours, 100))
    assert said == b"%b %d" % (given, os.getpid())
    return child, ours


async def test_a_process_is_a_child_of_its_parent_and_outlives_the_helper(
    helper: Forks, process: Process
) -> None:
    """Also of a parent with threads. No other can be started then."""
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    (first, of_first), (second, of_second) = [await started(helper, given) for given in (b"first", b"second")]
    assert psutil.Process(first.pid).ppid() == os.getpid()
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(HelperEnded):
        await within(helper.start(b"third", []))
    assert not first.has_ended
    with of_first, of_second:
        of_first.send(b"x")
        assert await within(first.wait()) == 1
        second.kill()
        assert await within(second.wait()) == -signal.SIGKILL


async def test_a_helper_that_hangs_is_killed(
    helper: Forks, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    (await started(helper, b"first"))[1].close()
    os.kill(process.pid, signal.SIGSTOP)
    monkeypatch.setattr(forks_module, "HANG_SECONDS", 0.05)
    with pytest.raises(HelperEnded):
        await helper.start(b"", [])
    assert process.wait() == -signal.SIGKILL


async def test_a_helper_that_ends_while_it_is_asked_is_told(helper: Forks, process: Process) -> None:
    (await started(helper, b"first"))[1].close()
    os.kill(process.pid, signal.SIGSTOP)
    asked: asyncio.Task[Any] = asyncio.create_task(helper.start(b"", []))
    await asyncio.sleep(0)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(HelperEnded):
        await within(asked)
