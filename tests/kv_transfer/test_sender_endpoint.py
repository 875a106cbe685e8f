"""The sender's endpoint in an engine, over a device that takes its time (`late_pool`)."""

import resource
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import baton.kv_transfer as kv
from baton.kv_transfer.endpoint.sender import Sender
from baton.kv_transfer.layout import Piece
from baton.kv_transfer.protocol import local_messages as lm
from baton.kv_transfer.slices import Slice

from .late_pool import LAYOUT, Bench, LatePool, late_pools


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[LatePool]:
    return late_pools(monkeypatch)


@pytest.fixture
def sending(late: list[LatePool], until: Any) -> Iterator[tuple[Bench, Sender, LatePool]]:
    bench = Bench(Sender, lm.FromSender)
    yield bench, bench.endpoint, late[0]
    late[0].go(len(late[0].work))
    bench.endpoint.shutdown()


def start(bench: Bench, prefill_id: bytes, transfer_id: bytes = b"t" * 16, *, session: int = 1) -> None:
    bench.channel.send(lm.StartOut(prefill_id, transfer_id, session, 4096, 4, LAYOUT.dtypes, ((0, 40),)))
    bench.channel.send(lm.Granted(session, 9, False))


def test_a_slice_waits_for_the_forward_and_then_for_its_copy(sending: Any, until: Any) -> None:
    bench, sender, pool = sending
    sender.open(b"p", [5, 1, 3], 40)
    bench.next(until, lm.Offer)
    sender.ready(b"p", 0, 0, 40)
    start(bench, b"p")
    until(lambda: sender.has_fetch(b"p"), "the start to be seen")
    assert pool.work == [], "gathered before the layer was written"
    pool.recorded[0].passed = True
    until(lambda: pool.work, "the gather")
    assert bench.silent(), "handed over before it was copied"
    pool.go()
    s = bench.next(until, Slice)
    assert s == Slice(Piece(0, 0, 1, 0, 40), b"t" * 16, 0, 40 * 64, slot=s.slot, dtype="float32")
    expected = torch.cat([bench.cache[0][:, b] for b in (5, 1, 3)], 1)[:, :40]
    got = torch.frombuffer(bytearray(bench.arena.slot(s.slot)[: s.size]), dtype=torch.float32)
    assert torch.equal(got.view(2, 40, 1, 8), expected)
    sender.close(b"p", "cancelled")


def test_what_was_cached_leaves_before_and_beside_what_is_computed(sending: Any, until: Any) -> None:
    bench, sender, pool = sending
    sender.open(b"p", [5, 1, 3], 40)
    bench.next(until, lm.Offer)
    sender.ready(b"p", None, 0, 16)
    pool.recorded[0].passed = True
    start(bench, b"p")
    until(lambda: len(pool.work) == 2, "the gathers of both layers")
    sender.ready(b"p", 0, 16, 40)
    pool.go(2)
    out = [bench.next(until, Slice) for _ in range(2)]
    assert [s.piece for s in out] == [Piece(layer, 0, 1, 0, 16) for layer in (0, 1)]
    assert pool.work == [], "nothing is computed yet"
    pool.recorded[1].passed = True
    until(lambda: pool.work, "the gather of what is computed")
    pool.go()
    s = bench.next(until, Slice)
    assert (s.seq, s.piece) == (2, Piece(0, 0, 1, 16, 24))
    sender.close(b"p", "cancelled")


def test_kv_of_the_prefix_cache_waits_for_no_step_under_way(sending: Any, until: Any) -> None:
    bench, sender, pool = sending
    sender.serve(b"p", [5, 1, 3, 2], 0, 64)
    assert bench.next(until, lm.Pinned) == lm.Pinned(b"p", 1)
    start(bench, b"p")
    assert bench.next(until, lm.CommitOut).frames == 2
    until(lambda: len(pool.work) == 2, "the gathers of both layers")
    pool.go(2)
    assert [bench.next(until, Slice).piece.layer for _ in range(2)] == [0, 1]
    sender.close(b"p", "cancelled")


def test_the_last_layer_waits_for_the_forward_on_the_device(sending: Any, until: Any) -> None:
    bench, sender, pool = sending
    pool.gather_most = 4
    sender.open(b"p", [5, 1, 3], 40)
    bench.next(until, lm.Offer)
    start(bench, b"p")
    until(lambda: sender.has_fetch(b"p"), "the start to be seen")
    sender.ready(b"p", 0, 0, 40)
    sender.ready(b"p", 1, 0, 40)
    assert pool.work == [], "out of turn, or the first layer did not wait"
    pool.recorded[0].passed = True
    until(lambda: len(pool.work) == 2, "both gathers")
    assert bench.silent()
    pool.go()
    assert bench.next(until, Slice).piece.layer == 0, "the first layer waited for the last"
    assert bench.silent()
    pool.recorded[1].passed = True
    pool.go()
    assert bench.next(until, Slice).piece.layer == 1
    sender.close(b"p", "cancelled")


def test_what_a_peer_reads_first_is_handed_over_before_the_next_gather(sending: Any, until: Any) -> None:
    bench, sender, pool = sending
    sender.open(b"p", [5, 1, 3], 40)
    bench.next(until, lm.Offer)
    bench.channel.send(lm.Reached(1, True))
    start(bench, b"p")
    sender.ready(b"p", None, 0, 40)
    pool.recorded[0].passed = True
    until(lambda: pool.work, "the first gather")
    sender.expect(b"q")
    bench.next(until, lm.Offer)
    assert len(pool.work) == 1
    pool.go()
    assert bench.next(until, Slice).piece.layer == 0
    until(lambda: pool.work, "the second gather")
    for prefill_id in (b"p", b"q"):
        sender.close(prefill_id, "cancelled")


def test_closing_releases_only_after_the_gathers_that_run(sending: Any, until: Any) -> None:
    bench, sender, pool = sending
    sender.open(b"p", [5, 1, 3], 40)
    sender.ready(b"p", None, 0, 40)
    bench.next(until, lm.Offer)
    start(bench, b"p")
    pool.recorded[0].passed = True
    until(lambda: len(pool.work) == 2, "both gathers")
    sender.close(b"p", "cancelled")
    assert bench.next(until, lm.CloseOut).reason == "cancelled"
    pool.go()
    first = bench.next(until, Slice)
    assert sender.poll() == [], "released while a gather may still read its blocks"
    pool.go()
    assert until(sender.poll, "the release", sender) == [kv.Released(b"p", "cancelled")]
    assert not sender.idle
    for slot in (first.slot, bench.next(until, Slice).slot):
        bench.channel.send(lm.SlotFree(slot, True))
    until(lambda: sender.idle, "the slots")


def test_no_peer_gets_more_than_its_slots_and_its_credit(sending: Any, until: Any) -> None:
    bench, sender, pool = sending
    for i in range(6):  # 12 slices, 2 for each prefill
        sender.open(bytes([i]), [i], 16)
        sender.ready(bytes([i]), None, 0, 16)
        pool.recorded[-1].passed = True
        bench.next(until, lm.Offer)  # only what was offered is ever started
        bench.channel.send(lm.StartOut(bytes([i]), bytes([i]), i % 2, 4096, 1, LAYOUT.dtypes, ((0, 16),)))
    bench.channel.send(lm.Granted(0, 9, False), lm.Granted(1, 1, False))
    until(lambda: len(pool.work) == 5, "four of six slots, one by credit")
    bench.channel.send(lm.Granted(1, 2, False))
    until(lambda: len(pool.work) == 6, "one more by credit")
    pool.go(6)
    out = [bench.next(until, Slice) for _ in range(6)]
    assert len({s.transfer_id for s in out}) == 3, "one transfer of a peer after the other"
    bench.channel.send(lm.Granted(1, 2, True))
    answer = bench.next(until, lm.Recalled)
    assert (answer.session, answer.total, answer.sent) == (1, 2, 2)
    for s in out:
        bench.channel.send(lm.SlotFree(s.slot, True))  # none of them left: their credit is good again
    until(lambda: len(pool.work) == 4, "what was left, as far as there is credit")
    pool.go(4)
    for i in range(6):
        sender.close(bytes([i]), "cancelled")


@pytest.mark.parametrize(("slot_bytes", "stop"), [(4096, 41), (63, 40)], ids=["positions", "room"])
def test_a_fetch_that_cannot_be_served_is_refused_and_nothing_else(
    sending: Any, until: Any, slot_bytes: int, stop: int
) -> None:
    """Of what a peer may ask for, nothing ends the pump, and with it the worker."""
    bench, sender, _ = sending
    sender.open(b"p", [5, 1, 3], 40)
    bench.next(until, lm.Offer)
    sender.ready(b"p", 0, 0, 40)
    bench.channel.send(lm.StartOut(b"p", b"t" * 16, 1, slot_bytes, 4, LAYOUT.dtypes, ((0, stop),)))
    assert bench.next(until, lm.RefuseFetch) == lm.RefuseFetch(b"t" * 16)
    sender.close(b"p", "cancelled")
    assert until(sender.poll, "the release", sender) == [kv.Released(b"p", "cancelled")]


def test_a_fetch_that_waited_for_a_cancelled_prefill_is_forgotten(sending: Any, until: Any) -> None:
    bench, sender, _ = sending
    bench.channel.send(lm.FetchWaits(b"p", False))
    until(lambda: sender.has_fetch(b"p"), "the FETCH")
    sender.expect(b"p")
    sender.close(b"p", "cancelled")
    bench.next(until, lm.Offer)
    bench.next(until, lm.CloseOut)
    start(bench, b"p")  # what the transfer process says to the offer
    until(lambda: not sender.has_fetch(b"p"), "the FETCH to be forgotten")


def test_an_error_in_the_pump_reaches_the_engine(late: list[LatePool], until: Any) -> None:
    bench = Bench(Sender, lm.FromSender)
    bench.channel.send(lm.SlotFree(3, False))  # a slot that it never gave
    select_error = until(lambda: bench.endpoint.error, "the pump to die", bench.endpoint)
    with pytest.raises(RuntimeError, match="pump died") as error:
        bench.endpoint.poll()
    assert error.value.__cause__ is select_error


def test_descriptors_may_have_any_number(late: list[LatePool], until: Any) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
    bench = Bench(Sender, lm.FromSender, lowest_fd=1500)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    bench.endpoint.open(b"p", [5, 1, 3], 40)
    bench.next(until, lm.Offer)
    bench.channel.send(lm.FetchWaits(b"p", False))
    until(lambda: bench.endpoint.has_fetch(b"p"), "the pump to hear of it")
    bench.endpoint.close(b"p", "cancelled")
    bench.endpoint.shutdown()
