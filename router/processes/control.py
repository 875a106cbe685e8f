"""Commands from the supervisor to the processes of one router, over a socket pair for each process.

A command is a line: `metrics`, `status`, `ping`, `reload`, `drain` or `stop`. The reply is a length of four
bytes and the payload. The supervisor sends one command at a time. The last three are commands, not signals,
because a signal to the whole process group would arrive twice. When the supervisor ends, the socket closes
and the processes end.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping

REPLY_SECONDS = 10.0
"""A process that takes longer counts as hung."""
_LENGTH_BYTES = 4
_MAX_BYTES = 64 << 20

Commands = Mapping[str, Callable[[], Awaitable[bytes]]]
"""For each command the function that makes its reply."""


async def serve_commands(control_fd: int, commands: Commands) -> None:
    """Replies to commands until the supervisor ends."""
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=control_fd))
    try:
        while command := (await reader.readline()).decode().strip():
            payload = await commands[command]()
            writer.write(len(payload).to_bytes(_LENGTH_BYTES) + payload)
            await writer.drain()
    finally:
        writer.close()


class ControlClient:
    """The supervisor's end of the socket pair."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._one_at_a_time = asyncio.Lock()

    @classmethod
    async def connect(cls, sock: socket.socket) -> "ControlClient":
        return cls(*await asyncio.open_unix_connection(sock=sock))

    async def send(self, command: str) -> bytes:
        """Returns the reply. Raises ConnectionError when the process has ended.

        Raises TimeoutError when the process hangs. Its late reply could follow a later command, so the caller
        must kill the process.
        """
        async with self._one_at_a_time:
            self._writer.write(command.encode() + b"\n")
            reply = asyncio.create_task(self._reply())
            try:
                for _ in range(2):  # if the supervisor itself was stopped during one half, the other counts
                    await asyncio.wait({reply}, timeout=REPLY_SECONDS / 2)
                if reply.done():
                    return reply.result()
            finally:
                reply.cancel()
            raise TimeoutError

    async def _reply(self) -> bytes:
        try:
            size = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES))
            assert size <= _MAX_BYTES, f"a reply of {size} bytes"
            return await self._reader.readexactly(size)
        except asyncio.IncompleteReadError as error:
            raise ConnectionResetError("the process has ended") from error

    def close(self) -> None:
        self._writer.close()
