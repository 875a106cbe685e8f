"""The estimated load of prefill workers, in any order of reports, submissions and ends."""

import pickle
import random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.kv_names import CHUNK_TOKENS, Tier
from baton.router.policy.chunk_index import MAX_LEVELS, ChunkIndex
from baton.router.policy.prefill import PrefillRequest, PrefillSnapshot
from baton.router.policy.prefill_loads import PrefillLoads, PrefillWork
from baton.rpc import worker_pb2 as pb
from baton.worker.service_process.cache_feed import CacheFeed

SPEED = 1000.0


def status(waiting: int, speed: float, **more: Any) -> pb.WorkerStatus:
    return pb.WorkerStatus(tokens_waiting=waiting, prefill_tokens_per_s=speed, **more)


def one(block_size: int = 16) -> tuple[PrefillLoads, int]:
    loads = PrefillLoads()
    row = loads.join("a:1", block_size=block_size, now=0)
    loads.reported(row, status(0, SPEED), 0)
    return loads, row


def look(loads: PrefillLoads, now: float, tokens: int = 100, chunks: list[int] = []) -> PrefillSnapshot:  # noqa: B006
    snapshot = loads.snapshot(PrefillRequest(key=1, tokens=tokens, chunks=chunks), now)
    assert snapshot is not None
    assert [snapshot.wait_of(row) for row in snapshot.rows] == snapshot.wait[snapshot.rows].tolist()
    return snapshot


def test_the_queue_is_the_report_plus_sent_minus_computed_tokens():
    loads, row = one()
    loads.reported(row, status(5000, SPEED), 10)
    work = PrefillWork(1000)
    loads.sent(row, work, 11)
    assert look(loads, 12).wait[row] == pytest.approx(4)
    loads.reported(row, status(50, SPEED), 13)
    assert look(loads, 13).wait[row] == pytest.approx(0.001), "its last token is not computed"
    loads.ended(row, work, computed=True, now=13)
    assert look(loads, 13).wait[row] == 0, "the 50 tokens were of this prompt"


def test_what_a_worker_has_lost_of_a_prefix_is_no_work_of_other_routers():
    """The router expected it in the cache of the worker, so it counted less for its own prompt."""
    loads, row = one()
    loads.sent(row, PrefillWork(100), 0)
    loads.reported(row, status(16_000, SPEED), 1)
    assert loads.tokens_of_others() == 0
    loads.reported(row, status(16_000, SPEED, tokens_of_others=2**63), 1)
    assert loads.tokens_of_others() == 16_000, "not more than there are"


def test_the_first_prompt_takes_as_long_as_its_plan_says():
    """A long prompt is slower than the mean speed of its worker. Its queue is not shorter for it."""
    loads, row = one()
    loads.reported(row, status(0, SPEED), 0)
    slow, other = PrefillWork(1000, seconds=3.0), PrefillWork(500)
    loads.sent(row, slow, 0)
    loads.sent(row, other, 0)
    waits = [look(loads, now).wait[row] for now in (0, 2, 5)]
    assert waits == pytest.approx([3.5, 1.5, 0.503])
    loads.ended(row, slow, computed=True, now=5)
    assert look(loads, 5).wait[row] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("short", "seconds"),
    [(PrefillWork(500), 0.5), (PrefillWork(500, seconds=0.75), 0.75), (PrefillWork(500, beside=0.5), 1.0)],
)
def test_a_prompt_that_ends_before_the_first_one_delays_it_by_its_own_time(
    short: PrefillWork, seconds: float
):
    """Engines compute short prompts before the rest of long ones. That does not begin again."""
    loads, row = one()
    loads.reported(row, status(0, SPEED), 0)
    loads.sent(row, PrefillWork(1000, seconds=20.0), 0)
    loads.sent(row, short, 4)
    loads.ended(row, short, computed=True, now=6)
    assert look(loads, 6).wait[row] == pytest.approx(20 - 6 + seconds)
    loads.sent(row, late := PrefillWork(50_000), 6)
    loads.ended(row, late, computed=True, now=7)
    assert look(loads, 7).wait[row] == pytest.approx(20), "the worker did nothing else since it got the first"


def test_images_that_wait_for_the_encoder_take_their_time():
    loads, row = one()
    loads.reported(row, status(2000, SPEED, tokens_of_others=2000, encode_queue_seconds=3.0), 10)
    assert look(loads, 10).wait[row] == pytest.approx(5)
    assert look(loads, 14).wait[row] == pytest.approx(1)
    assert loads.tokens_of_others() == 2000


def test_images_of_prompts_that_were_sent_take_their_time():
    """Also of those that no report counts yet: many requests with images may come within a second."""
    loads, row = one()
    loads.reported(row, status(0, SPEED), 0)
    works = [PrefillWork(1000, seconds=1.5, beside=0.5), PrefillWork(500, beside=2.0)]
    for work in works:
        loads.sent(row, work, 0)
    loads.reported(row, status(0, SPEED), 0)
    assert [look(loads, now).wait[row] for now in (0, 1)] == pytest.approx([4, 3])
    loads.ended(row, works[0], computed=True, now=1.5)
    assert look(loads, 1.5).wait[row] == pytest.approx(2.5)
    loads.ended(row, works[1], computed=False, now=2)
    assert look(loads, 2).wait[row] == 0


def test_a_worker_computes_the_first_of_the_prompts_that_wait():
    loads, row = one()
    loads.reported(row, status(0, SPEED), 0)
    first, second = PrefillWork(1000), PrefillWork(1000)
    for work in (first, second):
        loads.sent(row, work, 0)
    loads.reported(row, status(0, SPEED), 0)  # it misses what is on its way
    waits = [look(loads, now).wait[row] for now in (0, 0.5, 5)]
    assert waits == pytest.approx([2, 1.5, 1.001]), "the second prompt waits for the first one"
    assert loads.tokens_waiting(row, 0.5) == 1500
    loads.ended(row, first, computed=True, now=6)
    assert [look(loads, now).wait[row] for now in (6, 6.5)] == pytest.approx([1, 0.5])


def test_first_tokens_show_what_is_left():
    """The worker is faster than it last reported."""
    loads, row = one()
    first, second = PrefillWork(1000), PrefillWork(500)
    loads.sent(row, first, 0)
    loads.reported(row, status(5000, 100, tokens_of_others=4000), 1)
    loads.sent(row, second, 1)
    assert loads.tokens_waiting(row, 2) == 5300, "100 tokens of the first were computed before the report"
    loads.ended(row, first, computed=True, now=2)
    assert loads.tokens_waiting(row, 2) == 4000 + 500, "of other routers, and of this one"
    loads.reported(row, status(400, 100, tokens_of_others=0), 3)
    loads.ended(row, second, computed=True, now=3.1)
    assert loads.tokens_waiting(row, 3.1) == 0


def test_a_cancelled_prefill_no_longer_waits():
    loads, row = one()
    works = [PrefillWork(tokens) for tokens in (1000, 500, 1000)]
    for work in works:
        loads.sent(row, work, 0)
    loads.reported(row, status(0, SPEED), 0)
    loads.ended(row, works[2], computed=False, now=0.5)
    assert look(loads, 0.5).wait[row] == pytest.approx(1), "the worker goes on with the first prompt"
    loads.ended(row, works[0], computed=False, now=0.5)
    assert look(loads, 0.5).wait[row] == pytest.approx(0.5)


def test_the_estimate_covers_the_wait_and_the_uncached_tokens():
    loads, row = one()
    loads.index.add(row, [7, 8])
    loads.sent(row, PrefillWork(1000), 0)
    request = PrefillRequest(key=1, tokens=228, chunks=[7, 8, 9])
    snapshot = loads.snapshot(request, 0)
    assert snapshot is not None
    assert (snapshot.wait[row], snapshot.cached.of(row)) == (pytest.approx(1), 128)


def test_an_unknown_speed_is_the_mean_of_the_others():
    loads = PrefillLoads()
    rows = [loads.join(name, block_size=16, now=0) for name in ("a:1", "b:1", "c:1")]
    loads.reported(rows[0], status(0, 3000), 0)
    loads.reported(rows[1], status(0, 0), 0)
    assert look(loads, 0).speed.tolist() == [3000, 3000, 3000]
    assert loads.tokens_per_s() == 3000
    loads.reported(rows[0], status(0, 1000), 0)
    assert loads.speed(loads.join("d:1", block_size=16, now=0)) == 1000
    loads.reported(rows[0], status(0, 0, long_chunk_tokens=50, long_chunk_seconds=0.1), 0, alone=False)
    assert loads.speed(loads.join("e:1", block_size=16, now=0)) == 500


def test_the_wait_at_a_worker_without_a_measured_speed_follows_the_guess() -> None:
    loads = PrefillLoads()
    rows = [loads.join(name, block_size=16, now=0) for name in "abc"]
    for row in rows[:2]:
        loads.sent(row, PrefillWork(6000), 0)
    loads.leave(rows[1])
    loads.reported(rows[2], status(0, 2000), 0)
    assert look(loads, 0).wait[rows[0]] == 3


def test_many_workers_join_with_the_rates_that_each_reports() -> None:
    loads = PrefillLoads()
    rows = [loads.join(f"{i}", block_size=16, now=0) for i in range(20)]
    for row in rows:
        loads.reported(row, status(100 * row, 1000 + row), 0)
    rows += [loads.join(f"{i}", block_size=16, now=0) for i in range(20, 40)]
    snapshot = look(loads, 0)
    assert [loads.speed(row) for row in rows[:20]] == [1000 + row for row in rows[:20]]
    assert snapshot.wait.tolist()[:20] == [100 * row / (1000 + row) for row in rows[:20]]
    assert [loads.speed(row) for row in rows[20:]] == [1009.5] * 20


@pytest.mark.parametrize(
    ("block_size", "tokens", "chunks", "cached"),
    [
        (16, 1000, 3, 192),
        (64, 1000, 3, 192),
        (128, 1000, 3, 128),  # only whole blocks count
        (16, 192, 3, 176),  # the last position is always computed, and so is its block
        (64, 192, 3, 128),
        (128, 256, 4, 128),
        (48, 1000, 3, 192),
    ],
)
def test_cached_tokens_are_full_blocks_before_the_last_position(block_size, tokens, chunks, cached):
    loads, row = one(block_size)
    loads.index.add(row, range(chunks))
    snapshot = look(loads, 0, tokens, list(range(20)))
    assert (snapshot.cached.of(row), snapshot.cached.most) == (cached, cached)


def test_the_chunks_of_a_sent_prompt_are_expected_until_its_token_comes():
    loads, row = one()
    work = PrefillWork(200, [1, 2, 3])
    loads.sent(row, work, 0)
    loads.sent(row, work, 0)
    loads.index.add(row, [1])
    assert look(loads, 0, 500, [1, 2, 3, 4]).cached.of(row) == 192
    loads.ended(row, work, computed=True, now=0)
    assert look(loads, 0, 500, [1, 2, 3, 4]).cached.of(row) == 192
    loads.ended(row, work, computed=True, now=0)
    assert look(loads, 0, 500, [1, 2, 3, 4]).cached.of(row) == 64, "only what was reported stays"
    loads.leave(row)
    assert not loads.index


def test_chunks_that_no_prompt_will_cache_any_more_take_no_memory():
    index = ChunkIndex()
    index.grow(2)
    empty = pickle.dumps(index)
    prompts = [(row, range(first, 200)) for row in range(2) for first in (0, 100)]
    for row, chunks in prompts:
        index.expect(row, chunks)
    assert len(pickle.dumps(index)) > len(empty) + 200
    for row, chunks in prompts:
        index.unexpect(row, chunks)
    assert pickle.dumps(index) == empty


def test_a_worker_that_is_cleared_is_found_no_more():
    index, chunks = ChunkIndex(), range(1000)
    index.grow(2)

    def cached() -> list[int]:
        found = index.overlap(range(1000), 100_000, CHUNK_TOKENS, 0b11)
        return [found.of(row) // CHUNK_TOKENS for row in range(2)]

    index.add(0, chunks)
    index.place(0, chunks[500:], Tier.HOST)
    index.expect(0, chunks[:2])
    index.add(1, range(10))
    assert cached() == [1000, 10]
    for left in (2, 0):
        index.clear(0)
        index.unexpect(0, chunks[: 2 - left])
        assert cached() == [left, 10]
        assert (index.reported(0), index.reported_by(0), len(index)) == (0, 2, 10)
        assert not index.offloaded(0, range(1000))
        index.add(0, range(20))
        assert cached() == [20, 10]
        assert not index.offloaded(0, range(1000)), "the tiers before are forgotten"
    assert len(index) == 20
    for row in range(2):
        index.clear(row)
    assert not index


def test_the_chunks_of_a_worker_that_has_gone_are_removed_part_by_part():
    """All at once would stop the event loop. They take no memory in the end."""
    index, rng = ChunkIndex(), random.Random(1)
    index.grow(3)

    def held() -> int:
        """A chunk takes 5 to 13 bytes."""
        return len(pickle.dumps(index))

    empty, after = held(), list[int]()
    for _ in range(3):
        gone = [rng.getrandbits(64) for _ in range(10_000)]
        index.add(0, gone)
        index.place(0, gone[:5000], Tier.HOST)
        index.add(1, gone[:10])
        index.clear(0)
        assert (len(index), index.reported(0)) == (10, 0)
        before, most = held(), 0
        assert before > 100_000
        for number in range(256):
            index.add(2, [number])
            now = held()
            most, before = max(most, before - now), now
        assert most < 100 * 13
        assert held() < empty + 266 * 13
        assert len(index) == 10 + 256
        index.discard(1, gone)
        index.clear(2)
        after.append(held())
    assert not index
    assert after[-1] < after[0] + 20, "the numbers of holders are used again"


def test_a_row_is_used_again():
    loads = PrefillLoads()
    assert [loads.join(name, block_size=16, now=0) for name in "abc"] == [0, 1, 2]
    for work in (PrefillWork(100, [1, 2]), PrefillWork(100, [1, 3])):
        loads.sent(1, work, 0)
    assert look(loads, 0, 500, [1, 2]).cached.of(1) == 128
    loads.leave(1)
    assert loads.join("d", block_size=16, now=0) == 1
    assert look(loads, 0, 500, [1, 2]).cached.of(1) == 0, "nothing is expected of the next one"
    assert loads.join("e", block_size=16, now=0) == 3


ROWS, CHUNKS = 20, 12
_EVENTS = st.tuples(
    st.sampled_from(("add", "discard", "expect", "unexpect", "clear")),
    st.integers(0, ROWS - 1),
    st.lists(st.integers(0, CHUNKS - 1), max_size=CHUNKS),
)


@settings(max_examples=60)
@given(st.lists(_EVENTS, max_size=80), st.permutations(range(CHUNKS)), st.integers(0, ROWS - 1))
@example([("add", 1, [2, 1]), ("expect", 1, [0])], [0, 2, 1, 3, 4, 5], 0)  # reported, and then expected
def test_the_index_agrees_with_a_table_of_all_workers(events, prompt, left_out):
    index = ChunkIndex()
    index.grow(ROWS)
    reported: list[set[int]] = [set() for _ in range(ROWS)]
    expected: list[list[list[int]]] = [[] for _ in range(ROWS)]
    for kind, row, chunks in events:
        # Of a prefix, workers expect and evict the end last and first. Other prompts have other chunks.
        if kind in ("add", "expect", "discard"):
            place = len(chunks)
            chunks = list(prompt[place:] if kind == "discard" else prompt[:place])
        if kind == "unexpect":
            if expected[row]:
                index.unexpect(row, expected[row].pop())
        elif kind == "clear":
            index.clear(row)
            reported[row].clear()
        else:
            getattr(index, kind)(row, chunks)
            match kind:
                case "add":
                    reported[row].update(chunks)
                case "discard":
                    reported[row].difference_update(chunks)
                case "expect":
                    expected[row].append(chunks)
    among = {row for row in range(ROWS) if row != left_out}
    cached = index.overlap(list(prompt), 10_000, 1, sum(1 << row for row in among))
    assert cached.of(left_out) == 0
    depths = dict.fromkeys(among, 0)
    for row in among:
        held = reported[row].union(*expected[row])
        depths[row] = next((i for i, chunk in enumerate(prompt) if chunk not in held), CHUNKS)
    counted = sorted({*depths.values()} - {0})[-MAX_LEVELS:]
    for row, depth in depths.items():
        assert cached.of(row) == (depth * CHUNK_TOKENS if depth in counted else 0)
        assert index.reported(row) == len(reported[row])
    assert cached.most == max(cached.of(row) for row in among)
    holders = {row for row in among if cached.of(row) == cached.most}
    assert {*cached.holders()} == (holders if cached.most else set())
    assert len(index) == len(set().union(*reported))


def test_a_rate_follows_what_the_worker_computed() -> None:
    loads = PrefillLoads()
    row = loads.join("a", block_size=16, now=0.0)
    computed = 0
    for second in range(1, 31):
        computed += 5_000
        loads.reported(row, status(0, 20_000.0, computed_prompt_tokens=computed), float(second))
    assert loads.prompt_rate(row) == pytest.approx(5_000, rel=0.04)
    loads.reported(row, status(0, 20_000.0, computed_prompt_tokens=computed), 160.0)
    assert loads.prompt_rate(row) < 200
    loads.leave(row)
    assert loads.prompt_rate(loads.join("b", block_size=16, now=161.0)) == 0


def test_the_first_report_of_a_worker_says_nothing_about_its_rate() -> None:
    """A router attaches to a worker that has run for days."""
    loads = PrefillLoads()
    row = loads.join("a:1", block_size=16, now=0)
    loads.reported(row, status(0, SPEED, computed_prompt_tokens=10**9, generation_tokens=10**9), 1e-4)
    assert loads.prompt_rate(row) == 0
    assert loads.demand() is None
    loads.reported(row, status(0, SPEED, computed_prompt_tokens=10**9 + 500), 1.0001)
    assert loads.prompt_rate(row) == pytest.approx(500)


def test_demand_is_what_came_to_workers_of_both_pools() -> None:
    loads = PrefillLoads()
    prefill = loads.join("a:1", block_size=16, now=0)
    decode = loads.join("b:1", block_size=16, now=0, serving=False)
    for row in (prefill, decode):
        loads.reported(row, status(0, SPEED), 0)
    for tokens in (100, 300):
        loads.sent(prefill, PrefillWork(tokens), 0)
    counts = {"computed_prompt_tokens": 300, "prefill_position": 50.0}
    loads.reported(prefill, status(0, SPEED, **counts), 1)
    assert loads.demand() is None, "no answers"
    decodes = {"requests_decoding": 4, "decode_context": 4000, "gap_cost": 0.4, "generation_tokens": 80}
    loads.reported(decode, status(0, SPEED, computed_prompt_tokens=100, prefill_position=90.0, **decodes), 1)
    demand = loads.demand()
    assert demand is not None
    assert demand.prompts == pytest.approx(400 / loads.prompts.value)
    assert demand.position == pytest.approx((300 * 50 + 100 * 90) / 400)
    assert (demand.output, demand.context, demand.gap_cost) == pytest.approx((80, 1000, 0.1))


def test_a_speed_beside_decodes_is_that_of_this_worker_alone() -> None:
    loads = PrefillLoads()
    row, other = (loads.join(name, block_size=16, now=0.0) for name in ("a", "b"))
    loads.reported(row, status(1000, 0.0, long_chunk_tokens=100, long_chunk_seconds=1.0), 0.0, alone=False)
    assert loads.tokens_waiting(row, 5.0) == 500
    assert loads.tokens_per_s() == 0
    loads.reported(other, status(0, 2000.0), 0.0)
    assert loads.tokens_per_s() == 2000


def test_a_report_shows_the_prompt_that_another_router_sent() -> None:
    """Workers count the tokens of a step until it is over, so this router waits for all of both prompts but
    what is computed of its own."""
    loads, row = one()
    loads.reported(row, status(0, 1000), 0)
    own = PrefillWork(1000)
    loads.sent(row, own, 0)
    loads.reported(row, status(1000 + 2000, 1000, tokens_of_others=2000), 0.5)
    assert look(loads, 0.5).wait[row] == pytest.approx(2.5)
    loads.ended(row, own, computed=True, now=1)
    assert look(loads, 1).wait[row] == pytest.approx(2)


def test_what_the_shared_store_has_counts_at_its_price_at_every_worker_that_reads_from_it():
    """Also after the end of the worker that wrote it."""
    loads, writer = one()
    feed, chunks = CacheFeed(), [*range(10)]
    for changes in feed.changed(dict.fromkeys(chunks, Tier.DEVICE), dict.fromkeys(chunks, True)):
        loads.index.apply(writer, pb.WorkerMessage.FromString(changes).cache)
    assert loads.index.reported(writer) == 10, "the store's chunks are not of this worker"
    loads.leave(writer)
    rows = [loads.join(name, block_size=16, now=0) for name in ("b:1", "c:1")]
    loads.reported(rows[0], status(0, SPEED, store_tokens_per_s=10_000), 0)
    loads.reported(rows[1], status(0, SPEED), 0)
    found = look(loads, 0, 1000, chunks)
    assert [found.cached.of(row) for row in rows] == [640, 0], "the other one has no store, or no known speed"
    assert found.load(rows[0]) == pytest.approx(640 / 10_000)
    loads.index.apply(rows[0], pb.CacheEvents(added=chunks[:5]))
    assert look(loads, 0, 1000, chunks).load(rows[0]) == pytest.approx(320 / 10_000)
    for changes in feed.changed({}, dict.fromkeys(chunks[7:], False)):
        loads.index.apply(rows[1], pb.WorkerMessage.FromString(changes).cache)
    assert look(loads, 0, 1000, chunks).cached.of(rows[0]) == 7 * CHUNK_TOKENS
    other = ChunkIndex()  # of a router that starts now
    other.grow(2)
    for part in feed.snapshot():
        other.apply(0, pb.WorkerMessage.FromString(part).cache)
    assert other.only_stored(0, [*range(20)]) == 0, "the worker has them, too"
    assert [chunk for chunk in range(20) if other.only_stored(1, [chunk])] == chunks[:7]


def test_an_adapter_is_where_the_last_report_says() -> None:
    loads, adapter = PrefillLoads(), b"a" * 16
    rows = [loads.join(f"{i}:1", block_size=16, now=0) for i in range(3)]

    def report(row: int, *adapters: bytes) -> None:
        report = pb.WorkerStatus(adapters_on_device=adapters, adapter_move_seconds=0.5)
        loads.reported(row, report, 0)

    def waits() -> list[float]:
        snapshot = loads.snapshot(PrefillRequest(1, 10, adapter=adapter), 0)
        assert snapshot is not None
        found = [float(snapshot.wait[row]) for row in rows]
        assert found == [loads.adapter_seconds(row, adapter) for row in rows]
        return found

    assert waits() == [0.0, 0.0, 0.0], "no move was measured"
    report(0, adapter)
    report(1, b"b" * 16, adapter)
    report(2)
    assert waits() == [0.0, 0.0, 0.5]
    report(1, b"b" * 16)
    assert waits() == [0.0, 0.5, 0.5]
    loads.leave(0)
    assert loads.join("other:1", block_size=16, now=0) == rows[0]
    report(0)
    assert waits() == [0.5, 0.5, 0.5], "another worker has the row"
