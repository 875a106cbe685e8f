"""Processes that share what their parent has imported and loaded: seconds and 100 MiB of each are saved.

    parent ─fork─▶ helper, which has no thread ─fork─▶ ─fork─▶ a process, which the parent adopts

The parent forks the helper before it has threads of its own, which a fork would lose. The process between
ends at once, so that a process is a child of the parent, and goes on when the helper ends.
"""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from baton.processes.children import Forked, adopt_orphans, become
from baton.processes.forking import serve_forks
from baton.processes.liveness import HANG_SECONDS

_ADOPTED_WITHIN = 10.0

Run = Callable[[bytes, Sequence[int]], int]
"""What a process does with what `Forks.start` was given. Returns its exit code."""


class HelperEnded(Exception):
    """The helper has ended, or hung and was killed. The parent may have threads by now: it forks no other."""


class Forks:
    """The parent's side. It owns the helper."""

    def __init__(self, helper: Forked, control: socket.socket) -> None:
        """`control`: to the helper."""
        self._helper, self._socket = helper, control
        self._socket.setblocking(False)
        self._one_at_a_time = asyncio.Lock()

    async def start(self, given: bytes, fds: Sequence[int]) -> Forked:
        """Starts a process with `given` and copies of `fds`. Raises OSError and HelperEnded."""
        async with self._one_at_a_time:
            with _adopting():
                try:
                    self._send(given, fds)
                    async with asyncio.timeout(HANG_SECONDS):
                        pid = int(await asyncio.get_running_loop().sock_recv(self._socket, 64) or 0)
                except (ConnectionError, TimeoutError):
                    pid = 0
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        if not pid:
            self._helper.kill()
            raise HelperEnded("the process that forks has ended, or hangs")
        return Forked(pid)

    def close(self) -> None:
        self._socket.close()
        self._helper.kill()
        self._helper.wait()

    def _send(self, given: bytes, fds: Sequence[int]) -> None:
        with os.fdopen(os.memfd_create("given"), "w+b") as file:
            file.write(given)
            file.seek(0)
            socket.send_fds(self._socket, [b"given"], [file.fileno(), *fds])


def fork_helper(title: str, run: Run, not_inherited: Sequence[int]) -> Forks:
    """Forks a helper off this process, which has no thread yet. `not_inherited`: descriptors of this process
    alone."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent_pid = os.getpid()
    if not (pid := os.fork()):
        for fd in (ours.detach(), *not_inherited):
            os.close(fd)
        become(parent_pid, lambda: serve(theirs, parent_pid, title, run))
    theirs.close()
    return Forks(Forked(pid), ours)


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """This process becomes the parent of its descendants that lose theirs."""
    adopt_orphans()
    try:
        yield
    finally:
        adopt_orphans(False)


# ------------------------------------------------------------ the helper


def serve(messages: socket.socket, parent_pid: int, title: str, run: Run) -> int:
    """Forks until its parent has gone."""

    def fork(_: bytes, fds: list[int]) -> None:
        with open(fds.pop(0), "rb") as file:
            given = file.read()
        reader, writer = os.pipe()
        try:
            if not (between := os.fork()):
                messages.close()
                os.close(reader)
                _fork_again(writer, parent_pid, lambda: run(given, fds))
            os.waitpid(between, 0)  # now the parent has adopted the process
            messages.send(os.read(reader, 64))
        except OSError as error:
            messages.send(b"%d" % -(error.errno or 1))
        finally:
            os.close(reader)
            os.close(writer)

    return serve_forks(messages, title, fork)


def _fork_again(writer: int, parent_pid: int, run: Callable[[], int]) -> NoReturn:
    try:
        pid = os.fork()
    except OSError as error:
        pid = -(error.errno or 1)
    if pid:
        os.write(writer, b"%d" % pid)
        os._exit(0)
    os.close(writer)
    until = time.monotonic() + _ADOPTED_WITHIN
    while os.getppid() != parent_pid and time.monotonic() < until:
        time.sleep(0.001)  # the process between ends
    become(parent_pid, run)
