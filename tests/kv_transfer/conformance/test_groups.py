"""Transfers between tensor parallel groups: their numbers of ranks may differ."""

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import baton.kv_transfer as kv
from baton.kv_names.cache_kinds import LATENT
from baton.kv_transfer.device.cuda_pool import CudaPool
from baton.kv_transfer.device.host_pool import HostPool
from baton.kv_transfer.layout import KVLayout
from tests.device import DEVICE
from tests.kv_transfer.ranks import as_bytes
from tests.layouts import kv_layout
from tests.within import WITHIN

from .conftest import EXPORTED, TCP, Kind

TRANSPORTS = pytest.mark.parametrize("transport", [TCP, EXPORTED], indirect=True, ids=str)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
"""With "cuda", the ranks of both sides share one GPU."""


HEADS = kv_layout(3, 12, 16, "bfloat16")
LATENTS = kv_layout(3, 1, 72, "bfloat16", kind=LATENT)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("transport", "prefill_ranks", "decode_ranks", "layout"),
    [
        *((EXPORTED, *sizes, HEADS) for sizes in ((2, 1), (1, 2), (2, 2), (4, 2), (2, 4))),
        *((TCP, *sizes, HEADS) for sizes in ((2, 1), (4, 2), (3, 4))),
        *(pytest.param(TCP, *sizes, HEADS, marks=pytest.mark.gpu) for sizes in ((1, 2), (2, 2))),
        *((EXPORTED, *sizes, LATENTS) for sizes in ((1, 2), (3, 2))),
        *((TCP, *sizes, LATENTS) for sizes in ((1, 1), (2, 3))),
    ],
    indirect=["transport"],
    ids=str,
)
def test_kv_at_decode_equals_kv_at_prefill(
    make_pair: Any, prefill_ranks: int, decode_ranks: int, layout: KVLayout, device: str, transport: Kind
) -> None:
    """Bit for bit, while the prefill computes.

    Chunks do not fit the blocks of either side. A part of the prompt is cached at prefill, and a part at
    decode. The first token is known before the last rank has written the last layers.
    """
    if transport is EXPORTED and device != DEVICE:
        pytest.skip("all tests export memory of one device")
    n, cached, missing = 333, 70, 41
    both: dict[str, Any] = {"layout": layout, "slot_bytes": 8192, "slots": 32, "device": device}
    pair = make_pair(
        {"ranks": prefill_ranks, "block_size": 32, "blocks": 24, **both},
        {"ranks": decode_ranks, "block_size": 48, "blocks": 24, **both},
    )
    ranks = pair.prefill.ranks
    prefill_id = pair.prefill.open(n)
    blocks = pair.prefill.held[prefill_id]
    decode_id = pair.decode.fetch(pair.prefill, prefill_id, n, start=missing)
    for start, stop in ((cached, 117), (117, 230), (230, n)):
        for layer in range(3):
            ranks.layer_done_on_rank_0()
            if start == cached and layer == 0:
                pair.prefill.sender.ready(prefill_id, None, 0, cached)
            pair.prefill.sender.ready(prefill_id, layer, start, stop)
            if stop < n:  # the other ranks have written it, too
                for copier in ranks.copiers:
                    copier.layer_done(layer)
    pair.prefill.sender.commit(prefill_id, kv.FirstToken(5))
    if ranks.copiers and layout is not LATENTS:  # latents come from rank 0 alone
        frames = pair.until(lambda: pair.decode.stats().frames_received, "the first frames")
        assert frames
        assert decode_id not in pair.decode.events, "a rank has not written the last layers"
    for copier in ranks.copiers:
        for layer in range(3):
            copier.layer_done(layer)
    event = pair.event(decode_id)
    assert event.stats.bytes == (n - missing) * layout.bytes_per_token
    pair.assert_same(blocks, decode_id, missing, n)
    here = pair.decode.rows(pair.decode.reserved[decode_id], 0, 0, missing)
    assert not as_bytes(here).any(), "positions that decode has did not travel"
    pair.until(lambda: pair.prefill.released == {prefill_id: "acked"}, "the ACK")
    pair.assert_whole()
    assert pair.prefill.stats().transports["decode 0"].startswith(transport.reached)


class Gate(threading.Event):
    """The ranks from 1 on copy only once this is set."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = False  # by a copy


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()

    def behind_gate(copy: Any) -> Any:
        def gated(pool: Any, *args: Any) -> Any:
            if threading.current_thread().name == "rank copies":
                gate.reached = True
                assert gate.wait(WITHIN)
            return copy(pool, *args)

        return gated

    for pool, name in itertools.product((HostPool, CudaPool), ("gather", "scatter")):
        monkeypatch.setattr(pool, name, behind_gate(getattr(pool, name)))
    yield gate
    gate.set()


@TRANSPORTS
@pytest.mark.parametrize("then", ["acked", "cancelled", "retargeted"])
def test_a_prefill_is_held_until_every_rank_of_decode_has_copied(
    make_pair: Any, gate: Gate, then: str, transport: Kind
) -> None:
    """And no block of either side is given back before."""
    pair = make_pair({"slots": 64}, {"ranks": 2, "slots": 64})
    prefill_id, other = pair.prefill.hold(60), pair.prefill.hold(60, token=9)
    blocks = pair.prefill.held[prefill_id if then == "acked" else other]
    decode_id = pair.decode.fetch(pair.prefill, prefill_id, 60)
    pair.until(lambda: pair.decode.stats().receiver_slots_free == 64 - 12, "all frames")
    pair.until(lambda: gate.reached, "a copy of rank 1")
    if then == "cancelled":
        pair.decode.receiver.cancel(decode_id)
    elif then == "retargeted":
        pair.decode.receiver.fetch(
            decode_id, prefill_id=other, kv_address=pair.prefill.address, attempt=1,
            incarnation=pair.prefill.incarnation, block_ids=pair.decode.reserved[decode_id], num_tokens=60,
        )  # fmt: skip
        if transport is TCP:  # else the slots of the sender are in use until every rank has read them
            pair.until(lambda: pair.decode.stats().frames_received == 24, "all frames of the other prefill")
        pair.until(lambda: pair.prefill.sender.has_fetch(other), "the FETCH")
    pair.poll()
    assert not pair.decode.events
    assert not pair.prefill.released
    gate.set()
    event = pair.event(decode_id)
    if then == "cancelled":
        assert event == kv.Closed(decode_id)
    else:
        assert event.first_token.token_id == (7 if then == "acked" else 9)
        pair.assert_same(blocks, decode_id, 0, 60)
        pair.until(lambda: pair.prefill.released, "the ACK")
    for held in list(pair.prefill.held):
        pair.prefill.sender.close(held, "cancelled")
    pair.assert_whole()


@TRANSPORTS
def test_a_prefill_is_released_only_after_every_rank_has_copied(make_pair: Any, gate: Gate) -> None:
    pair = make_pair({"ranks": 2})
    prefill_id = pair.prefill.hold(60)
    decode_id = pair.decode.fetch(pair.prefill, prefill_id, 60)
    pair.until(lambda: gate.reached, "a copy of rank 1")
    pair.prefill.sender.close(prefill_id, "cancelled")
    assert pair.event(decode_id) == kv.FetchFailed(decode_id, "cancelled")
    assert not pair.prefill.released
    gate.set()
    pair.until(lambda: pair.prefill.released == {prefill_id: "cancelled"}, "the release")
    pair.assert_whole()
