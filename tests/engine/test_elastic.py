"""States and KV share one budget of memory: pages move between them, and no tensor moves."""

import gc
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.bench.lab.shapes import BAMBA, write_shape
from baton.engine import Engine, EngineRequest, SamplingParams
from baton.engine.api.pools import Pool
from baton.engine.core.block_pool import BlockPool
from baton.engine.core.cells import Cells
from baton.engine.core.elastic import Amounts, Budget, Lacking, Move
from baton.engine.core.live_request import LiveRequest
from baton.engine.core.prefix_cache import PrefixCache
from baton.engine.core.request_lives import RequestLives
from baton.engine.core.state_copies import StateCopies
from baton.engine.core.units import Units
from baton.engine.engine import pools_of
from baton.engine.execution import elastic_cache, memory_sizing
from baton.engine.execution.memory_sizing import MemoryUse, PoolSize
from baton.engine.loader.families import cache_spec
from baton.engine.loader.hf_config import read_config
from baton.kv_names.cache_kinds import Window
from tests.device import DEVICE
from tests.engine.conftest import TINY_QWEN3_5, MakeEngine, TinyOf, request_of, save_tiny, tokens_of
from tests.engine.scheduling import ROOT, make, of_slots, step

BLOCK = 64
UNIT = 4
"""Blocks of a unit. It has 3 pages; a unit of 2 slots has 8."""


class Pages:
    """Follows the moves of a budget, with a millisecond for each page. Asserts that nothing which is held
    loses its memory."""

    def __init__(self, budget: Budget, lives: RequestLives) -> None:
        self.lives = lives
        self.present: set[tuple[Pool, int]] = set()
        self.moved = 0  # pages
        budget.move = self.move
        budget.clock = lambda: self.moved / 1000

    def move(self, moves: Sequence[Move]) -> None:
        used = {(Pool.BLOCKS, block // UNIT) for live in self.lives for block in live.blocks}
        used |= {(Pool.SLOTS, live.states.slot // 2) for live in self.lives if live.states is not None}
        for cells, unit, present in moves:
            assert ((cells, unit) in self.present) is not present
            if present:
                self.present.add((cells, unit))
                self.moved += 3 if cells is Pool.BLOCKS else 8
            else:
                assert (cells, unit) not in used
                self.present.remove((cells, unit))

    def of(self, kind: Pool) -> int:
        return sum(each is kind for each, _ in self.present)


@pytest.fixture
def lives() -> RequestLives:
    """68 pages: 4 units of blocks, 4 of states and 1 of copies have 12 + 32 + 8 at the start, 16 are free.
    There could be 20 units of blocks, or 7 of states."""
    pool = BlockPool(20 * UNIT, BLOCK, units=Units(0, 20 * UNIT, UNIT, 4, keeps_first=True))
    states = Cells[bytes](Units(0, 14, 2, 4, keeps_first=True))
    copies = StateCopies(14, 6, 256, BLOCK, 1, Units(14, 6, 2, 1, keeps_first=False))
    cache = PrefixCache(pool, ROOT, copies=copies)
    budget = Budget(pool, states, copies, pages=Amounts(3, 8), page_bytes=1, free_pages=16)
    return RequestLives(pool, max_num_seqs=14, cache=cache, states=states, budget=budget)


@pytest.fixture
def pages(lives: RequestLives) -> Pages:
    assert lives.budget is not None
    pages = Pages(lives.budget, lives)
    pages.present = {(Pool.BLOCKS, unit) for unit in range(4)} | {(Pool.SLOTS, unit) for unit in range(4)}
    pages.present.add((Pool.SLOTS, 7))
    return pages


def start(lives: RequestLives, number: int, blocks: int) -> LiveRequest | None:
    return lives.start(request_of(number, [number] * (blocks * BLOCK)))


def room(lives: RequestLives) -> int:
    """Blocks that one request could have."""
    assert lives.budget is not None
    return lives.pool.free + lives.budget.more_blocks


def test_idle_slots_become_blocks_and_come_back(lives: RequestLives, pages: Pages) -> None:
    total = room(lives)
    assert total == 80 == lives.pool.num_blocks
    long = start(lives, 1, 78)
    assert long is not None, "a request may need nearly all memory"
    assert (pages.of(Pool.BLOCKS), pages.of(Pool.SLOTS)) == (20, 1)
    second = start(lives, 2, 1)
    assert second is not None, "the first unit of slots has two"
    assert start(lives, 3, 1) is None, "no memory for a third slot"
    assert not lives.memory.has_room(3, 0)
    lives.drop(long)
    lives.drop(second)
    assert room(lives) == total
    lives.assert_whole()
    short = [start(lives, 10 + n, 1) for n in range(14)]
    assert None not in short
    assert (pages.of(Pool.BLOCKS), pages.of(Pool.SLOTS)) == (4, 7)
    for live in filter(None, short):
        lives.drop(live)
    assert room(lives) == total
    lives.assert_whole()


def test_a_growing_request_takes_idle_slots_before_it_preempts(lives: RequestLives, pages: Pages) -> None:
    live = start(lives, 1, 30)
    assert live is not None
    before = pages.of(Pool.SLOTS)
    while lives.memory.has_room(1, 0):
        lives.memory.provide(1)
        lives.pool.extend(live.held, 1)
    assert len(live.blocks) == 80
    assert pages.of(Pool.SLOTS) < before
    lives.drop(live)
    lives.assert_whole()


def test_what_a_tier_copies_keeps_its_memory(lives: RequestLives, pages: Pages) -> None:
    """A cached block may be given out while a tier copies it, but its unit stays."""
    let = lives.pool.lease(13)
    assert room(lives) == 80
    short = [start(lives, n, 1) for n in range(13)]
    assert (Pool.BLOCKS, 13 // UNIT) in pages.present
    let()
    for live in filter(None, short):
        lives.drop(live)
    lives.assert_whole()


def test_the_states_that_a_request_begins_with_are_no_memory_for_it(
    lives: RequestLives, pages: Pages
) -> None:
    cache = lives.cache
    assert cache is not None
    assert cache.copies is not None
    prompt = [5] * (4 * BLOCK)
    live = lives.start(request_of(1, prompt))
    assert live is not None
    slot = cache.copies.allocate()
    assert slot is not None
    lives.memory.publish(live, len(prompt))
    assert live.names is not None
    cache.publish_states(live.names, 4 * BLOCK, slot)
    lives.drop(live)
    most = lives.start(request_of(2, prompt + [6] * (63 * BLOCK)))
    assert most is not None
    assert most.num_cached == 4 * BLOCK
    assert most.states is not None
    assert most.states.begins_with == slot
    assert (pages.of(Pool.BLOCKS), pages.of(Pool.SLOTS)) == (17, 2)
    assert (Pool.SLOTS, slot // 2) in pages.present
    lives.drop(most)
    whole = lives.start(request_of(3, prompt + [7] * (75 * BLOCK)))
    assert whole is not None, "it gives up the states, so that it can have all memory"
    assert whole.num_cached == 0
    assert (pages.of(Pool.BLOCKS), pages.of(Pool.SLOTS)) == (20, 1)
    lives.drop(whole)
    lives.assert_whole()


def test_few_copies_take_the_memory_of_cached_blocks(lives: RequestLives, pages: Pages) -> None:
    """Those that are more than half of what they may be take only that of blocks with nothing in them."""
    states, copies = lives.memory.states, None if lives.cache is None else lives.cache.copies
    assert states is not None
    assert copies is not None
    cached = lives.start(request_of(1, range(70 * BLOCK)))
    assert cached is not None
    lives.memory.publish(cached, 70 * BLOCK)
    lives.drop(cached)
    assert lives.pool.cached == 70
    before = pages.of(Pool.SLOTS)
    held = [states.allocate_copy() for _ in range(6)]
    assert pages.of(Pool.SLOTS) == before + 2, "the first slots find two units, and then there are enough"
    assert held.count(None) == 2
    assert lives.pool.cached < 70
    for slot in held:
        if slot is not None:
            copies.release(slot)
    lives.assert_whole()


def test_copies_take_no_block_of_an_import_that_begins(lives: RequestLives, pages: Pages) -> None:
    """It needs a slot for states, whose memory is that of blocks, and all blocks but the watermark."""
    exchange, cache = lives.prefix_exchange, lives.cache
    assert exchange is not None
    assert cache is not None
    assert cache.copies is not None
    assert lives.budget is not None
    lives.budget.provide(Amounts(9 * UNIT))
    assert lives.budget.free_pages < lives.budget.pages.slots
    held = [cache.copies.allocate() for _ in range(2)]
    blocks = lives.pool.free
    missing = exchange.missing(request_of(1, range(100 * BLOCK)), blocks)
    assert missing is not None
    started = exchange.start_import(missing)
    assert started is None, "all blocks are taken, so no memory is left for the slot"
    assert lives.pool.free == blocks
    for slot in held:
        assert slot is not None
        cache.copies.release(slot)
    lives.assert_whole()


def decoding(lives: RequestLives) -> LiveRequest:
    live = start(lives, 99, 1)
    assert live is not None
    live.decodes = True
    return live


def test_while_requests_decode_no_step_waits_for_more_than_its_moves(
    lives: RequestLives, pages: Pages
) -> None:
    """A new request waits until steps have moved what it lacks."""
    assert lives.budget is not None
    budget, short = lives.budget, decoding(lives)
    found: list[int] = []
    for seconds in (0.0, 0.02, 0.0, 0.02):
        assert start(lives, 1, 70) is None
        assert lives.is_moving_memory
        before, took = pages.moved, budget.go_on(seconds)
        found.append(pages.moved - before)
        assert took == pytest.approx(found[-1] / 1000)
    assert found == [6, 18, 6, 12], (
        "a unit of blocks has 3 pages, and a step may wait for one of slots, with 8"
    )
    long = start(lives, 1, 70)
    assert long is not None
    assert not lives.is_moving_memory
    lives.drop(long)
    budget.go_on(0.0)
    short.decodes = False
    assert start(lives, 2, 1) is not None


def test_the_memory_of_a_request_that_decodes_comes_at_once(lives: RequestLives, pages: Pages) -> None:
    assert lives.budget is not None
    live = decoding(lives)
    lives.budget.go_on(0.0)
    assert start(lives, 1, 70) is None
    assert lives.memory.grow(live, 20)
    assert lives.is_moving_memory
    assert not lives.memory.grow(live, 20, keep=1), "drafts are in no hurry"
    lives.budget.go_on(math.inf)
    assert not lives.is_moving_memory, "others took the memory"
    lives.drop(live)
    lives.assert_whole()


def test_cached_blocks_of_a_request_stay_while_memory_moves_for_it() -> None:
    scheduler = make(
        num_blocks=40, block_size=4, windows=[Window(4, tile=4)], window_blocks=20, prefix_cache=True,
        elastic=True,
    )  # fmt: skip
    lives = scheduler.lives
    assert lives.budget is not None
    assert lives.pool.windows is not None
    tables: list[list[int]] = []
    for first in (0, 100):  # the first ones are evicted before the others
        live = lives.start(EngineRequest(b"a", list(range(first, first + 60)), [], SamplingParams()))
        assert live is not None
        while not live.decodes:
            step(scheduler)
        lives.memory.publish(live, 60)
        tables.append(list(live.blocks[:14]))
        lives.drop(live)
    lives.budget.lacking = Lacking(Amounts(windows=lives.pool.windows.grantable + 16), tables[0])
    lives.budget.go_on(math.inf)
    assert lives.budget.lacking is None
    cached = [sum(lives.pool.has_cached(range(block, block + 1)) for block in table) for table in tables]
    assert cached[0] == 14 > cached[1]
    lives.assert_whole()


@pytest.mark.parametrize("seed", range(4))
def test_random_lives_keep_every_page(lives: RequestLives, pages: Pages, seed: int) -> None:
    rng = random.Random(seed)
    running: list[LiveRequest] = []
    budget, states = lives.budget, lives.memory.states
    assert budget is not None
    assert states is not None
    for number in range(1, 400):
        choice = rng.random()
        if choice < 0.5:
            prompt = [rng.randrange(3)] * (BLOCK * rng.choice((1, 1, 2, 5, 20, 60)))
            live = lives.start(request_of(number, prompt + [number % 100] * rng.randrange(1, BLOCK)))
            if live is not None:
                running.append(live)
        elif choice < 0.8 and running:
            lives.drop(running.pop(rng.randrange(len(running))))
        elif running:
            live = rng.choice(running)
            full = len(live.token_ids) // BLOCK
            slot = states.allocate_copy() if rng.random() < 0.5 and full else None
            lives.memory.publish(live, full * BLOCK)
            if slot is not None:
                assert lives.cache is not None
                assert live.names is not None
                lives.cache.publish_states(live.names, full * BLOCK, slot)
            wanted = rng.choice((1, 9))
            if lives.memory.has_room(wanted, 0):
                lives.memory.provide(wanted)
                lives.pool.extend(live.held, wanted)
        used = 3 * pages.of(Pool.BLOCKS) + 8 * pages.of(Pool.SLOTS)
        assert used + budget.free_pages == 68
        lives.pool.assert_consistent()
    for live in running:
        lives.drop(live)
    lives.assert_whole()
    assert room(lives) == 80


# The engine


SEATS, SHORT, LONG = 32, 6, 240
ROOM = 1_100_000 if DEVICE == "cpu" else 64_000_000
"""Bytes for states and KV: a page of a CPU has 4 KiB, one of a GPU 2 MiB."""
LARGE: dict[str, dict[str, Any]] = {
    "Bamba": {
        "hidden_size": 1024, "num_key_value_heads": 4, "mamba_n_heads": 32, "mamba_d_head": 64,
        "mamba_d_state": 64, "initializer_range": 0.1,
    },
    "Qwen3_5Text": {
        "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "rope_parameters": TINY_QWEN3_5["rope_parameters"] | {"mrope_section": [24, 24, 16]},
    },
}  # fmt: skip
"""For large pages: four states fill one, and so does the KV of 512 tokens."""


PAGES_OF_CPU = pytest.mark.skipif(DEVICE != "cpu", reason="with pages of 2 MiB it is the same as Bamba")


@pytest.fixture(
    scope="module",
    params=["Bamba", pytest.param("Bamba, units of 16 slots", marks=PAGES_OF_CPU), "Qwen3_5Text"],
)
def path(
    request: pytest.FixtureRequest, tiny_of: TinyOf, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    kind, *large = request.param.split(",")
    with pytest.MonkeyPatch.context() as patch:
        if not large:  # then the inputs of convolutions have memory for all slots
            patch.setattr(elastic_cache, "RESIDENT_SHARE", 3)
        if DEVICE == "cpu":
            yield tiny_of(kind)
        else:
            save_tiny(directory := tmp_path_factory.mktemp(kind), kind, **LARGE[kind])
            yield directory


def elastic(tiny_engine: MakeEngine, path: Path, room: int = ROOM, **options: Any) -> Engine:
    """An engine with so much memory for its cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_sizing, "CPU_POOL_BYTES", room)
        patch.setattr(MemoryUse, "room", lambda use, share: room)
        settings = {
            "max_num_seqs": SEATS, "max_num_batched_tokens": 64, "elastic_memory": True, **options,
        }  # fmt: skip
        engine = tiny_engine(model=str(path), num_blocks=None, **settings)
    assert engine.lives.budget is not None, "the model has states or windows"
    return engine


def batch(first: int, count: int, tokens: int) -> list[EngineRequest]:
    rng = random.Random(first)
    return [
        request_of(first + n, [rng.randrange(3, 199) for _ in range(tokens)], max_tokens=4, ignore_eos=True)
        for n in range(count)
    ]


def run_at_once(
    engine: Engine, plain: Engine, requests: list[EngineRequest], begun: Callable[[], None] = lambda: None
) -> None:
    """All have room at the same time, and the tokens that `plain` gives. Then the pool is whole. `begun` is
    called when all have begun."""
    total, found = engine.blocks_free, dict[bytes, list[int]]()
    for request in requests:
        assert engine.start(request) is not None, "there is room for all at the same time"
        found[request.id] = []
    begun()
    while engine.loop.has_work:
        for output in engine.loop.step().outputs:
            found[output.id].append(output.token)
    assert [*found.values()] == tokens_of(plain, requests)
    engine.assert_whole()
    assert engine.blocks_free == total


def fitting(budget: Budget, blocks: int) -> int:
    """Requests with so many blocks and a slot that would fit a pool which is split for them."""
    stats = budget.stats
    whole = stats.kv_memory_bytes + stats.state_memory_bytes + stats.free_bytes
    each = budget.place_bytes(Pool.BLOCKS) * blocks + budget.place_bytes(Pool.SLOTS)
    return int(whole / each)


@pytest.mark.all
def test_short_requests_then_long_ones_then_short_ones(path: Path, tiny_engine: MakeEngine) -> None:
    """At least 0.9 of the requests that a split for them alone has room for run at the same time. All have
    the tokens of an engine with memory for all, and no tensor moves."""
    engine = elastic(tiny_engine, path, enable_prefix_caching=True)
    plain = tiny_engine(model=str(path), num_blocks=4096, max_num_seqs=SEATS, max_num_batched_tokens=64)
    addresses = [x.data_ptr() for x in of_slots(engine)]
    budget, total = engine.lives.budget, engine.num_blocks
    assert budget is not None
    assert engine.blocks_free == total
    long = int(0.9 * fitting(budget, -(-LONG // engine.block_size)))
    assert 4 < long < SEATS
    for requests in (batch(100, SEATS, SHORT), batch(200, long, LONG), batch(300, SEATS, SHORT)):
        run_at_once(engine, plain, requests)
    assert engine.stats().preemptions == 0
    assert budget.stats.moved_bytes > 200_000
    assert addresses == [x.data_ptr() for x in of_slots(engine)]


@pytest.mark.all
@pytest.mark.skipif(DEVICE != "cpu", reason="a page of 2 MiB has the windows of all requests")
@pytest.mark.parametrize("kind", ["Gemma3Text", "GptOss"])
def test_windows_get_what_requests_need(
    tmp_path_factory: pytest.TempPathFactory, tiny_engine: MakeEngine, kind: str
) -> None:
    """Each request finds room, whatever it needs of both. As no number says how many there should be of each,
    their share is that in the requests before."""
    save_tiny(path := tmp_path_factory.mktemp(kind), kind, max_position_embeddings=512)
    engine = elastic(tiny_engine, path, 3_400_000, enable_prefix_caching=True, block_size=16)
    plain = tiny_engine(model=str(path), num_blocks=4096, max_num_seqs=SEATS, max_num_batched_tokens=64)
    pool, budget, total = engine.lives.pool, engine.lives.budget, engine.num_blocks
    assert budget is not None
    assert pool.windows is not None
    assert engine.blocks_free == total
    addresses = [x.data_ptr() for layer in engine.caches for x in layer]
    fewest, found_windows = pool.windows.present, []
    for requests in (batch(100, SEATS, SHORT), batch(200, 6, LONG), batch(300, SEATS, SHORT)):
        run_at_once(engine, plain, requests, begun=lambda: found_windows.append(pool.windows.present))
    assert fewest < found_windows[0] < found_windows[1], "both found fewer than they needed"
    assert pool.windows.present > found_windows[1], "the last ones had as many window blocks as blocks"
    assert engine.stats().preemptions == 0
    assert addresses == [x.data_ptr() for layer in engine.caches for x in layer]


def test_the_memory_of_an_engine_goes_with_its_last_tensor(path: Path, tiny_engine: MakeEngine) -> None:
    def used() -> int:
        """Bytes that torch did not allocate. On a CPU only those of `DeviceMemory`."""
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()
            return total - free - torch.cuda.memory_reserved()
        lines = Path("/proc/self/maps").read_text().splitlines()
        ranges = [line.split(maxsplit=1)[0].split("-") for line in lines if "baton-device-memory" in line]
        return sum(int(end, 16) - int(begin, 16) for begin, end in ranges)

    elastic(tiny_engine, path).close()  # so that a GPU has loaded its kernels
    before = used()
    engine = elastic(tiny_engine, path)
    tensor = of_slots(engine)[0]
    del engine
    assert used() > before + ROOM // 2
    tensor[0] = 1
    del tensor
    assert used() < before + ROOM // 2


@pytest.mark.all
def test_all_ranks_move_the_same_memory(
    tiny_of: TinyOf, ranks: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    config: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 64}
    path, found = tiny_of("Bamba"), list[list[list[int]]]()
    monkeypatch.setattr(elastic_cache, "RESIDENT_SHARE", 3)
    for size in (1, 2):
        # Until the next engine: the threads of other ranks plan their caches after rank 0.
        monkeypatch.setattr(memory_sizing, "CPU_POOL_BYTES", 450_000 * size)
        engine = ranks(path, size, num_blocks=None, **config)
        assert engine.lives.budget is not None
        found.append([])
        for requests in (batch(100, 16, SHORT), batch(200, 4, LONG), batch(300, 16, SHORT)):
            tokens: dict[bytes, list[int]] = {request.id: [] for request in requests}
            for request in requests:
                assert engine.start(request) is not None
            while engine.loop.has_work:
                for output in engine.loop.step().outputs:
                    tokens[output.id].append(output.token)
            found[-1] += tokens.values()
            engine.assert_whole()
        assert engine.lives.budget.stats.moved_bytes > 0
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("page_mib", "pages", "share"),
    [(2, 15532, 1.0), (32, 954, 0.97), (64, 462, 0.88), (128, 216, 0.75), (256, 93, 0.5)],
)
def test_the_shape_of_bamba_holds_short_requests_and_then_long_ones(
    tmp_path: Path, page_mib: int, pages: int, share: float
) -> None:
    """With 33 GB, 256 short requests, and then eight of 128,000 tokens. The arithmetic only. `share`: of the
    requests that a split for them alone holds."""
    config = read_config(write_shape(BAMBA, tmp_path))
    planned = elastic_cache.plan(
        cache_spec(config, torch.bfloat16),
        128,
        33 * 10**9,
        page_mib << 20,
        most_slots=256,
        most_copies=2,
        min_blocks=16,
    )
    assert planned is not None
    assert planned.num_pages == pages
    pool, states = pools_of(
        PoolSize(planned.blocks.places, 131072, planned.slots.places, 2, None, planned), 128, None
    )
    assert states is not None
    budget = Budget(
        pool, states, None, pages=Amounts(planned.blocks.pages, planned.slots.pages),
        page_bytes=planned.page_bytes, free_pages=planned.free_pages,
    )  # fmt: skip
    lives = RequestLives(pool, max_num_seqs=256, states=states, budget=budget)
    shares: list[float] = []
    for count, tokens in ((256, 80), (8, 128_000), (256, 80)):
        held = [lives.start(request_of(n, [n] * tokens)) for n in range(count)]
        each = budget.place_bytes(Pool.SLOTS) + -(-tokens // 128) * budget.place_bytes(Pool.BLOCKS)
        shares.append(len([*filter(None, held)]) / min(count, int(33e9 / each)))
        for live in filter(None, held):
            lives.drop(live)
        lives.assert_whole()
    assert round(min(shares), 2) == share
