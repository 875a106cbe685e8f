"""Processes that share what a helper has imported and loaded: seconds and 100 MiB of each are saved.

    parent ─exec─▶ helper, which has no thread ─fork─▶ ─fork─▶ a process, which the parent adopts

The parent may have threads. The process between ends at once, so that a process is a child of the parent, and
goes on when the helper ends.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from setproctitle import setproctitle

from baton.processes.children import Adopted, adopt_orphans, die_with_parent
from baton.processes.liveness import HANG_SECONDS
from baton.processes.spawn import spawn

_ADOPTED_WITHIN = 10.0
_MOST_FDS = 16


class Forks:
    """The parent's side. It owns the helper, and starts it again when it has ended."""

    def __init__(self, *arguments: str) -> None:
        """`arguments`: of Python, for the helper. The number of its socket follows."""
        self._arguments = arguments
        self._given = b""
        self._one_at_a_time = asyncio.Lock()
        self._helper, self._socket = self._spawn()

    def give(self, given: bytes) -> None:
        """What the helper waits for before it forks."""
        self._given = given
        self._send(given)

    async def start(self, given: bytes, fds: Sequence[int]) -> Adopted:
        """Starts a process with `given` and copies of `fds`. Raises OSError."""
        async with self._one_at_a_time:
            if self._helper.poll() is not None:
                self._socket.close()
                self._helper, self._socket = self._spawn()
                self._send(self._given)
            with _adopting():
                self._send(given, fds)
                try:
                    async with asyncio.timeout(HANG_SECONDS):
                        pid = int(await asyncio.get_running_loop().sock_recv(self._socket, 64) or 0)
                except TimeoutError:
                    self._helper.kill()
                    pid = 0
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        if not pid:
            self._helper.wait()
            raise ConnectionError("the process that forks has ended")
        return Adopted(pid)

    def close(self) -> None:
        self._socket.close()
        self._helper.kill()
        self._helper.wait()

    def _spawn(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = theirs.fileno()
            helper = spawn(*self._arguments, str(number), given=b"", pass_fds=[number])
        ours.setblocking(False)
        return helper, ours

    def _send(self, given: bytes, fds: Sequence[int] = ()) -> None:
        with os.fdopen(os.memfd_create("given"), "w+b") as file:
            file.write(given)
            file.seek(0)
            socket.send_fds(self._socket, [b"given"], [file.fileno(), *fds])


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """This process becomes the parent of its descendants that lose theirs."""
    adopt_orphans()
    try:
        yield
    finally:
        adopt_orphans(False)


# ------------------------------------------------------------ the helper


def serve(control: int, load: Callable[[bytes], str], run: Callable[[bytes, Sequence[int]], int]) -> None:
    """Forks until its parent has gone. `load`: gets what all share, returns the title of the helper. `run`:
    what a process does with what `start` has given. Returns its exit code."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # for the parent
        signal.signal(number, signal.SIG_IGN)
    parent_pid = os.getppid()
    die_with_parent()
    messages = socket.socket(fileno=control)
    setproctitle(load(_received(messages)[0]))
    while True:
        given, fds = _received(messages)
        reader, writer = os.pipe()
        try:
            if not (between := os.fork()):
                messages.close()
                os.close(reader)
                _fork_again(writer, parent_pid, lambda given=given, fds=fds: run(given, fds))
            os.waitpid(between, 0)  # now the parent has adopted the process
            messages.send(os.read(reader, 64))
        except OSError as error:
            messages.send(b"%d" % -(error.errno or 1))
        for fd in (*fds, reader, writer):
            os.close(fd)


def _received(messages: socket.socket) -> tuple[bytes, list[int]]:
    message, fds, *_ = socket.recv_fds(messages, 64, _MOST_FDS)
    if not message:
        os._exit(0)
    with open(fds.pop(0), "rb") as file:
        return file.read(), fds


def _fork_again(writer: int, parent_pid: int, run: Callable[[], int]) -> NoReturn:
    code = 1
    try:
        pid = os.fork()
    except OSError as error:
        pid = -(error.errno or 1)
    if pid:
        os.write(writer, b"%d" % pid)
        os._exit(0)
    try:
        os.close(writer)
        until = time.monotonic() + _ADOPTED_WITHIN
        while os.getppid() != parent_pid and time.monotonic() < until:
            time.sleep(0.001)  # the process between ends
        die_with_parent(parent_pid)
        code = run()
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    os._exit(code)
