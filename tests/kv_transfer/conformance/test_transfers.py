"""Whole transfers between real transfer processes. KV arrives bit for bit or not at all."""

import json
import math
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import baton.kv_transfer as kv
from baton.kv_transfer.wait import wait
from tests.kv_transfer.conftest import Pair, until
from tests.kv_transfer.transfer_process import deadlines
from tests.within import WITHIN

from .conftest import EVERY_KIND, TCP, Kind

GROUPS = pytest.mark.parametrize("ranks", [(1, 1), (2, 4)], ids=["one rank", "2 to 4 ranks"])
"""Ranks of the prefill worker and of the decode worker. 4 ranks share 2 KV heads."""


def test_layers_stream_while_the_prefill_computes(make_pair: Any) -> None:
    """FETCH first, then chunk by chunk, layer by layer, block size 16 to 32; a cached prefix at once."""
    pair = make_pair({"block_size": 16}, {"block_size": 32, "blocks": 32})
    n = 300
    prefill_id = pair.prefill.open(n)
    decode_id = pair.decode.fetch(pair.prefill, prefill_id, n)
    pair.prefill.sender.ready(prefill_id, None, 0, 64)
    pair.until(
        lambda: pair.decode.stats().frames_received >= 3,
        "the cached prefix to arrive",
    )
    for start, stop in ((64, 200), (200, n)):
        for layer in range(3):
            pair.prefill.sender.ready(prefill_id, layer, start, stop)
    pair.until(lambda: pair.decode.stats().frames_received >= 57, "all layers to arrive before COMMIT")
    assert decode_id not in pair.decode.events
    first = kv.FirstToken(42, -0.5, (42, 7), (-0.5, -1.5))
    blocks = pair.prefill.held[prefill_id]
    pair.prefill.sender.commit(prefill_id, first)
    event = pair.event(decode_id)
    assert isinstance(event, kv.Injected)
    assert event.first_token == first
    assert event.stats.bytes == n * pair.prefill.layout.bytes_per_token
    assert 0 < event.stats.exposed_seconds < event.stats.fetch_seconds
    pair.assert_same(blocks, decode_id, 0, n)
    pair.until(lambda: pair.prefill.released, "the ACK to release the prefill")
    assert pair.prefill.released[prefill_id] == "acked"
    pair.assert_whole()


@pytest.mark.all
@GROUPS
def test_chunks_of_a_prefix_cache_travel(make_pair: Any, ranks: tuple[int, int]) -> None:
    """From blocks of 128 into blocks of 16. The holder lacks the last chunk."""
    pair = make_pair(
        {"block_size": 128, "blocks": 8, "ranks": ranks[0]}, {"block_size": 16, "ranks": ranks[1]}
    )
    names = pair.prefill.cache(6)
    fetch_id = pair.decode.fetch_content(pair.prefill, [*names[1:], os.urandom(16)], first_chunk=1)
    event = pair.event(fetch_id)
    assert isinstance(event, kv.Injected)
    assert event.stats.bytes == 5 * 64 * pair.prefill.layout.bytes_per_token
    pair.assert_same(pair.prefill.cached_blocks, fetch_id, 64, 384)
    pair.until(lambda: [*pair.prefill.released.values()] == ["acked"], "the pin to be released")
    fetch_id = pair.decode.fetch_content(pair.prefill, [os.urandom(16)], first_chunk=1)
    assert pair.event(fetch_id) == kv.FetchFailed(fetch_id, "gone")
    cancelled = pair.decode.fetch_content(pair.prefill, names)
    pair.decode.receiver.cancel(cancelled)
    assert pair.event(cancelled) == kv.Closed(cancelled)
    pair.assert_whole()


def test_traces_have_each_frame(make_pair: Any, tmp_path: Path) -> None:
    """Also of slices that are read in memory of the peer."""
    traces = {"send": tmp_path / "prefill.trace", "recv": tmp_path / "decode.trace"}
    pair = make_pair(*({"trace_path": str(path)} for path in traces.values()))
    prefill_id = pair.prefill.hold(100)
    decode_id = pair.decode.fetch(pair.prefill, prefill_id, 100)
    event = pair.event(decode_id)
    assert isinstance(event, kv.Injected)
    pair.until(lambda: prefill_id in pair.prefill.released, "the ACK")
    pair.assert_whole()
    for process in (pair.prefill.process, pair.decode.process):
        process.terminate()
        process.wait(WITHIN)
    for name, path in traces.items():
        of_forks = tmp_path.glob(f"{path.stem}.*.trace")  # each has its own
        lines = [line for each in (path, *of_forks) for line in each.read_text().splitlines()[1:]]
        spans = [json.loads(line.rstrip(",")) for line in lines]
        frames = [span["args"]["seq"] for span in spans if span["name"] == name]
        assert sorted(frames) == [*range(event.stats.frames)]
        assert all(span["dur"] >= 0 for span in spans if span["name"] == name)


def test_only_missing_positions_travel(pair: Pair) -> None:
    prefill_id = pair.prefill.hold(100)
    blocks = pair.prefill.held[prefill_id]
    decode_id = pair.decode.fetch(pair.prefill, prefill_id, 100, start=37)
    event = pair.event(decode_id)
    assert event.stats.bytes == 63 * pair.prefill.layout.bytes_per_token
    pair.assert_same(blocks, decode_id, 37, 100)
    for layer in range(3):
        assert not pair.decode.rows(pair.decode.reserved[decode_id], layer, 0, 37).any()
    pair.assert_whole()


def test_nothing_missing_is_a_commit_of_no_frames(pair: Pair) -> None:
    prefill_id = pair.prefill.hold(40, token=99)
    decode_id = pair.decode.fetch(pair.prefill, prefill_id, 40, start=40)
    event = pair.event(decode_id)
    assert (event.first_token.token_id, event.stats.frames, event.stats.hidden_share) == (99, 0, 1.0)
    pair.assert_whole()


@pytest.mark.cases(1)
@pytest.mark.parametrize("transport", EVERY_KIND, indirect=True, ids=str)
def test_many_at_once_huge_and_tiny_through_a_small_arena(make_pair: Any) -> None:
    """Far more data in flight than slots, from both ends of the size range: no mix blocks another."""
    both = {"slot_bytes": 8 << 10}  # 32 positions
    pair = make_pair(
        {"slots": 6, "blocks": 400, **both}, {"slots": 5, "blocks": 200, "block_size": 32, **both}
    )
    random.seed(1)
    sizes = [3072, 1, 750, *(random.randrange(1, 60) for _ in range(12)), 375]
    early, late = sizes[:8], sizes[8:]
    jobs = []
    for n in early:
        prefill_id = pair.prefill.hold(n)
        jobs.append((prefill_id, n, pair.decode.fetch(pair.prefill, prefill_id, n)))
    half = [(pair.prefill.open(n), n) for n in late]
    for prefill_id, n in half:
        pair.prefill.sender.ready(prefill_id, None, 0, n // 2)
        jobs.append((prefill_id, n, pair.decode.fetch(pair.prefill, prefill_id, n)))
    blocks = dict(pair.prefill.held)
    for prefill_id, n in reversed(half):
        pair.prefill.sender.ready(prefill_id, None, n // 2, n)
        pair.prefill.sender.commit(prefill_id, kv.FirstToken(1))
    for prefill_id, n, decode_id in jobs:
        assert isinstance(pair.event(decode_id), kv.Injected), n
        pair.assert_same(blocks[prefill_id], decode_id, 0, n)
    pair.assert_whole()
    assert len(pair.prefill.free) == 400


@pytest.mark.all
def test_a_prefill_that_computes_nothing_yet_starves_no_other(
    make_prefill: Any, make_decode: Any, pair_of: Any
) -> None:
    """Two FETCHes came first and took all credits of a small arena. They are recalled for other transfers."""
    slow = [make_prefill(name=f"prefill slow {i}") for i in range(2)]
    fast, decode = make_prefill(name="prefill fast"), make_decode(slots=4)
    waiting = [pair_of(prefill, decode) for prefill in slow]
    ids = [prefill.open(200) for prefill in slow]
    fetches = [decode.fetch(prefill, prefill_id, 200) for prefill, prefill_id in zip(slow, ids, strict=True)]
    for pair, prefill, prefill_id in zip(waiting, slow, ids, strict=True):
        pair.until(lambda p=prefill, i=prefill_id: p.sender.has_fetch(i), "the first FETCHes to arrive")
    other = pair_of(fast, decode)
    decode_id = decode.fetch(fast, fast.hold(500), 500)
    assert isinstance(other.event(decode_id), kv.Injected)
    other.until(lambda: fast.sender.idle, "the ACK")
    for pair, prefill, prefill_id, fetch_id in zip(waiting, slow, ids, fetches, strict=True):
        prefill.sender.ready(prefill_id, None, 0, 200)
        prefill.sender.commit(prefill_id, kv.FirstToken(1))
        assert isinstance(pair.event(fetch_id), kv.Injected)
    for pair in waiting:
        pair.assert_whole()


@pytest.mark.all
def test_a_receiver_that_does_not_read_keeps_no_other_waiting(
    make_prefill: Any, make_decode: Any, pair_of: Any
) -> None:
    """Its engine hangs: neither prefill's forward pass nor another decode worker notices."""
    prefill = make_prefill(slots=8, blocks=256)
    stuck, other = make_decode(name="decode stuck", slots=4), make_decode(name="decode other")
    a, b = pair_of(prefill, stuck), pair_of(prefill, other)
    first = prefill.open(500)
    lost = stuck.fetch(prefill, first, 500)
    until(lambda: prefill.sender.has_fetch(first), "the FETCH", prefill.sender)
    for layer in range(3):
        prefill.sender.ready(first, layer, 0, 500)
    prefill.sender.commit(first, kv.FirstToken(1))
    until(lambda: stuck.stats().receiver_slots_free <= 2, "its arena to fill up", prefill.sender)
    for _ in range(3):
        second = prefill.hold(400)
        blocks = prefill.held[second]
        taken = other.fetch(prefill, second, 400)
        assert isinstance(b.event(taken), kv.Injected)
        b.assert_same(blocks, taken, 0, 400)
        other.release(taken)
    assert prefill.stats().deadlines == {}, "the stuck one was given up, and only then came the others"
    blocks = prefill.held[first]
    assert isinstance(a.event(lost), kv.Injected)
    a.assert_same(blocks, lost, 0, 500)
    a.assert_whole()
    b.assert_whole()


@pytest.mark.all
@GROUPS
def test_a_new_fetch_supersedes(
    make_prefill: Any, make_decode: Any, pair_of: Any, ranks: tuple[int, int]
) -> None:
    """A second decode worker takes over in mid-transfer, without a second prefill."""
    prefill, first = make_prefill(ranks=ranks[0]), make_decode(name="decode 0", ranks=ranks[1])
    second = make_decode(name="decode 1")
    a, b = pair_of(prefill, first), pair_of(prefill, second)
    prefill_id = prefill.open(200)
    prefill.sender.ready(prefill_id, None, 0, 100)
    lost = first.fetch(prefill, prefill_id, 200)
    a.until(lambda: first.stats().frames_received, "the first transfer to be under way")
    taken = second.fetch(prefill, prefill_id, 200)
    assert a.event(lost) == kv.FetchFailed(lost, "superseded")
    blocks = prefill.held[prefill_id]
    prefill.sender.ready(prefill_id, None, 100, 200)
    prefill.sender.commit(prefill_id, kv.FirstToken(1))
    assert isinstance(b.event(taken), kv.Injected)
    b.assert_same(blocks, taken, 0, 200)
    a.assert_whole()
    b.assert_whole()


def test_fetch_before_the_prefill_is_known(make_pair: Any) -> None:
    pair = make_pair({"deadlines": deadlines(fetch_wait=50.0)})
    early, queued = os.urandom(16), os.urandom(16)
    fetch = pair.decode.fetch(pair.prefill, early, 30)
    pair.until(lambda: pair.prefill.sender.has_fetch(early), "the FETCH to wait")
    pair.prefill.sender.expect(queued)
    patient = pair.decode.fetch(pair.prefill, queued, 30)
    pair.until(lambda: pair.prefill.sender.has_fetch(queued), "the second FETCH")
    pair.prefill.later(50.0)
    # Only the one that no prefill answers runs into the deadline.
    assert pair.event(fetch) == kv.FetchFailed(fetch, "deadline")
    assert pair.prefill.stats().deadlines == {"fetch_wait": 1}
    pair.until(lambda: not pair.prefill.sender.has_fetch(early), "the news of that")
    pair.prefill.hold(30, queued)
    assert isinstance(pair.event(patient), kv.Injected)
    pair.assert_whole()


@pytest.mark.parametrize("reason", ["finished", "cancelled", "gone"])
@pytest.mark.parametrize("when", ["before the fetch", "waiting", "streaming"])
def test_the_senders_own_end(pair: Pair, reason: Any, when: str) -> None:
    prefill_id = os.urandom(16)
    if when == "before the fetch":
        pair.prefill.open(50, prefill_id)
        pair.prefill.sender.close(prefill_id, reason)
        pair.until(lambda: prefill_id in pair.prefill.released, "the release")
    decode_id = pair.decode.fetch(pair.prefill, prefill_id, 50)
    if when != "before the fetch":
        pair.until(lambda: pair.prefill.sender.has_fetch(prefill_id), "the FETCH")
        if when == "streaming":
            pair.prefill.open(50, prefill_id)
            pair.prefill.sender.ready(prefill_id, None, 0, 30)
        pair.prefill.sender.close(prefill_id, reason)
    assert pair.event(decode_id) == kv.FetchFailed(decode_id, reason)
    if when != "waiting":
        pair.until(lambda: pair.prefill.released.get(prefill_id) == reason, "the release")


def test_after_the_ack_and_after_the_hold_deadline_it_is_gone(make_pair: Any) -> None:
    pair = make_pair({"deadlines": deadlines(hold=50.0)})
    acked = pair.prefill.hold(20)
    pair.event(pair.decode.fetch(pair.prefill, acked, 20))
    unwanted = pair.prefill.hold(20)
    pair.until(lambda: pair.prefill.released, "the ACK")
    pair.until(lambda: pair.prefill.later(20.0) or len(pair.prefill.released) == 2, "the hold deadline")
    assert pair.prefill.released == {acked: "acked", unwanted: "deadline"}
    assert pair.prefill.stats().deadlines == {"hold": 1}
    for prefill_id in (acked, unwanted):
        again = pair.decode.fetch(pair.prefill, prefill_id, 20)
        assert pair.event(again) == kv.FetchFailed(again, "gone")
    pair.assert_whole()


def test_asking_for_positions_that_are_not_there(pair: Pair) -> None:
    prefill_id = pair.prefill.hold(20)
    decode_id = pair.decode.fetch(pair.prefill, prefill_id, 21)
    assert pair.event(decode_id) == kv.FetchFailed(decode_id, "integrity")
    assert pair.prefill.stats().refused == {"fetch_range": 3}  # two FETCHes more, by itself
    pair.prefill.sender.close(prefill_id, "cancelled")


@pytest.mark.cases(1)
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("transport", "ranks"),
    [(TCP, (2, 4)), (TCP, (4, 2)), *((kind, (1, 1)) for kind in EVERY_KIND)],
    indirect=["transport"],
    ids=str,
)
@pytest.mark.parametrize("count", [24, pytest.param(1_000, marks=pytest.mark.long)])
def test_cancel_at_random_moments(make_pair: Any, count: int, ranks: tuple[int, int]) -> None:
    """Many fetches are cancelled, at either side, and their blocks re-used at once: no late byte lands."""
    settings = {"slots": 8}
    pair = make_pair(
        {"blocks": 128, "ranks": ranks[0], **settings}, {"blocks": 48, "ranks": ranks[1], **settings}
    )
    rng = random.Random(3)
    running: dict[bytes, tuple[bytes, int, list[int]]] = {}
    cancel_at: dict[bytes, int] = {}
    ended = looks = started = 0
    while ended < count:
        wait([pair.prefill.sender.fileno(), pair.decode.receiver.fileno()], 0.001)
        pair.poll()
        looks += 1
        if len(running) < 6 and len(pair.decode.free) > 8 and len(pair.prefill.free) > 8:
            n = rng.randrange(1, 120)
            prefill_id = pair.prefill.open(n)
            cut = rng.randrange(n)
            pair.prefill.sender.ready(prefill_id, None, 0, cut)
            decode_id = pair.decode.fetch(pair.prefill, prefill_id, n)
            pair.prefill.sender.ready(prefill_id, None, cut, n)
            pair.prefill.sender.commit(prefill_id, kv.FirstToken(n))
            running[decode_id] = (prefill_id, n, pair.prefill.held[prefill_id])
            started += 1
            if started % 4 == 0:  # before anything can have come
                pair.decode.receiver.cancel(decode_id)
            elif started % 2 == 0:
                cancel_at[decode_id] = looks + rng.randrange(20)
        for decode_id in [d for d in running if cancel_at.get(d, math.inf) <= looks]:
            if rng.random() < 0.5:
                pair.decode.receiver.cancel(decode_id)
            pair.prefill.sender.close(running[decode_id][0], "cancelled")
            del cancel_at[decode_id]
        for decode_id in [d for d in running if d in pair.decode.events]:
            prefill_id, n, blocks = running.pop(decode_id)
            event = pair.decode.events[decode_id]
            if isinstance(event, kv.Injected):
                assert event.first_token.token_id == n
                if prefill_id in pair.prefill.held:  # not re-used yet
                    pair.assert_same(blocks, decode_id, 0, n)
            else:
                pair.prefill.sender.close(prefill_id, "cancelled")
            pair.decode.release(decode_id)
            ended += 1
    for decode_id, (prefill_id, _, _) in running.items():
        pair.decode.receiver.cancel(decode_id)
        pair.prefill.sender.close(prefill_id, "cancelled")
    pair.until(lambda: all(d in pair.decode.events for d in running) and not pair.prefill.held, "the end")
    for decode_id in running:
        pair.decode.release(decode_id)
    pair.assert_whole()
    assert (len(pair.prefill.free), len(pair.decode.free)) == (128, 48)
    assert not any(layer.any() for layer in pair.decode.ranks.tensors), "a late byte landed in a free block"
    kinds = Counter(type(e) for e in pair.decode.events.values())
    assert kinds[kv.Injected] > count // 4, kinds
    assert kinds[kv.FetchFailed] + kinds[kv.Closed] > count // 16, kinds


@GROUPS
def test_fetch_again_under_the_same_decode_id(make_pair: Any, ranks: tuple[int, int]) -> None:
    """Retarget: the reservation stays, the KV comes from another prefill; the first fetch reports nothing."""
    pair = make_pair({"ranks": ranks[0]}, {"ranks": ranks[1]})
    stuck, other = pair.prefill.open(40), pair.prefill.hold(40, token=5)
    blocks = pair.prefill.held[other]
    pair.prefill.sender.ready(stuck, None, 0, 30)
    decode_id = pair.decode.fetch(pair.prefill, stuck, 40)
    pair.until(lambda: pair.decode.stats().frames_received >= 3, "KV of the first FETCH")
    pair.decode.receiver.fetch(
        decode_id, prefill_id=other, kv_address=pair.prefill.address, incarnation=pair.prefill.incarnation,
        attempt=0, block_ids=pair.decode.reserved[decode_id], num_tokens=40,
    )  # fmt: skip
    assert pair.event(decode_id).first_token.token_id == 5
    pair.assert_same(blocks, decode_id, 0, 40)
    pair.until(lambda: not pair.prefill.sender.has_fetch(stuck), "the end of the first transfer")
    pair.prefill.sender.close(stuck, "cancelled")
    pair.assert_whole()


@pytest.mark.parametrize("transport", EVERY_KIND, indirect=True, ids=str)
def test_a_byte_that_changes_between_gather_and_scatter(make_pair: Any, transport: Kind) -> None:
    """It is found, and the KV is fetched again by itself."""
    pair = make_pair(connected=False)
    with transport.bent(pair) as address:
        prefill_id = pair.prefill.hold(64)
        blocks = pair.prefill.held[prefill_id]
        decode_id = pair.decode.fetch(pair.prefill, prefill_id, 64, kv_address=address)
        assert isinstance(pair.event(decode_id), kv.Injected)
        pair.assert_same(blocks, decode_id, 0, 64)
        pair.assert_whole()
    counter, reason = transport.found
    assert pair.decode.stats().checksum_failures == {counter: 1}
    assert pair.decode.stats().transfers[reason] == 1
