"""A pool of sandboxed children for the texts of clients. Each child takes one request at a time.

To process a client's text may take seconds, and may crash the library that does it. In a child it does not
block the event loop, and a crash ends only the child. All router processes of a host have one helper that
forks children (`processes.sandbox`). `serve` is what all children do.
"""

import asyncio
import logging
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from typing import Any

import msgspec

from baton.processes.sandbox import helper
from baton.processes.sandbox.client import Child, ChildDied, ForkServer, Frame
from baton.router.admission.slots import Slots
from baton.router.errors import ApiError, InvalidRequest, all_errors
from baton.system import oom_kills
from baton.system.logs import stack_without_text
from baton.vision.images import CHANNELS, MOST_PIXELS

log = logging.getLogger(__name__)

_ERRORS = {kind.__name__: kind for kind in all_errors()}
MOST_SHARED_BYTES = CHANNELS * MOST_PIXELS
"""Beside a reply."""


class ChildPool:
    """Up to `count` children of one kind. API keys take turns, as in `Slots`. A request above `long_bytes` is
    long. The first idle child takes it, always in the same order: a child keeps the tokens of chats, and
    15,000 tokens take 70 times as long in a child that has not seen the earlier turns.

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
        self._children = [Child(server, kind, MOST_SHARED_BYTES) for _ in range(count)]
        self._idle = list(range(count))  # a heap of their numbers
        self._slots = Slots(count)

    async def ask(self, key: str, *parts: Frame, too_much: InvalidRequest) -> tuple[Any, memoryview]:
        """As `call`, but also raises ApiErrors in place of ChildDied: `too_much` if the child died of the
        request."""
        try:
            return await self.call(key, *parts)
        except ChildDied as died:
            if died.then == "refused":
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
            if died.then != "sent again":
                raise
            if oom_kills() > kills:
                died.then = "refused"
                raise
        return await self._call(key, parts)

    async def _call(self, key: str, parts: Sequence[Frame]) -> tuple[Any, memoryview]:
        is_long = sum(map(len, parts)) > self._long_bytes
        reply, shared = await self._slots.run(key, partial(self._by_child, parts), is_long=is_long)
        return read_answer(reply, self._decode), shared

    async def _by_child(self, parts: Sequence[Frame]) -> tuple[bytes, memoryview]:
        number = heappop(self._idle)
        try:
            return await self._children[number].call(parts)
        finally:
            heappush(self._idle, number)

    async def close(self) -> None:
        """Ends all children. No request may follow."""
        await self._slots.close()
        await asyncio.gather(*(child.end() for child in self._children))


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


def serve(answer: Callable[[bytes], bytes], cpu_seconds: float) -> None:
    """Serves a child, as `helper.serve`. `answer` gives MessagePack, or raises an ApiError."""
    helper.serve(partial(answered, answer), cpu_seconds)


def answered(answer: Callable[[bytes], bytes], request: bytes) -> bytes:
    """Returns the reply that `read_answer` reads: the answer, or the error that was raised."""
    try:
        return msgspec.msgpack.encode(Answer(msgspec.Raw(answer(request))))
    except ApiError as error:
        message = error.message.encode(errors="backslashreplace").decode()
        return msgspec.msgpack.encode(Error(type(error).__name__, message, error.param))
    except MemoryError:
        sys.exit(1)  # the memory limit: the router refuses the request
    except Exception as error:  # noqa: BLE001  (a defect: the router logs it)
        return msgspec.msgpack.encode(Defect("\n".join(stack_without_text(error))))


_reply = msgspec.msgpack.Decoder(Answer | Error | Defect).decode


def read_answer(reply: bytes, decode: Callable[[msgspec.Raw], Any] = msgspec.msgpack.decode) -> Any:
    """Decodes what `answered` was given. Raises the ApiError that it caught; one without details for a
    defect, which the log has."""
    match _reply(reply):
        case Answer(value):
            return decode(value)
        case Error(kind, message, param):
            raise _ERRORS[kind](message, param=param)
        case Defect(stack):
            log.error("a child process failed\n%s", stack)
            raise ApiError("the request failed inside the router")
