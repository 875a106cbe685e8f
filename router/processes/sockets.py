"""The sockets of the processes of one router: one port for clients, and commands from the supervisor.

Each process has a socket pair with the supervisor for its commands.

A command is a line: `metrics`, `status`, `ping`, `keys` and the keys, `drain` or `stop`. The reply is a
length of four bytes and the payload. The supervisor sends one command at a time. The last two are commands,
not signals, because a signal to the whole process group would arrive twice. When the supervisor ends, the
socket closes and the processes end.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable

from baton.machine.connections import Connection, Connections
from baton.machine.system import cannot_listen, family, waited_for_cpu

log = logging.getLogger(__name__)

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
            command, _, given = line.strip().partition(b" ")
            payload = await answer(command.decode(), given)
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


_AT_ONCE = 64
"""Connections that a `Listener` accepts before others may use the event loop."""
_PAUSE_SECONDS = 0.1
"""Before the next try, when this process or the system has no descriptor left."""


class Listener:
    """Accepts the connections of a listening socket, and keeps to the bound of `connections`."""

    def __init__(
        self,
        listening: socket.socket,
        connect: Callable[[Connection], asyncio.BaseProtocol],
        connections: Connections,
        context: ssl.SSLContext | None = None,
    ) -> None:
        """`connect`: makes the protocol of a connection, which says when that is busy, idle and closed."""
        self._listening = listening
        self._connect = connect
        self._connections = connections
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._failing = False  # accept has failed, and the log says so
        listening.setblocking(False)
        self._loop.add_reader(listening.fileno(), self._accept)

    def close(self) -> None:
        """Accepts no more connections. Those that are open stay open. Idempotent."""
        if self._listening.fileno() >= 0:
            self._loop.remove_reader(self._listening.fileno())
            self._listening.close()

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                sock, address = self._listening.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                self._pause(error)
                return
            self._failing = False
            sock.setblocking(False)
            slot = self._connections.open(address[0], sock.close)
            if slot is None:
                sock.close()
                continue
            handshake = asyncio.create_task(self._open(sock, slot))
            slot.end = handshake.cancel
            self._handshakes.add(handshake)
            handshake.add_done_callback(self._handshakes.discard)

    async def _open(self, sock: socket.socket, slot: Connection) -> None:
        """With TLS this takes until the client has done its part."""
        try:
            await self._loop.connect_accepted_socket(lambda: self._connect(slot), sock, ssl=self._context)
        except (OSError, asyncio.CancelledError):  # the client failed, or too many connections are open
            slot.close()
            sock.close()

    def _pause(self, error: OSError) -> None:
        """There are no descriptors, or no memory for a socket."""
        if not self._failing:
            self._failing = True
            log.error("connections wait, since none can be accepted: %s", error.strerror)
        self._connections.evict()
        self._loop.remove_reader(self._listening.fileno())
        self._loop.call_later(_PAUSE_SECONDS, self._resume)

    def _resume(self) -> None:
        if self._listening.fileno() >= 0:
            self._loop.add_reader(self._listening.fileno(), self._accept)


SEND_BUFFER_BYTES = 256 << 10
"""Bytes that the kernel buffers for one client that does not read. Its default is megabytes."""
BACKLOG = 1024
EXTRA = 64
"""Connections above the bound of clients, so that a probe is always answered."""


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
        try:
            made.bind(address)
        except OSError:  # connections in TIME_WAIT, of a router that did not share the port
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
    except OSError as error:
        made.close()
        raise ValueError(cannot_listen(flag, host, port, error)) from error
    return made
