"""Commands of the supervisor to the processes of one router, and the ports that they share.

Each process has a socket pair with the supervisor for its commands.

A command is a line: `metrics`, `status`, `request` and an id, `ping`, `keys` and the keys, `drain` or `stop`.
The reply is a length of four bytes and the payload. The supervisor sends one command at a time. The last two
are commands, not signals, because a signal to the whole process group would arrive twice. When the supervisor
ends, the socket closes and the processes end.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable

from baton.processes.liveness import Silence, reply, waited_for_cpu
from baton.system.addresses import binding, cannot_listen, family

REPLY_SECONDS = 10.0
"""A process that takes longer counts as hung. The time in which it waits for a CPU does not count."""
_PARTS = 10
"""Of this time. If the supervisor itself was stopped for long, that counts as one part."""
_LENGTH_BYTES = 4
_MAX_BYTES = 64 << 20


async def serve_commands(control_fd: int, answer: Callable[[str, bytes], Awaitable[bytes]]) -> None:
    """Replies to commands until the supervisor ends. `answer` gets a command and its argument, and makes the
    reply."""
    reader, writer = await asyncio.open_unix_connection(
        sock=socket.socket(fileno=control_fd), limit=_MAX_BYTES
    )
    try:
        while line := await reader.readline():
            command, _, argument = line.strip().partition(b" ")
            payload = await answer(command.decode(), argument)
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
            silence, part = Silence(REPLY_SECONDS), REPLY_SECONDS / _PARTS
            return await reply(self._reply(), silence, part, lambda: waited_for_cpu(self._pid))

    async def _reply(self) -> bytes:
        try:
            size = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES))
            assert size <= _MAX_BYTES, f"a reply of {size} bytes"
            return await self._reader.readexactly(size)
        except asyncio.IncompleteReadError as error:
            raise ConnectionResetError("the process has ended") from error

    def close(self) -> None:
        self._writer.close()


def reserve(flag: str, host: str, port: int) -> socket.socket:
    """Returns a socket that reserves a port for sockets that share it.

    It does not listen, so it gets no connections. Raises ValueError naming the flag when another program has
    the port, even with SO_REUSEPORT.
    """
    address, both = binding(host)
    reserved = socket.socket(family(address), socket.SOCK_STREAM)
    try:
        with socket.socket(family(address), socket.SOCK_STREAM) as probe:
            for each in (reserved, probe):
                if each.family == socket.AF_INET6:
                    each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not both)
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # allows TIME_WAIT
            probe.bind((address, port))
            bound = probe.getsockname()
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            reserved.bind(bound)
        except OSError:  # connections in TIME_WAIT, of a router that did not share the port
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind(bound)
    except OSError as error:
        reserved.close()
        raise ValueError(cannot_listen(flag, host, port, error)) from error
    return reserved
