"""KV that outlives its engine: the next engine on the memory uses what is whole, and computes the rest."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from baton.engine import CachedBlock, Engine, EngineRequest
from baton.engine.api.config import EngineConfig
from baton.engine.api.pools import Outcome, Pool, RecordMemory
from baton.engine.api.request import CacheChange, Hooks
from baton.engine.core.kept_blocks import packed, record_bytes, unpacked
from baton.engine.core.kept_table import SUMMED_AT_ONCE, KeptTable
from baton.engine.core.offload_tier import OffloadTier
from baton.engine.core.prefix_cache import PrefixCache
from baton.engine.execution.kept_cache import Keep, KeptCache, Measured, measured
from baton.engine.execution.memory_sizing import PoolSize
from baton.engine.layers.ranks import Ranks
from baton.engine.models.cache_spec import AttentionCache, Places
from baton.steps.step_model import StepModel
from baton.system.device_memory import open_device_memory
from baton.system.kept_pages import CannotShareError, KeptMemory, KeptPages, close
from baton.worker.engine_process.offload import offload_pumps
from tests.device import DEVICE
from tests.engine.conftest import MakeEngine, TinyOf, request_of, run
from tests.engine.drafting import draft_always
from tests.engine.test_images import pixels_of, request_with
from tests.engine.test_speculation import THREE, answers_of, requests_of

PROMPT = [*range(3, 43)]  # ten blocks
SETTINGS: dict[str, Any] = {
    "block_size": 4,
    "max_num_batched_tokens": 64,
    "enable_prefix_caching": True,
    # Prompts are computed at once: on a busy machine one stream would end before another begins.
    "itl_target": 60.0,
}
CPU = SETTINGS | {"device": "cpu"}


def nothing() -> None:
    pass


def answer(
    engine: Engine, salt: bytes = b"", prompt: list[int] = PROMPT, **sampling: Any
) -> tuple[list[int], int]:
    """The tokens of a request, and how many positions of its prompt were cached."""
    request = request_of(1, prompt, max_tokens=12, ignore_eos=True, **sampling)
    request.cache_salt = salt
    outputs = run(engine, [request])[request.id].outputs
    engine.assert_whole()
    settle(engine)
    return [output.token for output in outputs], outputs[0].cached_tokens


def settle(engine: Engine) -> None:
    """A GPU sums KV after the steps."""
    cache = engine.lives.cache
    assert cache is not None
    cache.settle()
    while any(records._under_way for records in cache._records):
        cache.settle()


def content(engine: Engine, files: KeptMemory) -> list[bytes]:
    """All that is kept, as the engine before sees it."""
    table = os.pread(files.table, os.fstat(files.table).st_size, 0)
    return [table, *(x.cpu().numpy().tobytes() for x in engine.caches)]


def names_of(engine: Engine, prompt: Sequence[int] = PROMPT, *, chunks: bool = False) -> list[bytes]:
    """Of the blocks of a prompt, or of its chunks."""
    cache = engine.lives.cache
    assert cache is not None
    names = cache.names(request_of(1, prompt))
    names.extend(prompt, len(prompt))
    return names.chunks if chunks else names.blocks


def block_of(engine: Engine, index: int) -> int:
    """The block with this index in the prompt."""
    [block] = engine.lives.pool.lookup([names_of(engine)[index]])
    return block


def cached(engine: Engine) -> set[bytes]:
    """The names of the blocks that the engine has."""
    pool = engine.lives.pool
    return {name for name in pool.names if pool.find(name) is not None}


def thin(engine: Engine) -> set[bytes]:
    """Of these, those without a window block."""
    pool = engine.lives.pool
    return {name for name in cached(engine) if not pool.has_window(pool.lookup([name])[0])}


def test_the_next_engine_has_prompts_and_answers_of_the_one_before(
    tiny_engine: MakeEngine, memory: KeptMemory
) -> None:
    first = tiny_engine(kept_files=[memory], **SETTINGS)
    tokens, cached = answer(first, logprobs=2)
    assert cached == 0
    seen: list[CacheChange] = []
    second = tiny_engine(kept_files=[memory], hooks=Hooks(cache_changed=seen.append), **SETTINGS)
    assert len(seen) == 12, "those of the answer, too: 51 of 52 positions have KV"
    assert answer(second, logprobs=2) == (tokens, 36)
    # A recovered stream has all but what fills no block.
    recovered = request_of(2, PROMPT, tokens[:11], max_tokens=12, ignore_eos=True)
    outputs = run(second, [recovered])[recovered.id].outputs
    assert [output.token for output in outputs] == tokens[11:]
    assert outputs[0].cached_tokens == 48
    assert answer(second, b"salt") == (tokens, 0), "no KV of another salt"
    third = tiny_engine(kept_files=[memory], **SETTINGS)
    assert answer(third, b"salt") == (tokens, 36)


def test_a_standby_leaves_the_memory_alone_until_its_turn(
    tiny_engine: MakeEngine, memory: KeptMemory
) -> None:
    first = tiny_engine(kept_files=[memory], **SETTINGS)
    tokens, _ = answer(first)
    before, stages = content(first, memory), list[str]()

    def turn() -> None:
        assert "loading weights" in stages
        assert "mapping KV" not in stages
        assert content(first, memory) == before
        assert answer(first, b"salt") == (tokens, 0), "the first one still computes and publishes"

    standby = tiny_engine(
        kept_files=[memory],
        wait_for_turn=turn,
        hooks=Hooks(progress=lambda stage, _: stages.append(stage)),
        **SETTINGS | {"cuda_graphs": DEVICE == "cuda"},
    )
    assert answer(standby, b"salt") == (tokens, 36)


def test_chunks_are_found_as_before(tiny_engine: MakeEngine, memory: KeptMemory) -> None:
    prompt = [token % 190 for token in range(3, 178)]  # two chunks and a part of the third
    first = tiny_engine(kept_files=[memory], **SETTINGS)
    answer(first, prompt=prompt)
    seen: list[CacheChange] = []
    second = tiny_engine(kept_files=[memory], hooks=Hooks(cache_changed=seen.append), **SETTINGS)
    chunks = [name for block in seen if isinstance(block, CachedBlock) for name in block.chunks]
    assert len(chunks) == 2
    prompts = []
    for engine in (first, second):
        cache = engine.lives.cache
        assert cache is not None
        assert cache.table(chunks, 0, 99)[0] == 2
        assert len(cache.table(chunks[1:], 1, 99)[1]) == 16
        prompts.append([*cache.last_used()])
    assert prompts[0] == prompts[1] == [(b"", chunks)]


def test_damaged_blocks_and_those_behind_them_are_computed_again(
    tiny_engine: MakeEngine, memory: KeptMemory
) -> None:
    first = tiny_engine(kept_files=[memory], **SETTINGS)
    tokens, _ = answer(first)
    block = block_of(first, 4)
    first.caches[1][1, block, 2, 0, 3] += 1  # one V of one position of the second layer
    second = tiny_engine(kept_files=[memory], **SETTINGS)
    assert answer(second) == (tokens, 16)
    table, name = os.pread(memory.table, os.fstat(memory.table).st_size, 0), names_of(second)[2]
    os.pwrite(memory.table, table.replace(name, bytes([name[0] ^ 1]) + name[1:]), 0)
    third = tiny_engine(kept_files=[memory], **SETTINGS)
    assert answer(third) == (tokens, 8)


@pytest.mark.parametrize("written", [False, True])
def test_what_was_evicted_or_never_published_is_not_found(
    tiny_engine: MakeEngine, memory: KeptMemory, written: bool
) -> None:
    """`written`: a place whose record has not ended yet, since nothing has read that it was given out."""
    first = tiny_engine(kept_files=[memory], num_blocks=20, **SETTINGS)
    tokens, _ = answer(first)
    other = [*range(100, 160)]
    answer(first, prompt=other)  # takes 18 blocks: only two of the first prompt are left
    reserved = first.reserve(request_of(7, range(50, 70), max_tokens=8))
    assert reserved is not None, "evicts blocks, and does not write them"
    if written:
        first.caches[0][:, [*reserved.blocks]] += 1
    else:
        settle(first)
    second = tiny_engine(kept_files=[memory], num_blocks=20, **SETTINGS)
    second.assert_whole()
    assert cached(second) == cached(first)
    assert answer(second)[0] == tokens


@pytest.mark.all
def test_an_engine_of_another_layout_forgets_what_was_kept(
    tiny_engine: MakeEngine, memory: KeptMemory
) -> None:
    """Alone. Those that follow it use what it keeps."""
    for settings in (
        CPU,
        CPU | {"num_blocks": 48},
        CPU | {"num_blocks": 96},
        CPU | {"block_size": 8},
        CPU | {"dtype": "bfloat16"},
        CPU | {"seed": 1, "load_format": "dummy"},
        CPU,
    ):
        tokens, cached = answer(tiny_engine(kept_files=[memory], **settings))
        assert not cached, settings
        block_size = settings["block_size"]
        assert answer(tiny_engine(kept_files=[memory], **settings)) == (tokens, 40 - block_size), settings


@pytest.mark.all
def test_a_standby_of_another_layout_ends_before_its_turn(
    tiny_engine: MakeEngine, memory: KeptMemory
) -> None:
    settings = SETTINGS | {"num_blocks": 2048}  # so larger blocks need more pages of a GPU, of 2 MiB
    first = tiny_engine(kept_files=[memory], **settings)
    right = answer(first)
    kept = content(first, memory)

    def turn() -> None:
        raise AssertionError("it cannot use the memory")

    other = settings | {"block_size": 8}
    with pytest.raises(CannotShareError, match="another layout"):
        tiny_engine(kept_files=[memory], wait_for_turn=turn, **other)
    assert content(first, memory) == kept
    del first
    assert answer(tiny_engine(kept_files=[memory], **other)) == right
    assert answer(tiny_engine(kept_files=[memory], wait_for_turn=lambda: None, **other)) == (right[0], 32)


def test_a_table_never_shrinks(tiny_engine: MakeEngine, memory: KeptMemory) -> None:
    tiny_engine(kept_files=[memory], **SETTINGS)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.table, os.fstat(memory.table).st_size - 1)


def test_a_record_that_is_half_written_or_too_long_does_not_count() -> None:
    size = record_bytes(4)
    table = memoryview(bytearray(3 * size))

    def kept() -> KeptTable:
        memory = RecordMemory(table, lambda places: Outcome(lambda: True, lambda: [7] * len(places)))
        return KeptTable(memory, size)

    one = CachedBlock(b"1" * 16, [], 0, b"", b"", [1, 2, 3, 4], b"tenant")
    two = CachedBlock(b"2" * 16, [b"c" * 16], 0, b"s" * 16, b"1" * 16, [5, 6, 7, 8])
    writer = kept()
    writer.add([(0, packed(one))])
    writer.add([(2, packed(two)), (1, packed(two._replace(name=b"3" * 16, salt=b"s" * size)))])
    found = {place: unpacked(body) for place, body in kept().left(nothing)}
    assert {place: each._replace(token_ids=[*each.token_ids]) for place, each in found.items()} == {
        0: one,
        2: two,
    }
    for length in (0, 3, 1 << 40):
        table[:8] = length.to_bytes(8, "little")
        assert [place for place, _ in kept().left(nothing)] == [2]
    table[2 * size + 16] ^= 255
    assert [*kept().left(nothing)] == []


def streams_that_go_on(
    make: Callable[[], Engine], asked: Sequence[EngineRequest], right: Mapping[bytes, list[int]]
) -> list[tuple[EngineRequest, int]]:
    """An engine dies when half of all tokens have come. The next one gets prompts with output so far, as from
    a worker. Returns these requests, and how many of their tokens it did not compute."""
    tokens: dict[bytes, list[int]] = {request.id: [] for request in asked}
    ended: set[bytes] = set()
    first = make()
    for request in asked:
        first.add(request)
    while 2 * sum(map(len, tokens.values())) < sum(map(len, right.values())):
        for output in first.loop.step().outputs:
            tokens[output.id].append(output.token)
            if output.finish_reason:
                ended.add(output.id)
    settle(first)
    going = [
        replace(request, output_ids=tokens[request.id], retried=True)
        for request in asked
        if request.id not in ended
    ]
    second = make()
    results = run(second, going)
    second.assert_whole()
    for request in going:
        assert tokens[request.id] + results[request.id].tokens == right[request.id], request
    return [
        (request, results[request.id].outputs[0].cached_tokens) for request in going if request.output_ids
    ]


def assert_kept(going: Sequence[tuple[EngineRequest, int]]) -> None:
    """What fills no block was computed again, and the last token, which had no KV."""
    assert len(going) > 1
    for request, cached in going:
        assert len(request.prompt_ids) + len(request.output_ids) - cached <= SETTINGS["block_size"] + 1


@pytest.mark.all
@pytest.mark.parametrize("drafts", [False, True])
def test_streams_of_every_kind_go_on(
    tiny_engine: MakeEngine, spelled_path: Path, memory: KeptMemory, drafts: bool
) -> None:
    """Seeds, penalties, grammars, stop tokens, bias and log probabilities, with drafts and without."""
    settings = SETTINGS | {"model": str(spelled_path), "num_blocks": 512}
    right = answers_of(run(tiny_engine(**settings), requests_of()))

    def make() -> Engine:
        if not drafts:
            return tiny_engine(kept_files=[memory], **settings)
        engine = tiny_engine(kept_files=[memory], speculative_config=THREE, **settings)
        draft_always(engine, right, 0.3)
        return engine

    assert_kept(streams_that_go_on(make, requests_of(), right))


WINDOWED = "Gemma3Text", "Gemma4Text", "GptOss"
WITH_STATES = "Bamba", "Qwen3_5Text", "KimiLinear", "Lfm2"
KEPT = [
    *((kind, 128) for kind in ("Qwen3Moe", "DeepseekV3", "DeepseekV32", *WINDOWED)),
    *((kind, 1024) for kind in WINDOWED),  # layers with windows have blocks of their own
]
if DEVICE == "cuda":  # one of each kind of pool: it takes half a minute to compile the kernels of a model
    WITH_STATES, KEPT = ("Bamba",), [("Qwen3Moe", 128), ("GptOss", 1024)]
NARROW = () if DEVICE == "cuda" else ("Bamba", "KimiLinear")
"""States in 16 bits, rounded after each token. Exact kernels of a GPU are not for float32."""


def asked_of(max_tokens: int, prompt: Sequence[int] = PROMPT) -> list[EngineRequest]:
    return [
        request_of(
            n,
            [token + n for token in prompt],
            max_tokens=max_tokens,
            ignore_eos=True,
            temperature=n,
            seed=n,
        )
        for n in range(3)
    ]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("kind", "num_blocks"), KEPT)
def test_models_of_every_kind_go_on(
    tiny_engine: MakeEngine, tiny_of: TinyOf, memory: KeptMemory, kind: str, num_blocks: int
) -> None:
    settings = SETTINGS | {"model": str(tiny_of(kind)), "num_blocks": num_blocks}
    asked = asked_of(24)
    right = answers_of(run(tiny_engine(**settings), asked))
    assert_kept(streams_that_go_on(lambda: tiny_engine(kept_files=[memory], **settings), asked, right))


@pytest.mark.all
@pytest.mark.parametrize(
    ("kind", "exact"),
    [
        *((kind, {}) for kind in WITH_STATES),
        *((kind, {"state_dtype": "bfloat16", "batch_invariant": True}) for kind in NARROW),
    ],
)
def test_models_with_states_go_on_from_the_last_copy(
    tiny_engine: MakeEngine, tiny_of: TinyOf, memory: KeptMemory, kind: str, exact: dict[str, Any]
) -> None:
    """An answer has a copy of the states at each multiple of 64 positions."""
    settings = SETTINGS | {"model": str(tiny_of(kind)), "num_blocks": 128} | exact
    asked = asked_of(28, range(3, 57))
    right = answers_of(run(tiny_engine(**settings), asked))
    going = streams_that_go_on(lambda: tiny_engine(kept_files=[memory], **settings), asked, right)
    assert [(len(x.prompt_ids) + len(x.output_ids)) // 64 for x, _ in going] == [1] * 3
    assert [cached for _, cached in going] == [64] * 3


def cache_of(engine: Engine) -> PrefixCache:
    assert engine.lives.cache is not None
    return engine.lives.cache


def test_damaged_states_are_computed_again(
    tiny_engine: MakeEngine, tiny_of: TinyOf, memory: KeptMemory
) -> None:
    settings = SETTINGS | {"model": str(tiny_of("Bamba")), "num_blocks": 256}
    prompt = [*range(3, 123)]
    tokens, _ = answer(tiny_engine(kept_files=[memory], **settings), prompt=prompt)
    turn = [*prompt, *tokens[:9]]
    second = tiny_engine(kept_files=[memory], **settings)
    right, cached = answer(second, prompt=turn)
    assert cached == 128, "the last copy of the answer"
    copies = cache_of(second).copies
    assert copies is not None
    [slot] = copies.lookup([names_of(second, turn)[31]])
    mixer = next(layer for layer, spec in enumerate(second.cache_spec) if not spec.arrays[0].per_token)
    second.caches[mixer].ssm[slot, 1, 2, 3] += 1
    third = tiny_engine(kept_files=[memory], **settings)
    assert answer(third, prompt=turn) == (right, 0), "it has the blocks, and no states"


@pytest.mark.all
def test_memory_that_is_kept_does_not_move_by_default(
    tiny_engine: MakeEngine, tiny_of: TinyOf, memory: KeptMemory
) -> None:
    # A pool without `num_blocks` fills a GPU, which has no room for a second one.
    settings = CPU | {"model": str(tiny_of("Bamba")), "num_blocks": None, "block_size": 64}
    prompt = [*range(3, 123)]
    for moves, cached in ((None, 128), (True, 0)):
        given = settings | {"elastic_memory": moves}
        tokens, _ = answer(tiny_engine(kept_files=[memory], **given), prompt=prompt)
        second = tiny_engine(kept_files=[memory], **given)
        assert (second.lives.budget is not None) == bool(moves)
        assert answer(second, prompt=[*prompt, *tokens[:9]])[1] == cached


def test_a_damaged_window_block_leaves_a_block_that_is_thin(
    tiny_engine: MakeEngine, tiny_of: TinyOf, memory: KeptMemory
) -> None:
    settings = SETTINGS | {"model": str(tiny_of("GptOss")), "num_blocks": 1024}
    first = tiny_engine(kept_files=[memory], **settings)
    tokens, _ = answer(first)
    layer = next(layer for layer, spec in enumerate(first.cache_spec) if spec.arrays[0].window)
    block = block_of(first, 8)
    assert first.window_blocks is not None
    first.caches[layer][1, first.window_blocks[block], 2, 0, 3] += 1
    second = tiny_engine(kept_files=[memory], **settings)
    assert thin(second) == {names_of(second)[8]}
    assert answer(second) == (tokens, 32)


@pytest.mark.all
@pytest.mark.parametrize(("kind", "num_blocks"), [("Bamba", 128), ("GptOss", 220)])
def test_a_cache_that_forgets_leaves_what_it_has(
    tiny_engine: MakeEngine, tiny_of: TinyOf, memory: KeptMemory, kind: str, num_blocks: int
) -> None:
    """Blocks are evicted, and window blocks and copies of states go to other prompts."""
    settings = SETTINGS | {
        "model": str(tiny_of(kind)),
        "num_blocks": num_blocks,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 4,
    }
    first = tiny_engine(kept_files=[memory], **settings)
    prompts = [[3 + (7 * n + i) % 150 for i in range(56 + 32 * n)] for n in range(6)]
    right = [answer(first, prompt=prompt)[0] for prompt in prompts]
    second = tiny_engine(kept_files=[memory], **settings)
    second.assert_whole()
    before, after = cache_of(first), cache_of(second)
    assert cached(second) == cached(first)
    assert thin(second) == thin(first)
    assert bool(thin(first)) == (kind == "GptOss"), "window blocks went to other blocks"
    if before.copies is not None and after.copies is not None:
        assert before.copies.names
        assert {*after.copies.names} == {*before.copies.names}
    assert [answer(second, prompt=prompt)[0] for prompt in prompts] == right
    # What the first one gives out to be written has no record any more.
    pool = first.lives.pool
    reserved = first.reserve(request_of(7, range(50, 70), max_tokens=8))
    assert reserved is not None
    assert pool.records is not None
    assert not any(block in pool.records for block in reserved.blocks)
    if before.copies is not None:
        slots = [before.copies.allocate() for _ in before.copies.units.all_places]
        assert before.copies.records is not None
        assert not any(slot in before.copies.records for slot in slots if slot is not None)
    if first.window_blocks is not None and pool.windows is not None:
        places = {int(first.window_blocks[block]) for block in reserved.blocks} - {0}
        assert places
        assert pool.windows.records is not None
        assert not any(place in pool.windows.records for place in places)


@pytest.mark.all
@pytest.mark.parametrize(
    ("kind", "num_blocks", "block_size"), [("Qwen3Moe", 64, 4), ("Bamba", 16, 16), ("GptOss", 220, 4)]
)
@pytest.mark.parametrize("reader", ["request", "other worker"])
def test_what_came_back_from_a_tier_is_kept(
    tiny_engine: MakeEngine,
    tiny_of: TinyOf,
    memory: KeptMemory,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    num_blocks: int,
    block_size: int,
    reader: str,
) -> None:
    """A request reads it, or another worker does. A block is kept if the cache of the first engine has it on
    the device."""
    monkeypatch.setattr(OffloadTier, "pays", lambda *_: True)
    settings = SETTINGS | {
        "model": str(tiny_of(kind)),
        "num_blocks": num_blocks,
        "block_size": block_size,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 4,
    }
    first = tiny_engine(kept_files=[memory], host_cache_size=1 << 25, **settings)
    pumps = offload_pumps(first, EngineConfig("tiny"))

    def pump() -> None:
        for each in pumps * 20:
            each.pump()

    def computed(prompt: list[int]) -> list[int]:
        first.add(request_of(len(tokens), prompt, max_tokens=5, ignore_eos=True))
        tokens.append([])
        while not first.idle:
            tokens[-1] += [output.token for output in first.loop.step().outputs]
            pump()
        return tokens[-1]

    tokens: list[list[int]] = []
    before = cache_of(first)
    num_copies = len(before.copies.units.all_places) if before.copies else 0
    count = max(num_blocks * block_size // 64, num_copies) + 3
    prompts = [[3 + (7 * n + i) % 150 for i in range(60)] for n in range(count)]
    right = [computed(prompt) for prompt in prompts]
    turn = [*prompts[0], *right[0]]
    names = names_of(first, turn)
    assert not first.lives.pool.lookup(names), "evicted"
    assert before.copies is None or names[-1] not in before.copies
    if reader == "request":
        computed(turn)
    else:
        come: list[bool] = []
        exchange = first.prefix_exchange
        assert exchange is not None
        chunks = names_of(first, turn, chunks=True)
        assert exchange.bring(chunks, 0, lambda: come.append(True))
        while not come:  # A GPU beside other tests needs longer for its copies.
            pump()
    assert first.stats().offload[0].loaded_tokens == 64
    settle(first)
    second = tiny_engine(kept_files=[memory], **settings)
    after = cache_of(second)
    assert cached(second) == cached(first) >= {*names}
    assert thin(second) == thin(first)
    if before.copies is not None and after.copies is not None:
        on_device = {name for name in before.copies.names if name in cached(first)}
        assert {*after.copies.names} == on_device >= {names[-1]}
    assert answer(second, prompt=turn)[1] == 64
    for each in pumps:
        each.close()


def test_prompts_with_images_go_on(tiny_engine: MakeEngine, tiny_of: TinyOf, memory: KeptMemory) -> None:
    """An image with as many tokens has other names."""
    settings = SETTINGS | {"model": str(tiny_of("Qwen3VL")), "num_blocks": 128}
    fresh = tiny_engine(**settings)
    asked = [request_with(n, fresh, [pixels_of(n, 40, 24), pixels_of(5, 16, 80)]) for n in range(3)]
    right = answers_of(run(fresh, asked))
    assert_kept(streams_that_go_on(lambda: tiny_engine(kept_files=[memory], **settings), asked, right))
    third = tiny_engine(kept_files=[memory], **settings)
    other = request_with(7, third, [pixels_of(7, 40, 24), pixels_of(5, 16, 80)])
    assert run(third, [other])[other.id].outputs[0].cached_tokens <= 8, "the text before the image"


@pytest.mark.all
def test_ranks_keep_their_parts(ranks: Any, tiny_path: Path, memory: KeptMemory) -> None:
    """Rank 0 verifies those of all."""
    of_rank_1 = KeptMemory.create()

    def make(**other: Any) -> Engine:
        return ranks(tiny_path, 2, kept_files=[memory, of_rank_1], **CPU | other)

    first = make()
    tokens, _ = answer(first)
    assert answer(make()) == (tokens, 36)
    block = block_of(first, 4)
    [kept] = of_rank_1.cache.pages()
    page, offset = divmod(block * first.caches[0][0, 0].nbytes, kept.page_bytes)  # K of the first layer
    fd, offset = kept.pages[page].fd, kept.pages[page].offset + offset
    os.pwrite(fd, bytes([os.pread(fd, 1, offset)[0] ^ 1]), offset)
    close(kept)
    assert answer(make()) == (tokens, 16)
    assert answer(make(num_blocks=32))[1] == 0, "of another layout"
    of_rank_1.close()


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.all)])
def test_memory_that_is_released_is_kept_anew_when_it_is_back(
    size: int, ranks: Any, tiny_path: Path, memory: KeptMemory
) -> None:
    files = [memory, *(KeptMemory.create() for _ in range(size - 1))]

    def make(**other: Any) -> Engine:
        settings = CPU | {"enable_memory_saver": True, "stands_by": True} | other
        return ranks(tiny_path, size, kept_files=files, **settings)

    first = make()
    tokens, _ = answer(first)
    first.loop.frozen = True
    first.memory.release(["kv_cache", "weights"])
    for each in files:
        assert [*each.cache.pages(), *each.weights.pages()] == [], "no process has a page of it"
    first.memory.resume(["weights", "kv_cache"])
    first.replace_weights(first.stage_weights(str(tiny_path)), "1")
    first.loop.frozen = False
    assert answer(first) == (tokens, 0)
    assert answer(make(weights_version="1")) == (tokens, 36)
    for each in files[1:]:
        each.close()


def test_a_sum_that_comes_late_is_of_what_the_place_has_then() -> None:
    """A device computes it beside the next steps, in which the place may be given out and recorded again."""
    table = memoryview(bytearray(3 * 64))
    come = [False]

    def late(places: Sequence[int]) -> Outcome:
        return Outcome(lambda: come[0], lambda: [100 + place for place in places])

    def made() -> KeptTable:
        return KeptTable(RecordMemory(table, late), 64)

    writer = made()
    writer.add([(0, b"one"), (1, b"two")])
    assert not any(table)
    writer.taken.append(1)
    writer.add([(1, b"three")])
    writer.taken.append(0)
    writer.add([(2, b"one")])
    come[0] = True
    assert [place in writer for place in range(3)] == [False, True, True]
    writer.settle()
    assert [*made().left(nothing)] == [(1, b"three"), (2, b"one")]
    writer.add([(0, b"two")])
    writer.clear()
    assert [*made().left(nothing)] == []


def test_a_table_gives_signs_of_life_while_it_is_verified() -> None:
    places = range(2 * SUMMED_AT_ONCE + 1)
    memory = RecordMemory(
        memoryview(bytearray(64 * len(places))),
        lambda batch: Outcome(lambda: True, lambda: [7 * place for place in batch]),
    )
    KeptTable(memory, 64).add((place, b"%d" % place) for place in places)
    ticks: list[None] = []
    left = KeptTable(memory, 64).left(lambda: ticks.append(None))
    assert [*left] == [(place, b"%d" % place) for place in places]
    assert len(ticks) == 3


def test_files_wait_for_each_engine_and_keep_memory_without_the_process_that_made_it() -> None:
    files, memory = KeptMemory.create(), open_device_memory(None, 4096, exportable=True)
    assert files.cache.pages() == []
    exported = KeptPages(4096, [memory.export(page) for page in memory.create(3)])
    os.pwrite(exported.pages[1].fd, b"kept", exported.pages[1].offset)
    files.cache.put([exported])
    close(exported)
    memory.close()
    for _ in range(2):
        [kept] = files.cache.pages()
        assert os.pread(kept.pages[1].fd, 4, kept.pages[1].offset) == b"kept"
        close(kept)
    files.close()


def test_what_an_engine_measured_is_there_for_the_next_one(memory: KeptMemory) -> None:
    keep, layer, places = (
        Keep([memory], record_bytes),
        AttentionCache(2, 8, torch.float32),
        Places(64, 4),
    )
    assert measured(Keep()) is None
    assert measured(keep) is None
    kept = KeptCache(keep, [layer], places, torch.device("cpu"))
    layer.allocate(places, kept)
    kept.open(b"root", Ranks())
    assert measured(keep) is None
    steps = StepModel((1, 8), (0.1, 0.3), 1e-9, (1, 512), (0.1, 0.2), 1e-12, 0.9)
    for found in (Measured(PoolSize(64, 256, 2, 3, 4), steps), Measured(PoolSize(64, 256))):
        kept.remember(found)
        assert measured(keep) == found


@pytest.mark.parametrize("text", [b"no JSON", b"{}", b'{"pool": {"other": 1}, "steps": null}'])
def test_what_another_version_measured_has_a_reason(memory: KeptMemory, text: bytes) -> None:
    os.pwrite(memory.table, bytes(32) + len(text).to_bytes(4, "little") + text, 0)
    with pytest.raises(ValueError, match="of another version"):
        measured(Keep([memory]))


def test_a_next_engine_writes_elsewhere_until_it_has_the_pages(memory: KeptMemory) -> None:
    """As it does when it warms up and captures graphs on a GPU."""
    device = torch.device(DEVICE)
    layers = [AttentionCache(2, 8, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float32)]
    places = Places(100, 4)

    def made() -> tuple[KeptCache, list[torch.Tensor]]:
        kept = KeptCache(Keep([memory], record_bytes), layers, places, device)
        return kept, [cast(torch.Tensor, layer.allocate(places, kept)) for layer in layers]

    first, of_first = made()
    first.open(b"root", Ranks())
    for number, tensor in enumerate(of_first):
        tensor.fill_(number + 1)
    second, of_second = made()
    for tensor in of_second:
        tensor.zero_()
    assert [x.unique().tolist() for x in of_first] == [[1], [2], [3]]
    sums = first.records[Pool.BLOCKS].sums([5, 6]).wait()
    second.open(b"root", Ranks())
    assert [x.unique().tolist() for x in of_second] == [[1], [2], [3]]
    of_second[2][1, 6, 3, 1, 7] += 1
    assert of_second[2].unique().tolist() == [3, 4], "it is there, also for another stream"
    assert [a == b for a, b in zip(second.records[Pool.BLOCKS].sums([5, 6]).wait(), sums, strict=True)] == [
        True,
        False,
    ]
    second.records[Pool.BLOCKS].table[:4] = b"kept"
    for root, table in ((b"root", b"kept"), (b"of another model", bytes(4))):
        third, _ = made()
        third.open(root, Ranks())
        assert third.records[Pool.BLOCKS].table[:4] == table
