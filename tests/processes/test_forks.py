"""Processes that share what a helper has loaded."""

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest

from baton.processes import forks as forks_module
from baton.processes.children import Child
from baton.processes.forks import Forks
from tests.within import within

HELPER = """
import os, socket, sys
from baton.processes import forks
loaded = b""
def load(given):
    global loaded
    loaded = given
    return "baton tests: helper"
def run(given, fds):
    with socket.socket(fileno=fds[0]) as sock:
        sock.send(b"%b %b %d" % (loaded, given, os.getppid()))
        return len(sock.recv(1))
forks.serve(int(sys.argv[1]), load, run)
"""


@pytest.fixture
async def helper() -> AsyncIterator[Forks]:
    made = Forks("-c", HELPER)
    made.give(b"loaded")
    yield made
    made.close()


async def started(helper: Forks, given: bytes) -> tuple[Child, socket.socket]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with theirs:
        child = Child("a process", await within(helper.start(given, [theirs.fileno()])))
    said = await within(asyncio.get_running_loop().sock_recv(ours, 100))
    assert said == b"loaded %b %d" % (given, os.getpid())
    return child, ours


async def test_a_process_is_a_child_of_its_parent_and_outlives_the_helper(helper: Forks) -> None:
    """Also of a parent with threads. One that has ended is replaced, at the next start."""
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    first, of_first = await started(helper, b"first")
    assert psutil.Process(first.pid).ppid() == os.getpid()
    before = helper._helper.pid
    os.kill(before, signal.SIGKILL)
    helper._helper.wait()
    second, of_second = await started(helper, b"second")
    assert helper._helper.pid != before
    assert not first.has_ended
    with of_first, of_second:
        of_first.send(b"x")
        assert await within(first.wait()) == 1
        second.kill()
        assert await within(second.wait()) == -signal.SIGKILL


async def test_a_helper_that_hangs_is_killed_and_the_next_start_has_another(
    helper: Forks, monkeypatch: pytest.MonkeyPatch
) -> None:
    (await started(helper, b"first"))[1].close()
    os.kill(helper._helper.pid, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(forks_module, "HANG_SECONDS", 0.05)
        with pytest.raises(ConnectionError, match="the process that forks"):
            await helper.start(b"", [])
    child, ours = await started(helper, b"second")
    ours.close()
    assert await within(child.wait()) == 0


async def test_a_helper_that_ends_while_it_is_asked_is_told(helper: Forks) -> None:
    (await started(helper, b"first"))[1].close()
    os.kill(helper._helper.pid, signal.SIGSTOP)
    asked: asyncio.Task[Any] = asyncio.create_task(helper.start(b"", []))
    await asyncio.sleep(0)
    os.kill(helper._helper.pid, signal.SIGKILL)
    with pytest.raises(OSError, match=r"the process that forks|reset"):
        await within(asked)
    with contextlib.closing((await started(helper, b"second"))[1]):
        pass
