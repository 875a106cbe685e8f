"""The TCP connector: opens sessions of N lanes, runs their handshakes, and ends those that are silent."""

import contextlib
import errno
import ipaddress
import os
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from baton.kv_transfer.config import TransferConfig
from baton.kv_transfer.process.handshakes import Handshake, Handshakes
from baton.kv_transfer.process.loop import Loop
from baton.kv_transfer.process.movers import ForkedMoverHandle, LocalMover
from baton.kv_transfer.process.stats import TransferCounters
from baton.kv_transfer.process.tcp_session import Session, Sessions
from baton.kv_transfer.protocol.frame import NO_TRANSFER, FrameType
from baton.kv_transfer.protocol.hello import Initiator, LaneRefused, Listener
from baton.kv_transfer.protocol.messages import HelloOpen, Identity, Ping, Side, encode
from baton.kv_transfer.trace import TraceWriter

_ACCEPTED_AT_ONCE = 64  # connections; the lanes have their turn before the next ones
SMALL_SEGMENT = 1200
"""Bytes of a TCP segment that each network carries: the least MTU of IPv6 is 1,280."""
_SCARCE = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


# (all sessions, number in this process, session id, number of lanes)
MakeSession = Callable[[Sessions, int, bytes, int], Session]


class TcpConnector:
    """All sessions of one transfer process."""

    def __init__(
        self, config: TransferConfig, memory: str, secret: bytes, make_sessions: Mapping[Side, MakeSession],
        counters: TransferCounters, trace: TraceWriter, tick_age: Callable[[float], float], loop: Loop,
        local: LocalMover, forked: Sequence[ForkedMoverHandle],
    ) -> None:  # fmt: skip
        """`memory`: as in `Identity`. `make_sessions`: by this process's side of the session."""
        self.config = config
        self.counters = counters
        self.sessions = Sessions(config, memory, counters, local, forked)
        self.handshakes = Handshakes(config.max_handshakes, counters, self._joined_session)
        self._make_sessions = make_sessions
        self._sessions_made = 0
        self._secret = secret
        self._trace = trace
        self._tick_age = tick_age
        self._next_ping = 0.0
        self._loop = loop

    # ------------------------------------------------------------ opening

    def connect(
        self, addresses: Sequence[tuple[str, int]], incarnation: int, lanes: int, avoid: Collection[int],
        *, narrow: bool,
    ) -> Session:  # fmt: skip
        """Starts a session. `session_up` or `session_down` follows. OSError: the session cannot start.

        `addresses`: of the cards of the peer. Lanes take turns with them, and with the cards of this side. So
        each way is a pair of cards. `avoid`: those that carried nothing lately. `narrow`: the peer sends
        packets of `SMALL_SEGMENT`."""
        session = self._session("receiver", os.urandom(16), lanes)
        session.address = f"{addresses[0][0]}:{addresses[0][1]}"
        sources = self.config.bind or (None,)
        all_ways = range(max(len(addresses), len(sources)))
        ways = [way for way in all_ways if way not in avoid] or [*all_ways]
        sockets: list[socket.socket] = []
        while len(sockets) < lanes:
            way = ways[len(sockets) % len(ways)]
            try:
                address, source = addresses[way % len(addresses)], sources[way % len(sources)]
                sockets.append(connecting(address, source, SMALL_SEGMENT if narrow else 0))
            except OSError:
                ways.remove(way)
                if ways:
                    session.bad.add(way)
                    continue
                for sock in sockets:
                    sock.close()
                raise
            if len(all_ways) > 1:
                session.ways.append(way)
        self.sessions.by_id[session.id] = session
        for number, sock in enumerate(sockets):
            party = Initiator(
                self._secret, self._identity("receiver"), session.id, number, lanes, incarnation,
                encrypt=self.config.encrypt,
            )  # fmt: skip
            handshake = self._handshake(sock, None, session, party)
            session.joining.append(handshake.connection)
            handshake.say(party.open)
        return session

    def accept(self, listener: socket.socket) -> bool:
        """Take what waits on the listening socket. False: it cannot be taken now, and goes on waiting."""
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                sock, address = listener.accept()
            except BlockingIOError:
                return True
            except OSError as e:  # out of descriptors, or the connection is gone again: others go on
                self.counters.refuse("accept", str(e))
                return e.errno not in _SCARCE
            party = Listener(self._secret, self._identity("sender"), encrypt=self.config.encrypt)
            self._handshake(sock, _network_of(address[0]), None, party)
        return True

    def _joined_session(self, opened: HelloOpen, peer: Identity) -> Session:
        """The session that an authenticated lane belongs to; a new one for its first lane."""
        by_id = self.sessions.by_id
        session = by_id.get(opened.session_id)
        if session is None:
            fetching = [other for other in by_id.values() if other.side == "sender"]
            if len(fetching) >= self.config.max_sessions:
                unused = [other for other in fetching if other.up and not other.in_use]
                if not unused:
                    raise LaneRefused("busy", f"{len(fetching)} peers fetch from here")
                min(unused, key=lambda other: max(other.opened, other.kv_moved)).give_way()
            session = by_id[opened.session_id] = self._session("sender", opened.session_id, opened.lanes)
        elif (
            session.side != "sender"
            or session.peer != peer
            or session.lane_count != opened.lanes
            or opened.lane in session.lanes
        ):
            raise LaneRefused("hello", f"lane {opened.lane} does not fit session of {session.name}")
        return session

    @property
    def lane_count(self) -> int:
        return len(self.handshakes) + sum(len(session.lanes) for session in self.sessions.by_id.values())

    # ------------------------------------------------------------ time

    def tick(self, now: float) -> None:
        """PING, and end what is silent. Call several times a second."""
        limits = self.config.deadlines
        for lane in self.handshakes.late(now):
            if lane.closing is None:
                self.counters.expire("handshake", "a lane did not authenticate in time")
                lane.close_soon("handshake", "too slow")
        ping = None
        if now >= self._next_ping:
            self._next_ping = now + limits.ping
            age = int(self._tick_age(now) * 1000)
            ping = encode(Ping(min(age, (1 << 32) - 1)))
        for session in list(self.sessions.by_id.values()):
            # If lanes over other cards are up, one that is not need not be waited for.
            others = session.lanes and len({*session.ways}) > 1
            patience = limits.handshake / 5 if others else limits.handshake
            if len(session.lanes) < session.lane_count and now >= session.opened + patience:
                for number in set(range(session.lane_count)).difference(session.lanes):
                    session.fails(number)
                self.counters.expire("handshake", f"{session.name}: {len(session.lanes)} lanes came up")
                session.end("unreachable" if not session.up else "lost", "not all lanes came up")
            elif session.lanes and now >= min(x.heard for x in session.lanes.values()) + limits.peer_dead:
                self.counters.expire("peer_dead", f"{session.name}: silent for {limits.peer_dead} s")
                session.end("dead", "silent")
            else:
                for lane in session.lanes.values():
                    if ping is not None:
                        lane.push(FrameType.PING, NO_TRANSFER, ping)

    def stop(self) -> None:
        """End all sessions: their lanes say what is queued, and close."""
        for session in list(self.sessions.by_id.values()):
            session.end("stopped", "the transfer process ends")

    def _session(self, side: Side, session_id: bytes, lanes: int) -> Session:
        self._sessions_made += 1
        return self._make_sessions[side](self.sessions, self._sessions_made, session_id, lanes)

    def _identity(self, side: Side) -> Identity:
        config = self.config
        return Identity(
            side=side, name=config.name, incarnation=config.incarnation,
            model_fingerprint=config.model_fingerprint, layout_fingerprint=config.layout.fingerprint,
            dtypes=config.layout.dtypes, slot_bytes=config.slot_bytes, memory=self.sessions.memory,
            sums=config.sums_lanes,
        )  # fmt: skip

    def _handshake(
        self, sock: socket.socket, network: str | None, session: Session | None, party: Initiator | Listener
    ) -> Handshake:
        """`network`: where the peer connected from; None: this side connected."""
        handshake = Handshake(self.handshakes, session, party, sock, self._loop, self._trace)
        deadline = time.monotonic() + self.config.deadlines.handshake
        crowded_out = self.handshakes.add(handshake.connection, network, deadline)
        if crowded_out is not None:
            self.counters.refuse("handshakes", "too many connections have not authenticated")
            crowded_out.close_soon("handshakes", "too many connections")
        self._loop.wake(handshake.connection.serve)
        return handshake


def use_cubic(sock: socket.socket) -> None:
    """Linux's own congestion control for the lanes that `sock` becomes or accepts, since BBR costs CPU time.
    Call it before the socket is connected: one that was once paced stays so."""
    with contextlib.suppress(OSError):  # not in this kernel, or forbidden: then as the machine would have it
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")


def _network_of(host: str) -> str:
    """What counts as one address: of IPv6, the /64 that one machine usually has to itself."""
    if ":" not in host:
        return host
    return str(ipaddress.ip_network((host.partition("%")[0], 64), strict=False))


def connecting(address: tuple[str, int], source: str | None, segment: int = 0) -> socket.socket:
    """A socket that connects or is connected. OSError: the connect cannot start.

    `source`: the interface that the lane uses, or an address of this machine. Addresses are numeric: a name
    lookup would block all lanes. `segment`: most bytes of a packet to here. 0: as the interface says.
    """
    infos = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    family, kind, protocol, _, sockaddr = infos[0]
    sock = socket.socket(family, kind, protocol)
    sock.setblocking(False)
    use_cubic(sock)
    try:
        if segment:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment)
        if source is not None and source in (name for _, name in socket.if_nameindex()):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, source.encode())
        elif source is not None:
            sock.bind((source, 0))
        sock.connect(sockaddr)
    except BlockingIOError:
        pass
    except OSError:
        sock.close()
        raise
    return sock
