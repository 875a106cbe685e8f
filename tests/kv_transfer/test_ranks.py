"""Copies when engines have several ranks: from the caches of some, through slots, into those of others."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import kv_transfer as kv
from kv_transfer import device
from kv_transfer import ranks as ranks_module
from kv_transfer.arena import Arena, ArenaEnd, channel_pair
from kv_transfer.channel import ChannelClosed
from kv_transfer.device import Event, Pool, Staged
from kv_transfer.layout import KVLayout, cut
from kv_transfer.ranks import open_ranks

from .ranks import Ranks, as_bytes, mapped, positions

BLOCKS = 40
SLOT = 4096
BLOCK_SIZES = (16, 32, 48, 256)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
"""With "cuda", the ranks of both sides share one GPU."""


def layout_of(heads: int) -> KVLayout:
    return KVLayout(num_layers=2, num_kv_heads=heads, head_dim=8, dtype="float32")


def until_passed(pool: Pool, event: Event) -> None:
    deadline = time.monotonic() + 20
    while event is not None and not pool.passed(event):
        assert time.monotonic() < deadline, "copies never end"
        time.sleep(0.0002)


class Group(Ranks):
    """The ranks of one engine, without a transfer process."""

    def __init__(self, heads: int, size: int, block_size: int, arena: Arena, device: str) -> None:
        shape = (2, BLOCKS, block_size, heads, 8)
        layers = [torch.randn(shape, device=device) for _ in range(2)]
        ends = [mapped(ArenaEnd(channel_pair()[0], arena)) for _ in range(2)]
        super().__init__(layers, [], block_size, layout_of(heads), size, *ends)
        self.gathers, self.scatters = (open_ranks(self.kv, end) for end in (self.sending, self.receiving))

    def close(self) -> None:
        self.gathers.close()
        self.scatters.close()
        super().close()


@contextmanager
def groups(heads: int, *sizes: tuple[int, int], device: str = "cpu") -> Iterator[list[Group]]:
    """Groups of so many ranks with blocks of so many positions, which share an arena."""
    arena = Arena.create(128, SLOT)
    made = [Group(heads, size, block_size, arena, device) for size, block_size in sizes]
    yield made
    for group in made:
        group.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("heads", "sender", "receiver"),
    [
        *((12, a, b) for a in (1, 2, 3, 4) for b in (1, 2, 3, 4)),
        *((2, a, b) for a in (1, 2, 4, 8) for b in (1, 2, 4, 8) if max(a, b) > 2),
    ],
)
def test_from_group_to_group(heads: int, sender: int, receiver: int, device: str) -> None:
    """Bit for bit, for heads that one rank or several ranks hold, and for different block sizes."""
    n, start = 250, 37
    size = BLOCK_SIZES[sender % 4], BLOCK_SIZES[(sender + receiver) % 4]
    here, there = (random.sample(range(BLOCKS), -(-n // block)) for block in size)
    sizes = (sender, size[0]), (receiver, size[1])
    with groups(heads, *sizes, device=device) as (source, target):
        tables = source.gathers.table(here, n), target.scatters.table(there, n)
        pieces = [
            piece
            for layer in range(2)
            for some in sorted(set(source.heads))
            for piece in cut(layout_of(heads), layer, (start, n), some, SLOT)
        ]
        slots = random.sample(range(128), len(pieces))
        gathered = source.gathers.gather(
            [Staged(p, slot, tables[0]) for p, slot in zip(pieces, slots, strict=True)]
        )
        until_passed(source.gathers, gathered)
        scattered = target.scatters.scatter(
            [Staged(p, slot, tables[1]) for p, slot in zip(pieces, slots, strict=True)]
        )
        until_passed(target.scatters, scattered[1])
        for layer in range(2):
            sent = source.rows(layer, positions(here, size[0], start, n))
            assert torch.equal(target.rows(layer, positions(there, size[1], start, n)), sent)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(2, 1), (1, 2), (2, 2), (4, 2), (2, 4), (3, 4)])
def test_kv_at_decode_equals_kv_at_prefill(
    make_pair: Any, prefill_ranks: int, decode_ranks: int, device: str
) -> None:
    """Bit for bit, over lanes, while the prefill computes.

    Chunks do not fit the blocks of either side. A part of the prompt is cached at prefill, and a part at
    decode. The first token is known before the last rank has written the last layers.
    """
    n, cached, missing = 333, 70, 41
    layout = KVLayout(3, 12, 16, "bfloat16")
    both: dict[str, Any] = {"layout": layout, "slot_bytes": 2 * SLOT, "slots": 32, "device": device}
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
    if ranks.copiers:
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


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The ranks from 1 on copy only once this is set."""
    gate = threading.Event()

    def behind_gate(copy: Any) -> Any:
        def gated(pool: Any, *args: Any) -> Any:
            if threading.current_thread().name == "kv copies":
                assert gate.wait(20)
            return copy(pool, *args)

        return gated

    for pool, name in itertools.product((device.HostPool, device.CudaPool), ("gather", "scatter")):
        monkeypatch.setattr(pool, name, behind_gate(getattr(pool, name)))
    yield gate
    gate.set()


@pytest.mark.parametrize("then", ["acked", "cancelled", "retargeted"])
def test_a_prefill_is_held_until_every_rank_of_decode_has_copied(
    make_pair: Any, gate: threading.Event, then: str
) -> None:
    """And no block of either side is given back before."""
    pair = make_pair(decode={"ranks": 2, "slots": 64})
    prefill_id, other = pair.prefill.hold(60), pair.prefill.hold(60, token=9)
    blocks = pair.prefill.held[prefill_id if then == "acked" else other]
    decode_id = pair.decode.fetch(pair.prefill, prefill_id, 60)
    pair.until(lambda: pair.decode.stats().frames_received == 12, "all frames")
    if then == "cancelled":
        pair.decode.receiver.cancel(decode_id)
    elif then == "retargeted":
        pair.decode.receiver.fetch(
            decode_id, prefill_id=other, kv_address=pair.prefill.address, attempt=1,
            incarnation=pair.prefill.incarnation, block_ids=pair.decode.reserved[decode_id], num_tokens=60,
        )  # fmt: skip
        pair.until(lambda: pair.decode.stats().frames_received == 24, "all frames of the other prefill")
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


def test_a_prefill_is_released_only_after_every_rank_has_copied(
    make_pair: Any, gate: threading.Event
) -> None:
    pair = make_pair({"ranks": 2})
    prefill_id = pair.prefill.hold(60)
    decode_id = pair.decode.fetch(pair.prefill, prefill_id, 60)
    pair.until(lambda: pair.decode.stats().frames_received, "the heads of rank 0")
    pair.prefill.sender.close(prefill_id, "cancelled")
    assert pair.event(decode_id) == kv.FetchFailed(decode_id, "cancelled")
    assert not pair.prefill.released
    gate.set()
    pair.until(lambda: pair.prefill.released == {prefill_id: "cancelled"}, "the release")
    pair.assert_whole()


def test_a_rank_gathers_a_layer_only_when_it_has_written_it(until: Any) -> None:
    with groups(4, (2, 16)) as (group,):
        table = group.gathers.table([3], 10)
        batch, ready = [], []
        for layer in range(2):
            group.layer_done_on_rank_0()
            ready.append(group.gathers.record())
            piece = next(cut(layout_of(4), layer, (0, 10), (2, 4), SLOT))
            batch.append(Staged(piece, layer, table))
        done = group.gathers.gather(batch, ready)
        time.sleep(0.01)
        assert not group.gathers.passed(done)
        filled = [group.sending.arena.slot(slot) for slot in range(2)]
        assert not any(map(any, filled))
        group.copiers[0].layer_done(0)
        until(lambda: any(filled[0]), "the first layer, which waits for no other")
        assert not any(filled[1])
        group.copiers[0].layer_done(1)
        until_passed(group.gathers, done)
        assert any(filled[1])


def test_a_rank_that_hangs_or_dies_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "SILENCE", 0.01)
    with groups(4, (2, 16)) as (group,):
        piece = next(cut(layout_of(4), 0, (0, 10), (2, 4), SLOT))
        group.layer_done_on_rank_0()
        ready = group.gathers.record()
        done = group.gathers.gather([Staged(piece, 0, group.gathers.table([3], 10))], [ready])
        time.sleep(0.02)
        with pytest.raises(RuntimeError, match="rank 1 has not copied KV"):
            group.gathers.passed(done)
        group.others[0].channel.shutdown(2)
        with pytest.raises(ChannelClosed):
            group.gathers.passed(done)
