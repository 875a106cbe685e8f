"""Runs the HELLO of `hello.py` on a lane that is not authenticated, then hands the lane to its session."""

from __future__ import annotations

from typing import Protocol

from baton.kv_transfer.process.lane import Lane
from baton.kv_transfer.process.stats import TransferCounters
from baton.kv_transfer.protocol.frame import NO_TRANSFER, FrameType, Header
from baton.kv_transfer.protocol.hello import Initiator, LaneRefused, Listener
from baton.kv_transfer.protocol.messages import (
    Hello,
    HelloOpen,
    HelloProof,
    HelloRefused,
    HelloReply,
    Identity,
    MessageError,
    decode_hello,
    encode,
)


class Joinable(Protocol):
    """The session that a lane asks to join."""

    def add(self, number: int, lane: Lane, peer: Identity) -> None: ...
    def end(self, reason: str, detail: str) -> None: ...


class Doorkeeper(Protocol):
    """What the connector is to a handshake."""

    @property
    def counters(self) -> TransferCounters: ...
    def lane_proved(self, lane: Lane) -> None: ...
    def joined_session(self, opened: HelloOpen, peer: Identity) -> Joinable: ...
    def lane_closed(self, lane: Lane) -> None: ...


class Handshake:
    """Owns a lane that is not authenticated. Implements LaneOwner."""

    def __init__(self, connector: Doorkeeper, session: Joinable | None, party: Initiator | Listener) -> None:
        self._connector = connector
        self.session = session  # None on the listening side, until the lane says which
        self._party = party

    def control(self, lane: Lane, header: Header, payload: memoryview) -> None:
        if lane.closing is not None:
            return
        try:
            self._step(lane, decode_hello(payload), payload)
        except LaneRefused as e:
            self._refuse(lane, e)
        except MessageError as e:
            self._refuse(lane, LaneRefused("hello", str(e)))

    def _step(self, lane: Lane, message: Hello, payload: memoryview) -> None:
        party = self._party
        if isinstance(message, HelloRefused):
            raise LaneRefused(*refused_by_peer(message))
        if isinstance(party, Listener) and isinstance(message, HelloOpen):
            say(lane, encode(party.answer(message, bytes(payload))))
        elif isinstance(party, Listener) and isinstance(message, HelloProof):
            opened, peer = party.check(message)
            if party.keys is not None:
                lane.encrypt(party.keys)
            self.session = self._connector.joined_session(opened, peer)
            self._up(lane, opened.lane, peer)
        elif isinstance(party, Initiator) and isinstance(message, HelloReply) and party.proof is None:
            try:
                peer = party.reply(message)
            finally:
                if party.proof is not None:
                    say(lane, encode(party.proof))
                if party.keys is not None:
                    lane.encrypt(party.keys)
            self._up(lane, party.lane, peer)
        else:
            raise LaneRefused("hello", f"unexpected {type(message).__name__}")

    def _up(self, lane: Lane, number: int, peer: Identity) -> None:
        assert self.session is not None
        self._connector.lane_proved(lane)
        self.session.add(number, lane, peer)

    def _refuse(self, lane: Lane, why: LaneRefused) -> None:
        self._connector.counters.refuse(why.reason, why.detail)
        say(lane, encode(HelloRefused(why.reason, why.detail[:512])))
        lane.close_soon(why.reason, why.detail)
        if self.session is not None and isinstance(self._party, Initiator):
            self.session.end(why.reason, why.detail)

    def lane_closed(self, lane: Lane, kind: str, why: str) -> None:
        self._connector.lane_closed(lane)
        if kind not in ("eof", "socket") and lane.closing is None:
            self._connector.counters.refuse(kind, f"in handshake: {why}")
        if self.session is not None:
            self.session.end("unreachable", why)


def refused_by_peer(message: HelloRefused) -> tuple[str, str]:
    """The counter, and what the peer says."""
    return "by_peer", f"{message.reason[:32]!r}: {message.detail[:256]!r}"


def say(lane: Lane, payload: bytes) -> None:
    lane.push(FrameType.HELLO, NO_TRANSFER, payload)
