"""ACKs that may have to be said again."""

from baton.kv_transfer.config import TransferDeadlines
from baton.kv_transfer.protocol.acks import Acks

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


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
