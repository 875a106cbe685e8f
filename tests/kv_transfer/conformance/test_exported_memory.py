"""Peers of one host read slices where they were gathered; over TCP where they cannot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import kv_transfer as kv
from kv_transfer.cuda_pool import CudaPool
from kv_transfer.device import HostPool, Staged
from kv_transfer.peer_memory import Unreachable
from tests.device import DEVICE
from tests.kv_transfer.conftest import Pair, until

from .conftest import EXPORTED, Kind

WRONG = "tcp: a slice could not be read, or was wrong"

pytestmark = pytest.mark.parametrize("transport", [EXPORTED], indirect=True, ids=str)


def mappings() -> int:
    """Of arenas, in this process."""
    return Path("/proc/self/maps").read_text().count("baton-kv-arena")


def pulled(pair: Any) -> int:
    """Transfers 64 positions, bit for bit. Returns how many slices decode read itself, of 12."""
    pool: Any = CudaPool if DEVICE == "cuda" else HostPool
    pull, slices = pool.pull, 0

    def counted(self: Any, memory: Any, batch: Sequence[Staged]) -> Any:
        nonlocal slices
        slices += len(batch)
        return pull(self, memory, batch)

    prefill_id = pair.prefill.hold(64)
    blocks = pair.prefill.held[prefill_id]
    decode_id = pair.decode.fetch(pair.prefill, prefill_id, 64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "pull", counted)
        assert isinstance(pair.event(decode_id), kv.Injected)
    pair.assert_same(blocks, decode_id, 0, 64)
    pair.decode.release(decode_id)
    pair.assert_whole()
    return slices


def test_it_is_withdrawn_after_a_wrong_slice_and_closed_with_its_session(
    make_pair: Any, transport: Kind
) -> None:
    before = mappings()
    pair = make_pair(decode={"deadlines": kv.TransferDeadlines(idle_close=0.3)})
    opened = DEVICE == "cpu"  # a GPU's memory is no mapping here
    assert mappings() == before + 4 + opened, "four arenas, and one of them as peer"
    assert pulled(pair) == 12
    with transport.bent(pair):
        assert pulled(pair) < 24, "all of it was read twice"
    assert pair.prefill.stats().transports == {"decode 0": WRONG}
    assert pulled(pair) == 0
    pair.until(lambda: pair.prefill.stats().transports == {}, "the session to end")
    pair.until(lambda: mappings() == before + 4, "the memory to be closed")
    transport.connect(pair)
    assert pulled(pair) == 12


def test_memory_that_cannot_be_read_any_more(make_pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The transfer goes on over TCP."""
    pair = make_pair()

    def lost(*_: Any) -> Any:
        raise Unreachable("gone")

    with monkeypatch.context() as patch:
        patch.setattr(CudaPool if DEVICE == "cuda" else HostPool, "pull", lost)
        assert pulled(pair) > 0
    assert pair.prefill.stats().transports == {"decode 0": WRONG}
    assert pulled(pair) == 0


def test_slices_are_read_after_the_sender_is_dead(make_pair: Any) -> None:
    """All of them were named, and COMMIT came. The request need not be prefilled again."""
    before = mappings()
    pair = make_pair({"slots": 32}, {"slots": 32})
    decode, prefill_id = pair.decode, pair.prefill.hold(64)
    blocks = pair.prefill.held[prefill_id]
    decode_id = decode.fetch(pair.prefill, prefill_id, 64)
    until(lambda: (stats := decode.stats()).receiver_slots_free == stats.slots - 12, "all slices")
    pair.prefill.process.kill()
    until(lambda: decode.stats().sessions == 0, "the session to end")
    event = until(lambda: decode.poll() or decode.events.get(decode_id), "the KV", decode.receiver)
    assert isinstance(event, kv.Injected)
    pair.assert_same(blocks, decode_id, 0, 64)
    until(lambda: decode.poll() or mappings() == before + 4, "the memory to be closed", decode.receiver)


@pytest.mark.parametrize(
    ("side", "config", "why"),
    [
        ("prefill", {"ranks": 2}, "the sender has several ranks"),
        ("decode", {"ranks": 2}, "the receiver has several ranks"),
        ("prefill", {"exports": False}, "--kv-connector tcp at the sender"),
        ("decode", {"exports": False}, "--kv-connector tcp at the receiver"),
    ],
)
def test_why_a_pair_uses_tcp(
    make_prefill: Any, make_decode: Any, side: str, config: dict[str, Any], why: str
) -> None:
    prefill = make_prefill(**(config if side == "prefill" else {}))
    pair = Pair(prefill, make_decode(**(config if side == "decode" else {})))
    assert pulled(pair) == 0
    pair.until(lambda: pair.prefill.stats().transports == {"decode 0": f"tcp: {why}"}, "the answer")
