"""Sessions over TCP: the authenticated lanes of one pair of workers, in the direction that KV takes."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from typing import Any, ClassVar, Protocol

from baton.kv_transfer.arena import Arena
from baton.kv_transfer.config import TransferConfig
from baton.kv_transfer.process.connector import FrameReceiver, FrameSender, ProtocolError, SessionHandler
from baton.kv_transfer.process.handshake import refused_by_peer
from baton.kv_transfer.process.lane import Lane
from baton.kv_transfer.process.lane_owner import OutgoingFrame
from baton.kv_transfer.process.movers import FarLane
from baton.kv_transfer.process.slots import SlotPipe
from baton.kv_transfer.process.stats import TransferCounters
from baton.kv_transfer.protocol.frame import NO_TRANSFER, FrameType, Header
from baton.kv_transfer.protocol.messages import (
    Control,
    HelloRefused,
    Identity,
    MessageError,
    Ping,
    Side,
    decode,
    decode_hello,
    encode,
    frame_type,
)


class SessionOwner(Protocol):
    """The connector, as its sessions use it."""

    config: TransferConfig
    counters: TransferCounters
    lane_count: int

    def place(self, lane: Lane, session: TcpSession) -> Lane | FarLane: ...
    def session_is_up(self, session: TcpSession) -> None: ...
    def session_ended(self, session: TcpSession, reason: str, detail: str) -> None: ...


class TcpSession(ABC):
    """What sessions of both directions have. Implements connector.Session and LaneOwner."""

    side: ClassVar[Side]
    """This process's side. The receiver connects, so its session is up with all of its lanes. The sender's
    is up with lane 0."""

    def __init__(
        self, handler: SessionHandler[Any], connector: SessionOwner, number: int, session_id: bytes,
        lane_count: int,
    ) -> None:  # fmt: skip
        self.handler = handler
        self.number = number
        self.id = session_id
        self.lane_count = lane_count
        self.lanes: dict[int, Lane | FarLane] = {}  # by lane number
        self.address = "an unknown address"  # where this side connected to
        self.peer: Identity | None = None
        self.slot_bytes = 0
        self.up = False
        self.ended = False
        self.opened = time.monotonic()
        self._open = 0  # lanes
        self._read_at = 0.0  # when a slice in exported memory was read
        self._connector = connector

    @property
    def kv_moved(self) -> float:
        return max((self._read_at, *(lane.kv_moved for lane in self.lanes.values())))

    def moved(self, now: float) -> None:
        self._read_at = now

    def send(self, message: Control, transfer_id: bytes = NO_TRANSFER) -> None:
        if not self.ended:
            self.lanes[0].push(frame_type(message), transfer_id, encode(message))

    def end(self, reason: str, detail: str) -> None:
        if self.ended:
            return
        self.ended = True
        self._connector.session_ended(self, reason, detail)
        for lane in self.lanes.values():
            lane.close_soon(reason, detail)
        self._over()

    def _over(self) -> None:
        if self.ended and self._open == 0:
            self.handler.session_over(self)

    def add(self, number: int, lane: Lane, peer: Identity) -> None:
        """`lane` is authenticated."""
        self.peer = peer
        self.slot_bytes = min(peer.slot_bytes, self._connector.config.slot_bytes)
        lane.owner, lane.max_payload = self, self.slot_bytes
        if number == 0:  # with the messages of the session
            lane.read_ahead()
            placed = lane
        else:
            placed = self._connector.place(lane, self)
        self.lanes[number] = placed
        self._attach(placed)
        self._open += 1
        enough = 0 in self.lanes if self.side == "sender" else len(self.lanes) == self.lane_count
        if enough and not self.up:
            self.up = True
            self._connector.session_is_up(self)

    @abstractmethod
    def _attach(self, lane: Lane | FarLane) -> None:
        """Follow the lane's KV frames, in the direction of the session."""

    # ------------------------------------------------------------ LaneOwner

    def control(self, lane: Lane | FarLane, header: Header, payload: memoryview) -> None:
        if self.ended:
            return
        try:
            if header.type is FrameType.HELLO and isinstance(said := decode_hello(payload), HelloRefused):
                raise ProtocolError(*refused_by_peer(said))  # this side counted the lane as up
            message = decode(self.side, header.type, payload)
            if isinstance(message, Ping):
                self._ping(message)
            elif not self.up or lane is not self.lanes.get(0):
                raise ProtocolError("order", f"{header.type.name} not on lane 0")
            else:
                self.handler.control(self, header, message)
        except ProtocolError as e:
            self._broken(e.kind, str(e))
        except MessageError as e:
            self._broken("message", str(e))

    def lane_closed(self, lane: Lane | FarLane, kind: str, why: str) -> None:
        self._connector.lane_count -= 1
        self._open -= 1
        if self.ended:
            self._over()
            return
        if kind in ("header", "control", "tag"):
            self._connector.counters.checksum(kind, f"{self.name}: {why}")
        elif kind not in ("eof", "socket"):
            self._connector.counters.refuse(kind, f"{self.name}: {why}")
        self.end("lost", why)

    @property
    def name(self) -> str:
        return self.peer.name if self.peer is not None else f"a worker at {self.address}"

    def _ping(self, message: Ping) -> None:
        assert self.peer is not None
        if message.incarnation != self.peer.incarnation:
            raise ProtocolError(
                "incarnation", f"PING of incarnation {message.incarnation:x}, which is not the session's"
            )
        limit = self._connector.config.deadlines.engine_dead
        if message.tick_age_ms > limit * 1000:
            self._connector.counters.expire(
                "engine_dead", f"{self.name}: no tick for {message.tick_age_ms} ms"
            )
            self.end("dead", "the peer's engine hangs")

    def _broken(self, kind: str, why: str) -> None:
        self._connector.counters.refuse(kind, f"{self.name}: {why}")
        self.end("lost", why)


class ReceivingSession(TcpSession):
    """KV frames come in. Implements LaneReceiver and FarReceiver."""

    side: ClassVar[Side] = "receiver"

    def __init__(
        self, receiver: FrameReceiver, arena: Arena, slots: SlotPipe, connector: SessionOwner, number: int,
        session_id: bytes, lane_count: int,
    ) -> None:  # fmt: skip
        super().__init__(receiver, connector, number, session_id, lane_count)
        self._receiver = receiver
        self._arena = arena
        self._slots = slots

    def _attach(self, lane: Lane | FarLane) -> None:
        lane.receiver = self

    def kv_begins(self, lane: Lane, header: Header) -> tuple[memoryview, Any]:
        slot = self._slots.take()
        place = self._arena.slot(slot)[: header.length]
        return place, self._receiver.kv_begins(self, header, slot)

    def far_begins(self, lane: FarLane, header: Header, slot: int) -> Any:
        return self._receiver.kv_begins(self, header, slot)

    def kv_ends(self, lane: Lane | FarLane, header: Header, ticket: Any, whole: bool | None) -> None:
        self._receiver.kv_ends(header, ticket, whole)


class SendingSession(TcpSession):
    """KV frames go out. Implements LaneSender and connector.SessionToDecode."""

    side: ClassVar[Side] = "sender"

    def __init__(
        self, sender: FrameSender, connector: SessionOwner, number: int, session_id: bytes, lane_count: int
    ) -> None:
        super().__init__(sender, connector, number, session_id, lane_count)
        self._sender = sender
        self._far: list[FarLane] = []  # the lanes that movers have
        self._waiting: deque[OutgoingFrame] = deque()  # for room in a mover

    def _attach(self, lane: Lane | FarLane) -> None:
        lane.sender = self
        if isinstance(lane, FarLane):
            self._far.append(lane)

    def send_frame(self, frame: OutgoingFrame) -> None:
        """By the lane with the fewest unsent bytes. If movers have lanes, by one of those."""
        if self._far:
            self._waiting.append(frame)
            self._feed()
        else:
            min(self.lanes.values(), key=lambda lane: lane.unsent).push_frame(frame)

    def _feed(self) -> None:
        """Give movers no more than they have room for: it shows late which lane is slow."""
        while self._waiting and (lane := min(self._far, key=lambda lane: lane.unsent)).has_room:
            lane.push_frame(self._waiting.popleft())

    def _over(self) -> None:
        while self._waiting:
            self._sender.frame_dropped(self._waiting.popleft())
        super()._over()

    def frame_begins(self, lane: Lane | FarLane, frame: OutgoingFrame) -> bool:
        return self._sender.frame_begins(frame)

    def frame_sent(self, lane: Lane | FarLane, frame: OutgoingFrame) -> None:
        self._sender.frame_sent(frame)
        if self._waiting:
            self._feed()

    def frame_dropped(self, lane: Lane | FarLane, frame: OutgoingFrame) -> None:
        self._sender.frame_dropped(frame)
