"""A pool of child processes for work that may be slow or may crash. Each child takes one request at a time.

To process a client's text may take seconds, and may crash the library that does it. In a child it does not
block the event loop, and a crash ends only the child. The parent writes requests to stdin, the child writes
replies to stdout. Both are frames: a length of four bytes, little-endian, then the payload. A child sends an
empty frame when it is ready, and ends when its stdin is closed.

Life of a child: started by its first request → request → reply → … → dead → started again by the next
request.
"""

import asyncio
import contextlib
import math
import os
import signal
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from baton.router.admission.fairness import FairQueue

Frame = bytes | bytearray
_LENGTH = struct.Struct("<I")
HANG_SECONDS = 60.0
"""Without a reply for so long, a child hangs, and is killed. Its limit of CPU time does not end a child that
sleeps."""
_DYING_SECONDS = 1.0
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


class Child:
    """One process, started when it is needed. Its owner sends one request at a time."""

    def __init__(self, command: Sequence[str], first_frame: bytes) -> None:
        self._command = command
        self._first_frame = first_frame
        self._process: asyncio.subprocess.Process | None = None

    async def call(self, parts: Sequence[Frame]) -> bytes:
        """Sends `parts` as one frame and returns the reply. Raises ChildDied."""
        return await self._exchange(await self.started(), parts, started=True)

    async def started(self) -> asyncio.subprocess.Process:
        """Returns the process, and starts it if it is not alive. Raises ChildDied."""
        if self._process is not None and self._is_dead(self._process):
            await self.end()
        if self._process is None:
            # A process that reads texts of clients must not have the router's secrets.
            env = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
            pipe = asyncio.subprocess.PIPE
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command, stdin=pipe, stdout=pipe, env=env
                )
            except OSError as error:  # the machine has no memory or no process left
                raise ChildDied(error.errno or 0, started=False) from error
            await self._exchange(
                self._process, [self._first_frame] if self._first_frame else None, started=False
            )
        return self._process

    @staticmethod
    def _is_dead(process: asyncio.subprocess.Process) -> bool:
        assert process.stdin is not None
        assert process.stdout is not None
        return process.returncode is not None or process.stdin.is_closing() or process.stdout.at_eof()

    async def _exchange(
        self, process: asyncio.subprocess.Process, parts: Sequence[Frame] | None, *, started: bool
    ) -> bytes:
        """Sends a frame, unless `parts` is None, and reads one."""
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            async with asyncio.timeout(HANG_SECONDS):
                if parts is not None:
                    stdin.write(_LENGTH.pack(sum(map(len, parts))))
                    for part in parts:
                        for begin in range(0, len(part), _SLICE_BYTES):
                            stdin.write(memoryview(part)[begin : begin + _SLICE_BYTES])
                            await stdin.drain()
                return await stdout.readexactly(*_LENGTH.unpack(await stdout.readexactly(_LENGTH.size)))
        except TimeoutError:
            await self.end()
            raise ChildDied(-signal.SIGKILL, started=started, hung=True) from None
        except (OSError, asyncio.IncompleteReadError, RuntimeError):  # uvloop: RuntimeError for a closed pipe
            # The pipe is closed, so the process is about to end. A kill now could lose its exit code:
            # asyncio's kill reaps a process that has ended meanwhile, and asyncio then reports 255.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DYING_SECONDS):
                    await process.wait()
            await self.end()
            assert process.returncode is not None
            raise ChildDied(process.returncode, started=started) from None

    async def end(self) -> None:
        """Kills the process if it is alive."""
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await process.wait()


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request that waits for a child."""

    child: asyncio.Future[Child]
    key: str
    size: int


class ChildPool:
    """Up to `count` children that run the same command. API keys take turns by the bytes of their requests.

    With several children, at most `count - 1` work on requests above `long_bytes`. Otherwise two clients with
    long requests would block all others. A free child that may take a long request takes it first, so that
    neither kind starves.

    Wait-for graph: a request waits for a child. A child waits only for its process, which replies or dies.
    """

    def __init__(
        self, command: Sequence[str], count: int, first_frame: bytes = b"", *, long_bytes: float = math.inf
    ) -> None:
        self._count = count
        self._long_bytes = long_bytes if count > 1 else math.inf
        self._idle = [Child(command, first_frame) for _ in range(count)]
        self._waiting: FairQueue[str, _Waiting] = FairQueue()
        self._waiting_long: FairQueue[str, _Waiting] = FairQueue()
        self._busy_long: set[Child] = set()
        self._calls: set[asyncio.Task[bytes]] = set()

    async def call(self, key: str, *parts: Frame) -> bytes:
        """Sends `parts` as one request for the client's API key `key`. Returns the reply.

        When the caller is cancelled, the child finishes and its reply is dropped. When a child is killed from
        outside, the request is sent once more. Raises ChildDied.
        """
        try:
            return await self._call(key, parts)
        except ChildDied as died:
            if not died.killed:
                raise
        return await self._call(key, parts)

    async def _call(self, key: str, parts: Sequence[Frame]) -> bytes:
        child = await self._acquire(key, sum(map(len, parts)))
        call = asyncio.create_task(child.call(parts))
        self._calls.add(call)
        call.add_done_callback(lambda _: self._called(call, child))
        return await asyncio.shield(call)

    async def start(self) -> None:
        """Starts all children, so that no request waits for a start. Raises ChildDied."""
        children = [await self._acquire("", 0) for _ in range(self._count)]
        try:
            started = await asyncio.gather(*(child.started() for child in children), return_exceptions=True)
        finally:
            for child in children:
                self._release(child)
        for failure in started:
            if isinstance(failure, BaseException):
                raise failure

    async def close(self) -> None:
        """Ends all children. No request may follow."""
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        await asyncio.gather(*(child.end() for child in self._idle))

    async def _acquire(self, key: str, size: int) -> Child:
        acquired: asyncio.Future[Child] = asyncio.get_running_loop().create_future()
        queue = self._waiting_long if size > self._long_bytes else self._waiting
        ticket = queue.push(key, 0, _Waiting(acquired, key, size))
        self._dispatch()
        try:
            return await acquired
        except asyncio.CancelledError:
            queue.remove(ticket)
            if not acquired.cancelled():  # the child was assigned at the same moment
                self._release(acquired.result())
            raise

    def _called(self, call: asyncio.Task[bytes], child: Child) -> None:
        self._calls.discard(call)
        self._release(child)

    def _release(self, child: Child) -> None:
        self._idle.append(child)
        self._busy_long.discard(child)
        self._dispatch()

    def _dispatch(self) -> None:
        while self._idle and len(self._busy_long) < self._count - 1 and len(self._waiting_long):
            if (child := self._assign(self._waiting_long)) is not None:
                self._busy_long.add(child)
        while self._idle and len(self._waiting):
            self._assign(self._waiting)

    def _assign(self, queue: FairQueue[str, _Waiting]) -> Child | None:
        """Gives an idle child to the first request of the queue. None: its caller was cancelled."""
        waiting = queue.pop()
        assert waiting is not None, "the queue is not empty"
        if waiting.child.done():
            return None
        child = self._idle.pop()
        queue.charge(waiting.key, waiting.size)
        waiting.child.set_result(child)
        return child
