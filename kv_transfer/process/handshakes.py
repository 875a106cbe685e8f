"""Lanes that have not authenticated. Any process on the network can open them, so their number is bounded."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from baton.kv_transfer.process.connection import Connection, FrameOwner
from baton.kv_transfer.process.stats import TransferCounters
from baton.kv_transfer.process.tcp_session import Session, refused_by_peer
from baton.kv_transfer.protocol import messages as wire
from baton.kv_transfer.protocol.frame import NO_TRANSFER, FrameType, Header
from baton.kv_transfer.protocol.hello import Initiator, LaneRefused, Listener

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


class Handshake(FrameOwner):
    """Runs the HELLO of `hello.py` on a connection, then hands it to its session as a lane."""

    def __init__(self, places: Handshakes, session: Session | None, party: Initiator | Listener) -> None:
        self.session = session  # None on the listening side, until the connection says which
        self._places = places
        self._party = party

    def control(self, connection: Connection, header: Header, payload: memoryview) -> None:
        if connection.closing is not None:
            return
        try:
            self._step(connection, wire.decode_hello(payload), payload)
        except LaneRefused as e:
            self._refuse(connection, e)
        except wire.ProtocolError as e:
            self._refuse(connection, LaneRefused("hello", str(e)))

    def _step(self, connection: Connection, message: wire.Hello, payload: memoryview) -> None:
        party = self._party
        if isinstance(message, wire.HelloRefused):
            raise LaneRefused(*refused_by_peer(message))
        if isinstance(party, Listener) and isinstance(message, wire.HelloOpen):
            say(connection, wire.encode(party.answer(message, bytes(payload))))
        elif isinstance(party, Listener) and isinstance(message, wire.HelloProof):
            opened, peer = party.check(message)
            if party.keys is not None:
                connection.encrypt(party.keys)
            self.session = self._places.join(opened, peer)
            self._up(connection, self.session, opened.lane, peer)
        elif isinstance(party, Initiator) and isinstance(message, wire.HelloReply) and party.proof is None:
            try:
                peer = party.reply(message)
            finally:
                if party.proof is not None:
                    say(connection, wire.encode(party.proof))
                if party.keys is not None:
                    connection.encrypt(party.keys)
            assert self.session is not None
            self._up(connection, self.session, party.lane, peer)
        else:
            raise LaneRefused("hello", f"unexpected {type(message).__name__}")

    def _up(self, connection: Connection, session: Session, number: int, peer: wire.Identity) -> None:
        self._places.proved(connection)
        if connection in session.joining:
            session.joining.remove(connection)
        session.add(number, connection, peer)

    def _refuse(self, connection: Connection, why: LaneRefused) -> None:
        self._places.counters.refuse(why.reason, why.detail)
        say(connection, wire.encode(wire.HelloRefused(why.reason, why.detail[:512])))
        connection.close_soon(why.reason, why.detail)
        if self.session is not None and isinstance(self._party, Initiator):
            self.session.end(why.reason, why.detail)

    def closed(self, connection: Connection, kind: str, why: str) -> None:
        self._places.closed(connection)
        if kind not in ("eof", "socket") and connection.closing is None:
            self._places.counters.refuse(kind, f"in handshake: {why}")
        if self.session is not None:
            self.session.end("unreachable", why)


def say(connection: Connection, payload: bytes) -> None:
    connection.push(FrameType.HELLO, NO_TRANSFER, payload)
