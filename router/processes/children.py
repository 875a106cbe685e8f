"""Child processes that do long or dangerous work for a router, one question at a time.

What a client wrote may take seconds to process, and may crash the library that does it. In a child it does
not stop the event loop, and only the child dies. The parent asks on stdin, the child answers on stdout.
Both send frames: four bytes of length, little-endian, then the payload. A child that is ready sends an empty
frame. It ends with its stdin.

Life of a child: started with the first question → asked → … → dead, and started again with the next question.
"""

import asyncio
import contextlib
import math
import os
import signal
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from router.admission.fairness import FairQueue

Frame = bytes | bytearray
_LENGTH = struct.Struct("<I")
_DYING_SECONDS = 1.0
_SLICE_BYTES = 256 << 10
"""Written at once: copying a whole body into a transport would stop the loop for milliseconds."""


class ChildDied(Exception):
    """The child died, or it could not start. `blameless`: the question is not the reason."""

    def __init__(self, code: int, *, started: bool) -> None:
        super().__init__(f"exit code {code}")
        # A person or the kernel kills with these. A limit, or a crash of a library, ends by other signals.
        self.killed = code in (-signal.SIGKILL, -signal.SIGTERM)
        self.blameless = self.killed or not started


class Child:
    """One process. Its owner asks one question at a time."""

    def __init__(self, command: Sequence[str], greeting: bytes) -> None:
        self._command = command
        self._greeting = greeting
        self._process: asyncio.subprocess.Process | None = None

    async def ask(self, parts: Sequence[Frame]) -> bytes:
        """Joins `parts` to one frame. Raises ChildDied."""
        return await self._exchange(await self.started(), parts, started=True)

    async def started(self) -> asyncio.subprocess.Process:
        """Starts the process, unless it lives. Raises ChildDied."""
        if self._process is not None and self._is_dead(self._process):
            await self.end()
        if self._process is None:
            # The secrets of the router are no concern of a process that reads what clients wrote.
            env = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
            pipe = asyncio.subprocess.PIPE
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command, stdin=pipe, stdout=pipe, env=env
                )
            except OSError as error:  # of memory or processes there are no more
                raise ChildDied(error.errno or 0, started=False) from error
            await self._exchange(self._process, [self._greeting] if self._greeting else None, started=False)
        return self._process

    @staticmethod
    def _is_dead(process: asyncio.subprocess.Process) -> bool:
        assert process.stdin is not None
        assert process.stdout is not None
        return process.returncode is not None or process.stdin.is_closing() or process.stdout.at_eof()

    async def _exchange(
        self, process: asyncio.subprocess.Process, parts: Sequence[Frame] | None, *, started: bool
    ) -> bytes:
        """Sends a frame, if there is one, and reads the next."""
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            if parts is not None:
                stdin.write(_LENGTH.pack(sum(map(len, parts))))
                for part in parts:
                    for begin in range(0, len(part), _SLICE_BYTES):
                        stdin.write(memoryview(part)[begin : begin + _SLICE_BYTES])
                        await stdin.drain()
            return await stdout.readexactly(*_LENGTH.unpack(await stdout.readexactly(_LENGTH.size)))
        except (
            OSError,
            asyncio.IncompleteReadError,
            RuntimeError,
        ):  # the last one: uvloop's, of a closed pipe
            # Its pipe is closed, so it is about to end. To kill it now may lose its exit code: asyncio's kill
            # reaps a process that ended meanwhile, and asyncio then reports 255.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DYING_SECONDS):
                    await process.wait()
            await self.end()
            assert process.returncode is not None
            raise ChildDied(process.returncode, started=started) from None

    async def end(self) -> None:
        """Kills the process, if it lives."""
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await process.wait()


@dataclass(frozen=True, slots=True)
class _Turn:
    child: asyncio.Future[Child]
    key: str
    size: int


class Children:
    """Up to `count` processes of one kind. Clients' keys take turns by the bytes that they ask.

    Where there are several, one takes no question of more than `long_bytes`. Otherwise two clients with long
    questions would make all others wait. A long question goes first to a child that may take it, so neither
    kind starves the other.

    What waits for what: a question waits for a child, and a child for nothing but its process, which answers
    or dies.
    """

    def __init__(
        self, command: Sequence[str], count: int, greeting: bytes = b"", *, long_bytes: float = math.inf
    ) -> None:
        self._count = count
        self._long_bytes = long_bytes if count > 1 else math.inf
        self._idle = [Child(command, greeting) for _ in range(count)]
        self._waiting: FairQueue[str, _Turn] = FairQueue()
        self._waiting_long: FairQueue[str, _Turn] = FairQueue()
        self._busy_long: set[Child] = set()
        self._asked: set[asyncio.Task[bytes]] = set()

    async def ask(self, key: str, *parts: Frame) -> bytes:
        """For the client with this key. A question that is given up is answered all the same, but to nobody.

        Where the child is killed from outside, another one is asked, once. Raises ChildDied.
        """
        try:
            return await self._ask(key, parts)
        except ChildDied as died:
            if not died.killed:
                raise
        return await self._ask(key, parts)

    async def _ask(self, key: str, parts: Sequence[Frame]) -> bytes:
        child = await self._turn(key, sum(map(len, parts)))
        asked = asyncio.create_task(child.ask(parts))
        self._asked.add(asked)
        asked.add_done_callback(lambda _: self._answered(asked, child))
        return await asyncio.shield(asked)

    async def start(self) -> None:
        """Starts all, so that no question waits for it. Raises ChildDied."""
        children = [await self._turn("", 0) for _ in range(self._count)]
        try:
            found = await asyncio.gather(*(child.started() for child in children), return_exceptions=True)
        finally:
            for child in children:
                self._free(child)
        for failure in found:
            if isinstance(failure, BaseException):
                raise failure

    async def close(self) -> None:
        """Ends all of them. Nothing may be asked from now on."""
        for asked in self._asked:
            asked.cancel()
        await asyncio.gather(*self._asked, return_exceptions=True)
        await asyncio.gather(*(child.end() for child in self._idle))

    async def _turn(self, key: str, size: int) -> Child:
        turn: asyncio.Future[Child] = asyncio.get_running_loop().create_future()
        queue = self._waiting_long if size > self._long_bytes else self._waiting
        ticket = queue.push(key, 0, _Turn(turn, key, size))
        self._dispatch()
        try:
            return await turn
        except asyncio.CancelledError:
            queue.remove(ticket)
            if not turn.cancelled():  # the turn came in the same moment
                self._free(turn.result())
            raise

    def _answered(self, asked: asyncio.Task[bytes], child: Child) -> None:
        self._asked.discard(asked)
        self._free(child)

    def _free(self, child: Child) -> None:
        self._idle.append(child)
        self._busy_long.discard(child)
        self._dispatch()

    def _dispatch(self) -> None:
        while self._idle and len(self._busy_long) < self._count - 1 and len(self._waiting_long):
            if (child := self._give(self._waiting_long)) is not None:
                self._busy_long.add(child)
        while self._idle and len(self._waiting):
            self._give(self._waiting)

    def _give(self, queue: FairQueue[str, _Turn]) -> Child | None:
        """An idle child, to the next turn of this queue. None: that question was given up."""
        turn = queue.pop()
        assert turn is not None, "it is not empty"
        if turn.child.done():
            return None
        child = self._idle.pop()
        queue.charge(turn.key, turn.size)
        turn.child.set_result(child)
        return child
