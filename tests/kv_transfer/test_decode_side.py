"""The receiving side of a transfer process alone: no network, and the time is told."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

import kv_transfer as kv
from kv_transfer import channel as ch
from kv_transfer.process import decode_side
from kv_transfer.process.connector import Session
from kv_transfer.process.decode_side import DecodeSide
from kv_transfer.process.slots import Slots
from kv_transfer.process.stats import Counters


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
    config = kv.TransferConfig(
        role="decode", name="decode 0", incarnation=1, model_fingerprint="m", num_slots=4, slot_bytes=4096,
        layout=kv.KVLayout(1, 1, 8, "float32"), deadlines=kv.Deadlines(unreachable=5.0),
    )  # fmt: skip
    ours, theirs = kv.channel_pair()
    engine = ch.Channel(ours, ch.ToReceiver)
    side = DecodeSide(config, Slots(4), ch.Channel(theirs, ch.FromReceiver), Counters())
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
