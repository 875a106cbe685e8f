"""ACKs that may have to be said again."""

from baton.kv_transfer.config import TransferDeadlines
from baton.kv_transfer.protocol.acks import Acks

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


def test_what_was_said_lately_comes_before_what_was_never_said() -> None:
    acks = Acks(TransferDeadlines(peer_dead=5.0))
    acks.injected(A, 0.0)
    assert acks.say(0.0) == [A]
    acks.injected(B, 8.0)
    assert acks.say(8.0) == [B]
    acks.expire(11.9)
    acks.lost(12.0)
    acks.injected(C, 12.0)
    assert acks.say(12.5) == [B, C]
    assert acks.say(12.6) == []
    acks.clear()
    acks.lost(12.7)
    assert acks.say(12.8) == []


def test_nothing_is_said_again_once_the_prefill_is_not_held() -> None:
    acks = Acks(TransferDeadlines(peer_dead=5.0, hold=30.0))
    acks.injected(A, 0.0)
    for now in (0.0, 9.0, 18.0, 27.0):
        assert acks.say(now) == [A]
        acks.lost(now)
    acks.injected(B, 28.0)
    acks.expire(30.0)
    assert acks.say(30.0) == [B]


def test_memory_is_bounded() -> None:
    acks = Acks(TransferDeadlines())
    ids = [i.to_bytes(16) for i in range(10_000)]
    for i in ids:
        acks.injected(i, 0.0)
    assert acks.say(0.0) == ids[-4096:]
    for i in ids[:4096]:
        acks.injected(i, 1.0)
    acks.lost(1.0)
    assert acks.say(1.0) == ids[:4096]
