"""The sockets of the processes of one router: one port for clients, and commands from the supervisor.

Each process has a socket pair with the supervisor for its commands.

A command is a line: `metrics`, `status`, `ping`, `reload`, `drain` or `stop`. The reply is a length of four
bytes and the payload. The supervisor sends one command at a time. The last three are commands, not signals,
because a signal to the whole process group would arrive twice. When the supervisor ends, the socket closes
and the processes end.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable

from baton.machine.system import cannot_listen, family, waited_for_cpu

REPLY_SECONDS = 10.0
"""A process that takes longer counts as hung. The time in which it waits for a CPU does not count."""
_PARTS = 10
"""Of this time. If the supervisor itself was stopped for long, that counts as one part."""
_LENGTH_BYTES = 4
_MAX_BYTES = 64 << 20


async def serve_commands(control_fd: int, answer: Callable[[str], Awaitable[bytes]]) -> None:
    """Replies to commands until the supervisor ends. `answer` makes the reply."""
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=control_fd))
    try:
        while command := (await reader.readline()).decode().strip():
            payload = await answer(command)
            writer.write(len(payload).to_bytes(_LENGTH_BYTES) + payload)
            await writer.drain()
    finally:
        writer.close()


class ControlClient:
    """The supervisor's end of the socket pair."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pid: int) -> None:
        self._reader = reader
        self._writer = writer
        self._pid = pid
        self._one_at_a_time = asyncio.Lock()

    @classmethod
    async def connect(cls, sock: socket.socket, pid: int) -> "ControlClient":
        """`pid`: of the process at the other end."""
        return cls(*await asyncio.open_unix_connection(sock=sock), pid)

    async def send(self, command: str) -> bytes:
        """Returns the reply. Raises ConnectionError when the process has ended.

        Raises TimeoutError when the process hangs. Its late reply could follow a later command, so the caller
        must kill the process.
        """
        async with self._one_at_a_time:
            self._writer.write(command.encode() + b"\n")
            reply = asyncio.create_task(self._reply())
            try:
                part, silent, waited = REPLY_SECONDS / _PARTS, 0.0, waited_for_cpu(self._pid)
                while silent < REPLY_SECONDS:
                    await asyncio.wait({reply}, timeout=part)
                    if reply.done():
                        return reply.result()
                    before, waited = waited, waited_for_cpu(self._pid)
                    silent = max(0.0, silent + part - (waited - before))
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


SEND_BUFFER_BYTES = 256 << 10
"""Bytes that the kernel buffers for one client that does not read. Its default is megabytes."""
BACKLOG = 1024


def listen(flag: str, host: str, port: int, *, share: bool = False) -> socket.socket:
    """Returns a listening TCP socket. `share`: other processes of this router listen at the same address.

    Raises ValueError naming the flag.
    """
    try:
        made = socket.create_server((host, port), family=family(host), backlog=BACKLOG, reuse_port=share)
    except OSError as error:
        raise ValueError(cannot_listen(flag, host, port, error)) from error
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # accepted sockets inherit it
    return made


def reserve(flag: str, host: str, port: int) -> socket.socket:
    """Returns a socket that reserves a port for sockets that share it.

    It does not listen, so it gets no connections. Raises ValueError naming the flag when another program has
    the port, even with SO_REUSEPORT.
    """
    made = socket.socket(family(host), socket.SOCK_STREAM)
    try:
        with socket.socket(family(host), socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # allows TIME_WAIT
            probe.bind((host, port))
            address = probe.getsockname()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind(address)
    except OSError as error:
        made.close()
        raise ValueError(cannot_listen(flag, host, port, error)) from error
    return made
