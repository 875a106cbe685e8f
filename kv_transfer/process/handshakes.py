"""Lanes that have not authenticated. Any process on the network can open them, so their number is bounded."""

import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from baton.kv_transfer.process.connection import Connection
from baton.kv_transfer.process.lane_messages import LaneClosed, Report, Said
from baton.kv_transfer.process.loop import Loop
from baton.kv_transfer.process.stats import TransferCounters
from baton.kv_transfer.process.tcp_session import Session, refused_by_peer
from baton.kv_transfer.protocol import messages as wire
from baton.kv_transfer.protocol.frame import NO_TRANSFER, FrameType
from baton.kv_transfer.protocol.hello import Initiator, LaneRefused, Listener
from baton.kv_transfer.trace import TraceWriter

_MOST_KNOWN = 4096  # addresses; the one whose last proof is oldest is forgotten first

# The session that an authenticated lane belongs to. Raises LaneRefused.
Join = Callable[[wire.HelloOpen, wire.Identity], Session]


@dataclass(frozen=True, slots=True)
class _Place:
    deadline: float
    address: str | None  # None: this side connected
    known: bool


class Handshakes:
    """Bounds the lanes that peers have opened and not proved.

    When all places are taken, the address with the most lanes gives up its oldest. Addresses from which a
    peer has authenticated before share as many places of their own.
    """

    def __init__(self, most: int, counters: TransferCounters, join: Join) -> None:
        self.counters = counters
        self.join = join
        self._most = most
        self._places: dict[Connection, _Place] = {}  # oldest first
        self._known: dict[str, None] = {}  # in order of the last proof

    def __len__(self) -> int:
        return len(self._places)

    def add(self, lane: Connection, address: str | None, deadline: float) -> Connection | None:
        """`address`: of the peer that connected; None: this side did, and the lane needs no place.

        Returns the lane that must close for the new one."""
        known = address in self._known
        closing = None if address is None else self._crowded_out(address, known=known)
        if closing is not None:
            del self._places[closing]
        self._places[lane] = _Place(deadline, address, known)
        return closing

    def _crowded_out(self, address: str, *, known: bool) -> Connection | None:
        rivals = {lane: p.address for lane, p in self._places.items() if p.address and p.known == known}
        if len(rivals) < self._most:
            return None
        lanes_of = Counter([*rivals.values(), address])
        busiest = max(lanes_of, key=lambda a: lanes_of[a])
        return next(lane for lane, a in rivals.items() if a == busiest)

    def proved(self, lane: Connection) -> None:
        address = self._places.pop(lane).address
        if address is not None:
            self._known.pop(address, None)
            self._known[address] = None
            if len(self._known) > _MOST_KNOWN:
                del self._known[next(iter(self._known))]

    def closed(self, lane: Connection) -> None:
        """Idempotent."""
        self._places.pop(lane, None)

    def late(self, now: float) -> list[Connection]:
        return [lane for lane, place in self._places.items() if now >= place.deadline]


class Handshake:
    """Runs the HELLO of `hello.py` on a connection, then hands it to its session as a lane."""

    def __init__(
        self, places: Handshakes, session: Session | None, party: Initiator | Listener, sock: socket.socket,
        loop: Loop, trace: TraceWriter,
    ) -> None:  # fmt: skip
        self.session = session  # None on the listening side, until the connection says which
        self.connection = Connection(sock, loop, self._report, trace)
        self._places = places
        self._party = party

    def say(self, payload: bytes) -> None:
        self.connection.push(FrameType.HELLO, NO_TRANSFER, payload)

    def _report(self, report: Report) -> None:
        match report:
            case Said(_, _, payload) if self.connection.closing is None:
                try:
                    self._step(wire.decode_hello(memoryview(payload)), payload)
                except LaneRefused as e:
                    self._refuse(e)
                except wire.ProtocolError as e:
                    self._refuse(LaneRefused("hello", str(e)))
            case LaneClosed(_, kind, why):
                self._closed(kind, why)

    def _step(self, message: wire.Hello, payload: bytes) -> None:
        party = self._party
        if isinstance(message, wire.HelloRefused):
            raise LaneRefused(*refused_by_peer(message))
        if isinstance(party, Listener) and isinstance(message, wire.HelloOpen):
            self.say(wire.encode(party.answer(message, payload)))
        elif isinstance(party, Listener) and isinstance(message, wire.HelloProof):
            opened, peer = party.check(message)
            if party.keys is not None:
                self.connection.encrypt(party.keys)
            self.session = self._places.join(opened, peer)
            self._up(self.session, opened.lane, peer)
        elif isinstance(party, Initiator) and isinstance(message, wire.HelloReply) and party.proof is None:
            try:
                peer = party.reply(message)
            finally:
                if party.proof is not None:
                    self.say(wire.encode(party.proof))
                if party.keys is not None:
                    self.connection.encrypt(party.keys)
            assert self.session is not None
            self._up(self.session, party.lane, peer)
        else:
            raise LaneRefused("hello", f"unexpected {type(message).__name__}")

    def _up(self, session: Session, number: int, peer: wire.Identity) -> None:
        self._places.proved(self.connection)
        if self.connection in session.joining:
            session.joining.remove(self.connection)
        session.add(number, self.connection, peer)

    def _refuse(self, why: LaneRefused) -> None:
        self._places.counters.refuse(why.reason, why.detail)
        self.say(wire.encode(wire.HelloRefused(why.reason, why.detail[:512])))
        self.connection.close_soon(why.reason, why.detail)
        if self.session is not None and isinstance(self._party, Initiator):
            self.session.end(why.reason, why.detail)

    def _closed(self, kind: str, why: str) -> None:
        self._places.closed(self.connection)
        if kind not in ("eof", "socket") and self.connection.closing is None:
            self._places.counters.refuse(kind, f"in handshake: {why}")
        if self.session is not None and isinstance(self._party, Initiator):
            self.session.lane_failed(self._party.lane, self.connection, why)
        elif self.session is not None:
            self.session.end("unreachable", why)
