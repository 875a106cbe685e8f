"""What the processes of one router say to the one that supervises them: answers, over a socket pair.

A question is a line (`metrics`, `status`, `ping`), its answer four bytes of length and as many more. So are
the orders `drain` and `stop`, since a signal might reach a whole group and come twice. There is one question
at a time. When the supervisor goes, the socket ends, and its processes with it.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping

ANSWER_SECONDS = 10.0
_LENGTH_BYTES = 4
_MAX_BYTES = 64 << 20

Answers = Mapping[str, Callable[[], Awaitable[bytes]]]


async def answer(control_fd: int, answers: Answers) -> None:
    """Until the supervisor is gone."""
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=control_fd))
    try:
        while question := (await reader.readline()).decode().strip():
            payload = await answers[question]()
            writer.write(len(payload).to_bytes(_LENGTH_BYTES) + payload)
            await writer.drain()
    finally:
        writer.close()


class Asker:
    """The supervisor's end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._one_at_a_time = asyncio.Lock()

    @classmethod
    async def on(cls, sock: socket.socket) -> "Asker":
        return cls(*await asyncio.open_unix_connection(sock=sock))

    async def ask(self, question: str) -> bytes:
        """Raises ConnectionError when the process is gone, TimeoutError when it hangs: then it must end."""
        async with self._one_at_a_time, asyncio.timeout(ANSWER_SECONDS):
            self._writer.write(question.encode() + b"\n")
            try:
                size = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES))
                assert size <= _MAX_BYTES, f"an answer of {size} bytes"
                return await self._reader.readexactly(size)
            except asyncio.IncompleteReadError as error:
                raise ConnectionResetError("the process is gone") from error

    def close(self) -> None:
        self._writer.close()
