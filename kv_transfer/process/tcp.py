"""The TCP connector: sessions of N lanes, their handshakes, liveness and end."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import itertools
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from kv_transfer.arena import Arena
from kv_transfer.config import TransferConfig
from kv_transfer.process.connector import Handler, ProtocolError
from kv_transfer.process.handshake import Handshake, say
from kv_transfer.process.handshakes import Handshakes
from kv_transfer.process.lane import Lane, OutgoingFrame
from kv_transfer.process.loop import Loop
from kv_transfer.process.movers import FarLane, MoverHandle
from kv_transfer.process.slots import Slots, take_slot
from kv_transfer.process.stats import Counters, printable
from kv_transfer.protocol.frame import NO_TRANSFER, FrameType, Header
from kv_transfer.protocol.hello import Initiator, Listener, Refused
from kv_transfer.protocol.messages import (
    Control,
    HelloOpen,
    Identity,
    MessageError,
    Ping,
    decode,
    encode,
    frame_type,
)
from kv_transfer.trace import TraceWriter

log = logging.getLogger("baton.kv")

_ACCEPTED_AT_ONCE = 64  # connections; the lanes have their turn before the next ones
_SCARCE = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class TcpSession:
    """Implements connector.Session, and owns its authenticated lanes, here and in movers."""

    def __init__(self, connector: TcpConnector, session_id: bytes, lane_count: int) -> None:
        connector.sessions_made += 1
        self.number = connector.sessions_made
        self.id = session_id
        self.lane_count = lane_count
        self.lanes: dict[int, Lane | FarLane] = {}  # by lane number
        self.peer: Identity | None = None
        self.slot_bytes = 0
        self.up = False
        self.ended = False
        self.opened = time.monotonic()
        self._far: list[FarLane] = []  # those of them in movers
        self._open = 0  # lanes
        self._waiting: deque[OutgoingFrame] = deque()  # for room in a mover
        self._connector = connector
        self._handler = connector.handler

    @property
    def kv_moved(self) -> float:
        return max((lane.kv_moved for lane in self.lanes.values()), default=0.0)

    def send(self, message: Control, transfer_id: bytes = NO_TRANSFER) -> None:
        if not self.ended:
            self.lanes[0].push(frame_type(message), transfer_id, encode(message))

    def send_frame(self, frame: OutgoingFrame) -> None:
        """Down the lane with the fewest unsent bytes; where there are movers, one of theirs."""
        if self._far:
            self._waiting.append(frame)
            self._feed()
        else:
            min(self.lanes.values(), key=lambda lane: lane.unsent).push_frame(frame)

    def _feed(self) -> None:
        """Give movers what they have room for, and no more: which lane will be slow is seen late."""
        while self._waiting and (lane := min(self._far, key=lambda lane: lane.unsent)).has_room:
            lane.push_frame(self._waiting.popleft())

    def end(self, reason: str, detail: str) -> None:
        if self.ended:
            return
        self.ended = True
        self._connector.session_ended(self, reason, detail)
        for lane in self.lanes.values():
            lane.close_soon(reason, detail)
        while self._waiting:
            self._handler.frame_dropped(self, self._waiting.popleft())
        self._over()

    def _over(self) -> None:
        if self.ended and self._open == 0:
            self._handler.session_over(self)

    def add(self, number: int, lane: Lane, peer: Identity) -> None:
        """`lane` is authenticated. The session is up with lane 0, or on decode with all of its lanes."""
        self.peer = peer
        self.slot_bytes = min(peer.slot_bytes, self._connector.config.slot_bytes)
        lane.owner, lane.max_payload = self, self.slot_bytes
        placed = lane if number == 0 else self._connector.place(lane, self)
        self.lanes[number] = placed
        if isinstance(placed, FarLane):
            self._far.append(placed)
        self._open += 1
        enough = 0 in self.lanes if self._connector.listening else len(self.lanes) == self.lane_count
        if enough and not self.up:
            self.up = True
            self._connector.session_is_up(self)

    # ------------------------------------------------------------ LaneOwner and FarOwner

    def kv_begins(self, lane: Lane, header: Header) -> tuple[memoryview, Any]:
        slot = take_slot(self._connector.slots)
        place = self._connector.arena.slot(slot)[: header.length]
        return place, self._handler.kv_begins(self, header, slot)

    def far_begins(self, lane: FarLane, header: Header, slot: int) -> Any:
        return self._handler.kv_begins(self, header, slot)

    def kv_ends(self, lane: Lane | FarLane, header: Header, ticket: Any, whole: bool | None) -> None:
        self._handler.kv_ends(self, header, ticket, whole)

    def control(self, lane: Lane | FarLane, header: Header, payload: memoryview) -> None:
        if self.ended:
            return
        try:
            message = decode(self._connector.config.role, header.type, payload)
            if isinstance(message, Ping):
                self._ping(message)
            elif not self.up or lane is not self.lanes.get(0):
                raise ProtocolError("order", f"{header.type.name} not on lane 0")
            else:
                self._handler.control(self, header, message)
        except ProtocolError as e:
            self._broken(e.kind, str(e))
        except MessageError as e:
            self._broken("message", str(e))

    def frame_begins(self, lane: Lane | FarLane, frame: OutgoingFrame) -> bool:
        return self._handler.frame_begins(self, frame)

    def frame_sent(self, lane: Lane | FarLane, frame: OutgoingFrame) -> None:
        self._handler.frame_sent(self, frame)
        if self._waiting:
            self._feed()

    def frame_dropped(self, lane: Lane | FarLane, frame: OutgoingFrame) -> None:
        self._handler.frame_dropped(self, frame)

    def lane_closed(self, lane: Lane | FarLane, kind: str, why: str) -> None:
        self._connector.lane_count -= 1
        self._open -= 1
        if self.ended:
            self._over()
            return
        if kind in ("header", "control"):
            self._connector.counters.checksum(kind, f"{self.name}: {why}")
        elif kind not in ("eof", "socket"):
            self._connector.counters.refuse(kind, f"{self.name}: {why}")
        self.end("lost", why)

    @property
    def name(self) -> str:
        return self.peer.name if self.peer is not None else "unknown peer"

    def _ping(self, message: Ping) -> None:
        assert self.peer is not None
        if message.incarnation != self.peer.incarnation:
            raise ProtocolError("incarnation", f"PING of {message.incarnation:x} in another's session")
        limit = self._connector.config.deadlines.engine_dead
        if message.tick_age_ms > limit * 1000:
            self._connector.counters.expire(
                "engine_dead", f"{self.name}: no tick for {message.tick_age_ms} ms"
            )
            self.end("dead", "the peer's engine hangs")

    def _broken(self, kind: str, why: str) -> None:
        self._connector.counters.refuse(kind, f"{self.name}: {why}")
        self.end("lost", why)


class TcpConnector:
    """All sessions of one transfer process."""

    def __init__(
        self, config: TransferConfig, secret: bytes, handler: Handler, counters: Counters, trace: TraceWriter,
        tick_age: Callable[[float], float], loop: Loop, movers: Sequence[MoverHandle], arena: Arena,
        slots: Slots | None,
    ) -> None:  # fmt: skip
        self.config = config
        self.arena = arena
        self.slots = slots  # None: no KV comes here
        self.handler = handler
        self.counters = counters
        self.sessions: dict[bytes, TcpSession] = {}  # by session id, from the first word to the end
        self.sessions_made = 0
        self.handshakes = Handshakes(config.max_handshakes)
        self.lane_count = 0
        self.listening = config.role == "prefill"
        self._secret = secret
        self._trace = trace
        self._tick_age = tick_age
        self._next_ping = 0.0
        self._identity = Identity(
            config.role, config.name, config.incarnation, config.model_fingerprint,
            config.layout.fingerprint, config.slot_bytes,
        )  # fmt: skip
        self._loop = loop
        self._movers = movers

    # ------------------------------------------------------------ opening

    def connect(self, address: tuple[str, int], incarnation: int, lanes: int) -> TcpSession:
        """Start a session; `session_up` or `session_down` follows. OSError: it could not start."""
        session = TcpSession(self, os.urandom(16), lanes)
        sockets: list[socket.socket] = []
        try:
            sources = itertools.cycle(self.config.bind or (None,))
            for source in itertools.islice(sources, lanes):
                sockets.append(_connecting(address, source))
        except OSError:
            for sock in sockets:
                sock.close()
            raise
        self.sessions[session.id] = session
        for number, sock in enumerate(sockets):
            party = Initiator(self._secret, self._identity, session.id, number, lanes, incarnation)
            say(self._adopt(sock, None, Handshake(self, session, party)), party.open)
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
            owner = Handshake(self, None, Listener(self._secret, self._identity))
            self._adopt(sock, _network_of(address[0]), owner)
        return True

    def joined_session(self, opened: HelloOpen, peer: Identity) -> TcpSession:
        """The session that an authenticated lane belongs to; a new one for its first lane."""
        session = self.sessions.get(opened.session_id)
        if session is None:
            if len(self.sessions) >= self.config.max_sessions:
                raise Refused("busy", f"{len(self.sessions)} sessions are open")
            session = self.sessions[opened.session_id] = TcpSession(self, opened.session_id, opened.lanes)
        elif session.peer != peer or session.lane_count != opened.lanes or opened.lane in session.lanes:
            raise Refused("hello", f"lane {opened.lane} does not fit session of {session.name}")
        return session

    def session_is_up(self, session: TcpSession) -> None:
        if self.listening:
            assert session.peer is not None
            for other in list(self.sessions.values()):
                same = other.peer is not None and other.peer.incarnation == session.peer.incarnation
                if same and other is not session:
                    other.end("lost", "replaced by a new session of the same peer")
        self.handler.session_up(session)

    def session_ended(self, session: TcpSession, reason: str, detail: str) -> None:
        del self.sessions[session.id]
        log.info("session with %s ended (%s): %s", *map(printable, (session.name, reason, detail)))
        for lane in self.handshakes:
            if isinstance(lane.owner, Handshake) and lane.owner.session is session:
                lane.close_soon(reason, detail)
        if session.up or not self.listening:
            self.handler.session_down(session, reason, detail)

    def place(self, lane: Lane, session: TcpSession) -> Lane | FarLane:
        """Where an authenticated lane goes on: in the mover with the fewest, or where it is."""
        if not self._movers:
            return lane
        return min(self._movers, key=lambda x: len(x.lanes)).adopt(lane, session)

    def lane_proved(self, lane: Lane) -> None:
        self.handshakes.proved(lane)

    def lane_closed(self, lane: Lane) -> None:
        """One that had not joined a session."""
        self.handshakes.closed(lane)
        self.lane_count -= 1

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
            ping = encode(Ping(self.config.incarnation, min(age, (1 << 32) - 1)))
        for session in list(self.sessions.values()):
            if len(session.lanes) < session.lane_count and now >= session.opened + limits.handshake:
                self.counters.expire("handshake", f"{session.name}: {len(session.lanes)} lanes came up")
                session.end("unreachable" if not session.up else "lost", "not all lanes came up")
            elif session.lanes and now >= min(x.heard for x in session.lanes.values()) + limits.peer_dead:
                self.counters.expire("peer_dead", f"{session.name}: silent for {limits.peer_dead} s")
                session.end("dead", "silent")
            else:
                for lane in session.lanes.values():
                    if ping is not None:
                        lane.push(FrameType.PING, NO_TRANSFER, ping)
                    if isinstance(lane, Lane):
                        lane.look_at_sent(now)
                        if lane.receiving:
                            lane.relax()

    def stop(self) -> None:
        """End all sessions: their lanes say what is queued, and close."""
        for session in list(self.sessions.values()):
            session.end("stopped", "the transfer process ends")

    def _adopt(self, sock: socket.socket, network: str | None, owner: Handshake) -> Lane:
        """`network`: where the peer connected from; None: this side connected."""
        self.lane_count += 1
        lane = Lane(sock, self._loop, owner, self._trace)
        deadline = time.monotonic() + self.config.deadlines.handshake
        crowded_out = self.handshakes.add(lane, network, deadline)
        if crowded_out is not None:
            self.counters.refuse("handshakes", "too many connections have not authenticated")
            crowded_out.close_soon("handshakes", "too many connections")
        self._loop.wake(lane.serve)
        return lane


def use_cubic(sock: socket.socket) -> None:
    """Linux's own congestion control for the lanes that `sock` becomes or accepts; before it is connected.

    Some machines have BBR, which lets a timer pace each burst: between two workers that costs more CPU than
    all that happens in Python. A socket that was once paced stays so, hence before.
    """
    with contextlib.suppress(OSError):  # not in this kernel, or forbidden: then as the machine would have it
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")


def _network_of(host: str) -> str:
    """What counts as one address: of IPv6, the /64 that one machine usually has to itself."""
    if ":" not in host:
        return host
    return str(ipaddress.ip_network((host.partition("%")[0], 64), strict=False))


def _connecting(address: tuple[str, int], source: str | None) -> socket.socket:
    """A socket whose connect is under way, or done; OSError if it cannot even start.

    `source`: the interface that it goes out from and that the KV comes in by, or an address of this machine.
    Only numeric addresses: a name lookup would block everybody here.
    """
    found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    family, kind, protocol, _, sockaddr = found[0]
    sock = socket.socket(family, kind, protocol)
    sock.setblocking(False)
    use_cubic(sock)
    try:
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
