"""Children of a helper, as the event loop of their caller has them.

Life of a child: started by its first request → request → reply → … → dead → started again by the next
request. `ENDS` has what follows. Beside a reply it may leave bytes in a file in memory that both have.
"""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from io import FileIO
from typing import Literal

import numpy as np

from baton.processes import children
from baton.processes.keep import keep
from baton.processes.liveness import HANG_SECONDS
from baton.processes.restarts import RestartPolicy
from baton.processes.sandbox.helper import LENGTH
from baton.processes.spawn import spawn

log = logging.getLogger(__name__)

Frame = bytes | bytearray
_DYING_SECONDS = 1.0
_RESTART_SECONDS = 0.5
_CHECK_SECONDS = 10.0
_PIECE_BYTES = 1 << 20
"""Of what is beside a reply, that one turn of the loop reads: 0.4 ms."""
_SLICE_BYTES = 256 << 10
"""Bytes of one write. To copy a whole body into a transport would block the loop for milliseconds."""


Phase = Literal["starting", "idle", "busy"]
End = Literal["killed", "ended", "hung"]
Then = Literal["replaced", "sent again", "fails", "refused"]

ENDS: dict[tuple[Phase, End], Then] = {
    ("starting", "killed"): "sent again",
    ("starting", "ended"): "fails",
    ("starting", "hung"): "fails",
    ("idle", "killed"): "replaced",
    ("idle", "ended"): "replaced",
    ("busy", "killed"): "sent again",
    ("busy", "ended"): "refused",
    ("busy", "hung"): "refused",
}
"""What follows for the request that a child has, or for the next one. A person or the kernel kills by SIGKILL
or SIGTERM. A limit or a crash of a library ends a child by another signal: a request may be the cause."""


class ChildDied(Exception):
    """The child died, or could not start.

    Attributes:
        then: as in `ENDS`.
    """

    def __init__(self, phase: Phase, code: int, *, hung: bool = False) -> None:
        super().__init__(f"no reply for {HANG_SECONDS:g} s" if hung else f"exit code {code}")
        end: End = "hung" if hung else "killed" if code in (-signal.SIGKILL, -signal.SIGTERM) else "ended"
        self.then: Then = ENDS[phase, end]


class ForkServer:
    """The process that forks children. It starts with the first of them, and again when it ends or hangs.
    Requests wait meanwhile.

    Attributes:
        fd: of the socket to it, for other processes of this host.
    """

    def __init__(self, arguments: Sequence[str], given: bytes = b"", fd: int | None = None) -> None:
        """`arguments`, `given`: of `spawn`, for the helper. `fd`: the helper is another process's."""
        self._arguments, self._given = arguments, given
        self._running: asyncio.Task[None] | None = None
        self._server_end: socket.socket | None = None
        if fd is None:
            self._socket, self._server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        else:
            self._socket = socket.socket(fileno=os.dup(fd))
        self._socket.setblocking(False)
        self.fd = self._socket.fileno()

    def start(self) -> None:
        if self._server_end is not None and self._running is None:
            self._running = asyncio.create_task(self._run())

    def spawn(self) -> subprocess.Popen[bytes]:
        """Starts the process, which `start` also keeps alive."""
        assert self._server_end is not None, "it is another process's"
        number = self._server_end.fileno()
        return spawn(*self._arguments, str(number), given=self._given, pass_fds=[number])

    async def _run(self) -> None:
        async def live() -> tuple[float, str]:
            helper = children.Child("helper", self.spawn())
            try:
                return 0.0, "has ended" if await self._ended(helper) else "hangs"
            finally:
                helper.kill()
                await helper.wait()

        def ended(why: str, delay: float) -> None:
            log.error("the process that forks children for requests %s; it starts again", why)

        await keep(live, RestartPolicy(_RESTART_SECONDS, _RESTART_SECONDS), asyncio.Event(), ended)

    async def _ended(self, helper: children.Child) -> bool:
        """Waits until the helper has ended, or does not fork. Returns whether it has ended.

        A check that an ended process has not read would wait for the next process, which starts only then. So
        both are awaited together."""
        ending = asyncio.create_task(helper.wait())
        check = None
        try:
            while not (await asyncio.wait({ending}, timeout=_CHECK_SECONDS))[0]:
                check = asyncio.create_task(self._check())
                first = asyncio.FIRST_COMPLETED
                done, _ = await asyncio.wait({ending, check}, timeout=HANG_SECONDS, return_when=first)
                if not done:
                    return False
                if check in done:
                    check.result()
            return True
        finally:
            for task in (ending, check):
                if task is not None:
                    task.cancel()

    async def _check(self) -> None:
        """Returns when the process has forked a child, or this one has no descriptor left to ask for one."""
        try:
            child = await self.fork("check")
        except OSError:  # no fault of the process that forks: its children go on
            return
        try:
            await child.ended()
        finally:
            child.close()

    async def fork(self, kind: str) -> "_Process":
        """Starts a child of this kind. Raises OSError."""
        self.start()
        pairs = socket.socketpair(), socket.socketpair()
        with contextlib.ExitStack() as child_ends, contextlib.ExitStack() as our_ends:
            for our_end, child_end in pairs:
                our_ends.enter_context(our_end)
                child_ends.enter_context(child_end)
            shared = our_ends.enter_context(open(os.memfd_create("shared"), "rb+", buffering=0))  # noqa: ASYNC230
            fds = [*(child_end.fileno() for _, child_end in pairs), shared.fileno()]
            socket.send_fds(self._socket, [kind.encode()], fds)
            streams = []
            for our_end, _ in pairs:
                streams.append(await asyncio.open_unix_connection(sock=our_end))
                our_ends.callback(streams[-1][1].close)  # if the caller is cancelled
            our_ends.pop_all()
        return _Process(*streams[0], *streams[1], shared)

    async def close(self) -> None:
        """Ends it with its children, unless it is another process's."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        for end in (self._socket, self._server_end):
            if end is not None:
                end.close()


@dataclass
class _Process:
    """The sockets to one child, and to the process that forked it: that one writes how the child ended. When
    the caller ends that stream, the child is killed."""

    replies: asyncio.StreamReader
    requests: asyncio.StreamWriter
    ends: asyncio.StreamReader
    alive: asyncio.StreamWriter
    shared: FileIO
    pid: int = 0

    @property
    def is_dead(self) -> bool:
        return self.requests.is_closing() or self.replies.at_eof()

    async def ended(self) -> int:
        """Waits for its end. Returns the exit code. It is killed if the process ends that forked it."""
        try:
            code, *_ = (await self.ends.read()).split() or [-signal.SIGKILL]
        except OSError:
            return -signal.SIGKILL
        return int(code)

    async def end(self) -> int:
        """Kills it if it is alive. Returns the exit code."""
        code = -signal.SIGKILL
        self.requests.close()
        with contextlib.suppress(OSError, TimeoutError):
            self.alive.write_eof()
            async with asyncio.timeout(_DYING_SECONDS):
                code = await self.ended()
        self.close()
        return code

    async def take(self, most: int) -> memoryview:
        """What the child has left beside its reply, at most so many bytes. Its memory is free then.

        Each piece takes a turn of the loop, from the last one on. In one turn 48 MiB would take 40 ms, most
        of them for memory that is new or given back. Raises OSError.
        """
        size = min(os.fstat(self.shared.fileno()).st_size, most)
        if not size:
            return memoryview(b"")
        answer = np.empty(size, np.uint8).data  # bytearray would write zeros: 25 ms
        for begin in reversed(range(0, size, _PIECE_BYTES)):
            piece = answer[begin : begin + _PIECE_BYTES]
            if os.preadv(self.shared.fileno(), [piece], begin) != len(piece):
                raise OSError(errno.EIO, "the file that a child shares became shorter")
            os.ftruncate(self.shared.fileno(), begin)
            await asyncio.sleep(0)
        return answer

    def close(self) -> None:
        """Closes both sockets and the file."""
        self.requests.close()
        self.alive.close()
        self.shared.close()


class Child:
    """One process, started when it is needed. Its owner sends one request at a time."""

    def __init__(self, server: ForkServer, kind: str, shared_bytes: int) -> None:
        """`shared_bytes`: what it may leave beside a reply."""
        self._server = server
        self._kind = kind
        self._shared_bytes = shared_bytes
        self._process: _Process | None = None

    async def call(self, parts: Sequence[Frame]) -> tuple[bytes, memoryview]:
        """Sends `parts` as one frame. Returns the reply, and what is beside it. Raises ChildDied."""
        if self._process is not None and self._process.is_dead:
            await self.end()
        if self._process is None:
            try:
                process = self._process = await self._server.fork(self._kind)
            except OSError as error:  # the machine has no memory or no process left
                raise ChildDied("starting", error.errno or 0) from error
            process.pid = int(await self._exchange(process, None))
        process = self._process
        reply = await self._exchange(process, parts)
        try:
            return reply, await process.take(self._shared_bytes)
        except OSError:
            await self.end()
            raise ChildDied("busy", -signal.SIGKILL) from None

    async def _exchange(self, process: _Process, parts: Sequence[Frame] | None) -> bytes:
        """Sends a frame, unless `parts` is None, and reads one."""
        requests, replies = process.requests, process.replies
        phase: Phase = "starting" if parts is None else "busy"
        try:
            async with asyncio.timeout(HANG_SECONDS):
                if parts is not None:
                    requests.write(LENGTH.pack(sum(map(len, parts))))
                    for part in parts:
                        for begin in range(0, len(part), _SLICE_BYTES):
                            requests.write(memoryview(part)[begin : begin + _SLICE_BYTES])
                            await requests.drain()
                return await replies.readexactly(*LENGTH.unpack(await replies.readexactly(LENGTH.size)))
        except TimeoutError:
            await self.end()
            raise ChildDied(phase, -signal.SIGKILL, hung=True) from None
        except (OSError, asyncio.IncompleteReadError, RuntimeError):  # uvloop: RuntimeError for a closed pipe
            # The socket is closed, so the process is about to end. A kill now would hide its exit code.
            code = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DYING_SECONDS):
                    code = await process.ended()
            await self.end()
            raise ChildDied(phase, -signal.SIGKILL if code is None else code) from None

    async def end(self) -> None:
        """Kills the process if it is alive."""
        process, self._process = self._process, None
        if process is not None:
            await process.end()
