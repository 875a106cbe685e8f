"""The tiers below the device under random operations, with the KV of each row as a model; and each rule by
itself."""

import random
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.engine.api.config import TierCells
from baton.engine.api.request import CacheChange, CachedBlock, EngineRequest, Hooks, Moved
from baton.engine.api.sampling_params import SamplingParams
from baton.engine.core import offload_tier
from baton.engine.core.block_pool import BlockPool
from baton.engine.core.cells import Rank
from baton.engine.core.link import RETRY
from baton.engine.core.live_request import LiveRequest, Phase
from baton.engine.core.offload_tier import CellCopy, CellTiers, Load
from baton.engine.core.prefix_cache import PrefixCache
from baton.engine.core.prefix_exchange import Pin
from baton.kv_names import Tier
from tests.engine.scheduling import hooks_to, make

BLOCK = 16
TENANTS = [b"one", b"two", b"three"]


def text(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(100), k=length)


class Observed:
    """The names that the prefix cache has reported."""

    def __init__(self) -> None:
        self.names: set[bytes] = set()

    def cache_changed(self, change: CacheChange) -> None:
        if isinstance(change, CachedBlock):
            assert change.name not in self.names
            self.names.add(change.name)
            return
        assert change.name in self.names
        if isinstance(change, Moved) and change.tier is None:
            self.names.remove(change.name)


class Worker:
    """A scheduler with a host tier and without a model. Of each row it has the tokens that its KV is for."""

    def __init__(self, num_blocks: int, num_places: int, seqs: int = 4, tier: Tier = Tier.HOST) -> None:
        self.observed = Observed()
        self.scheduler = make(
            num_blocks, seqs, 64, prefix_cache=True, block_size=BLOCK, hooks=hooks_to(self.observed),
            offload_places={TierCells(tier, False): num_places},
        )  # fmt: skip
        [self.tier] = self.scheduler.lives.offload
        self.rows: dict[int, object] = {}
        self.places: dict[int, list[object]] = {}
        self.saved: dict[int, list[object]] = {}  # what `places` had at the end of the copy, as a checksum
        self.under_way = self.tier.under_way
        self.requests = 0

    def add(
        self, prompt: list[int], tenant: bytes = b"", answer: int = 2, *, handover: bool = False
    ) -> LiveRequest:
        self.requests += 1
        request = EngineRequest(
            self.requests.to_bytes(4), prompt, tenant=tenant, sampling=SamplingParams(max_tokens=answer)
        )
        return self.scheduler.lives.add(request, handover=handover)

    def step(self) -> None:
        schedule = self.scheduler.schedule()
        self.scheduler.launched(schedule)
        schedule.end_leases()
        for live, chunk in schedule.chunks.items():
            tokens = tuple(live.token_ids)
            for position in range(chunk.stop):
                row = live.blocks[position // BLOCK] * BLOCK + position % BLOCK
                if position >= chunk.start:
                    self.rows[row] = tokens[: position + 1]
                assert self.rows[row] == tokens[: position + 1], "the KV of another prompt"
            if live.num_left == 0:
                self.scheduler.lives.memory.publish(live, chunk.stop)
                live.token_ids.append(7)
                if live.handover:
                    self.scheduler.lives.hold(live)
                elif len(live.token_ids) == live.asked.longest:
                    self.scheduler.lives.drop(live)

    def is_eager(self) -> None:
        """The tier saves all that the pool may evict from now on."""
        pool = self.scheduler.lives.pool
        self.tier.shared.clean = pool.num_blocks
        pool.release(pool.hold(pool.unused))  # so the list is made again

    def start_copies(self, most: int = 99) -> int:
        copies = self.tier.next_loads(most) or self.tier.next_saves(most)
        for copy in copies:
            if copy.load is None:
                self.places[copy.place] = self._block(copy)[: BLOCK // 2]
        return len(copies)

    def end_copy(self) -> None:
        copy = self.under_way[0]
        if copy.load is None:  # the second half is read late: the block may have another owner by now
            self.places[copy.place] += self._block(copy)[BLOCK // 2 :]
            self.saved[copy.place] = list(self.places[copy.place])
            self.tier.ended(True)
            return
        for offset, content in enumerate(self.places[copy.place]):
            self.rows[copy.cell * BLOCK + offset] = content
        self.tier.ended(self.places[copy.place] == self.saved[copy.place])

    def _block(self, copy: CellCopy) -> list[object]:
        return [self.rows.get(copy.cell * BLOCK + offset) for offset in range(BLOCK)]

    def copy_all(self) -> None:
        while self.start_copies() or self.under_way:
            while self.under_way:
                self.end_copy()

    def run(self, *prompts: list[int], tenant: bytes = b"") -> list[LiveRequest]:
        lives = [self.add(prompt, tenant) for prompt in prompts]
        for _ in range(1000):
            if not any(self.scheduler.lives):
                break
            self.step()
            self.copy_all()
        assert not any(self.scheduler.lives), "a request waits forever"
        self.copy_all()
        self.scheduler.lives.assert_whole()
        return lives


class TierMachine(RuleBasedStateMachine):
    """Prompts grow and branch, in a pool that is too small for them. Copies take long, and some go wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.worker = Worker(num_blocks=20, num_places=60)
        self.lives: list[LiveRequest] = []

    @rule(
        family=st.integers(0, 3), length=st.sampled_from([20, 60, 100, 160]), branch=st.booleans(),
        tenant=st.sampled_from(TENANTS), handover=st.booleans(),
    )  # fmt: skip
    def add(self, family: int, length: int, branch: bool, tenant: bytes, handover: bool) -> None:
        prompt = [*text(length, family), *([len(self.lives)] if branch else [])]
        live = self.worker.add(prompt, tenant, answer=1 + len(self.lives) % 3, handover=handover)
        self.lives.append(live)

    @rule(steps=st.integers(1, 20), copies=st.booleans())
    def step(self, steps: int, copies: bool) -> None:
        for _ in range(steps):
            self.worker.step()
            if copies:
                self.worker.copy_all()

    @rule(most=st.integers(1, 4))
    def start_copies(self, most: int) -> None:
        self.worker.start_copies(most)

    @precondition(lambda self: self.worker.under_way)
    @rule()
    def end_copies(self) -> None:
        for _ in range(len(self.worker.under_way)):
            self.worker.end_copy()

    @precondition(lambda self: self.worker.under_way)
    @rule()
    def end_copy(self) -> None:
        self.worker.end_copy()

    @precondition(lambda self: self.worker.saved)
    @rule(choice=st.randoms())
    def damage(self, choice: random.Random) -> None:
        self.worker.places[choice.choice(list(self.worker.saved))] = [object()] * BLOCK

    @precondition(lambda self: any(self.worker.scheduler.lives))
    @rule(choice=st.randoms())
    def cancel(self, choice: random.Random) -> None:
        live = choice.choice(list(self.worker.scheduler.lives))
        self.worker.scheduler.lives.drop(live)

    @invariant()
    def everything_has_one_owner(self) -> None:
        worker = self.worker
        worker.scheduler.lives.pool.assert_consistent()
        worker.tier.assert_consistent()
        pool, cache = worker.scheduler.lives.pool, worker.scheduler.lives.cache
        assert cache is not None
        cache.settle()  # an eviction is reported when the cache reads it
        known = {name for name in worker.observed.names if pool.lookup([name]) or name in worker.tier}
        assert known == worker.observed.names, "a name that was reported is in no tier"
        assert pool.cached <= len(known)

    @rule()
    def hand_over(self) -> None:
        for live in list(self.worker.scheduler.lives.held):
            self.worker.scheduler.lives.drop(live)

    def teardown(self) -> None:
        scheduler = self.worker.scheduler
        for _ in range(1000):
            if not any(scheduler.lives):
                break
            self.worker.step()
            self.worker.copy_all()
            self.hand_over()
        self.worker.copy_all()
        assert not any(scheduler.lives), "a request waits forever"
        scheduler.lives.assert_whole()


TestTier = TierMachine.TestCase
TestTier.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_what_the_pool_evicts_comes_back_from_the_host() -> None:
    worker = Worker(num_blocks=32, num_places=64, seqs=1)
    prompts = [text(100, seed) for seed in range(9)]
    worker.run(*prompts)
    again = worker.run(*prompts)
    assert [live.num_cached for live in again] == [96] * 9
    assert worker.tier.stats.loaded_tokens >= 4 * 96


def test_others_compute_while_a_request_is_loaded() -> None:
    worker = Worker(num_blocks=32, num_places=64, seqs=2)
    old = text(100, 1)
    worker.run(old, *(text(100, seed) for seed in range(2, 9)))
    loaded, computed = worker.add(old), worker.add(text(30, 4))
    worker.step()
    assert loaded.phase is Phase.LOADING
    assert computed.num_left == 1
    worker.run()


def test_the_pool_gives_out_a_block_without_waiting_for_its_copy() -> None:
    worker = Worker(num_blocks=16, num_places=64)
    worker.run(text(100, 1))
    assert not worker.tier.stats.saved
    worker.is_eager()
    assert worker.start_copies()
    taken = worker.scheduler.lives.pool.hold(16)
    while worker.under_way:
        worker.end_copy()
    assert worker.tier.stats.dropped
    assert not worker.tier.stats.saved
    worker.scheduler.lives.pool.release(taken)
    worker.scheduler.lives.assert_whole()


def test_a_damaged_block_is_forgotten_and_its_prompt_computed() -> None:
    worker = Worker(num_blocks=32, num_places=64, seqs=1)
    prompt = text(100, 1)
    worker.run(prompt, *(text(100, seed) for seed in range(2, 9)))
    worker.places = {place: [None] * BLOCK for place in worker.places}
    [live] = worker.run(prompt)
    assert live.num_cached == 0
    assert worker.tier.stats.damaged == 6
    assert worker.tier.stats.loaded_tokens == 0


def test_nothing_is_copied_while_the_pool_has_room() -> None:
    worker = Worker(num_blocks=64, num_places=64)
    worker.run(text(200, 1), text(200, 2))
    assert worker.tier.stats.saved == 0


def test_the_tenant_with_most_blocks_gives_up_its_own() -> None:
    worker = Worker(num_blocks=32, num_places=12, seqs=1)
    quiet = text(60, 1)
    worker.run(quiet, tenant=b"quiet")
    for seed in range(2, 20):
        worker.run(text(100, seed), tenant=b"busy")
    [live] = worker.run(quiet, tenant=b"quiet")
    assert live.num_cached == 48


def test_no_block_gives_up_its_place_while_others_get_their_memory() -> None:
    worker = Worker(num_blocks=16, num_places=12, seqs=1)
    for ready, num_places, saved in ((0, 12, 0), (3, 12, 3), (5, 12, 5), (5, 5, 6)):
        worker.tier.have(ready, num_places)
        for seed in range(6):
            worker.run(text(100, 10 * saved + seed))
        assert worker.tier.places_used == ready
        assert worker.tier.stats.saved >= saved
        assert (worker.tier.stats.saved > ready) == (num_places < 12), "the memory is all that can be had"
    assert worker.tier.stats.blocks_total == 5


def test_a_prompt_is_computed_if_that_takes_less_time_than_recent_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, pool = 0.0, BlockPool(1, BLOCK)
    [tier] = CellTiers(
        pool, BLOCK, {TierCells(Tier.HOST, False): 8}, {b"a": CachedBlock(b"a", [], 0, b"", b"", [])}, []
    ).tiers
    monkeypatch.setattr(offload_tier, "time", SimpleNamespace(monotonic=lambda: now))
    assert tier.pays(1, 0.1), "nothing is known"
    blocks = pool.hold(1)
    pool.publish(blocks.table[0], b"a")
    pool.release(blocks)
    assert tier.next_saves(1)
    tier.ended(True)
    tier.load(b"a", 0, Load(lambda is_right: None))
    assert tier.next_loads(1)
    now = 1.0
    tier.ended(True)
    assert tier.stats.tokens_per_s == BLOCK
    assert tier.pays(1, 1.1)
    assert not tier.pays(1, 0.9)
    now += RETRY
    assert tier.pays(1, 0.9), "a load is tried again"


def test_a_pool_block_behind_a_gap_is_shared_and_not_loaded() -> None:
    """The pool lacks the middle of a prompt, and has its end."""
    worker = Worker(num_blocks=24, num_places=64)
    prompt = text(100, 1)
    worker.run(prompt)
    pool, cache = worker.scheduler.lives.pool, worker.scheduler.lives.cache
    assert cache is not None
    live = worker.add(prompt)
    names = cache.names_of(live).blocks
    worker.scheduler.lives.drop(live)
    blocks = pool.lookup(names[:6])
    for block in blocks[:2]:
        pool._idle[Rank.ONLY].move_to_end(block, last=False)
    worker.is_eager()
    while worker.start_copies():
        while worker.under_way:
            worker.end_copy()
    taken = pool.hold(len(pool._free) + 2)  # evicts the first two blocks
    pool.release(taken)
    assert not pool.lookup(names[:1])
    [again] = worker.run(prompt)
    assert again.num_cached == 96
    assert worker.tier.stats.loaded_tokens == 2 * BLOCK


@pytest.mark.parametrize("handed_back", [False, True])
def test_a_preempted_request_gets_its_kv_back_from_the_host(handed_back: bool) -> None:
    """The first request needs all blocks in the end. A request that is handed back comes again from its
    router, with the tokens that it has."""
    worker = Worker(num_blocks=14, num_places=64, seqs=2)
    first, second = worker.add(text(60, 1), answer=150), worker.add(text(60, 2), answer=60)
    while second.phase is not Phase.RUNNING:
        worker.step()
    second.hand_back = handed_back
    while second.phase is Phase.RUNNING:
        worker.step()
        worker.copy_all()
    tokens = list(second.token_ids)
    while first.phase is not Phase.GONE:
        worker.step()
        worker.copy_all()
    resumed = worker.add(tokens, answer=3) if handed_back else second
    worker.run()
    known = (len(tokens) - 1) // BLOCK * BLOCK
    assert known > 60, "it has KV of its answer, too"
    assert resumed.num_cached >= known - BLOCK
    assert worker.tier.stats.loaded_tokens > 2 * BLOCK


def fill(worker: Worker, prompt: list[int]) -> None:
    """The host tier has the prompt then, and the pool has not."""
    worker.run(prompt)
    for seed in range(50, 60):
        worker.run(text(100, seed))
    assert worker.tier.stats.saved


@pytest.mark.parametrize("damaged", [False, True])
def test_what_the_host_has_is_served_to_other_workers_unless_it_is_damaged(damaged: bool) -> None:
    holder = Worker(num_blocks=48, num_places=200, seqs=1)
    prompt = text(200, 1)
    fill(holder, prompt)
    exchange = holder.scheduler.lives.prefix_exchange
    assert exchange is not None
    missing = Worker(48, 99).scheduler.lives.prefix_exchange.missing(EngineRequest(b"r", prompt), 99)  # type: ignore[union-attr]
    assert missing is not None
    assert exchange.pin(missing.chunks, 0) is None
    if damaged:
        holder.places = {place: [None] * BLOCK for place in holder.places}
    pinned: list[Pin | None] = []
    assert exchange.bring(missing.chunks, 0, lambda: pinned.append(exchange.pin(missing.chunks, 0)))
    assert not pinned
    assert not exchange.empty
    holder.copy_all()
    [pin] = pinned
    count = 0 if pin is None else pin.num_chunks
    assert (count, holder.tier.stats.damaged) == ((0, 12) if damaged else (3, 0))
    for position in range(count * 64):
        assert pin is not None
        row = pin.table[position // BLOCK] * BLOCK + position % BLOCK
        assert holder.rows[row] == tuple(prompt[: position + 1])
    assert not exchange.bring(missing.chunks, 0, pinned.clear), "the pool has it, or the tier forgot it"
    if pin is not None:
        pin.end()
    holder.scheduler.lives.assert_whole()


def test_only_what_neither_the_pool_nor_the_host_has_is_fetched() -> None:
    worker = Worker(num_blocks=48, num_places=200, seqs=1)
    prompt = text(400, 1)
    fill(worker, prompt[:130])
    exchange = worker.scheduler.lives.prefix_exchange
    assert exchange is not None
    missing = exchange.missing(EngineRequest(b"r", prompt), 99)
    assert missing is not None
    assert (missing.first_chunk, len(missing.chunks), missing.hits) == (2, 4, [])
    started = exchange.start_import(missing)
    assert started is not None
    for position in range(128, 384):
        worker.rows[started.table[position // BLOCK] * BLOCK + position % BLOCK] = tuple(
            prompt[: position + 1]
        )
    started.end(384)
    [live] = worker.run(prompt)
    assert live.num_cached == 384
    assert worker.tier.stats.loaded_tokens == 128


def test_no_copy_is_made_for_a_while_after_one_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(offload_tier, "time", SimpleNamespace(monotonic=lambda: now))
    worker = Worker(num_blocks=16, num_places=64)
    worker.run(text(100, 1))
    worker.is_eager()
    assert len(worker.tier.next_saves(3)) == 3
    for _ in range(3):
        worker.tier.ended(False)
    assert worker.tier.stats.failed == 3
    worker.is_eager()
    assert not worker.tier.next_saves(3)
    now += offload_tier.PAUSE
    assert len(worker.tier.next_saves(3)) == 3


def test_a_block_is_loaded_from_the_fastest_tier_and_reported_there() -> None:
    pool, seen = BlockPool(8, BLOCK), dict[bytes, Tier | None]()

    def changed(change: CacheChange) -> None:
        seen[change.name] = change.tier if isinstance(change, Moved) else Tier.DEVICE

    hooks = Hooks(cache_changed=changed)
    places = {TierCells(Tier.DISK, False): 4, TierCells(Tier.HOST, False): 2}
    cache = PrefixCache(pool, b"root", hooks=hooks, offload_places=places)
    host, disk = cache.offload
    names = cache.names(EngineRequest(b"r", text(4 * BLOCK, 1)))
    names.extend(text(4 * BLOCK, 1), 4 * BLOCK)
    blocks = pool.hold(4)
    cache.publish(names, blocks.table, 0, 4)
    pool.release(blocks)
    host.shared.clean = 8
    for tier, count in ((host, 1), (disk, 2)):
        for _ in tier.next_saves(count):
            tier.ended(True)
    pool.release(pool.hold(8))
    cache.settle()
    last, second_last = names.blocks[3], names.blocks[2]  # the end is evicted first
    assert (seen[last], seen[second_last], seen[names.blocks[0]]) == (Tier.HOST, Tier.DISK, None)
    host.drop(last)
    cache.settle()
    assert seen[last] is Tier.DISK
    block, ended = pool.hold(1), list[bool]()
    cache.load([(last, block.table[0])], ended.append)
    for _ in disk.next_loads(9):
        disk.ended(True)
    assert ended == [True]
    assert seen[last] is Tier.DEVICE
    pool.release(block)
