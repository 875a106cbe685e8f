"""A router follows the reports of the workers' prefix caches."""

import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from baton.kv_names import Tier, prompt_hints
from baton.router.policy.chunk_index import ChunkIndex
from baton.router.policy.fleet import Fleet
from baton.router.policy.prefill import PrefillRequest
from baton.router.policy.prefixes import Prefixes, PrefixSource
from baton.router.policy.settings import PlanSettings
from baton.router.text.tokenizer import ModelTokenizer
from baton.rpc import worker_pb2 as pb
from baton.worker.service_process import cache_feed
from baton.worker.service_process.cache_feed import MAX_CHUNKS, CacheFeed
from baton.worker.service_process.streams import MAX_UNREAD_CACHE_BYTES, RouterStream
from tests.fake_worker import FakeWorker
from tests.router.conftest import Cluster, make_cluster
from tests.router.test_overflow import offering
from tests.router.test_recovery import decodes
from tests.router_messages import next_message

CHUNKS = list(range(9))
RNG = random.Random(1)


@pytest.mark.all
@patch.object(cache_feed, "MAX_CHUNKS", 2)
@given(
    st.lists(
        st.tuples(
            st.dictionaries(st.sampled_from(CHUNKS), st.sampled_from([Tier.DEVICE, Tier.HOST, Tier.DISK])),
            st.lists(st.sampled_from(CHUNKS)),
            st.booleans(),
            st.integers(0, 3),
        ),
        max_size=30,
    )
)
@example([({0: Tier.DEVICE}, [], False, 2), ({}, [1], True, 1)])  # a drop between two parts
def test_the_router_has_the_same_chunks_as_the_worker_after_dropped_reports(changes):
    """Each report is queued or dropped. The router reads a few messages after each, parts of a snapshot among
    them. It never counts more chunks than the worker has: that would refuse the worker."""
    feed, index, stream = CacheFeed(), ChunkIndex(), RouterStream(1)
    most = 0
    index.grow(1)
    has: dict[int, Tier] = {}

    def changed(now: dict[int, Tier], evicted: list[int], unread: int = 0) -> None:
        nonlocal most
        for chunk in evicted:
            has.pop(chunk, None)
        has.update(now)
        most = max(most, len(has))
        stream.unread_bytes += unread
        for message in feed.changed({**dict.fromkeys(evicted), **now}):
            stream.put_cache_events(message)
        stream.unread_bytes -= unread

    def read(count: float) -> None:
        while count and (message := next_message(stream)):
            count -= 1
            index.apply(0, pb.WorkerMessage.FromString(message).cache)
            assert index.reported(0) <= most

    changed({1: Tier.DEVICE, 2: Tier.HOST}, [])
    read(math.inf)
    assert not index.reported(0), "the router has not asked for them"
    stream.want_cache_events(feed.snapshot)
    for now, evicted, dropped, count in changes:
        unread = 2 * MAX_UNREAD_CACHE_BYTES if dropped else 0
        changed(now, [chunk for chunk in evicted if chunk not in now], unread)
        read(count)
    changed({3: Tier.HOST}, [])
    changed({4: Tier.DISK}, [3])
    read(math.inf)
    found = [chunk for chunk in range(100) if index.reported_by(chunk) & 1]
    assert index.reported(0) == len(found)
    assert {chunk: index.slowest_tier(0, [chunk]) for chunk in found} == has


def test_large_changes_and_snapshots_travel_in_bounded_parts():
    feed = CacheFeed()
    added = list(range(2 * MAX_CHUNKS + 1))
    for messages in ([*feed.snapshot()], feed.changed(dict.fromkeys(added, Tier.DEVICE)), [*feed.snapshot()]):
        events = [pb.WorkerMessage.FromString(message).cache for message in messages]
        assert all(len(each.added) <= MAX_CHUNKS for each in events)
    assert sorted(chunk for each in events for chunk in each.added) == added
    assert [each.reset for each in events] == [True, False, False]


def test_a_router_that_reads_too_slowly_gets_only_tokens():
    stream = RouterStream(1)
    stream.want_cache_events(lambda: iter([b"snapshot"]))
    assert next_message(stream) == b"snapshot"
    unread = b"x" * (MAX_UNREAD_CACHE_BYTES + 1)
    stream.put(unread)
    stream.put_cache_events(b"events")
    stream.put(b"tokens")
    assert [next_message(stream) for _ in range(2)] == [unread, b"tokens"]
    stream.unread_bytes = 0  # they are written
    stream.put_cache_events(b"events after those that it lacks")
    assert [next_message(stream) for _ in range(2)] == [b"snapshot", None]


def prefix_source(fleet: Fleet, row: int, chunks: Sequence[int], tokens: int) -> PrefixSource | None:
    """Its seconds depend on the machine."""
    found = Prefixes(fleet, PrefillRequest(1, tokens, chunks)).source(row)
    return None if found is None else found._replace(seconds=0.0)


@pytest.fixture
async def caching(tokenizer: ModelTokenizer, tmp_path: Path) -> AsyncIterator[Cluster]:
    """Three prefill workers and a decode worker with empty prefix caches."""
    async with make_cluster(tokenizer, tmp_path, prefill=3, wait=False) as made:
        for worker in made.workers:
            worker.cache = set()
        await made.until(lambda: len(made.pool.ready(pb.POOL_PREFILL)) == 3 and bool(made.pool.desk.decodes))
        await made.until(lambda: all(worker.attached for worker in made.workers))
        yield made


def reported(cluster: Cluster) -> list[int]:
    """Returns how many chunks each worker has, as far as the router knows."""
    index = cluster.pool.desk.loads.index
    return [index.reported(cluster.connection(worker).row) for worker in cluster.prefills]


async def went_to(cluster: Cluster, prompt: list[int], session: str) -> int:
    before = [len(worker.submitted) for worker in cluster.prefills]
    await cluster.complete(prompt=prompt, user=session, max_tokens=1)
    [index] = [i for i, worker in enumerate(cluster.prefills) if len(worker.submitted) > before[i]]
    return index


async def test_chunks_have_the_names_of_the_prefill_workers(tokenizer: ModelTokenizer, tmp_path: Path):
    """Two decode workers keep KV in another dtype, and so have another root."""
    async with make_cluster(tokenizer, tmp_path, decode=2) as made:
        for connection in made.pool.ready(pb.POOL_DECODE):
            connection.description.content_root = b"fp8"
        [prefill] = made.pool.ready(pb.POOL_PREFILL)
        prefill.description.content_root = b"plain"
        made.pool.availability_changed(prefill)
        assert made.pool.content_root == b"plain"


async def test_requests_go_to_the_worker_that_reported_their_prefix(caching: Cluster):
    prompt = list(range(3, 503))
    home = await went_to(caching, prompt, "a")
    other = (home + 1) % 3
    caching.prefills[other].change_cache(prompt_hints(prompt, b"", b""))
    await caching.until(lambda: reported(caching)[other] == 7)
    assert await went_to(caching, prompt, "a") == other
    caching.prefills[other].change_cache([], prompt_hints(prompt, b"", b""))
    await caching.until(lambda: reported(caching)[other] == 0)
    assert await went_to(caching, prompt, "a") == home


async def test_the_chunks_of_a_lost_worker_are_forgotten(caching: Cluster):
    worker = caching.prefills[0]
    worker.change_cache([1, 2, 3])
    await caching.until(lambda: reported(caching)[0] == 3)
    port = int(worker.address.rpartition(":")[2])
    index = caching.pool.desk.loads.index
    await worker.kill()
    await caching.until(lambda: not len(index))
    worker.cache = {8}
    await worker.start(port)
    await caching.until(lambda: len(index) == 1)


async def test_a_worker_that_reports_more_chunks_than_blocks_is_refused(caching: Cluster):
    worker = caching.prefills[0]
    worker.change_cache(range(512))
    await caching.until(lambda: reported(caching)[0] == 512)
    worker.change_cache([512])
    await caching.until(lambda: len(caching.pool.ready(pb.POOL_PREFILL)) == 2)
    assert "more cached chunks" in caching.connection(worker).reason


async def test_a_worker_with_a_host_tier_may_report_more_chunks(caching: Cluster):
    worker = caching.prefills[0]
    caching.connection(worker).description.offload_blocks = 1
    worker.change_cache(range(512))
    worker.change_cache([512])
    await caching.until(lambda: reported(caching)[0] == 513)
    assert len(caching.pool.ready(pb.POOL_PREFILL)) == 3


async def test_a_prefill_goes_with_the_name_of_the_worker_that_has_more_of_its_prompt(
    caching: Cluster, monkeypatch: pytest.MonkeyPatch
):
    prompt, [decode] = list(range(3, 503)), caching.decodes
    home = caching.prefills[await went_to(caching, prompt, "a")]

    async def source() -> int | None:
        """The incarnation that the next prefill is told to fetch from."""
        await caching.complete(prompt=prompt, user="a", max_tokens=1)
        submitted = home.submitted[-1].prefill
        return submitted.content.incarnation if submitted.HasField("content") else None

    assert await source() is None
    index = caching.pool.desk.loads.index
    decode.change_cache(prompt_hints(prompt, b"", b"")[:3])
    await caching.until(lambda: len(index) == 3)
    assert await source() == decode.incarnation
    home.change_cache(prompt_hints(prompt, b"", b"")[:2])
    await caching.until(lambda: reported(caching)[caching.prefills.index(home)] == 2)
    assert await source() == decode.incarnation
    home.change_cache(prompt_hints(prompt, b"", b"")[2:3])
    await caching.until(lambda: reported(caching)[caching.prefills.index(home)] == 3)
    assert await source() is None
    decode.change_cache(prompt_hints(prompt, b"", b"")[3:])
    await caching.until(lambda: len(index) == 7)
    assert await source() == decode.incarnation
    pool = caching.pool
    connection = caching.connection(decode)
    monkeypatch.setattr(pool.desk, "settings", PlanSettings(prefix_fetches=False))
    assert await source() is None
    monkeypatch.undo()
    other = next(w for w in caching.prefills if w is not home)
    home_there, other_there = caching.connection(home), caching.connection(other)
    chunks = prompt_hints(prompt, b"", b"")
    index.expect(other_there.row, chunks)
    found = {prefix_source(pool.desk, home_there.row, chunks, 500) for _ in range(9)}
    assert found == {PrefixSource(connection.row, Tier.DEVICE, 256, 448)}, (
        "the other one will have it, but has nothing to send yet"
    )
    index.unexpect(other_there.row, chunks)


async def test_a_decode_worker_that_computes_a_prompt_gets_the_name_of_the_worker_that_has_it(
    caching: Cluster,
):
    prompt, [decode], holder = list(range(3, 503)), caching.decodes, caching.prefills[0]
    await caching.complete(prompt=prompt)
    index = caching.pool.desk.loads.index
    holder.change_cache(prompt_hints(prompt, b"", b""))
    await caching.until(lambda: len(index) == 7)
    await caching.complete(prompt=prompt)
    handed_over = decodes(decode)[-1]
    assert handed_over.HasField("source")
    assert not handed_over.HasField("content"), "the prefill worker sends the KV"
    await offering(caching)
    await caching.complete(prompt=prompt)
    computed = decodes(decode)[-1]
    assert not computed.HasField("source")
    assert computed.content.incarnation == holder.incarnation
    [connection] = caching.pool.ready(pb.POOL_DECODE)
    connection.description.content_root = b"fp8"
    await caching.complete(prompt=prompt)
    assert not decodes(decode)[-1].HasField("source")
    assert not decodes(decode)[-1].HasField("content"), "the holder knows KV of another dtype by other names"


@pytest.mark.parametrize("alone", ["asker", "holder"])
async def test_a_prefix_stays_where_it_is_if_one_of_two_workers_exchanges_none(caching: Cluster, alone: str):
    """A vLLM worker does not. Its router thought that prefixes come at no cost: sessions of agents moved, and
    prompts were computed again (two H200, vLLM 0.26: 0.78 of their tokens were cached, of 0.88 at most)."""
    asker, holder, *_ = caching.prefills
    chunks = prompt_hints(list(range(3, 503)), b"", b"")
    holder.change_cache(chunks)
    await caching.until(lambda: len(caching.pool.desk.loads.index) == 7)
    asking, has = caching.connection(asker), caching.connection(holder)
    assert prefix_source(caching.pool.desk, asking.row, chunks, 500) == PrefixSource(
        has.row, Tier.DEVICE, 448, 448
    )
    (asking if alone == "asker" else has).description.exchanges_prefixes = False
    assert prefix_source(caching.pool.desk, asking.row, chunks, 500) is None


async def test_the_source_is_one_that_is_fetched_in_little_time(caching: Cluster):
    prompt, [asker, slow, fast] = list(range(3, 503)), caching.prefills
    chunks = prompt_hints(prompt, b"", b"")
    asking = caching.connection(asker)
    for worker in (slow, fast):
        worker.change_cache(chunks)
    slow.change_cache([], tiers={Tier.HOST: chunks[2:]})
    index = caching.pool.desk.loads.index
    slow_row, fast_row = caching.connection(slow).row, caching.connection(fast).row
    await caching.until(lambda: index.slowest_tier(slow_row, chunks) is Tier.HOST)
    await caching.until(lambda: index.reported(fast_row) == 7)
    asker.status.prefill_tokens_per_s = 1000.0  # 448 tokens take 0.448 s

    async def source(**speeds: tuple[FakeWorker, Tier, float]) -> PrefixSource | None:
        del asker.status.prefix_links[:]
        for holder, tier, speed in speeds.values():
            asker.status.prefix_links.add(
                incarnation=holder.incarnation, tier=pb.Tier.Name(tier), wait=0.1, tokens_per_s=speed
            )
        asker.status.tokens_waiting += 1
        asker.report()
        await caching.until(lambda: asking.status.tokens_waiting == asker.status.tokens_waiting)
        found = {prefix_source(caching.pool.desk, asking.row, chunks, 500) for _ in range(9)}
        [only] = found
        return only

    from_fast = PrefixSource(fast_row, Tier.DEVICE, 448, 448)
    from_slow = PrefixSource(slow_row, Tier.HOST, 448, 448)
    assert await source(a=(fast, Tier.DEVICE, 1e4), b=(slow, Tier.HOST, 5e3)) == from_fast
    assert await source(a=(fast, Tier.DEVICE, 1e4), b=(slow, Tier.HOST, 2e4)) == from_slow
    assert await source(a=(fast, Tier.DEVICE, 1e4)) == from_slow, "it was not measured lately"
    assert await source(b=(slow, Tier.HOST, 5e3), c=(fast, Tier.DISK, 1e9)) == from_fast
    assert await source(a=(fast, Tier.DEVICE, 2e3), b=(slow, Tier.HOST, 9e2)) == from_fast
    assert await source(a=(fast, Tier.DEVICE, 1e3), b=(slow, Tier.HOST, 9e2)) is None, "computing is faster"
    asker.status.prefix_links.add(incarnation=1, wait=float("nan"))
    for rate in (float("inf"), float("nan"), -1.0, 0.0, 1e9):
        asker.status.kv_links.add(incarnation=1, bytes_per_s=rate)
    asker.report()
    await caching.until(lambda: asking._invalid_rates)
    assert len(asking.status.prefix_links) == 2
    assert [link.bytes_per_s for link in asking.status.kv_links] == [1e9]


async def test_askers_of_one_prefix_go_to_many_holders(caching: Cluster):
    """Otherwise a holder that is a little faster would get all of them."""
    chunks = prompt_hints(list(range(3, 503)), b"", b"")
    asker, *holders = [*caching.prefills, *caching.decodes]
    asking = caching.connection(asker)
    for number, worker in enumerate(holders):
        worker.change_cache(chunks)
        asker.status.prefix_links.add(incarnation=worker.incarnation, wait=0.01 * number, tokens_per_s=1e6)
    asker.status.prefill_tokens_per_s = 1000.0
    asker.report()
    index = caching.pool.desk.loads.index
    await caching.until(lambda: bool(asking.status.prefix_links))
    await caching.until(lambda: sum(map(index.reported, range(4))) == 21)
    caching.pool.desk.rng = random.Random(0)
    found = Counter(prefix_source(caching.pool.desk, asking.row, chunks, 500) for _ in range(300))
    assert len(found) == 2, "of any two the faster one"
    assert max(found.values()) < 240


def test_chunks_that_only_one_worker_has_are_found():
    index = ChunkIndex()
    index.grow(3)
    for row, chunks in enumerate(((1, 2, 3, 4), (2, 3), (3, 4))):
        index.add(row, chunks)
    index.place(0, [1], Tier.HOST)
    assert index.sole_holders([1, 2, 3, 4, 5]) == {0: [1]}
    index.discard(0, [2, 4])
    assert index.sole_holders([2, 4]) == {1: [2], 2: [4]}
    index.add(0, [6, 7])
    index.add(2, [6, 7])
    index.add(1, [7])
    assert [index.sole_partners(row) for row in range(3)] == [{2}, set(), {0}]
    index.clear(1)
    assert index.sole_holders([2, 7]) == {}
