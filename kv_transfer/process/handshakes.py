"""Lanes that have not authenticated. Any process on the network can open them, so their number is bounded."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from baton.kv_transfer.process.frames import LaneOwner
from baton.kv_transfer.process.lane import Lane
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
        self._places: dict[Lane, _Place] = {}  # oldest first
        self._known: dict[str, None] = {}  # in order of the last proof

    def __len__(self) -> int:
        return len(self._places)

    def add(self, lane: Lane, address: str | None, deadline: float) -> Lane | None:
        """`address`: of the peer that connected; None: this side did, and the lane needs no place.

        Returns the lane that must close for the new one."""
        known = address in self._known
        closing = None if address is None else self._crowded_out(address, known=known)
        if closing is not None:
            del self._places[closing]
        self._places[lane] = _Place(deadline, address, known)
        return closing

    def _crowded_out(self, address: str, *, known: bool) -> Lane | None:
        rivals = {lane: p.address for lane, p in self._places.items() if p.address and p.known == known}
        if len(rivals) < self._most:
            return None
        lanes_of = Counter([*rivals.values(), address])
        busiest = max(lanes_of, key=lambda a: lanes_of[a])
        return next(lane for lane, a in rivals.items() if a == busiest)

    def proved(self, lane: Lane) -> None:
        address = self._places.pop(lane).address
        if address is not None:
            self._known.pop(address, None)
            self._known[address] = None
            if len(self._known) > _MOST_KNOWN:
                del self._known[next(iter(self._known))]

    def closed(self, lane: Lane) -> None:
        """Idempotent."""
        self._places.pop(lane, None)

    def late(self, now: float) -> list[Lane]:
        return [lane for lane, place in self._places.items() if now >= place.deadline]


class Handshake(LaneOwner[Lane]):
    """Runs the HELLO of `hello.py` on a lane, then hands the lane to its session."""

    def __init__(self, places: Handshakes, session: Session | None, party: Initiator | Listener) -> None:
        self.session = session  # None on the listening side, until the lane says which
        self._places = places
        self._party = party

    def control(self, lane: Lane, header: Header, payload: memoryview) -> None:
        if lane.closing is not None:
            return
        try:
            self._step(lane, wire.decode_hello(payload), payload)
        except LaneRefused as e:
            self._refuse(lane, e)
        except wire.ProtocolError as e:
            self._refuse(lane, LaneRefused("hello", str(e)))

    def _step(self, lane: Lane, message: wire.Hello, payload: memoryview) -> None:
        party = self._party
        if isinstance(message, wire.HelloRefused):
            raise LaneRefused(*refused_by_peer(message))
        if isinstance(party, Listener) and isinstance(message, wire.HelloOpen):
            say(lane, wire.encode(party.answer(message, bytes(payload))))
        elif isinstance(party, Listener) and isinstance(message, wire.HelloProof):
            opened, peer = party.check(message)
            if party.keys is not None:
                lane.encrypt(party.keys)
            self.session = self._places.join(opened, peer)
            self._up(lane, self.session, opened.lane, peer)
        elif isinstance(party, Initiator) and isinstance(message, wire.HelloReply) and party.proof is None:
            try:
                peer = party.reply(message)
            finally:
                if party.proof is not None:
                    say(lane, wire.encode(party.proof))
                if party.keys is not None:
                    lane.encrypt(party.keys)
            assert self.session is not None
            self._up(lane, self.session, party.lane, peer)
        else:
            raise LaneRefused("hello", f"unexpected {type(message).__name__}")

    def _up(self, lane: Lane, session: Session, number: int, peer: wire.Identity) -> None:
        self._places.proved(lane)
        if lane in session.joining:
            session.joining.remove(lane)
        session.add(number, lane, peer)

    def _refuse(self, lane: Lane, why: LaneRefused) -> None:
        self._places.counters.refuse(why.reason, why.detail)
        say(lane, wire.encode(wire.HelloRefused(why.reason, why.detail[:512])))
        lane.close_soon(why.reason, why.detail)
        if self.session is not None and isinstance(self._party, Initiator):
            self.session.end(why.reason, why.detail)

    def lane_closed(self, lane: Lane, kind: str, why: str) -> None:
        self._places.closed(lane)
        if kind not in ("eof", "socket") and lane.closing is None:
            self._places.counters.refuse(kind, f"in handshake: {why}")
        if self.session is not None:
            self.session.end("unreachable", why)


def say(lane: Lane, payload: bytes) -> None:
    lane.push(FrameType.HELLO, NO_TRANSFER, payload)
