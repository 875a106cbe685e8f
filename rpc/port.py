"""A gRPC server whose port keeps to a bound of connections, as the HTTP ports do.

gRPC owns its sockets, and its own bound keeps the connections that came first: idle clients could close the
port to all others. So this module finds the accepted sockets among the descriptors of the process, and counts
them with `system.connections`. To end a connection it shuts the socket down, and gRPC sees that the client
has gone. No byte of a call passes through here.

Life of a connection: gRPC accepts it → found, idle → busy while it has a `call` ⇄ idle → gone. A connection
also ends if it has no `call` within `FIRST_CALL_SECONDS`.
"""

import asyncio
import contextlib
import ipaddress
import logging
import os
import resource
import socket
import stat
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import isasyncgenfunction
from typing import Any
from urllib.parse import unquote

import grpc
import grpc.aio

from baton.system.connections import Connection, Connections

log = logging.getLogger(__name__)

FIRST_CALL_SECONDS = 5.0
"""From its arrival, for a connection to make a call that its server serves only to some."""
_EXTRA = 64
"""Connections above the bound if all others are busy, so that a probe is answered."""
_SECONDS = 0.25
"""Between two looks for new connections."""
_CROWDED_SECONDS = 0.02
"""The same while connections come to a full port."""
_FAILED_SECONDS = 1.0
"""Before the next try, if the descriptors cannot be listed."""
_AT_ONCE = 512
"""Descriptors that are looked at before others may use the event loop."""
_DESCRIPTORS = "/proc/self/fd"

_Call = Callable[[grpc.aio.ServicerContext], contextlib.AbstractContextManager[None]]
Address = tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]


def affordable_connections() -> int:
    """The bound of a gRPC port, which leaves most descriptors of its process to others."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8


@dataclass(eq=False, slots=True)
class _Client:
    """The client's end of a connection. Its first call may come before the socket is found.

    Attributes:
        calls: those that are open and make the connection busy.
        has_called: it has had a `call`.
        inode: of the socket.
        arrived: when the socket was found, in seconds of `time.monotonic`.
    """

    calls: int = 0
    has_called: bool = False
    slot: Connection | None = None
    inode: int = 0
    arrived: float = 0.0


class Server:
    """A server of `grpc.aio` with such a port. `start` and `stop` do what they do there.

    Attributes:
        grpc: the server, which services are added to.
    """

    def __init__(
        self,
        interceptors: Sequence[grpc.aio.ServerInterceptor],
        options: Sequence[tuple[str, int]],
        *,
        proven: bool,
        message_timeout: float | None = None,
    ) -> None:
        """`proven`: only clients that have proved the cluster's secret can call. So each call is a `call`.
        `message_timeout`: seconds in which the message of a unary request must arrive."""
        self._most = affordable_connections()
        # gRPC refuses connections that arrive faster than this module finds them.
        bound = ("grpc.max_allowed_incoming_connections", 3 * self._most)
        each = _EachCall(self.call if proven else lambda context: contextlib.nullcontext(), message_timeout)
        self.grpc = grpc.aio.server(interceptors=[*interceptors, each], options=[*options, bound])
        self._port = 0
        self._connections = Connections("gRPC", self._most)
        self._clients: dict[Address, _Client] = {}
        self._inodes: dict[int, Address | None] = {}  # of all sockets; None: no connection of this port
        self._following: asyncio.Task[None] | None = None

    def add_port(self, address: str, credentials: grpc.ServerCredentials | None) -> int:
        """Listens at `address`, once. Returns the port. Raises RuntimeError if it cannot be had."""
        if credentials is None:
            self._port = self.grpc.add_insecure_port(address)
        else:
            self._port = self.grpc.add_secure_port(address, credentials)
        return self._port

    async def start(self) -> None:
        await self.grpc.start()
        self._connections = Connections(f"gRPC port {self._port}", self._most, _EXTRA)
        self._following = asyncio.create_task(self._follow(), name="gRPC connections")

    @property
    def has_connections(self) -> bool:
        """Whether a client is connected. One that has come within `_SECONDS` may not count yet."""
        return bool(self._clients)

    async def stop(self, grace: float | None) -> None:
        """Listens no more, and tells clients to leave. Calls end by themselves, or after `grace` seconds. A
        second stop may have less grace."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait({self._following})
        await self.grpc.stop(grace)

    @contextlib.contextmanager
    def call(self, context: grpc.aio.ServicerContext, *, busy: bool = True) -> Iterator[None]:
        """Counts a call while the context is open. `busy`: its connection stays open, whatever others do.

        A call that any client can make must not make its connection busy.
        """
        client = self._clients.setdefault(_address(context.peer()), _Client())
        client.has_called = True
        client.calls += busy
        if client.calls and client.slot is not None:
            client.slot.busy()
        try:
            yield
        finally:
            client.calls -= busy
            if not client.calls and client.slot is not None:
                client.slot.idle()

    # ------------------------------------------------------------ sockets

    async def _follow(self) -> None:
        while True:
            began = time.monotonic()
            try:
                crowded = await self._look()
            except Exception:
                log.exception("gRPC port %d: its connections cannot be counted", self._port)
                self._connections.evict()
                await asyncio.sleep(_FAILED_SECONDS)
                continue
            self._end_silent()
            took = time.monotonic() - began
            await asyncio.sleep(max(took, _CROWDED_SECONDS) if crowded else _SECONDS)

    async def _look(self) -> bool:
        """Finds the connections that have come and that have gone. Returns whether some came and the port is
        full. Raises OSError."""
        known = set(self._inodes)
        present: set[int] = set()
        for count, name in enumerate(os.listdir(_DESCRIPTORS), 1):
            if count % _AT_ONCE == 0:
                await asyncio.sleep(0)
            with contextlib.suppress(OSError):  # closed meanwhile
                status = os.fstat(fd := int(name))
                if stat.S_ISSOCK(status.st_mode):
                    present.add(inode := status.st_ino)
                    if inode not in self._inodes:
                        self._inodes[inode] = self._find(fd, inode)
        for inode in self._inodes.keys() - present:
            address = self._inodes.pop(inode)
            client = None if address is None else self._clients.get(address)
            if address is not None and client is not None and client.inode == inode:
                self._gone(address, client)
        for address, client in list(self._clients.items()):
            if not client.inode and not client.calls:  # it has called and gone before it was found
                self._gone(address, client)
        return len(self._connections) >= self._most and not self._inodes.keys() <= known

    def _find(self, fd: int, inode: int) -> Address | None:
        """Counts a socket if it is a connection of this port. Raises OSError if it was closed meanwhile."""
        sock = socket.socket(fileno=fd)
        try:
            if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.getsockname()[1] != self._port:
                return None
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return None
            host, port, *_ = sock.getpeername()
        finally:
            sock.detach()  # it is gRPC's
        address = _normal(host, port)
        client = self._clients.get(address)
        if client is not None and client.inode:  # an earlier connection, which has ended
            self._gone(address, client)
            client = None
        client = self._clients.setdefault(address, client or _Client())
        client.inode, client.arrived = inode, time.monotonic()
        client.slot = self._connections.open(host, partial(_shut, fd, inode))
        if client.slot is None:
            _shut(fd, inode)
        elif client.calls:
            client.slot.busy()
        return address

    def _gone(self, address: Address, client: _Client) -> None:
        del self._clients[address]
        if client.slot is not None:
            client.slot.close()

    def _end_silent(self) -> None:
        """Ends connections that should have had a call."""
        latest = time.monotonic() - FIRST_CALL_SECONDS
        for client in self._clients.values():
            if not client.has_called and client.slot is not None and client.arrived < latest:
                client.slot.close()
                client.slot.end()


def _shut(fd: int, inode: int) -> None:
    """Shuts a socket down, unless it is closed and its descriptor has become that of another file."""
    with contextlib.suppress(OSError):  # closed by gRPC or by the client
        copy = os.dup(fd)
        if os.fstat(copy).st_ino != inode:
            os.close(copy)
            return
        with socket.socket(fileno=copy) as sock:
            sock.shutdown(socket.SHUT_RDWR)


def _address(peer: str) -> Address:
    """Of a peer as gRPC writes it: "ipv4:10.0.0.1:5000" or "ipv6:%5Bfe80::1%25eth0%5D:5000"."""
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return _normal(host.strip("[]"), int(port))


def _normal(host: str, port: int) -> Address:
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address, port


async def message_of(
    requests: AsyncIterator[Any], context: grpc.aio.ServicerContext, seconds: float | None
) -> Any:
    """Returns the message of a unary request. Ends the call if it does not arrive within `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            return await anext(requests)
    except (TimeoutError, StopAsyncIteration):
        within = "" if seconds is None else f" within {seconds:g} s"
        text = f"the call's message did not come{within}"
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, text)


class _EachCall(grpc.aio.ServerInterceptor):
    """Counts each call of a server, and ends a unary request whose message does not come. gRPC itself waits
    without bound: a client could open many calls and send nothing."""

    def __init__(self, call: _Call, seconds: float | None) -> None:
        """As of `Server`. `call` is open while a handler runs."""
        self._call = call
        self._seconds = seconds

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        kinds = (handler.request_streaming, handler.response_streaming)
        answer: Any = getattr(handler, "_".join("stream" if streams else "unary" for streams in kinds))

        # gRPC calls a stream handler before the first message arrives.
        async def serve(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> None:
            with self._call(context):
                request: Any = requests
                if not handler.request_streaming:
                    request = await message_of(requests, context, self._seconds)
                if isasyncgenfunction(answer):
                    async with contextlib.aclosing(answer(request, context)) as responses:
                        async for response in responses:
                            await context.write(response)
                else:
                    response = await answer(request, context)
                    if not handler.response_streaming:
                        await context.write(response)

        return grpc.stream_stream_rpc_method_handler(
            serve, handler.request_deserializer, handler.response_serializer
        )
