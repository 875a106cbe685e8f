"""The open connections of one port, and which of them ends when there are too many.

A client needs no key to open connections. So a port has a bound. Above it an idle connection ends: the oldest
one of the address that has most of them. Clients at other addresses keep theirs. A connection is busy only
while it serves a request with a valid key: other requests do not protect it.

Life of a connection: `open` → busy ⇄ idle → `close`, or ended by its `end` while it is idle.
"""

import asyncio
import logging
import resource
import socket
from collections import OrderedDict
from collections.abc import Callable

from baton.system import memory_share

log = logging.getLogger(__name__)

_IPV6_NETWORK_BYTES = 8
"""One client may have all addresses of a /64."""
_CONNECTION_BYTES = 384 << 10
"""That a client without a key can make a connection take: 128 KiB in this process, for what it sends ahead
and for a piece of its response, and as much for each of the kernel's two buffers."""


def affordable_connections(processes: int) -> int:
    """Connections that each of `processes` may keep open. They take half of its descriptors at most, and all
    of them a quarter of the memory."""
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return memory_share(4 * processes * _CONNECTION_BYTES, most=descriptors // 2)


class Connection:
    """One open connection. It is idle at first, and busy while it serves a key.

    Attributes:
        end: closes it; `Connections` calls this.
        is_extra: more are open than the bound. It should be used only for what must always be answered.
    """

    __slots__ = ("_client", "_of", "end", "is_extra")

    def __init__(
        self, of: "Connections", client: bytes, end: Callable[[], object], *, is_extra: bool
    ) -> None:
        self.end = end
        self.is_extra = is_extra
        self._of = of
        self._client = client

    def busy(self) -> None:
        self._of.set_busy(self, self._client)

    def idle(self) -> None:
        self._of.set_idle(self, self._client)

    def close(self) -> None:
        """The connection is closed. Idempotent."""
        self._of.close(self, self._client)


class Connections:
    """Counts the connections of a port. Pure. Every operation takes constant time.

    Attributes:
        most: while so many are open, each new one ends an idle one.
        none: set while no connection is open.
    """

    def __init__(self, name: str, most: int, extra: int = 0) -> None:
        """`name`: of the port, for the log. `extra`: new connections above `most` if none is idle."""
        self.most = most
        self.none = asyncio.Event()
        self.none.set()
        self._name = name
        self._extra = extra
        self._open: set[Connection] = set()
        self._idle: dict[bytes, OrderedDict[Connection, None]] = {}  # client → its idle ones, oldest first
        self._clients: dict[int, OrderedDict[bytes, None]] = {}  # number of idle ones → clients
        self._largest = 0  # the largest of these numbers
        self._crowded = False  # `most` was reached, and the log says so

    def __len__(self) -> int:
        return len(self._open)

    def open(self, host: str, end: Callable[[], object]) -> Connection | None:
        """Counts a connection from the IP address `host`. None: there is no room, and it must be closed."""
        if len(self._open) >= self.most:
            self._tell()
            if not self.evict() and len(self._open) >= self.most + self._extra:
                return None
        elif self._crowded and len(self._open) < self.most // 2:
            self._crowded = False
        client = _client(host)
        connection = Connection(self, client, end, is_extra=len(self._open) >= self.most)
        self._open.add(connection)
        self.none.clear()
        self.set_idle(connection, client)
        return connection

    def evict(self) -> bool:
        """Ends the oldest idle connection of the client that has most. False: no connection is idle."""
        if not self._largest:
            return False
        client = next(iter(self._clients[self._largest]))
        connection = next(iter(self._idle[client]))
        connection.close()
        connection.end()
        return True

    def set_idle(self, connection: Connection, client: bytes) -> None:
        idle = self._idle.setdefault(client, OrderedDict())
        if connection in self._open and connection not in idle:
            idle[connection] = None
            self._move(client, len(idle) - 1, len(idle))

    def set_busy(self, connection: Connection, client: bytes) -> None:
        idle = self._idle.get(client)
        if idle is not None and connection in idle:
            del idle[connection]
            self._move(client, len(idle) + 1, len(idle))

    def close(self, connection: Connection, client: bytes) -> None:
        self.set_busy(connection, client)
        self._open.discard(connection)
        if not self._open:
            self.none.set()

    def _move(self, client: bytes, before: int, after: int) -> None:
        """The client has `after` idle connections instead of `before`, one more or less."""
        if before:
            del self._clients[before][client]
            if not self._clients[before]:
                del self._clients[before]
        if after:
            self._clients.setdefault(after, OrderedDict())[client] = None
        else:
            del self._idle[client]
        if after > self._largest or self._largest not in self._clients:
            self._largest = after

    def _tell(self) -> None:
        """Logs once that the port is full, until half of the connections have closed."""
        if not self._crowded:
            self._crowded = True
            text = "%s: %d connections are open, the most it may have; new ones end idle ones"
            log.warning(text, self._name, self.most)


def _client(host: str) -> bytes:
    """What counts as one client: an IPv4 address, or a /64 of IPv6."""
    if ":" not in host:
        return host.encode()
    address = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
    is_ipv4 = address.startswith(bytes(10) + b"\xff\xff")
    return address if is_ipv4 else address[:_IPV6_NETWORK_BYTES]
