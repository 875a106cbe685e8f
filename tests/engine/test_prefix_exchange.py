"""Prefixes travel from one pool to another: pins, imports, the cache, and the owners of the blocks."""

import random
from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.api.config import TierCells
from baton.engine.api.request import CacheChange, EngineRequest, Hooks, Kept
from baton.engine.core.prefix_exchange import Import
from baton.engine.core.prefix_names import PrefixNames
from baton.kv_names import CHUNK_TOKENS, Tier
from baton.kv_transfer.endpoint.store_offers import LATER
from baton.worker.engine_process.shared_store import StoreSource
from tests.engine.scheduling import ROOT, make
from tests.stand_in import stand_in


class Worker:
    """A scheduler without a model. `kv` says of which (position, tokens before it) each row has the KV."""

    def __init__(self, block_size: int, num_blocks: int = 256) -> None:
        self.block_size = block_size
        self.scheduler = make(
            num_blocks, budget=4096, prefix_cache=True, block_size=block_size,
            offload_places={TierCells(Tier.HOST, False): num_blocks},
        )  # fmt: skip
        self.kv: dict[int, object] = {}
        assert self.scheduler.lives.prefix_exchange is not None
        self.exchange = self.scheduler.lives.prefix_exchange
        self._ids = iter(range(1 << 30))

    def row(self, blocks, position: int) -> int:
        return blocks[position // self.block_size] * self.block_size + position % self.block_size

    def compute(self, prompt: Sequence[int], salt: bytes = b"") -> int:
        """Checks the KV of the positions that were cached. Returns their number."""
        request = EngineRequest(next(self._ids).to_bytes(4), prompt, cache_salt=salt)
        live = self.scheduler.lives.start(request)
        assert live is not None
        for position in range(len(prompt)):
            expected = content(prompt, position, salt)
            row = self.row(live.blocks, position)
            if position < live.num_cached:
                assert self.kv[row] == expected
            self.kv[row] = expected
        self.scheduler.lives.memory.publish(live, len(prompt))
        self.scheduler.lives.drop(live)
        return live.num_cached

    def move_to_host(self) -> None:
        """Moves all cached blocks from the pool to the host tier."""
        pool, [tier] = self.scheduler.lives.pool, self.scheduler.lives.offload
        taken = pool.hold(pool.free - pool.cached)  # so that the pool would evict next
        while saves := tier.next_saves(99):
            for _ in saves:
                tier.ended(True)
        pool.release(pool.hold(pool.free))
        pool.release(taken)
        self.kv.clear()

    def start_import(self, prompt: list[int], salt: bytes = b"", most: int = 99) -> Import | None:
        missing = self.exchange.missing(EngineRequest(b"r", prompt, cache_salt=salt), most)
        return None if missing is None else self.exchange.start_import(missing)


def chunks_of(prompt: list[int], salt: bytes = b"") -> Sequence[bytes]:
    names = PrefixNames(ROOT, salt, 16)
    names.extend(prompt, len(prompt) // CHUNK_TOKENS * CHUNK_TOKENS)
    return names.chunks


def content(prompt: Sequence[int], position: int, salt: bytes) -> object:
    return position, tuple(prompt[: position + 1]), salt


def move(holder: Worker, asker: Worker, wanted: Import) -> int:
    """Copies what the holder has, into blocks that no request reads. Returns the number of chunks."""
    missing = wanted.missing
    pin = holder.exchange.pin(missing.chunks, missing.first_chunk)
    count = 0 if pin is None else pin.num_chunks
    first = missing.first_chunk * CHUNK_TOKENS
    stop = first + count * CHUNK_TOKENS
    for position in range(first, stop):
        assert pin is not None
        row = asker.row(wanted.table, position)
        cell = asker.scheduler.lives.pool.cell(wanted.table[position // asker.block_size])
        assert cell.leases
        assert cell.name is None
        asker.kv[row] = holder.kv[holder.row(pin.table, position)]
    wanted.end(stop)
    if pin is not None:
        pin.end()
    return count


def text(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


SIZES = [16, 32, 64, 128, 192]


@pytest.mark.parametrize("there", SIZES)
@pytest.mark.parametrize("here", SIZES)
def test_a_prefix_moves_between_pools_of_any_block_sizes(there: int, here: int) -> None:
    holder, asker = Worker(there), Worker(here)
    prompt = text(600)
    holder.compute([*prompt, 1])
    wanted = asker.start_import([*prompt, 2, 3])
    assert wanted is not None
    moved = move(holder, asker, wanted)
    assert moved == min(600 // there * there, 601 // here * here) // CHUNK_TOKENS
    assert asker.compute([*prompt, 2, 3]) == moved * CHUNK_TOKENS, "in a block that is not full, too"
    for worker in (holder, asker):
        worker.scheduler.lives.assert_whole()


@pytest.mark.parametrize("shared", range(176, 225, 16))
def test_a_prefix_of_another_worker_ends_with_a_whole_chunk(shared: int) -> None:
    """Blocks of 16 are found block by block on the worker that has them, 64 tokens at a time by others."""
    holder, asker, prompt = Worker(16), Worker(16), text(shared)
    holder.compute([*prompt, *text(20, seed=1)])
    following = [*prompt, *text(20, seed=2)]
    wanted = asker.start_import(following)
    assert wanted is not None
    move(holder, asker, wanted)
    assert asker.compute(following) == {176: 128, 192: 192, 208: 192, 224: 192}[shared]
    assert holder.compute(following) == shared


@pytest.mark.parametrize("here", SIZES)
def test_only_what_is_missing_is_asked_for(here: int) -> None:
    holder, asker = Worker(16), Worker(here)
    prompt = text(600)
    holder.compute(prompt)
    known = asker.compute(prompt[:301]) or 301 // here * here
    wanted = asker.start_import(prompt)
    assert wanted is not None
    assert wanted.missing.first_chunk == known // CHUNK_TOKENS
    move(holder, asker, wanted)
    assert asker.compute(prompt) >= 512 // here * here
    assert asker.start_import(prompt) is None or here == 16, "a part of a chunk may be left"


@pytest.mark.parametrize("here", SIZES)
def test_a_prefix_is_fetched_behind_blocks_that_only_the_host_has(here: int) -> None:
    """A fetched chunk fills whole blocks, or the block would be cached without the KV of its beginning."""
    holder, asker = Worker(16), Worker(here)
    prompt = text(600)
    holder.compute([*prompt, 1])
    known = 200 // here * here
    asker.compute(prompt[:200])
    asker.move_to_host()
    wanted = asker.start_import([*prompt, 2])
    assert wanted is not None
    assert wanted.missing.first_chunk == known // CHUNK_TOKENS
    move(holder, asker, wanted)
    pool = asker.scheduler.lives.pool
    names = wanted.missing.names.blocks
    for index, name in enumerate(names):
        for block in pool.lookup([name]):
            for position in range(index * here, (index + 1) * here):
                assert asker.kv[block * here + position % here] == content(prompt, position, b"")
    assert all(pool.lookup([name]) for name in names[known // here : 576 // here])
    asker.scheduler.lives.assert_whole()


def test_at_most_so_many_chunks_are_missing_and_take_blocks() -> None:
    holder, asker = Worker(16), Worker(16)
    prompt = text(600)
    holder.compute(prompt)
    free = asker.scheduler.lives.pool.free
    wanted = asker.start_import(prompt, most=3)
    assert wanted is not None
    assert len(wanted.missing.chunks) == 3
    assert free - asker.scheduler.lives.pool.free == len(wanted.held.blocks) == 3 * CHUNK_TOKENS // 16
    assert move(holder, asker, wanted) == 3
    assert asker.compute(prompt) == 3 * CHUNK_TOKENS
    asker.scheduler.lives.assert_whole()


def test_what_is_missing_takes_no_block() -> None:
    worker = Worker(16)
    missing = worker.exchange.missing(EngineRequest(b"r", text(600)), 99)
    assert missing is not None
    assert len(missing.chunks) == 9
    assert worker.scheduler.lives.pool.free == worker.scheduler.lives.pool.num_blocks
    worker.scheduler.lives.assert_whole()


def test_tenants_do_not_find_the_prefixes_of_others() -> None:
    holder, asker = Worker(16), Worker(16)
    prompt = text(300)
    holder.compute(prompt, b"one")
    wanted = asker.start_import(prompt, b"other")
    assert wanted is not None
    assert move(holder, asker, wanted) == 0
    assert asker.compute(prompt, b"other") == 0


def test_pins_keep_their_blocks_and_take_a_bounded_share() -> None:
    holder, asker = Worker(16, num_blocks=40), Worker(16)
    prompt = text(400)
    holder.compute(prompt)
    wanted = asker.start_import(prompt)
    assert wanted is not None
    pin = holder.exchange.pin(wanted.missing.chunks, 0)
    assert pin is not None
    assert (pin.num_chunks, len(pin.table)) == (2, 8), "a quarter of 40 blocks has room for two chunks"
    assert holder.exchange.pin(wanted.missing.chunks, 0) is None
    pool = holder.scheduler.lives.pool
    taken = pool.hold(pool.free)
    assert not {*taken.table} & {*pin.held.blocks}
    pool.release(taken)
    with pytest.raises(AssertionError, match="left behind"):
        holder.scheduler.lives.assert_whole()
    pin.end()
    holder.scheduler.lives.assert_whole()
    wanted.end(0)
    asker.scheduler.lives.assert_whole()
    assert asker.compute(prompt) == 0


def test_a_pin_needs_room_beside_the_queue() -> None:
    holder, asker = Worker(16, num_blocks=40), Worker(16)
    prompt = text(400)
    holder.compute(prompt)
    wanted = asker.start_import(prompt)
    assert wanted is not None
    waiting = holder.scheduler.lives.add(EngineRequest(b"w", text(600, 1)), handover=True)
    first = wanted.missing.chunks[0]
    assert holder.exchange.pin(wanted.missing.chunks, 0) is None
    assert [holder.exchange.has(first, chunk) for chunk in (0, 1)] == [True, False]
    assert not holder.exchange.has(b"another", 0)
    held = partial(StoreSource.lend, stand_in(StoreSource, _exchange=holder.exchange))
    assert [held(name, 0, 0) for name in (first, b"another")] == [LATER, None], "offers wait for room"
    holder.scheduler.lives.drop(waiting)
    pin = holder.exchange.pin(wanted.missing.chunks, 0)
    assert pin is not None
    assert pin.num_chunks == 2
    pin.end()


def test_an_import_needs_room_beside_the_queue() -> None:
    asker = Worker(16, num_blocks=40)
    prompt = text(400)
    waiting = asker.scheduler.lives.add(EngineRequest(b"w", text(300, 1)), handover=True)
    assert asker.start_import(prompt) is None
    asker.scheduler.lives.drop(waiting)
    assert asker.start_import(prompt) is not None


@pytest.mark.all
@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(SIZES),
    st.sampled_from(SIZES),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 500), st.booleans()), min_size=1, max_size=12),
)
def test_prompts_that_grow_and_branch_move_with_the_right_kv(there: int, here: int, turns) -> None:
    """`Worker.compute` checks the KV of each cached position. The pools are too small for all prompts."""
    holder, asker = (Worker(size, num_blocks=1536 // size) for size in (there, here))
    for number, (family, length, fetched) in enumerate(turns):
        prompt = [*text(length, family), number]
        if fetched and (wanted := asker.start_import(prompt)) is not None:
            move(holder, asker, wanted)
        (asker if fetched else holder).compute(prompt)
        for worker in (holder, asker):
            worker.scheduler.lives.assert_whole()


@pytest.mark.parametrize("size", SIZES)
def test_a_peer_that_names_wrong_positions_gets_nothing(size: int) -> None:
    """A block table for these positions would be of any length, and have no block for some of them."""
    holder = Worker(size)
    prompt = text(600)
    holder.compute(prompt)
    names = PrefixNames(ROOT, b"", size)
    names.extend(prompt, len(prompt))
    chunks = names.chunks
    assert holder.exchange.pin(chunks, (1 << 32) - 1) is None
    assert holder.exchange.pin([b"?" * 16], (1 << 32) - 1) is None
    for first in range(4):
        pin = holder.exchange.pin([chunks[2], chunks[2], *chunks[3:6]], first)
        assert (pin is not None) == (first == 2)
        if pin is not None:
            assert pin.num_chunks == 1
            assert len(pin.table) * size >= (first + 1) * CHUNK_TOKENS
            pin.end()
    holder.scheduler.lives.assert_whole()


def test_the_prefixes_used_last_come_first() -> None:
    worker = Worker(16, num_blocks=52)
    old, new = text(200, 1), text(200, 2)
    branch = [*old[:64], *text(100, 3)]
    for prompt in (old, new, branch):
        worker.compute(prompt)
    worker.compute(new, salt=b"salt")
    assert worker.compute(old) == 192
    assert list(worker.exchange.cache.last_used()) == [
        (b"", chunks_of(old)),
        (b"salt", chunks_of(new, b"salt")),
        (b"", chunks_of(branch)),
        (b"", chunks_of(new)),
    ]
    last = text(640, 4)
    worker.compute(last)  # evicts all but the beginnings of the last used prompts
    [newest, *_] = worker.exchange.cache.last_used()
    assert newest == (b"", chunks_of(last))


def test_the_next_turn_goes_on_in_the_last_block_of_the_turn_before() -> None:
    """Its 64 tokens there are not computed again."""
    worker = Worker(128)
    history = text(200)
    assert worker.compute(history, salt=b"tenant") == 0
    assert worker.compute(history) == 0
    assert worker.compute([*history, *text(50, 1)]) == 192
    assert worker.compute([*history, *text(100, 2)]) == 192
    assert worker.compute([*history, *text(60, 3)]) == 128, "the turn before has filled the block"
    later = EngineRequest(b"r", [*history, *text(60, 4)], cache_salt=b"tenant")
    missing = worker.exchange.missing(later, 99)
    assert missing is not None
    assert (missing.first_chunk, missing.computed_from) == (2, 192), "a fetch brings whole blocks"
    assert worker.compute(later.prompt_ids, salt=b"tenant") == 192
    worker.scheduler.lives.assert_whole()


@pytest.mark.parametrize("remnant", [False, True])
@pytest.mark.parametrize("tokens", [1, 17, 64, 65])
def test_a_prompt_without_a_full_chunk_lacks_nothing_that_travels(tokens: int, remnant: bool) -> None:
    """Though it has full blocks."""
    missing = Worker(16).exchange.missing(EngineRequest(b"r", text(tokens)), 99, remnant=remnant)
    assert (missing is not None) is (tokens > CHUNK_TOKENS)


def test_the_last_chunk_of_a_prompt_travels_without_the_rest_of_its_block() -> None:
    holder, asker = Worker(128), Worker(128)
    changes: list[CacheChange] = []
    holder.exchange.cache._hooks = Hooks(cache_changed=changes.append)
    holder.compute(text(200), salt=b"tenant")
    holder.compute(text(90, 1))
    [(salt, name, chunk, _), (_, other, first, _)] = [x for x in changes if isinstance(x, Kept)]
    assert (salt, chunk, first) == (b"tenant", 2, 0)
    later = EngineRequest(b"r", [*text(200), *text(50, 2)], cache_salt=b"tenant")
    full = asker.exchange.missing(later, 99)
    assert full is not None
    assert len(full.chunks) == 2
    missing = asker.exchange.missing(later, 99, remnant=True)
    assert missing is not None
    assert missing.chunks[-1] == name
    started = asker.exchange.start_import(missing)
    assert started is not None
    pin, last = holder.exchange.pin(missing.chunks, 0), holder.exchange.pin_remnant(name, 2)
    assert pin is not None
    assert last is not None
    assert holder.exchange.pin_remnant(name, 2) is None
    for position in range(192):
        table = pin.table if position < 128 else last.table
        asker.kv[asker.row(started.table, position)] = holder.kv[holder.row(table, position)]
    last.end()
    pin.end()
    started.end(192)
    assert asker.exchange.missing(later, 99, remnant=True) is None
    assert asker.compute(later.prompt_ids, salt=b"tenant") == 192
    assert holder.compute(later.prompt_ids, salt=b"tenant") == 192, "it has its remnant again"
    for worker in (holder, asker):
        worker.scheduler.lives.assert_whole()
    taken = holder.scheduler.lives.pool.hold(holder.scheduler.lives.pool.free)
    assert holder.exchange.pin_remnant(other, 0) is None
    holder.scheduler.lives.pool.release(taken)


def test_a_request_that_failed_leaves_no_remnant() -> None:
    worker = Worker(128)
    live = worker.scheduler.lives.start(EngineRequest(b"r", text(200)))
    assert live is not None
    worker.scheduler.lives.drop(live)
    assert worker.compute([*text(200), 1]) == 0


def test_a_prompt_is_hashed_once_for_its_fetch_and_its_prefill() -> None:
    worker = Worker(16)
    request = EngineRequest(b"r", list(range(200)))
    missing = worker.exchange.missing(request, 99)
    assert missing is not None
    live = worker.scheduler.lives.add(request, handover=True)
    assert worker.scheduler.lives.memory.hits(live) == []
    assert live.names is missing.names
