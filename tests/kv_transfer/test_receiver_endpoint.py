"""The receiver's endpoint in an engine, over a device that takes its time (`late_pool`)."""

import math
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import baton.kv_transfer as kv
from baton.kv_transfer.endpoint import injector
from baton.kv_transfer.endpoint import receiver as receiver_module
from baton.kv_transfer.endpoint.live_fetch import LayerPace
from baton.kv_transfer.endpoint.receiver import Receiver
from baton.kv_transfer.layout import Piece
from baton.kv_transfer.protocol import local_messages as lm
from baton.kv_transfer.slices import Slice

from .late_pool import Bench, LatePool, late_pools


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[LatePool]:
    return late_pools(monkeypatch)


class Now:
    """The receiver's clock. It stands still until the test changes it."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def monotonic(self) -> float:
        return self.seconds


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Now:
    made = Now()
    for module in (injector, receiver_module):
        monkeypatch.setattr(module, "time", made)
    return made


@pytest.fixture
def receiving(late: list[LatePool], now: Now) -> Iterator[tuple[Bench, Receiver, LatePool]]:
    bench = Bench(Receiver, lm.FromReceiver)
    yield bench, bench.endpoint, late[0]
    bench.endpoint.shutdown()


def ask(bench: Bench, prefill_id: bytes) -> None:
    bench.endpoint.fetch(
        b"d",
        prefill_id=prefill_id,
        kv_address="127.0.0.1:1",
        incarnation=1,
        attempt=0,
        block_ids=[7, 2],
        num_tokens=20,
    )


def fetch(bench: Bench, until: Any) -> bytes:
    ask(bench, b"p")
    message = bench.next(until, lm.FetchIn)
    assert message.ranges == ((0, 20),)
    return message.transfer_id


def arrive(bench: Bench, transfer_id: bytes, slot: int, layer: int) -> bytes:
    data = os.urandom(20 * 64)
    bench.arena.slot(slot)[: len(data)] = data
    bench.channel.send(arrived(transfer_id, slot, layer, 0, 20))
    return data


def arrived(transfer_id: bytes, slot: int, layer: int, start: int, count: int) -> lm.Arrived:
    piece = Piece(layer, 0, 1, start, count)
    size = count * 64
    return lm.Arrived(Slice(piece, transfer_id, layer, size, slot=slot, dtype="float32"))


def complete(bench: Bench, transfer_id: bytes) -> None:
    bench.channel.send(
        lm.Complete(transfer_id, kv.FirstToken(9), lm.Arrival(2 * 20 * 64, 20, 2, 0.5, 1.0, 2.0, 2.5))
    )


def test_injected_only_after_the_last_scatter(receiving: Any, until: Any) -> None:
    bench, receiver, pool = receiving
    transfer_id = fetch(bench, until)
    data = [arrive(bench, transfer_id, slot, layer) for slot, layer in ((4, 0), (2, 1))]
    complete(bench, transfer_id)
    assert receiver.poll() == []
    assert receiver.poll_within is not None, "nothing else would wake the engine"
    assert bench.silent(), "slots given back before they were copied"
    pool.go()
    (event,) = receiver.poll()
    assert isinstance(event, kv.Injected)
    assert (event.first_token.token_id, event.stats.transfer_seconds, event.stats.bytes) == (9, 1.0, 2560)
    assert bench.next(until, lm.Emptied).slots == [4, 2]
    assert bench.next(until, lm.InjectedIn).transfer_id == transfer_id
    assert receiver.idle
    assert receiver.poll_within is None
    for layer in range(2):
        got = torch.cat([bench.cache[layer][:, b] for b in (7, 2)], 1)[:, :20].contiguous()
        assert got.numpy().tobytes() == data[layer]


@pytest.mark.parametrize("how", ["injected", "cancelled", "asked again"])
def test_the_end_of_a_fetch_is_known_with_the_layers_of_its_last_tokens(
    receiving: Any, until: Any, now: Now, how: str
) -> None:
    bench, receiver, pool = receiving
    transfer_id = fetch(bench, until)
    arrive(bench, transfer_id, 4, 0)
    bench.channel.send(arrived(transfer_id, 2, 1, 0, 12))
    receiver.poll()
    assert receiver.next_injection == math.inf, "one of two layers, and the first tokens of the other"
    bench.channel.send(arrived(transfer_id, 3, 1, 12, 8))
    receiver.poll()
    assert receiver.next_injection == now.seconds
    if how == "injected":
        bench.channel.send(
            lm.Complete(transfer_id, kv.FirstToken(9), lm.Arrival(2 * 20 * 64, 20, 3, 0.5, 1.0, 2.0, 2.5))
        )
    elif how == "cancelled":
        receiver.cancel(b"d")
    else:
        bench.channel.send(lm.FailedIn(transfer_id, "integrity", retry=True))
    pool.go(len(pool.work))
    receiver.poll()
    assert receiver.next_injection == math.inf


def test_the_last_layer_comes_as_fast_as_those_before() -> None:
    pace = LayerPace()
    pace.came(2, 10, 100.0)
    assert pace.ends_at == math.inf
    pace.came(4, 10, 101.0)
    assert pace.ends_at == 103.5, "half a second for each of layers 5 to 9"
    pace.came(8, 10, 101.5)
    assert pace.ends_at == pytest.approx(101.75)
    pace.came(9, 10, 105.0)
    assert pace.ends_at == 105.0


def test_layers_that_are_taken_together_do_not_tell_how_fast_they_come() -> None:
    pace = LayerPace()
    for layer in (0, 2, 1):
        pace.came(layer, 10, 100.0)
    assert pace.ends_at == math.inf
    pace.came(3, 10, 102.0)
    assert pace.ends_at == 114.0, "2 seconds for layer 3, and for each of layers 4 to 9"


def test_a_launch_that_is_due_goes_first(receiving: Any, until: Any, now: Now) -> None:
    bench, receiver, pool = receiving
    transfer_id = fetch(bench, until)
    arrive(bench, transfer_id, 4, 0)
    assert receiver.poll(spare=0.0) == []
    assert receiver.poll_within is not None
    assert not receiver.idle
    assert receiver.poll(spare=1.0) == []
    assert not pool.work, "it waits for others"
    now.seconds += 2 * injector.HOLD
    assert receiver.poll(spare=1.0) == []
    assert len(pool.work) == 1
    arrive(bench, transfer_id, 2, 1)
    complete(bench, transfer_id)
    assert receiver.poll(spare=0.0) == []
    assert len(pool.work) == 1, "injected while a step is to be launched"
    receiver.poll(spare=1.0)
    assert len(pool.work) == 2, "the last layer waits for no others"
    pool.go(2)
    (event,) = receiver.poll(spare=0.0)
    assert isinstance(event, kv.Injected)
    assert receiver.idle


def test_where_a_launch_is_always_due_slices_do_not_wait_for_ever(
    receiving: Any, until: Any, now: Now
) -> None:
    """The device is done before the host has launched the next step: else no request would ever join."""
    bench, receiver, pool = receiving
    transfer_id = fetch(bench, until)
    for layer in range(2):
        arrive(bench, transfer_id, layer, layer)
    complete(bench, transfer_id)
    assert receiver.poll(spare=0.0) == []
    assert not pool.work
    now.seconds += 1.1 * injector.PATIENCE
    assert receiver.poll(spare=0.0) == []
    pool.go()
    (event,) = receiver.poll(spare=0.0)
    assert isinstance(event, kv.Injected)


def test_what_waits_for_others_is_not_written_once_it_is_cancelled(receiving: Any, until: Any) -> None:
    bench, receiver, pool = receiving
    arrive(bench, fetch(bench, until), 4, 0)
    assert receiver.poll(spare=0.0) == []
    receiver.cancel(b"d")
    assert receiver.poll(spare=0.0) == [kv.Closed(b"d")], "its blocks are free, and may soon be another's"
    assert receiver.poll() == []
    assert pool.work == []
    bench.next(until, lm.CancelIn)
    assert bench.next(until, lm.Emptied).slots == [4]
    assert receiver.idle


@pytest.mark.parametrize("how", ["cancel", "failure", "failure, then cancel"])
def test_blocks_are_given_back_only_after_the_last_scatter(receiving: Any, until: Any, how: str) -> None:
    bench, receiver, pool = receiving
    transfer_id = fetch(bench, until)
    arrive(bench, transfer_id, 3, 0)
    assert receiver.poll() == []
    if how != "cancel":
        bench.channel.send(lm.FailedIn(transfer_id, "gone", retry=False))
        assert receiver.poll() == []
    if how != "failure":
        receiver.cancel(b"d")
    if how == "cancel":
        assert bench.next(until, lm.CancelIn).transfer_id == transfer_id
        arrive(bench, transfer_id, 5, 1)  # was on its way: its slot goes back, its bytes go nowhere
    assert receiver.poll() == []
    pool.go()
    expected = kv.FetchFailed(b"d", "gone") if how == "failure" else kv.Closed(b"d")
    assert receiver.poll() == [expected]
    receiver.cancel(b"d")
    assert receiver.poll() == []
    freed = bench.next(until, lm.Emptied).slots
    if how == "cancel":
        freed += bench.next(until, lm.Emptied).slots
    assert sorted(freed) == ([3, 5] if how == "cancel" else [3])
    assert receiver.idle
    assert pool.work == []


@pytest.mark.parametrize("failed", [False, True])
def test_a_fetch_that_replaces_one_waits_for_its_scatters(receiving: Any, until: Any, failed: bool) -> None:
    """It is a Retarget, and the old one's failure may be known and not reported yet: it says nothing of the
    new one."""
    bench, receiver, pool = receiving
    transfer_id = fetch(bench, until)
    arrive(bench, transfer_id, 3, 0)
    assert receiver.poll() == []
    if failed:
        bench.channel.send(lm.FailedIn(transfer_id, "gone", retry=False))
        assert receiver.poll() == []
    ask(bench, b"q")
    assert receiver.poll() == []
    receiver.cancel(b"d")
    assert receiver.poll() == [], "its blocks are still written for the old one"
    pool.go()
    assert receiver.poll() == [kv.Closed(b"d")]
    assert receiver.idle


def test_it_asks_again_twice_and_drops_late_slices_of_the_old_transfer(receiving: Any, until: Any) -> None:
    bench, receiver, pool = receiving
    transfer_id = fetch(bench, until)
    for _ in range(2):
        arrive(bench, transfer_id, 1, 0)
        receiver.poll()
        bench.channel.send(lm.FailedIn(transfer_id, "integrity", retry=True))
        arrive(bench, transfer_id, 2, 1)
        pool.go()
        assert receiver.poll() == []
        assert bench.next(until, lm.Emptied).slots == [1]
        again = bench.next(until, lm.FetchIn)
        assert again.transfer_id != transfer_id
        assert (again.prefill_id, again.ranges) == (b"p", ((0, 20),))
        assert bench.next(until, lm.Emptied).slots == [2]
        transfer_id = again.transfer_id
    bench.channel.send(lm.FailedIn(transfer_id, "integrity", retry=True))
    assert receiver.poll() == [kv.FetchFailed(b"d", "integrity")]


def test_what_is_said_of_a_transfer_is_of_no_earlier_one(receiving: Any, until: Any, now: Now) -> None:
    bench, receiver, pool = receiving
    transfer_id = fetch(bench, until)
    arrive(bench, transfer_id, 1, 0)
    receiver.poll()
    pool.go()
    bench.channel.send(lm.FailedIn(transfer_id, "integrity", retry=True))
    receiver.poll()
    assert bench.next(until, lm.Emptied).slots == [1]
    transfer_id, asked_again = bench.next(until, lm.FetchIn).transfer_id, now.seconds
    now.seconds += 1.0
    for slot, layer in ((2, 0), (3, 1)):
        arrive(bench, transfer_id, slot, layer)
    complete(bench, transfer_id)
    receiver.poll()
    pool.go()
    (event,) = receiver.poll()
    assert event.stats.scatter_at > asked_again


def share(bench: Bench, until: Any) -> bytes:
    """Asks for two ranges of a split prompt."""
    bench.endpoint.fetch_ranges(
        b"f",
        prefill_id=b"p",
        kv_address="127.0.0.1:1",
        incarnation=1,
        block_ids=[7, 2, 4],
        ranges=((4, 12), (20, 40)),
    )
    message = bench.next(until, lm.FetchIn)
    assert (message.ranges, message.states_at) == (((4, 12), (20, 40)), ())
    return message.transfer_id


def has(receiver: Receiver, layer: int, stop: int) -> bool:
    """Whether a step may go on now."""
    return receiver.wait_for_layer([b"f"], layer, stop, -math.inf, lambda: None)


def test_a_layer_is_there_when_its_last_scatter_is_over(receiving: Any, until: Any) -> None:
    bench, receiver, pool = receiving
    transfer_id = share(bench, until)
    bench.channel.send(arrived(transfer_id, 4, 0, 4, 6))
    receiver.poll()
    pool.go(len(pool.work))
    assert not has(receiver, 0, 20), "a part of the first range"
    assert has(receiver, 0, 4), "no position below is fetched"
    bench.channel.send(arrived(transfer_id, 3, 0, 10, 2))
    receiver.poll()
    assert not has(receiver, 0, 20), "the copy is under way"
    pool.go(len(pool.work))
    assert has(receiver, 0, 20)
    assert not has(receiver, 0, 40), "the second range"
    assert not has(receiver, 1, 20), "another layer"
    receiver.cancel(b"f")
    assert not has(receiver, 0, 20), "the fetch has ended"


def test_slots_that_are_free_inside_a_step_are_given_back_soon(receiving: Any, until: Any) -> None:
    """They may be all slots. Then nothing comes that would wake the engine."""
    bench, receiver, pool = receiving
    transfer_id = share(bench, until)
    bench.channel.send(arrived(transfer_id, 4, 0, 4, 8))
    receiver.poll()
    pool.go(len(pool.work))
    assert has(receiver, 0, 12)
    assert receiver.poll_within is not None
    receiver.poll()
    assert bench.next(until, lm.Emptied).slots == [4]
    receiver.poll()  # it has reported the beginning of the range
    assert receiver.poll_within is None


def unverified(checksum: int, *what: Any) -> lm.Arrived:
    message = arrived(*what)
    message.slice.sum, message.slice.verified = checksum, False
    return message


@pytest.mark.parametrize("right", [True, False])
def test_a_slice_that_the_device_sums_is_used_only_when_its_sum_was_right(
    receiving: Any, until: Any, right: bool
) -> None:
    """By no step that waits for its layer, and by none that waits for the whole fetch."""
    bench, receiver, pool = receiving
    pool.sums = {4: 7, 3: 8}
    transfer_id = share(bench, until)
    bench.channel.send(
        unverified(7, transfer_id, 4, 0, 4, 8),
        unverified(8 if right else 9, transfer_id, 3, 1, 4, 8),
        arrived(transfer_id, 2, 0, 20, 20),
        arrived(transfer_id, 1, 1, 20, 20),
        lm.Complete(transfer_id, kv.FirstToken(9), lm.Arrival(56 * 64, 28, 4, 0.5, 1.0, 2.0, 2.5)),
    )
    receiver.poll()
    assert not has(receiver, 0, 20), "the copy is under way"
    pool.go(len(pool.work))
    assert has(receiver, 0, 20)
    assert has(receiver, 1, 20) is right
    injected = [event for event in receiver.poll() if isinstance(event, kv.Injected)]
    assert bool(injected) is right
    emptied = bench.next(until, lm.Emptied)
    assert (sorted(emptied.slots), emptied.damaged) == ([1, 2, 3, 4], [] if right else [3])
    if not right:
        bench.channel.send(lm.FailedIn(transfer_id, "integrity", retry=False))
        assert [type(event) for event in receiver.poll()] == [kv.FetchFailed]


def test_the_end_of_each_range_is_reported_once(receiving: Any, until: Any) -> None:
    bench, receiver, _ = receiving
    transfer_id = share(bench, until)
    bench.channel.send(arrived(transfer_id, 4, 0, 4, 6))
    assert receiver.poll() == []
    bench.channel.send(arrived(transfer_id, 3, 0, 10, 2))
    assert receiver.poll() == [kv.Began(b"f", 12)]
    bench.channel.send(arrived(transfer_id, 2, 1, 10, 2), arrived(transfer_id, 1, 0, 20, 20))
    assert receiver.poll() == [kv.Began(b"f", 40)]


def test_what_ends_during_a_wait_is_reported_once_and_by_the_next_poll(receiving: Any, until: Any) -> None:
    bench, receiver, pool = receiving
    transfer_id = share(bench, until)
    data = [(0, 4, 8), (0, 20, 20), (1, 4, 8), (1, 20, 20)]
    for seq, (layer, start, count) in enumerate(data):
        piece = Piece(layer, 0, 1, start, count)
        size = count * 64
        bench.channel.send(lm.Arrived(Slice(piece, transfer_id, seq, size, slot=seq, dtype="float32")))
    bench.channel.send(
        lm.Complete(transfer_id, kv.FirstToken(0), lm.Arrival(56 * 64, 28, 4, 0.5, 1.0, 2.0, 2.5))
    )
    ticks: list[int] = []

    def tick() -> None:
        ticks.append(1)
        pool.go(len(pool.work))

    assert receiver.wait_for_layer([b"f"], 1, 40, math.inf, tick)
    assert receiver.wait_for_layer([b"f"], 0, 40, math.inf, tick)
    assert ticks
    pool.go(len(pool.work))
    events = receiver.poll()
    ends = [event for event in events if not isinstance(event, kv.Began)]
    assert [event.stop for event in events if isinstance(event, kv.Began)] == [12, 40]
    assert len(ends) == 1
    assert isinstance(ends[0], kv.Injected)
    assert receiver.poll() == []
    assert receiver.idle


@pytest.mark.parametrize("ended", ["failed", "injected"])
@pytest.mark.parametrize("then", ["cancelled", "fetched again"])
def test_what_a_wait_finds_of_another_fetch_may_be_taken_back(
    receiving: Any, until: Any, now: Now, ended: str, then: str
) -> None:
    """A step waits for a part of a prompt, and routers say meanwhile what becomes of other requests."""
    bench, receiver, pool = receiving
    transfer_id = fetch(bench, until)
    share(bench, until)
    if ended == "failed":
        bench.channel.send(lm.FailedIn(transfer_id, "gone", retry=False))
    else:
        for layer in range(2):
            arrive(bench, transfer_id, 1 + layer, layer)
        complete(bench, transfer_id)

    def tick() -> None:
        now.seconds += 0.02
        pool.go(len(pool.work))

    for _ in range(2):
        assert not receiver.wait_for_layer([b"f"], 0, 40, now.seconds + 0.05, tick)
    assert receiver.poll_within, "an end is known"
    if then == "cancelled":
        receiver.cancel(b"d")
        assert receiver.poll() == [kv.Closed(b"d")]
    else:
        ask(bench, b"q")
        while not isinstance(message := bench.next(until, object), lm.FetchIn):
            assert isinstance(message, lm.Emptied | lm.InjectedIn)
        assert receiver.poll() == []
        bench.channel.send(lm.FailedIn(message.transfer_id, "gone", retry=False))
        assert receiver.poll() == [kv.FetchFailed(b"d", "gone")]
    receiver.cancel(b"d")
    assert receiver.poll() == []


@pytest.mark.parametrize("how", ["failed", "late"])
def test_a_wait_ends_with_its_fetch_or_its_time(receiving: Any, until: Any, now: Now, how: str) -> None:
    bench, receiver, _ = receiving
    transfer_id = share(bench, until)

    def tick() -> None:
        now.seconds += 0.02 if how == "late" else 0.0

    if how == "failed":
        bench.channel.send(lm.FailedIn(transfer_id, "gone", retry=True))
    assert not receiver.wait_for_layer([b"f"], 0, 40, now.seconds + 0.05, tick)
    assert [type(event) for event in receiver.poll()] == ([kv.FetchFailed] if how == "failed" else [])
