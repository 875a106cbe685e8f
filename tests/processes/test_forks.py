"""Processes that share what their parent has loaded."""

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from baton.processes import forks as forks_module
from baton.processes.children import Child, Forked, process_end
from baton.processes.forks import Forks, HelperEnded
from baton.processes.sandbox import helper as sandbox
from tests.processes.helpers import helper
from tests.within import within

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
def process(ends: tuple[socket.socket, socket.socket]) -> Forked:
    """The helper's."""
    with ends[1] as theirs:
        return helper(theirs, "-c", HELPER)


@pytest.fixture
def forks(ends: tuple[socket.socket, socket.socket], process: Forked) -> Iterator[Forks]:
    with contextlib.closing(Forks(process, ends[0])) as made:
        yield made


async def started(forks: Forks, given: bytes) -> tuple[Child, socket.socket]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with theirs:
        child = Child("a process", await within(forks.start(given, [theirs.fileno()])))
    said = await within(asyncio.get_running_loop().sock_recv(ours, 100))
    assert said == b"%b %d" % (given, os.getpid())
    return child, ours


async def test_a_process_is_a_child_of_its_parent_and_outlives_the_helper(
    forks: Forks, process: Forked
) -> None:
    """Also of a parent with threads. No other can be started then."""
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    (first, of_first), (second, of_second) = [await started(forks, given) for given in (b"first", b"second")]
    assert psutil.Process(first.pid).ppid() == os.getpid()
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(HelperEnded):
        await within(forks.start(b"third", []))
    assert not first.has_ended
    with of_first, of_second:
        of_first.send(b"x")
        assert await within(first.wait()) == 1
        second.kill()
        assert await within(second.wait()) == -signal.SIGKILL


async def test_a_helper_that_hangs_is_killed(
    forks: Forks, process: Forked, monkeypatch: pytest.MonkeyPatch
) -> None:
    (await started(forks, b"first"))[1].close()
    os.kill(process.pid, signal.SIGSTOP)
    monkeypatch.setattr(forks_module, "HANG_SECONDS", 0.05)
    with pytest.raises(HelperEnded):
        await forks.start(b"", [])
    await within(process_end(process.pid))


async def test_a_helper_that_ends_while_it_is_asked_is_told(forks: Forks, process: Forked) -> None:
    (await started(forks, b"first"))[1].close()
    os.kill(process.pid, signal.SIGSTOP)
    asked: asyncio.Task[Any] = asyncio.create_task(forks.start(b"", []))
    await asyncio.sleep(0)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(HelperEnded):
        await within(asked)


def test_a_child_replies_before_it_gives_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    happened = list[bytes]()
    requests = iter([b"a", b"b", None])
    monkeypatch.setattr(sandbox, "read", lambda: next(requests))
    monkeypatch.setattr(sandbox, "_write", happened.append)
    monkeypatch.setattr(sandbox, "_give_memory_back", lambda: happened.append(b"gives back"))
    sandbox.serve(bytes.upper, 20.0)
    assert happened[1:] == [b"A", b"gives back", b"B", b"gives back"]
