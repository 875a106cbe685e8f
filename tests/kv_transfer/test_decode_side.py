"""The receiving side of a transfer process alone: no network, and the time is told."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

import kv_transfer as kv
from kv_transfer import channel as ch
from kv_transfer.process import decode_side
from kv_transfer.process.connector import Session
from kv_transfer.process.decode_side import DecodeSide
from kv_transfer.process.slots import Slots
from kv_transfer.process.stats import Counters
from kv_transfer.protocol.frame import FrameType, Header
from kv_transfer.protocol.messages import Commit


def make_side(slots: int = 4) -> tuple[DecodeSide, ch.Channel]:
    """One layer of 64 bytes a position; and the engine's end of its channel."""
    config = kv.TransferConfig(
        role="decode", name="decode 0", incarnation=1, model_fingerprint="m", num_slots=slots,
        slot_bytes=4096, layout=kv.KVLayout(1, 1, 8, "float32"), deadlines=kv.Deadlines(unreachable=5.0),
    )  # fmt: skip
    ours, theirs = kv.channel_pair()
    side = DecodeSide(config, Slots(slots), ch.Channel(theirs, ch.FromReceiver), Counters())
    return side, ch.Channel(ours, ch.ToReceiver)


class Nowhere:
    """A connector that reaches nobody."""

    def __init__(self) -> None:
        self.attempts: list[tuple[tuple[str, int], int]] = []

    def connect(self, address: tuple[str, int], incarnation: int, lanes: int) -> Session:
        self.attempts.append((address, lanes))
        raise ConnectionRefusedError("nobody listens")


def test_it_connects_again_less_and_less_often_until_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(decode_side, "time", SimpleNamespace(monotonic=lambda: now))
    side, engine = make_side()
    side.connector = nowhere = Nowhere()
    side.engine(ch.FetchIn(b"t" * 16, b"p" * 16, "[::1]:7000", 9, ((0, 4),), 0, 1))
    assert nowhere.attempts == [(("::1", 7000), 4)]
    times, ended = [0.0], 0.0
    for tick in range(1, 700):
        now, before = tick / 100, len(nowhere.attempts)
        side.tick(now)
        if len(nowhere.attempts) > before:
            times.append(now)
        if side.quiet and not ended:
            ended = now
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert gaps == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0], abs=0.011)
    assert ended == 5.0
    assert not side.busy, "nobody is waited for"
    side._channel.flush()
    assert engine.receive() == [ch.FailedIn(b"t" * 16, "unreachable", False)]


class Peer:
    """A connector whose sessions come up and go down as the test says."""

    def __init__(self) -> None:
        self.sessions: list[Any] = []

    def connect(self, address: tuple[str, int], incarnation: int, lanes: int) -> Session:
        said: list[object] = []
        number = len(self.sessions) + 1
        session = SimpleNamespace(number=number, lane_count=1, kv_heard=0.0, said=said)
        session.send = lambda message, _=b"": said.append(message)
        self.sessions.append(session)
        return cast("Session", session)


def test_what_is_complete_is_injected_whatever_becomes_of_its_peer() -> None:
    """Its session is lost, and who answers then is another incarnation."""
    side, engine = make_side()
    side.connector = peer = Peer()
    side.engine(ch.FetchIn(b"t" * 16, b"p" * 16, "[::1]:7000", 9, ((0, 4),), 0, 1))
    (session,) = peer.sessions
    side.session_up(session)
    slot = side._slots.take()
    assert slot is not None
    head = Header(FrameType.KV, b"t" * 16, head_count=1, token_count=4, length=256)
    side.kv_ends(session, head, side.kv_begins(session, head, slot), True)
    side.control(session, Header(FrameType.COMMIT, b"t" * 16), Commit(kv.FirstToken(7), 1, 256))
    side.session_down(session, "lost", "closed")
    side.session_over(session)
    side.tick(time.monotonic())
    side.session_down(peer.sessions[1], "incarnation", "it is now another")
    side._channel.flush()
    assert [type(message) for message in engine.receive()] == [ch.Arrived, ch.Complete]
    side.engine(ch.SlotsFree([slot]))
    side.engine(ch.InjectedIn(b"t" * 16))
    assert side.quiet
    assert side.slots_free() == 4
