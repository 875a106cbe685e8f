"""The engines' endpoints over a device that takes its time, the test playing the transfer process.

On CUDA a gather or scatter goes on after the call that started it. Until its event has passed no slot is
handed over or given back, no block is reported free, and nothing is reported injected.
"""

from __future__ import annotations

import fcntl
import math
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kv_transfer as kv
from kv_transfer import channel as ch
from kv_transfer import ranked_pool
from kv_transfer.device.host_pool import HostPool
from kv_transfer.receiver import ArenaReceiver, _LayerPace
from kv_transfer.sender import ArenaSender

LAYOUT = kv.KVLayout(2, 1, 8, "float32")  # 64 B a position and layer
NO_TRACE = kv.TraceWriter(None, "")
SLOTS = 6


class LateEvent:
    def __init__(self) -> None:
        self.passed = False


class LatePool(HostPool):
    """Does the work when its event is let through, as a stream does when it gets there."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.recorded: list[LateEvent] = []
        self.work: list[tuple[LateEvent, Any]] = []  # in stream order

    def record(self) -> LateEvent:
        self.recorded.append(LateEvent())
        return self.recorded[-1]

    def passed(self, event: Any) -> bool:
        return event.passed

    def gather(self, batch: Any, after: Any = ()) -> LateEvent:
        event = LateEvent()

        def work() -> None:
            assert all(e is None or e.passed for e in after), "a stream waits for these"
            HostPool.gather(self, batch)

        self.work.append((event, work))
        return event

    def scatter(self, batch: Any) -> tuple[LateEvent, LateEvent]:
        copied, scattered = LateEvent(), LateEvent()
        self.work.append((copied, lambda: None))
        self.work.append((scattered, lambda: HostPool.scatter(self, batch)))
        return copied, scattered

    def go(self, count: int = 1) -> None:
        """Let the stream run on by `count` events."""
        for event, work in [self.work.pop(0) for _ in range(count)]:
            work()
            event.passed = True


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[LatePool]:
    """The pool that the next endpoint opens."""
    made: list[LatePool] = []

    def open_pool(*args: Any, **_: Any) -> LatePool:
        made.append(LatePool(*args))
        return made[-1]

    monkeypatch.setattr(ranked_pool, "open_pool", open_pool)
    return made


class Bench:
    """An endpoint and the transfer process's end of its channel."""

    def __init__(self, endpoint: Any, receives: Any, lowest_fd: int = 0) -> None:
        ours, theirs = kv.channel_pair()
        if lowest_fd:
            theirs = socket.socket(fileno=fcntl.fcntl(theirs.detach(), fcntl.F_DUPFD_CLOEXEC, lowest_fd))
        self.arena = kv.Arena.create(SLOTS, 4096)
        end = kv.ArenaEnd(theirs, self.arena)
        self.cache = [torch.arange(2.0 * 8 * 16 * 8).view(2, 8, 16, 1, 8) for _ in range(2)]
        self.endpoint = endpoint(end, kv.PagedKV(self.cache, 16, LAYOUT, "cpu"), NO_TRACE)
        self.channel = ch.Channel(ours, receives)
        self.inbox: list[Any] = []

    def next(self, until: Any, kind: type) -> Any:
        """The next message, which must be of this type."""

        def some() -> bool:
            self._receive()
            return bool(self.inbox)

        until(some, kind.__name__, self.channel)
        message = self.inbox.pop(0)
        assert isinstance(message, kind), message
        return message

    def silent(self) -> bool:
        self._receive()
        return not self.inbox

    def _receive(self) -> None:
        for message in self.channel.receive():
            self.inbox += message.slices if isinstance(message, ch.SlicesOut) else [message]


@pytest.fixture
def sending(late: list[LatePool], until: Any) -> Iterator[tuple[Bench, ArenaSender, LatePool]]:
    bench = Bench(ArenaSender, ch.FromSender)
    yield bench, bench.endpoint, late[0]
    late[0].go(len(late[0].work))
    bench.endpoint.shutdown()


def start(bench: Bench, prefill_id: bytes, transfer_id: bytes = b"t" * 16, *, session: int = 1) -> None:
    bench.channel.send(ch.StartOut(prefill_id, transfer_id, session, 4096, 4, ((0, 40),), 0, 1))
    bench.channel.send(ch.Granted(session, 9, False))


def test_a_slice_waits_for_the_forward_and_then_for_its_copy(sending: Any, until: Any) -> None:
    bench, sender, pool = sending
    sender.open(b"p", [5, 1, 3], 40)
    bench.next(until, ch.Offer)
    sender.ready(b"p", 0, 0, 40)
    start(bench, b"p")
    until(lambda: sender.has_fetch(b"p"), "the start to be seen")
    assert pool.work == [], "gathered before the layer was written"
    pool.recorded[0].passed = True
    until(lambda: pool.work, "the gather")
    assert bench.silent(), "handed over before it was copied"
    pool.go()
    s = bench.next(until, ch.SliceOut)
    assert (s.seq, s.layer, s.token_start, s.token_count, s.length) == (0, 0, 0, 40, 40 * 64)
    expected = torch.cat([bench.cache[0][:, b] for b in (5, 1, 3)], 1)[:, :40]
    got = torch.frombuffer(bytearray(bench.arena.slot(s.slot)[: s.length]), dtype=torch.float32)
    assert torch.equal(got.view(2, 40, 1, 8), expected)
    sender.close(b"p", "cancelled")


def test_what_was_cached_leaves_before_and_beside_what_is_computed(sending: Any, until: Any) -> None:
    bench, sender, pool = sending
    sender.open(b"p", [5, 1, 3], 40)
    bench.next(until, ch.Offer)
    sender.ready(b"p", None, 0, 16)
    pool.recorded[0].passed = True
    start(bench, b"p")
    until(lambda: len(pool.work) == 2, "the gathers of both layers")
    sender.ready(b"p", 0, 16, 40)
    pool.go(2)
    out = [bench.next(until, ch.SliceOut) for _ in range(2)]
    assert [(s.layer, s.token_start, s.token_count) for s in out] == [(0, 0, 16), (1, 0, 16)]
    assert pool.work == [], "nothing is computed yet"
    pool.recorded[1].passed = True
    until(lambda: pool.work, "the gather of what is computed")
    pool.go()
    s = bench.next(until, ch.SliceOut)
    assert (s.seq, s.layer, s.token_start, s.token_count) == (2, 0, 16, 24)
    sender.close(b"p", "cancelled")


def test_kv_of_the_prefix_cache_waits_for_no_step_under_way(sending: Any, until: Any) -> None:
    bench, sender, pool = sending
    sender.serve(b"p", [5, 1, 3, 2], 0, 64)
    assert bench.next(until, ch.Pinned) == ch.Pinned(b"p", 1)
    start(bench, b"p")
    assert bench.next(until, ch.CommitOut).frames == 2
    until(lambda: len(pool.work) == 2, "the gathers of both layers")
    pool.go(2)
    assert [bench.next(until, ch.SliceOut).layer for _ in range(2)] == [0, 1]
    sender.close(b"p", "cancelled")


def test_the_last_layer_waits_for_the_forward_on_the_device(sending: Any, until: Any) -> None:
    bench, sender, pool = sending
    pool.gather_most = 4
    sender.open(b"p", [5, 1, 3], 40)
    bench.next(until, ch.Offer)
    start(bench, b"p")
    until(lambda: sender.has_fetch(b"p"), "the start to be seen")
    sender.ready(b"p", 0, 0, 40)
    sender.ready(b"p", 1, 0, 40)
    assert pool.work == [], "out of turn, or the first layer did not wait"
    pool.recorded[0].passed = True
    until(lambda: len(pool.work) == 2, "both gathers")
    assert bench.silent()
    pool.go()
    assert bench.next(until, ch.SliceOut).layer == 0, "the first layer waited for the last"
    assert bench.silent()
    pool.recorded[1].passed = True
    pool.go()
    assert bench.next(until, ch.SliceOut).layer == 1
    sender.close(b"p", "cancelled")


def test_what_a_peer_reads_first_is_handed_over_before_the_next_gather(sending: Any, until: Any) -> None:
    bench, sender, pool = sending
    sender.open(b"p", [5, 1, 3], 40)
    bench.next(until, ch.Offer)
    bench.channel.send(ch.Reached(1, True))
    start(bench, b"p")
    sender.ready(b"p", None, 0, 40)
    pool.recorded[0].passed = True
    until(lambda: pool.work, "the first gather")
    sender.expect(b"q")
    bench.next(until, ch.Offer)
    assert len(pool.work) == 1
    pool.go()
    assert bench.next(until, ch.SliceOut).layer == 0
    until(lambda: pool.work, "the second gather")
    for prefill_id in (b"p", b"q"):
        sender.close(prefill_id, "cancelled")


def test_commit_does_not_wait_for_the_pump(sending: Any, until: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, sender, _ = sending
    sender.open(b"p", [5, 1, 3], 40)
    bench.next(until, ch.Offer)
    start(bench, b"p")
    until(lambda: sender.has_fetch(b"p"), "the start to be seen")
    sleeps, end_of_sleep = threading.Event(), threading.Event()

    def sleep(*_: Any) -> list[int]:
        sleeps.set()
        end_of_sleep.wait()
        return []

    monkeypatch.setattr("kv_transfer.sender.wait", sleep)
    sender.expect(b"q")  # ends the wait that is under way
    assert sleeps.wait(20)
    sender.commit(b"p", kv.FirstToken(1))
    bench.next(until, ch.Offer)
    assert bench.next(until, ch.CommitOut).first_token == kv.FirstToken(1)
    bench.next(until, ch.Finished)
    with pytest.raises(BlockingIOError):  # the pump is not woken for nothing
        os.eventfd_read(sender._wake)
    monkeypatch.undo()
    end_of_sleep.set()
    for prefill_id in (b"p", b"q"):
        sender.close(prefill_id, "cancelled")


def test_closing_releases_only_after_the_gathers_that_run(sending: Any, until: Any) -> None:
    bench, sender, pool = sending
    sender.open(b"p", [5, 1, 3], 40)
    sender.ready(b"p", None, 0, 40)
    bench.next(until, ch.Offer)
    start(bench, b"p")
    pool.recorded[0].passed = True
    until(lambda: len(pool.work) == 2, "both gathers")
    sender.close(b"p", "cancelled")
    assert bench.next(until, ch.CloseOut).reason == "cancelled"
    pool.go()
    first = bench.next(until, ch.SliceOut)
    assert sender.poll() == [], "released while a gather may still read its blocks"
    pool.go()
    assert until(sender.poll, "the release", sender) == [kv.Released(b"p", "cancelled")]
    assert not sender.idle
    for slot in (first.slot, bench.next(until, ch.SliceOut).slot):
        bench.channel.send(ch.SlotFree(slot, True))
    until(lambda: sender.idle, "the slots")


def test_no_peer_gets_more_than_its_window_and_its_credit(sending: Any, until: Any) -> None:
    bench, sender, pool = sending
    for i in range(4):  # 8 slices, 2 for each prefill
        sender.open(bytes([i]), [i], 16)
        sender.ready(bytes([i]), None, 0, 16)
        pool.recorded[-1].passed = True
        bench.next(until, ch.Offer)  # only what was offered is ever started
        bench.channel.send(ch.StartOut(bytes([i]), bytes([i]), i % 2, 4096, 2, ((0, 16),), 0, 1))
    bench.channel.send(ch.Granted(0, 9, False), ch.Granted(1, 1, False))
    until(lambda: len(pool.work) == 3, "two slices by window, one by credit")
    bench.channel.send(ch.Granted(1, 2, False))
    until(lambda: len(pool.work) == 4, "one more by credit")
    pool.go(4)
    out = [bench.next(until, ch.SliceOut) for _ in range(4)]
    assert {s.transfer_id for s in out} == {bytes([i]) for i in range(4)}, "round robin over the transfers"
    bench.channel.send(ch.Granted(1, 2, True))
    answer = bench.next(until, ch.Recalled)
    assert (answer.session, answer.total, answer.sent) == (1, 2, 2)
    for s in out:
        bench.channel.send(ch.SlotFree(s.slot, True))  # none of them left: their credit is good again
    until(lambda: len(pool.work) == 4, "what was left")
    pool.go(4)
    for i in range(4):
        sender.close(bytes([i]), "cancelled")


@pytest.mark.parametrize(
    ("slot_bytes", "stop", "heads"),
    [(4096, 41, 1), (4096, 40, 2), (63, 40, 1)],
    ids=["positions", "heads", "room"],
)
def test_a_fetch_that_cannot_be_served_is_refused_and_nothing_else(
    sending: Any, until: Any, slot_bytes: int, stop: int, heads: int
) -> None:
    """Of what a peer may ask for, nothing ends the pump, and with it the worker."""
    bench, sender, _ = sending
    sender.open(b"p", [5, 1, 3], 40)
    bench.next(until, ch.Offer)
    sender.ready(b"p", 0, 0, 40)
    bench.channel.send(ch.StartOut(b"p", b"t" * 16, 1, slot_bytes, 4, ((0, stop),), 0, heads))
    assert bench.next(until, ch.RefuseFetch) == ch.RefuseFetch(b"t" * 16)
    sender.close(b"p", "cancelled")
    assert until(sender.poll, "the release", sender) == [kv.Released(b"p", "cancelled")]


def test_a_fetch_that_waited_for_a_cancelled_prefill_is_forgotten(sending: Any, until: Any) -> None:
    bench, sender, _ = sending
    bench.channel.send(ch.FetchWaits(b"p", False))
    until(lambda: sender.has_fetch(b"p"), "the FETCH")
    sender.expect(b"p")
    sender.close(b"p", "cancelled")
    bench.next(until, ch.Offer)
    bench.next(until, ch.CloseOut)
    start(bench, b"p")  # what the transfer process says to the offer
    until(lambda: not sender.has_fetch(b"p"), "the FETCH to be forgotten")


def test_an_error_in_the_pump_reaches_the_engine(late: list[LatePool], until: Any) -> None:
    bench = Bench(ArenaSender, ch.FromSender)
    bench.channel.send(ch.SlotFree(3, False))  # a slot that it never gave
    select_error = until(lambda: bench.endpoint._error, "the pump to die", bench.endpoint)
    with pytest.raises(RuntimeError, match="pump died") as error:
        bench.endpoint.poll()
    assert error.value.__cause__ is select_error


def test_descriptors_may_have_any_number(late: list[LatePool], until: Any) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
    bench = Bench(ArenaSender, ch.FromSender, lowest_fd=1500)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    bench.endpoint.open(b"p", [5, 1, 3], 40)
    bench.next(until, ch.Offer)
    bench.channel.send(ch.FetchWaits(b"p", False))
    until(lambda: bench.endpoint.has_fetch(b"p"), "the pump to hear of it")
    bench.endpoint.close(b"p", "cancelled")
    bench.endpoint.shutdown()


@pytest.fixture
def receiving(late: list[LatePool]) -> Iterator[tuple[Bench, ArenaReceiver, LatePool]]:
    bench = Bench(ArenaReceiver, ch.FromReceiver)
    yield bench, bench.endpoint, late[0]
    bench.endpoint.shutdown()


def fetch(bench: Bench, until: Any) -> bytes:
    bench.endpoint.fetch(
        b"d",
        prefill_id=b"p",
        kv_address="127.0.0.1:1",
        incarnation=1,
        attempt=0,
        block_ids=[7, 2],
        num_tokens=20,
    )
    message = bench.next(until, ch.FetchIn)
    assert message.ranges == ((0, 20),)
    return message.transfer_id


def arrive(bench: Bench, transfer_id: bytes, slot: int, layer: int) -> bytes:
    data = os.urandom(20 * 64)
    bench.arena.slot(slot)[: len(data)] = data
    bench.channel.send(ch.Arrived(transfer_id, slot, layer, layer, None, 0, 1, 0, 20, len(data), "float32"))
    return data


def complete(bench: Bench, transfer_id: bytes) -> None:
    bench.channel.send(ch.Complete(transfer_id, kv.FirstToken(9), 2, 2 * 20 * 64, 0.5, 1.0, 2.0, 2.5))


def test_injected_only_after_the_last_scatter(receiving: Any, until: Any) -> None:
    bench, receiver, pool = receiving
    transfer_id = fetch(bench, until)
    data = [arrive(bench, transfer_id, slot, layer) for slot, layer in ((4, 0), (2, 1))]
    complete(bench, transfer_id)
    assert receiver.poll() == []
    assert receiver.poll_within is not None, "nothing else would wake the engine"
    assert bench.silent(), "slots given back before they were copied"
    pool.go()
    assert receiver.poll() == []
    assert bench.next(until, ch.SlotsFree).slots == [4, 2]
    assert bench.silent(), "ACK before the scatter was over"
    pool.go()
    (event,) = receiver.poll()
    assert isinstance(event, kv.Injected)
    assert (event.first_token.token_id, event.stats.transfer_seconds, event.stats.bytes) == (9, 1.0, 2560)
    assert bench.next(until, ch.InjectedIn).transfer_id == transfer_id
    assert receiver.idle
    assert receiver.poll_within is None
    for layer in range(2):
        got = torch.cat([bench.cache[layer][:, b] for b in (7, 2)], 1)[:, :20].contiguous()
        assert got.numpy().tobytes() == data[layer]


@pytest.mark.parametrize("how", ["injected", "cancelled", "asked again"])
def test_the_end_of_a_fetch_is_known_with_the_layers_of_its_last_tokens(
    receiving: Any, until: Any, how: str
) -> None:
    bench, receiver, pool = receiving
    transfer_id = fetch(bench, until)
    arrive(bench, transfer_id, 4, 0)
    bench.channel.send(ch.Arrived(transfer_id, 2, 1, 1, None, 0, 1, 0, 12, 12 * 64, "float32"))
    receiver.poll()
    assert receiver.next_injection == math.inf, "one of two layers, and the first tokens of the other"
    bench.channel.send(ch.Arrived(transfer_id, 3, 2, 1, None, 0, 1, 12, 8, 8 * 64, "float32"))
    before = time.monotonic()
    receiver.poll()
    assert before <= receiver.next_injection <= time.monotonic()
    if how == "injected":
        bench.channel.send(ch.Complete(transfer_id, kv.FirstToken(9), 3, 2 * 20 * 64, 0.5, 1.0, 2.0, 2.5))
    elif how == "cancelled":
        receiver.cancel(b"d")
    else:
        bench.channel.send(ch.FailedIn(transfer_id, "integrity", retry=True))
    pool.go(len(pool.work))
    receiver.poll()
    assert receiver.next_injection == math.inf


def test_the_last_layer_comes_as_fast_as_those_before() -> None:
    pace = _LayerPace()
    pace.came(2, 10, 100.0)
    assert pace.ends_at == math.inf
    pace.came(4, 10, 101.0)
    assert pace.ends_at == 103.5, "half a second for each of layers 5 to 9"
    pace.came(8, 10, 101.5)
    assert pace.ends_at == pytest.approx(101.75)
    pace.came(9, 10, 105.0)
    assert pace.ends_at == 105.0


def test_layers_that_are_taken_together_do_not_tell_how_fast_they_come() -> None:
    pace = _LayerPace()
    for layer in (0, 2, 1):
        pace.came(layer, 10, 100.0)
    assert pace.ends_at == math.inf
    pace.came(3, 10, 102.0)
    assert pace.ends_at == 114.0, "2 seconds for layer 3, and for each of layers 4 to 9"


def test_a_launch_that_is_due_goes_first(receiving: Any, until: Any) -> None:
    bench, receiver, pool = receiving
    transfer_id = fetch(bench, until)
    arrive(bench, transfer_id, 4, 0)
    assert receiver.poll(spare=0.0) == []
    assert receiver.poll_within is not None
    assert not receiver.idle
    until(lambda: receiver.poll(spare=1.0) or pool.work, "it to have waited for others", seconds=5)
    arrive(bench, transfer_id, 2, 1)
    complete(bench, transfer_id)
    assert receiver.poll(spare=0.0) == []
    assert len(pool.work) == 2, "injected while a step is to be launched"
    receiver.poll(spare=1.0)
    assert len(pool.work) == 4, "the last layer waits for no others"
    pool.go(4)
    (event,) = receiver.poll(spare=0.0)
    assert isinstance(event, kv.Injected)
    assert receiver.idle


def test_where_a_launch_is_always_due_slices_do_not_wait_for_ever(receiving: Any, until: Any) -> None:
    """The device is done before the host has launched the next step: else no request would ever join."""
    bench, receiver, pool = receiving
    transfer_id = fetch(bench, until)
    for layer in range(2):
        arrive(bench, transfer_id, layer, layer)
    complete(bench, transfer_id)
    until(lambda: receiver.poll(spare=0.0) or pool.work, "it to lose patience")
    pool.go(2)
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
    bench.next(until, ch.CancelIn)
    assert bench.next(until, ch.SlotsFree).slots == [4]
    assert receiver.idle


@pytest.mark.parametrize("how", ["cancel", "failure", "failure, then cancel"])
def test_blocks_are_given_back_only_after_the_last_scatter(receiving: Any, until: Any, how: str) -> None:
    bench, receiver, pool = receiving
    transfer_id = fetch(bench, until)
    arrive(bench, transfer_id, 3, 0)
    assert receiver.poll() == []
    if how != "cancel":
        bench.channel.send(ch.FailedIn(transfer_id, "gone", retry=False))
        assert receiver.poll() == []
    if how != "failure":
        receiver.cancel(b"d")
    if how == "cancel":
        assert bench.next(until, ch.CancelIn).transfer_id == transfer_id
        arrive(bench, transfer_id, 5, 1)  # was on its way: its slot goes back, its bytes go nowhere
    assert receiver.poll() == []
    pool.go(2)
    expected = kv.FetchFailed(b"d", "gone") if how == "failure" else kv.Closed(b"d")
    assert receiver.poll() == [expected]
    receiver.cancel(b"d")
    assert receiver.poll() == []
    freed = bench.next(until, ch.SlotsFree).slots
    if how == "cancel":
        freed += bench.next(until, ch.SlotsFree).slots
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
        bench.channel.send(ch.FailedIn(transfer_id, "gone", retry=False))
        assert receiver.poll() == []
    receiver.fetch(
        b"d",
        prefill_id=b"q",
        kv_address="127.0.0.1:1",
        incarnation=2,
        attempt=0,
        block_ids=[7, 2],
        num_tokens=20,
    )
    pool.go()
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
        bench.channel.send(ch.FailedIn(transfer_id, "integrity", retry=True))
        arrive(bench, transfer_id, 2, 1)
        pool.go(2)
        assert receiver.poll() == []
        again = bench.next(until, ch.FetchIn)
        assert again.transfer_id != transfer_id
        assert (again.prefill_id, again.ranges) == (b"p", ((0, 20),))
        assert sorted(bench.next(until, ch.SlotsFree).slots) == [1, 2]
        transfer_id = again.transfer_id
    bench.channel.send(ch.FailedIn(transfer_id, "integrity", retry=True))
    assert receiver.poll() == [kv.FetchFailed(b"d", "integrity")]
