"""A pool of child processes for work that may be slow or may crash. Each child takes one request at a time.

To process a client's text may take seconds, and may crash the library that does it. In a child it does not
block the event loop, and a crash ends only the child. The parent writes requests to a socket, the child
replies to it. Both are frames: a length of four bytes, little-endian, then the payload. The first frame of a
child is its pid. Beside a reply a child may leave bytes in a file in memory that both have. It ends when its
socket is closed.

Children are forked by a process that has loaded what they need, so a child starts within milliseconds and
takes little memory. All router processes of a host have one such process. `preparation.pipe` is its side.

Life of a child: started by its first request → request → reply → … → dead → started again by the next
request.
"""

import asyncio
import contextlib
import errno
import logging
import math
import os
import signal
import socket
import struct
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from io import FileIO
from typing import Any

import msgspec
import numpy as np

from baton.processes.children import process_end
from baton.router.admission.slots import Slots
from baton.router.errors import ApiError, InvalidRequest, all_errors
from baton.system import oom_kills
from baton.system.python_path import python_path
from baton.vision.images import CHANNELS, MOST_PIXELS

log = logging.getLogger(__name__)

Frame = bytes | bytearray
_ERRORS = {kind.__name__: kind for kind in all_errors()}
_LENGTH = struct.Struct("<I")
HANG_SECONDS = 60.0
"""Without a reply for so long, a child hangs, and is killed. Its limit of CPU time does not end a child that
sleeps."""
_DYING_SECONDS = 1.0
_RESTART_SECONDS = 0.5
_CHECK_SECONDS = 10.0
MOST_SHARED_BYTES = CHANNELS * MOST_PIXELS
"""Beside a reply."""
_PIECE_BYTES = 1 << 20
"""Of what is beside a reply, that one turn of the loop reads: 0.4 ms."""
_SLICE_BYTES = 256 << 10
"""Bytes of one write. To copy a whole body into a transport would block the loop for milliseconds."""


class ChildDied(Exception):
    """The child died, or could not start.

    Attributes:
        killed: SIGKILL or SIGTERM ended it, which a person or the kernel sends. A limit or a crash of a
            library ends it by another signal.
        caused_by_request: the request may be the cause.
    """

    def __init__(self, code: int, *, started: bool, hung: bool = False) -> None:
        super().__init__(f"no reply for {HANG_SECONDS:g} s" if hung else f"exit code {code}")
        self.killed = code in (-signal.SIGKILL, -signal.SIGTERM) and not hung
        self.caused_by_request = started and not self.killed


class ForkServer:
    """The process that forks children. It starts with the first of them, and again when it ends or hangs.
    Requests wait meanwhile.

    Attributes:
        fd: of the socket to it, for other processes of this host.
    """

    def __init__(self, command: Sequence[str], state: bytes = b"", fd: int | None = None) -> None:
        """`state`: for its stdin. `fd`: the process is another one's."""
        self._command, self._state = command, state
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
            self._running = asyncio.create_task(self._run(self._server_end))

    async def _run(self, server_end: socket.socket) -> None:
        # A process that reads texts of clients must not have the router's secrets.
        env = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
        env |= python_path()
        number = server_end.fileno()
        while True:
            process = None
            try:
                with os.fdopen(os.memfd_create("state"), "w+b") as state:
                    state.write(self._state)
                    state.seek(0)
                    process = subprocess.Popen(  # noqa: ASYNC220
                        [*self._command, str(number)], stdin=state, pass_fds=[number], env=env
                    )
                why = "has ended" if await self._ended(process.pid) else "hangs"
            except OSError as error:  # the machine has no memory or no process left
                why = f"cannot start: {error}"
            finally:
                if process is not None:
                    process.kill()
                    process.wait()
            log.error("the process that forks children for requests %s; it starts again", why)
            await asyncio.sleep(_RESTART_SECONDS)

    async def _ended(self, pid: int) -> bool:
        """Waits until the process has ended, or does not fork. Returns whether it has ended.

        A check that an ended process has not read would wait for the next process, which starts only then. So
        both are awaited together."""
        ending = asyncio.create_task(process_end(pid))
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
        with contextlib.ExitStack() as child_ends, contextlib.ExitStack() as router_ends:
            for router_end, child_end in pairs:
                router_ends.enter_context(router_end)
                child_ends.enter_context(child_end)
            shared = router_ends.enter_context(open(os.memfd_create("shared"), "rb+", buffering=0))  # noqa: ASYNC230
            fds = [*(child_end.fileno() for _, child_end in pairs), shared.fileno()]
            socket.send_fds(self._socket, [kind.encode()], fds)
            streams = []
            for router_end, _ in pairs:
                streams.append(await asyncio.open_unix_connection(sock=router_end))
                router_ends.callback(streams[-1][1].close)  # if the caller is cancelled
            router_ends.pop_all()
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
    the router ends that stream, the child is killed."""

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
            return int(await self.ends.read() or -signal.SIGKILL)
        except OSError:
            return -signal.SIGKILL

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

    async def take(self) -> memoryview:
        """What the child has left beside its reply. Its memory is free then.

        Each piece takes a turn of the loop, from the last one on. In one turn 48 MiB would take 40 ms, most
        of them for memory that is new or given back. Raises OSError.
        """
        size = min(os.fstat(self.shared.fileno()).st_size, MOST_SHARED_BYTES)
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

    def __init__(self, server: ForkServer, kind: str) -> None:
        self._server = server
        self._kind = kind
        self._process: _Process | None = None

    async def call(self, parts: Sequence[Frame]) -> tuple[bytes, memoryview]:
        """Sends `parts` as one frame. Returns the reply, and what is beside it. Raises ChildDied."""
        if self._process is not None and self._process.is_dead:
            await self.end()
        if self._process is None:
            try:
                process = self._process = await self._server.fork(self._kind)
            except OSError as error:  # the machine has no memory or no process left
                raise ChildDied(error.errno or 0, started=False) from error
            process.pid = int(await self._exchange(process, None))
        process = self._process
        reply = await self._exchange(process, parts)
        try:
            return reply, await process.take()
        except OSError:
            await self.end()
            raise ChildDied(-signal.SIGKILL, started=True) from None

    async def _exchange(self, process: _Process, parts: Sequence[Frame] | None) -> bytes:
        """Sends a frame, unless `parts` is None, and reads one."""
        requests, replies, started = process.requests, process.replies, parts is not None
        try:
            async with asyncio.timeout(HANG_SECONDS):
                if parts is not None:
                    requests.write(_LENGTH.pack(sum(map(len, parts))))
                    for part in parts:
                        for begin in range(0, len(part), _SLICE_BYTES):
                            requests.write(memoryview(part)[begin : begin + _SLICE_BYTES])
                            await requests.drain()
                return await replies.readexactly(*_LENGTH.unpack(await replies.readexactly(_LENGTH.size)))
        except TimeoutError:
            await self.end()
            raise ChildDied(-signal.SIGKILL, started=started, hung=True) from None
        except (OSError, asyncio.IncompleteReadError, RuntimeError):  # uvloop: RuntimeError for a closed pipe
            # The socket is closed, so the process is about to end. A kill now would hide its exit code.
            code = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DYING_SECONDS):
                    code = await process.ended()
            await self.end()
            raise ChildDied(-signal.SIGKILL if code is None else code, started=started) from None

    async def end(self) -> None:
        """Kills the process if it is alive."""
        process, self._process = self._process, None
        if process is not None:
            await process.end()


class ChildPool:
    """Up to `count` children of one kind. API keys take turns, as in `Slots`. A request above `long_bytes` is
    long.

    Wait-for graph: a request waits for a child. A child waits only for its process, which replies or dies.
    """

    def __init__(
        self,
        server: ForkServer,
        kind: str,
        count: int,
        decode: Callable[[msgspec.Raw], Any] = msgspec.msgpack.decode,
        *,
        long_bytes: float = math.inf,
    ) -> None:
        """`decode`: reads an answer. A child may have been taken over by a client, so it checks types."""
        self._decode = decode
        self._long_bytes = long_bytes
        self._idle = [Child(server, kind) for _ in range(count)]
        self._slots = Slots(count)

    async def ask(self, key: str, *parts: Frame, too_much: InvalidRequest) -> tuple[Any, memoryview]:
        """As `call`, but also raises ApiErrors in place of ChildDied: `too_much` if the child died of the
        request."""
        try:
            return await self.call(key, *parts)
        except ChildDied as died:
            if died.caused_by_request:
                raise too_much from died
            raise ApiError(f"the router has no process for this request: {died}") from died

    async def call(self, key: str, *parts: Frame) -> tuple[Any, memoryview]:
        """Sends `parts` as one request for the client's API key `key`. Returns the answer, and what the child
        has left beside it.

        When the caller is cancelled, the child finishes and its reply is dropped. When a child is killed from
        outside, the request is sent once more, unless the kernel killed for want of memory. Raises ChildDied,
        and the ApiError that the child raised.
        """
        kills = oom_kills()
        try:
            return await self._call(key, parts)
        except ChildDied as died:
            died.caused_by_request |= died.killed and oom_kills() > kills
            if died.caused_by_request or not died.killed:
                raise
        return await self._call(key, parts)

    async def _call(self, key: str, parts: Sequence[Frame]) -> tuple[Any, memoryview]:
        is_long = sum(map(len, parts)) > self._long_bytes
        reply, shared = await self._slots.run(key, partial(self._by_child, parts), is_long=is_long)
        return read_answer(reply, self._decode), shared

    async def _by_child(self, parts: Sequence[Frame]) -> tuple[bytes, memoryview]:
        child = self._idle.pop()
        try:
            return await child.call(parts)
        finally:
            self._idle.append(child)

    async def close(self) -> None:
        """Ends all children. No request may follow."""
        await self._slots.close()
        await asyncio.gather(*(child.end() for child in self._idle))


class Answer(msgspec.Struct, tag="answer", array_like=True):
    """What a child replies."""

    value: msgspec.Raw


class Error(msgspec.Struct, tag="error", array_like=True):
    """A child replies this when it raises an ApiError."""

    kind: str
    message: str
    param: str | None


class Defect(msgspec.Struct, tag="defect", array_like=True):
    """A child replies this when it raises another exception."""

    stack: str


_reply = msgspec.msgpack.Decoder(Answer | Error | Defect).decode


def read_answer(reply: bytes, decode: Callable[[msgspec.Raw], Any] = msgspec.msgpack.decode) -> Any:
    """Decodes what `pipe.answered` was given. Raises the ApiError that it caught; one without details for a
    defect, which the log has."""
    match _reply(reply):
        case Answer(value):
            return decode(value)
        case Error(kind, message, param):
            raise _ERRORS[kind](message, param=param)
        case Defect(stack):
            log.error("a child process failed\n%s", stack)
            raise ApiError("the request failed inside the router")
