"""Sessions over TCP: the authenticated lanes of one pair of workers, in the direction that KV takes."""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from baton.kv_transfer.config import TransferConfig
from baton.kv_transfer.layout import Dtypes
from baton.kv_transfer.process.connection import Connection
from baton.kv_transfer.process.lane import Lane, LaneOwner
from baton.kv_transfer.process.movers import MoverHandle
from baton.kv_transfer.process.stats import TransferCounters, printable
from baton.kv_transfer.protocol import messages as wire
from baton.kv_transfer.protocol.frame import NO_TRANSFER, FrameType, Header
from baton.kv_transfer.protocol.hello import why_lanes

log = logging.getLogger("baton.kv")

CROWDED = "crowded"  # a session that is not in use ends, since another peer needs its place


class SessionHandler(Protocol):
    """Gets the events of the sessions of one side, each with its session: `PrefillSide`, `DecodeSide`."""

    def session_up(self, session: Any) -> None: ...

    def session_down(self, session: Any, reason: str, detail: str) -> None:
        """The session ended, or (decode) never came up. Frames of it may begin until `session_over`."""

    def session_over(self, session: Any) -> None:
        """All lanes are closed, and no frame is under way. Comes after `session_down`."""

    def control(self, session: Any, header: Header, message: wire.Control) -> None:
        """Raises ProtocolError."""


H = TypeVar("H", bound=SessionHandler)


class Sessions:
    """All sessions of one transfer process, and the places of their lanes."""

    def __init__(
        self, config: TransferConfig, memory: str, counters: TransferCounters, local: MoverHandle,
        forked: Sequence[MoverHandle],
    ) -> None:  # fmt: skip
        """`memory`: as in `Identity`. `local`, `forked`: what serves lanes, in this process and in others."""
        self.memory = memory
        self.config = config
        self.counters = counters
        self.by_id: dict[bytes, Session] = {}  # from the first word to the end
        self._local = local
        self._forked = forked

    def is_up(self, session: "Session") -> None:
        if session.side == "sender":
            assert session.peer is not None
            for other in list(self.by_id.values()):
                if other is session or other.side == "receiver" or other.peer is None:
                    continue
                if other.peer.incarnation == session.peer.incarnation:
                    other.end("lost", "replaced by a new session of the same peer")
        session.handler.session_up(session)

    def ended(self, session: "Session", reason: str, detail: str) -> None:
        del self.by_id[session.id]
        log.info("session with %s ended (%s): %s", *map(printable, (session.name, reason, detail)))
        if session.up or session.side == "receiver":
            session.handler.session_down(session, reason, detail)

    def lane(self, number: int, connection: Connection, session: "Session", *, summed: bool) -> Lane:
        """An authenticated lane goes on in the fork with the fewest; lane 0, which has messages, does not."""
        forks = self._forked if number else ()
        mover = min(forks, key=lambda x: len(x.lanes), default=self._local)
        sends = session.side == "sender"
        return mover.adopt(
            connection, session, session.slot_bytes, summed=summed, sends=sends, ahead=number == 0
        )

    def kv_lanes(self, lanes: Mapping[int, Lane]) -> list[Lane]:
        """Those of forks; all if no fork has one."""
        return [lane for number, lane in lanes.items() if number and self._forked] or [*lanes.values()]


class Session(LaneOwner, Generic[H]):
    """A connection of two workers: what sessions of both directions have.

    It ends once, and its credits and open transfers end with it."""

    side: ClassVar[wire.Side]
    """This process's side. The receiver connects, so its session is up with all of its lanes. The sender's
    is up with lane 0."""
    dtypes: Dtypes
    """In which slices travel: known from `session_up` on."""

    def __init__(
        self, handler: H, sessions: Sessions, number: int, session_id: bytes, lane_count: int
    ) -> None:
        self.handler = handler
        self.number = number  # unique in this process
        self.id = session_id
        self.lane_count = lane_count
        self.lanes: dict[int, Lane] = {}  # by lane number
        self.kv_lanes: list[Lane] = []
        self.joining: list[Connection] = []  # that this side opened, until they are authenticated or closed
        self.address = "an unknown address"  # where this side connected to
        self.ways: list[int] = []  # of each lane that this side opened: its pair of cards, by number
        self.bad: set[int] = set()  # those that carry nothing, as far as is known
        self.peer: wire.Identity | None = None  # known from `session_up` on
        self.transport = "tcp"  # how most of its KV comes
        self.slot_bytes = 0  # the largest payload that both sides take
        self.why_lanes = ""  # as in `hello`
        self.up = False
        self.ended = False
        self.opened = time.monotonic()
        self._open = 0  # lanes
        self._read_at = 0.0  # when a slice in exported memory was read
        self._sessions = sessions

    @property
    def kv_moved(self) -> float:
        """When bytes of KV frames last came, or when the peer last took some (time.monotonic()). 0: never."""
        return max((self._read_at, *(lane.kv_moved for lane in self.lanes.values())))

    def moved(self, now: float) -> None:
        """The peer read a slice, or a slice that it exported was read."""
        self._read_at = now

    def send(self, message: wire.Control, transfer_id: bytes = NO_TRANSFER) -> None:
        """Queues a control message. Control messages stay in order, but may overtake frames."""
        if not self.ended:
            self.lanes[0].push(wire.frame_type(message), transfer_id, wire.encode(message))

    @property
    def in_use(self) -> bool:
        """Whether it has a transfer, or a FETCH that waits."""
        raise NotImplementedError

    def give_way(self) -> None:
        """Ends a session that is not in use. The peer learns that no ACK is lost."""
        detail = "it was not in use, and too many peers fetch from here"
        self.lanes[0].push(FrameType.HELLO, NO_TRANSFER, wire.encode(wire.HelloRefused(CROWDED, detail)))
        self.end(CROWDED, detail)

    def end(self, reason: str, detail: str) -> None:
        if self.ended:
            return
        self.ended = True
        self._note_silent()
        self._sessions.ended(self, reason, detail)
        for lane in (*self.joining, *self.lanes.values()):
            lane.close_soon(reason, detail)
        self._over()

    def fails(self, lane: int) -> None:
        """The lane cannot be opened, or is silent: perhaps its card was lost."""
        if self.ways:
            self.bad.add(self.ways[lane])

    def lane_failed(self, number: int, connection: Connection, why: str) -> None:
        """The connection did not become this lane. If no lane becomes one, the peer is lost, and no card. So
        with several cards the session waits for the others."""
        if self.ended:
            return
        self.fails(number)
        self.joining.remove(connection)
        if not (self.ways and self.joining):
            self.end("unreachable", why)

    def _note_silent(self) -> None:
        if not self.ways:
            return
        since = time.monotonic() - self._sessions.config.deadlines.peer_dead / 2
        silent = [number for number, lane in self.lanes.items() if lane.heard < since]
        if len(silent) < len(self.lanes):  # else the peer is lost, and no card
            for number in silent:
                self.fails(number)

    def _over(self) -> None:
        if self.ended and self._open == 0:
            self.handler.session_over(self)

    def add(self, number: int, connection: Connection, peer: wire.Identity) -> None:
        """The connection is authenticated, as a lane with this number."""
        self.peer = peer
        config = self._sessions.config
        summed = config.sums_lanes and peer.sums
        self.slot_bytes = min(peer.slot_bytes, config.slot_bytes)
        mine = config.layout.dtypes
        if self.side == "sender":
            self.why_lanes = why_lanes(self._sessions.memory, peer.memory)
            self.dtypes = mine.sent_to(peer.dtypes)
        else:
            self.why_lanes = why_lanes(peer.memory, self._sessions.memory)
            self.dtypes = peer.dtypes.sent_to(mine)
        self.lanes[number] = self._sessions.lane(number, connection, self, summed=summed)
        self.kv_lanes = self._sessions.kv_lanes(self.lanes)
        self._open += 1
        enough = 0 in self.lanes if self.side == "sender" else len(self.lanes) == self.lane_count
        if enough and not self.up:
            self.up = True
            self._sessions.is_up(self)
        elif self.bad and not self.joining:
            self.end("unreachable", "not all lanes came up")

    # ------------------------------------------------------------ LaneOwner

    def control(self, lane: Lane, header: Header, payload: memoryview) -> None:
        if self.ended:
            return
        try:
            if header.type is FrameType.HELLO and isinstance(
                said := wire.decode_hello(payload), wire.HelloRefused
            ):
                if said.reason == CROWDED:
                    self.end(CROWDED, said.detail)
                    return
                raise wire.ProtocolError(*refused_by_peer(said))  # this side counted the lane as up
            message = wire.decode(self.side, header.type, payload)
            if isinstance(message, wire.Ping):
                self._ping(message)
            elif not self.up or lane is not self.lanes.get(0):
                raise wire.ProtocolError("order", f"{header.type.name} not on lane 0")
            else:
                self.handler.control(self, header, message)
        except wire.ProtocolError as e:
            self._sessions.counters.refuse(e.kind, f"{self.name}: {e}")
            self.end("lost", str(e))

    def lane_closed(self, kind: str, why: str) -> None:
        self._open -= 1
        if self.ended:
            self._over()
            return
        if kind in ("header", "control", "tag"):
            self._sessions.counters.checksum(kind, f"{self.name}: {why}")
        elif kind not in ("eof", "socket"):
            self._sessions.counters.refuse(kind, f"{self.name}: {why}")
        self.end("lost", why)

    @property
    def name(self) -> str:
        return self.peer.name if self.peer is not None else f"a worker at {self.address}"

    def _ping(self, message: wire.Ping) -> None:
        limit = self._sessions.config.deadlines.engine_dead
        if message.tick_age_ms > limit * 1000:
            self._sessions.counters.expire(
                "engine_dead", f"{self.name}: no tick for {message.tick_age_ms} ms"
            )
            self.end("lost", "the peer's engine hangs")


def refused_by_peer(message: wire.HelloRefused) -> tuple[str, str]:
    """The counter, and what the peer says."""
    return "by_peer", f"{message.reason[:32]!r}: {message.detail[:256]!r}"
