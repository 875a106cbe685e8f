"""When a worker fetches a prefix instead of computing it, and what it does if the fetch ends badly."""

from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from baton.engine import Engine, EngineRequest
from baton.engine.core.link import RETRY, Link
from baton.engine.core.prefix_exchange import Import, MissingPrefix, PrefixExchange
from baton.engine.core.prefix_names import PrefixNames
from baton.kv_names import CHUNK_TOKENS
from baton.kv_transfer import Closed, FetchFailed, FirstToken, Injected, InjectStats, Receiver, TraceWriter
from baton.kv_transfer.endpoint.shared_store import SharedStore
from baton.rpc import worker_pb2 as pb
from baton.worker.engine_process import prefix_fetches
from baton.worker.engine_process.attempt import Attempt, AttemptTable
from baton.worker.engine_process.prefix_fetches import PrefixFetches, PrefixLinks, Workers
from baton.worker.engine_process.shared_store import SLACK, StoreSource
from baton.worker.messages import Origin
from baton.worker.stats import RequestCounts
from tests.router_messages import content_at
from tests.stand_in import stand_in

TOKEN_BYTES = 100
SOURCE = content_at("127.0.0.1:7000", 8)
S = TypeVar("S")
OTHER = content_at("127.0.0.1:7001", 9)
CHUNKS = [bytes([i]) * 16 for i in range(4)]


class World:
    """`PrefixFetches` beside stand-ins of an engine, a receiver and a store, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(prefix_fetches, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.missing: dict[bytes, list[bytes]] = {}  # by request id; else CHUNKS
        self.computed_from = CHUNK_TOKENS
        self.room = True
        self.imports: dict[int, int | None] = {}  # positions that were complete, by number. None: it goes on
        self.asked: list[bytes] = []  # fetch ids
        self._owners: dict[bytes, Any] = {}  # of these
        self._attempts: dict[bytes, Attempt] = {}  # the newest of each name
        self.cancelled: list[bytes] = []
        self.added: list[bytes] = []
        self.fetched: list[int] = []  # as it was told to each of them
        self.counts = RequestCounts()
        self.prompt_tokens_per_s = 0.0
        exchange = stand_in(
            PrefixExchange,
            missing=self.find_missing,
            start_import=self.start_import,
        )
        self.engine = stand_in(
            Engine,
            prefix_exchange=exchange,
            prompt_seconds=lambda tokens, *_: (
                tokens / self.prompt_tokens_per_s if self.prompt_tokens_per_s else 0.0
            ),
        )
        self.began: set[bytes] = set()
        self.ends = 0.0  # of a fetch from a store
        self.fetches = PrefixFetches(self.engine, self.counts, TraceWriter(None, ""))
        self.fetches.sources.append(
            Workers(self.source(Receiver, began=lambda fetch_id: fetch_id in self.began), 7, PrefixLinks())
        )

    def source(self, kind: type[S], **more: object) -> S:
        """What is fetched from."""
        return stand_in(kind, fetch_content=self.ask, cancel=self.cancelled.append, **more)

    def put_behind(self) -> StoreSource:
        """A store behind the other workers."""
        return self.put_store(
            self.source(SharedStore, ends=lambda fetch_id: self.ends if fetch_id in self.began else None)
        )

    def put_store(self, store: SharedStore) -> StoreSource:
        assert self.engine.prefix_exchange is not None
        source = StoreSource(self.engine, self.engine.prefix_exchange, lambda _: store)
        self.fetches.sources.append(source)
        return source

    def ask(self, fetch_id: bytes, *, owner: Any, **_: object) -> None:
        self.asked.append(fetch_id)
        self._owners[fetch_id] = owner

    def end(self, event: Injected | FetchFailed | Closed) -> None:
        """The receiver or the store reports this."""
        self._owners.pop(event.decode_id).handle(event)

    def attempt(self, name: bytes) -> Attempt:
        made = self._attempts[name] = Attempt(stream=1, origin=Origin(name, "", "", 0.0), tokens=1)
        assert AttemptTable[Attempt](lambda message: None).open(made)
        return made

    def cancel(self, name: bytes) -> None:
        self._attempts[name].cancel()

    def get(self, name: bytes, source: pb.ContentSource | None) -> bool:
        def then(fetched: int) -> None:
            self.added.append(name)
            self.fetched.append(fetched)

        return self.fetches.get(self.attempt(name), EngineRequest(name, [1]), source, then)

    def find_missing(self, request: EngineRequest, most: int, **_: bool) -> MissingPrefix | None:
        chunks = self.missing.get(request.id, CHUNKS)[:most]
        found = MissingPrefix(chunks, 1, PrefixNames(b"root", b"", 16), (), self.computed_from)
        return found if chunks else None

    def start_import(self, missing: MissingPrefix) -> Import | None:
        if not self.room:
            return None
        number = len(self.imports)
        self.imports[number] = None

        def end(num_tokens: int, *, all_positions: bool) -> None:
            self.imports[number] = num_tokens

        return stand_in(Import, missing=missing, table=range(99), state_slot=None, end=end)

    def start(self, name: bytes = b"r", source: pb.ContentSource = SOURCE) -> bool:
        return self.get(name, source)

    def inject(self, chunks: int, seconds: float, waited: float = 0.0, connecting: float = 0.0) -> None:
        """The newest fetch has taken `seconds`, of which it `waited` for the first frame, after a session was
        made."""
        tokens, asked = chunks * CHUNK_TOKENS, self.now - seconds
        began = asked - connecting
        stats = InjectStats(tokens * TOKEN_BYTES, tokens, 1, asked, asked + waited, 0, 0, began, 0, self.now)
        self.end(Injected(self.asked[-1], FirstToken(0), stats))

    @property
    def empty(self) -> bool:
        waits = any(attempt.leases for attempt in self._attempts.values())
        return not waits and not self.fetches._open and None not in self.imports.values()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_what_came_enters_the_cache_before_the_prompt_is_added(world: World) -> None:
    assert world.start()
    assert not world.added
    world.inject(3, 0.1)
    assert [*world.imports.values()] == [4 * CHUNK_TOKENS], "one chunk was there, and three of four came"
    assert world.added == [b"r"]
    assert world.fetched == [3 * CHUNK_TOKENS]
    assert world.counts.fetched_by_tier == [3 * CHUNK_TOKENS, 0, 0, 0]
    assert world.counts.prefix_fetched_bytes == 3 * CHUNK_TOKENS * TOKEN_BYTES
    assert world.empty


def test_nothing_is_fetched_from_itself_or_without_need_or_room(world: World) -> None:
    assert not world.start(source=content_at("127.0.0.1:7000", 7))
    world.missing[b"r"] = []
    assert not world.start()
    world.missing.clear()
    world.room = False
    assert not world.start()
    assert world.empty
    assert not world.asked


def test_what_the_last_block_has_already_is_no_gain_of_a_fetch(world: World) -> None:
    """That block is not full, so it is fetched as a whole. Computing goes on in it."""
    world.prompt_tokens_per_s = 1000.0
    assert world.start()
    world.inject(4, seconds=0.2)  # as many tokens take 0.256 s to compute
    world.computed_from = 2 * CHUNK_TOKENS
    assert not world.start(), "three chunks take 0.192 s"
    assert world.empty


def test_the_time_to_make_a_session_counts_when_the_last_one_has_ended(world: World) -> None:
    world.prompt_tokens_per_s = 1000.0
    assert world.start()
    world.inject(4, seconds=0.1, waited=0.02, connecting=0.2)
    assert world.start(), "0.1 s and 0.256 s"
    world.inject(4, seconds=0.1, waited=0.02)
    world.now += 50.0
    assert world.start()
    world.inject(4, seconds=0.1, waited=0.02)
    world.now += 61.0
    assert not world.start(), "0.3 s and 0.256 s"
    assert world.empty


def test_a_long_prefix_is_fetched_though_short_ones_are_computed(world: World) -> None:
    world.prompt_tokens_per_s = 1000.0
    world.missing |= {b"short": CHUNKS[:1], b"long": CHUNKS}
    assert world.start(b"short")
    world.inject(1, seconds=0.07)
    assert not world.start(b"short"), "it takes 0.064 s to compute"
    assert world.start(b"long"), "which takes 0.256 s to compute, and four times 0.07 to fetch if all is slow"
    world.inject(4, seconds=0.3)
    assert not world.start(b"long"), "as measured"
    assert world.empty


@pytest.mark.parametrize(("reason", "again"), [("gone", True), ("busy", True), ("integrity", False)])
def test_a_worker_is_asked_again_after_a_stale_hint(world: World, reason: str, again: bool) -> None:
    world.start()
    world.end(FetchFailed(world.asked[0], reason))
    assert world.start() is again


def test_of_the_last_two_fetches_of_a_size_the_faster_one_counts() -> None:
    link = Link()
    for seconds, pays in ((10.0, False), (1.0, True), (10.0, True), (10.0, False), (1.0, True)):
        link.measured(64, 0.0, seconds, now=0.0)
        assert link.pays(64, 2.0, now=0.0) is pays


def test_a_slow_fetch_is_not_the_last_one(world: World) -> None:
    """As the first ones of a process, which open memory. One prompt tries it again after some seconds."""
    world.prompt_tokens_per_s = 1000.0
    assert world.start()
    world.inject(4, seconds=1.0)  # as many tokens take 0.256 s to compute
    for _ in range(2):
        assert not any(world.start() for _ in range(100))
        world.now += RETRY
        assert world.start()
        world.inject(4, seconds=1.0)
    world.now += RETRY
    assert world.start()
    world.inject(4, seconds=0.01)
    assert world.start(), "it is fast again"


@pytest.mark.parametrize("reason", ["busy", "cancelled"])
def test_all_prompts_that_wait_for_a_fetch_are_computed_if_it_fails(world: World, reason: str) -> None:
    for name in (b"1", b"2"):
        assert world.start(name)
    [fetch_id] = world.asked
    world.end(FetchFailed(fetch_id, reason) if reason == "busy" else Closed(fetch_id))
    assert world.added == [b"1", b"2"]
    assert [*world.imports.values()] == [0]
    assert world.empty


def test_a_fetch_that_takes_too_long_is_given_up(world: World) -> None:
    world.prompt_tokens_per_s = 256.0  # a second
    world.start()
    world.began = {*world.asked}
    world.now = 2.9
    world.fetches.expire()
    assert not world.added
    world.now = 3.0
    world.fetches.expire()
    assert world.added == [b"r"]
    assert world.cancelled == world.asked
    assert not world.start(b"early"), "it would take 3 s again, and to compute it takes one"
    world.prompt_tokens_per_s = 64.0
    assert world.start(b"next"), "not the fetch that was given up"
    world.inject(4, 0.1)
    assert None in world.imports.values(), "the receiver may still write into the blocks"
    world.end(Closed(world.asked[0]))
    assert world.added == [b"r", b"next"]
    assert world.empty


def test_prompts_with_the_same_missing_chunk_wait_for_one_fetch(world: World) -> None:
    for name in (b"1", b"2", b"3"):
        assert world.start(name)
    [fetch_id] = world.asked
    world.cancel(b"1")
    assert not world.cancelled
    world.missing |= {b"2": [], b"3": []}
    world.inject(4, 0.1)
    assert world.added == [b"2", b"3"]
    assert [*world.imports.values()] == [5 * CHUNK_TOKENS]
    assert world.empty
    for name in (b"4", b"5"):
        world.start(name)
        world.cancel(name)
    assert world.cancelled == world.asked[1:]
    for fetch_id in world.asked[1:]:
        world.end(Closed(fetch_id))
    assert world.added == [b"2", b"3"]
    assert world.empty


def test_a_prompt_fetches_what_the_fetch_before_did_not_bring(world: World) -> None:
    """It may be the end of another chat with the same beginning."""
    for name in (b"1", b"2", b"3"):
        assert world.start(name)
    world.missing |= {b"2": [b"2" * 16], b"3": CHUNKS}  # the beginning came for 2, and was evicted for 3
    world.inject(4, 0.1)
    assert world.added == [b"1", b"3"], "what came and is gone is not fetched again"
    assert len(world.asked) == 2
    world.inject(1, 0.1)
    assert world.added == [b"1", b"3", b"2"]
    assert world.fetched == [4 * CHUNK_TOKENS, 0, CHUNK_TOKENS], "what came for each of them"
    assert world.empty


def test_a_prompt_does_not_wait_longer_than_it_would_compute(world: World) -> None:
    world.prompt_tokens_per_s = 1000.0
    world.start()
    world.inject(4, 0.1)
    world.missing[b"short"] = CHUNKS[:1]  # takes 0.064 s to compute
    assert world.start(b"long")
    assert not world.start(b"short")
    world.inject(4, 0.1)
    assert world.empty


def test_no_block_is_taken_before_the_fetch_is_known_to_pay(world: World) -> None:
    world.prompt_tokens_per_s = 1000.0
    world.start()
    world.inject(4, 1.0)
    assert not world.start()
    world.start(b"1", OTHER)
    world.start(b"2", OTHER)
    assert len(world.imports) == len(world.asked) == 2


def test_each_worker_has_a_bandwidth_of_its_own(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_fetches, "MOST_LINKS", 2)
    world.prompt_tokens_per_s = 1000.0
    assert world.start()
    world.inject(4, 1.0)  # as many tokens take 0.256 s to compute
    assert not world.start()
    assert world.start(source=OTHER)
    world.inject(4, 0.01)
    assert not world.start()
    assert world.start(source=content_at("127.0.0.1:7002", 10))
    world.inject(4, 0.01)
    assert world.start(), "of many workers the oldest is forgotten"
    world.inject(4, 0.01)
    assert world.empty


def stats_of(chunks: int, now: float) -> InjectStats:
    return InjectStats(TOKEN_BYTES, chunks * CHUNK_TOKENS, 1, now, now, now, now, now, now, now)


def test_what_no_worker_has_comes_from_the_store(world: World) -> None:
    assert not world.get(b"none", None), "there is no store, and no worker was named"
    world.put_behind()
    assert world.get(b"a", SOURCE)
    world.missing[b"a"] = CHUNKS[2:]
    world.inject(2, 0.1)
    assert not world.added, "the store is asked for the rest"
    world.end(Injected(world.asked[-1], FirstToken(0), stats_of(1, world.now)))
    assert (world.added, world.fetched) == ([b"a"], [3 * CHUNK_TOKENS])
    assert world.counts.fetched_by_tier == [2 * CHUNK_TOKENS, 0, 0, CHUNK_TOKENS]
    assert world.get(b"b", None)
    world.end(FetchFailed(world.asked[-1], "gone"))
    assert (world.added, world.fetched[1:]) == ([b"a", b"b"], [0])
    assert len(world.asked) == 3
    assert world.empty


def test_a_prompt_that_ends_waits_for_the_store_no_more(world: World) -> None:
    world.put_behind()
    assert world.get(b"a", None)
    world.cancel(b"a")
    assert world.cancelled == world.asked
    world.end(Closed(world.asked[0]))
    assert not world.added
    assert world.empty


def test_a_slow_store_is_given_up_after_twice_the_expected_time_at_most(world: World) -> None:
    store = world.put_behind()
    limit, link = store.limit, store.place.link
    assert limit(0.0, 0.0) == limit(0.0, 1.0) == SLACK, "nothing is known"
    assert limit(0.1, 1.0) == 0.2
    assert limit(0.9, 1.0) == 1.0, "no later than it would be computed"
    assert limit(SLACK / 10, 1.0) == SLACK
    assert limit(SLACK / 10, SLACK / 4) == SLACK / 4, "nor if that takes no time"
    link.probed(0.0, 1 / 2000.0)
    world.prompt_tokens_per_s = 1000.0
    assert world.get(b"a", None)
    world.began.add(world.asked[0])
    world.now = 0.256 + 0.001
    world.fetches.expire()
    assert (world.added, world.fetched) == ([b"a"], [0])
    world.end(Closed(world.asked[0]))
    assert not world.get(b"b", None), "computing is faster"
    assert world.empty


def test_a_fetch_that_will_be_late_is_given_up_at_once(world: World) -> None:
    store = world.put_behind()
    store.place.link.probed(0.0, 1 / 2000.0)
    world.prompt_tokens_per_s = 1000.0  # 0.256 s for all
    assert world.get(b"a", None)
    world.began.add(world.asked[0])
    world.now, world.ends = 0.01, 0.25
    world.fetches.expire()
    assert not world.added, "it is in time"
    world.now, world.ends = 0.02, 0.3
    world.fetches.expire()
    assert (world.added, world.cancelled) == ([b"a"], world.asked)
    world.end(Closed(world.asked[0]))
    assert not world.get(b"b", None), "it would have taken 0.3 s"
    assert world.empty


def test_no_prompt_waits_for_a_store_that_a_probe_found_slow(world: World) -> None:
    store = world.put_behind()
    world.prompt_tokens_per_s = 1000.0
    link = store.place.link
    link.probed(0.0, 1 / 900.0)
    assert link.expected(1 << 10) == pytest.approx((1 << 10) / 900.0)
    assert not world.get(b"a", None)
    link.measured(4 * CHUNK_TOKENS, 0.0, 0.1, now=0.0)
    assert link.pays(4 * CHUNK_TOKENS, 0.11, 0.0), "fetches say more than a probe"
    link.probed(0.0, 1 / 450.0)
    assert not link.pays(4 * CHUNK_TOKENS, 0.19, 0.0), "and a later one says how they have changed"
    assert link.pays(4 * CHUNK_TOKENS, 0.21, 0.0)
    link.waited.add(5.0)
    assert not link.pays(4 * CHUNK_TOKENS, 0.21, 0.0)
    link.probed(0.0, 1 / 450.0)
    assert link.pays(4 * CHUNK_TOKENS, 0.21, 0.0), "it answers at once again"


class SlowStore:
    """A store of which the reads take their time, as a receiver. The chunks of an 8B Llama in bfloat16."""

    COMPUTING, TOKENS, TOKEN_BYTES = 8000 / 0.21, 8000, 131_072
    ANSWER, AHEAD = 0.001, 4  # seconds until it says what it has; objects that the first answer needs

    def __init__(self, world: World, gb_per_s: float, promised: float) -> None:
        self.gb_per_s, self.promised = gb_per_s, promised  # the second: what probes find
        self.session, self.unanswered, self.probes = 1, 0, 0
        self.answers_probes = True
        self._world = world
        self._began = 0.0
        store = stand_in(
            SharedStore,
            session=property(lambda _: self.session),
            unanswered=property(lambda _: self.unanswered),
            probe=self.probe,
            fetch_content=self.fetch_content,
            ends=self.ends,
            cancel=world.cancelled.append,
        )
        self._source = world.put_store(store)

    def probe(self) -> bool:
        if self.answers_probes:
            self.probes += 1
            self.link.probed(self.ANSWER, self._seconds(1, self.promised))
        return self.answers_probes

    def fetch_content(self, fetch_id: bytes, *, owner: Any, **_: object) -> None:
        self._world.ask(fetch_id, owner=owner)
        self._began = self._world.now

    def ends(self, fetch_id: bytes) -> float | None:
        if self._world.now < self._began + self.ANSWER:
            return None
        first = self.ANSWER + self._seconds(self.AHEAD * CHUNK_TOKENS, self.gb_per_s)
        is_known = self._world.now >= self._began + first
        return self._began + self.ANSWER + self._seconds(self.TOKENS, self.gb_per_s) if is_known else 0.0

    def _seconds(self, tokens: int, gb_per_s: float) -> float:
        return tokens * self.TOKEN_BYTES / gb_per_s / 1e9

    @property
    def link(self) -> Link:
        return self._source.place.link

    def waits(self, prompts: int) -> list[float]:
        """For how long each of these prompts waits, one after the other, until it is computed or has come."""
        world, found = self._world, list[float]()
        for number in range(prompts):
            name, since = number.to_bytes(4), world.now
            world.missing[name] = [name + bytes([chunk]) for chunk in range(self.TOKENS // CHUNK_TOKENS)]
            self._source.measure(world.now)
            if world.get(name, None):
                while name not in world.added:
                    world.now += 0.001
                    if world.now >= since + self.ANSWER + self._seconds(self.TOKENS, self.gb_per_s):
                        self.link.waited.add(self.ANSWER)
                        stats = InjectStats(
                            0, self.TOKENS, 1, since, since + self.ANSWER, 0, 0, since, 0, world.now
                        )
                        world.end(Injected(world.asked[-1], FirstToken(0), stats))
                    world.fetches.expire()
                if world.cancelled:
                    world.end(Closed(world.cancelled.pop()))
            found.append(world.now - since)
            world.now += self.TOKENS / self.COMPUTING
        world.added.clear()
        return found


def test_prompts_do_not_wait_while_the_store_is_silent_or_its_speed_is_not_known(world: World) -> None:
    store = SlowStore(world, 100.0, 100.0)
    store.session, store.answers_probes = 0, False
    assert not any(store.waits(3))
    store.session = 1
    assert not any(store.waits(3))
    store.answers_probes = True
    assert all(store.waits(3))
    store.unanswered = 1
    assert not any(store.waits(3))
    store.session, store.unanswered, store.answers_probes = 2, 0, False
    assert not any(store.waits(3)), "what was measured is of another store"


@pytest.mark.cases(1)
@pytest.mark.parametrize(("promised", "tries"), [(2.2, 0), (6.6, 1)], ids=["as probed", "slower"])
def test_no_prompt_waits_for_a_store_that_is_slower_than_computing(
    world: World, promised: float, tries: int
) -> None:
    world.prompt_tokens_per_s = SlowStore.COMPUTING
    world.computed_from = 0
    store = SlowStore(world, 2.2, promised)
    waits = store.waits(1500)  # five minutes
    assert sum(map(bool, waits)) == tries, "one may, if all that is known is wrong"
    assert max(waits) <= 0.1 * store.TOKENS / store.COMPUTING, "the time of the first answers"
    assert 3 <= store.probes <= 6, "its speed is measured beside them"
    store.gb_per_s, store.promised = 5 * store.gb_per_s, 5 * store.promised
    waits = store.waits(400)
    begins = next(number for number, wait in enumerate(waits) if wait)
    assert begins <= prefix_fetches.RECENT / 0.21 + 1, "the next probe finds that it is faster now"
    assert all(waits[begins:])
    assert max(waits) < store.TOKENS / store.COMPUTING


def test_a_store_that_does_not_answer_is_not_asked_for_a_while(world: World) -> None:
    world.put_behind()
    world.prompt_tokens_per_s = 1000.0
    assert world.get(b"a", None)
    world.now = SLACK - 0.001
    world.fetches.expire()
    assert not world.added
    world.now = SLACK
    world.fetches.expire()
    assert (world.added, world.cancelled) == ([b"a"], world.asked)
    world.end(Closed(world.asked[0]))
    assert not world.get(b"b", None)
    world.now += prefix_fetches.PAUSE
    assert world.get(b"c", None)
