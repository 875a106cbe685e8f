"""Arrays with windows: what the next token does not read is not sent, and no later prompt begins with blocks
that lack what it reads.

What was not sent is NaN in the caches here. So a token that reads it is none.
"""

import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

import baton.bench.lab.shapes as bench
import baton.kv_transfer as kv
from baton.engine import Engine, EngineConfig, EngineRequest, SamplingParams
from baton.engine.api.config import SpeculativeConfig
from baton.engine.core.offload_tier import OffloadTier
from baton.engine.core.prefix_exchange import Pin
from baton.engine.core.window_blocks import WindowBlocks
from baton.engine.execution.cache_limits import CacheLimits
from baton.engine.execution.memory_sizing import PoolSize
from baton.engine.execution.start import moves_memory
from baton.engine.execution.warmup import rehearsal_in, warm_up
from baton.engine.loader.families import cache_spec
from baton.engine.loader.hf_config import model_config_from_hf
from baton.kv_names.cache_kinds import Window, first_read, last_unread
from baton.kv_transfer import KVLayout
from baton.kv_transfer.wait import wait
from baton.worker.engine_process.offload import offload_pumps
from baton.worker.engine_process.paged_kv import kv_layout
from tests.device import DEVICE
from tests.engine.checkpoints import load
from tests.engine.conftest import save_tiny, tokens_of
from tests.engine.drafting import draft_always
from tests.engine.test_unequal_groups import ON_CPU, Pair, Side
from tests.ledger import model_of, register
from tests.within import WITHIN

register()
KINDS: dict[str, dict[str, Any]] = {
    "Gemma3Text": {},
    "Gemma4Text": {},
    "GptOss": {},
    "Llama4Text": {"attention_chunk_size": 160},
    "Mistral": {"sliding_window": 40},
    "Ledger": {"num_attention_heads": 4, "num_key_value_heads": 2},
}
RNG = random.Random(11)
TEXT = [RNG.randrange(3, 199) for _ in range(440)]
SAMPLING = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def request(shared: int, own: int) -> EngineRequest:
    """Begins with `shared` tokens of the text, and has `own` other ones."""
    other = [3 + (7 * i + own) % 190 for i in range(own)]
    return EngineRequest(os.urandom(16), [*TEXT[:shared], *other], [], SAMPLING)


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            name = "Llama" if kind == "Ledger" else kind
            save_tiny(made[kind], name, max_position_embeddings=512, **KINDS[kind])
            if kind == "Ledger":
                model_of(made[kind])
        return made[kind]

    return make


def side(path: Path, ranks: int = 1, **config: Any) -> Side:
    made = Side(path, kv_layout(load(path)), ranks, enable_prefix_caching=True, **config)
    for cache in chain.from_iterable(made.caches):
        cache.fill_(torch.nan)
    return made


def hits_of(engine: Engine, asked: EngineRequest, path: Path) -> int:
    """Computes a request there. Returns how many positions it found."""
    before = engine.stats().prefix_cache_hits
    assert tokens_of(engine, [asked]) == expected(path, [asked])
    return engine.stats().prefix_cache_hits - before


def expected(path: Path, requests: Sequence[EngineRequest]) -> list[list[int]]:
    return tokens_of(load(path, device=DEVICE, num_blocks=64, block_size=16), requests)


def needed(layout: KVLayout, start: int, stop: int) -> int:
    """Bytes of what the token at `stop` and later ones read of positions from `start` on."""
    return sum(
        array.bytes * len(layers) * sum(b - a for a, b in array.read_of([(start, stop)], [stop]))
        for array, layers in layout.token_arrays
    )


@pytest.mark.all
@pytest.mark.parametrize(
    ("kind", "prefill_ranks", "decode_ranks", "sizes"),
    [
        pytest.param("Gemma3Text", 1, 1, (16, 16), marks=pytest.mark.long),
        pytest.param("Gemma3Text", 1, 2, (64, 4), marks=ON_CPU),
        pytest.param("Gemma4Text", 2, 1, (64, 16), marks=ON_CPU),
        pytest.param("GptOss", 2, 1, (16, 64), marks=[ON_CPU, pytest.mark.long]),
        ("Llama4Text", 1, 1, (16, 128)),
        ("Mistral", 1, 1, (128, 16)),
        pytest.param("Ledger", 2, 1, (16, 16), marks=ON_CPU),
    ],
)
def test_a_handover_brings_what_windows_read(
    path_of: Callable[[str], Path], kind: str, prefill_ranks: int, decode_ranks: int, sizes: tuple[int, int]
) -> None:
    """Then later prompts begin with all or a part of one that came so, and are handed over or computed where
    it is."""
    path = path_of(kind)
    layout = kv_layout(load(path))
    assert any(array.window for array in layout.arrays)
    waves = [[request(0, 9), request(400, 0)], [request(400, 37), request(230, 3), request(150, 1)]]
    local = [request(400, 30), request(230, 5), request(230, 8), request(140, 5)]
    prefill, decode = (
        side(path, ranks, block_size=size, num_blocks=2048 // size, max_num_batched_tokens=50)
        for ranks, size in zip((prefill_ranks, decode_ranks), sizes, strict=True)
    )
    with closing(prefill), closing(decode):
        pair = Pair(prefill, decode)
        assert pair.run(waves[0]) == expected(path, waves[0])
        part = decode.engine.start_part(request(200, 0), [range(200)], read_at=[200])
        assert part is not None
        assert part.num_cached == 0, "other workers would read what is not there"
        decode.engine.cancel(part)
        assert pair.run(waves[1]) == expected(path, waves[1])
        starts = zip([of for wave in waves for of in wave], pair.cached, strict=True)
        sent = sum(needed(layout, start, len(of.prompt_ids)) for of, start in starts)
        kept = [array for arrays in decode.engine.cache_arrays for array in arrays]
        sent += len(pair.cached) * sum(array.bytes for array in kept if not array.per_token)
        assert decode.transfer.stats().bytes_received == sent
        assert pair.cached[2] == 400 // sizes[1] * sizes[1], "a turn goes on behind what came"
        if kind == "Ledger":
            return  # a request begins with cached blocks where the cache has its states, too
        hits = [hits_of(decode.engine, of, path) for of in local]
        assert hits[0] == 400 // sizes[1] * sizes[1]
        assert hits[2] >= 230 // sizes[1] * sizes[1], "blocks that have all take the place of the thin ones"
        decode.engine.assert_whole()


@pytest.mark.all
def test_a_prefix_brings_what_windows_read(path_of: Callable[[str], Path]) -> None:
    path, asked = path_of("Gemma3Text"), request(400, 30)
    layout = kv_layout(load(path))
    holder, asker = (side(path, block_size=16, num_blocks=99) for _ in range(2))
    exchanges = holder.engine.prefix_exchange, asker.engine.prefix_exchange
    with closing(holder), closing(asker):
        tokens_of(holder.engine, [request(400, 0)])
        there, here = exchanges
        assert there is not None
        assert here is not None
        missing = here.missing(asked, 99)
        assert missing is not None
        into = here.start_import(missing)
        assert into is not None
        asker.receiver.fetch_content(
            os.urandom(16), chunks=missing.chunks, first_chunk=0, kv_address=holder.transfer.address,
            incarnation=holder.transfer.incarnation, block_ids=into.table,
        )  # fmt: skip
        events, pins, deadline = [], list[Pin](), time.monotonic() + WITHIN
        while not events or not holder.sender.idle:
            assert time.monotonic() < deadline
            wait([holder.sender.fileno(), asker.receiver.fileno()], 0.01)
            events += asker.receiver.poll()
            for event in holder.sender.poll():
                if isinstance(event, kv.Released):
                    pins.pop().end()
                    continue
                pin = there.pin_prefix(event.chunks, event.first_chunk)
                assert pin is not None
                pins.append(pin)
                holder.sender.serve(event.pin_id, pin.table, 0, 64 * pin.num_chunks)
        [injected] = events
        assert isinstance(injected, kv.Injected)
        assert (injected.stats.tokens, injected.stats.bytes) == (384, needed(layout, 0, 384))
        into.end(injected.stats.tokens)
        assert [here.cache.is_whole(chunk) for chunk in missing.chunks] == [False] * 4 + [True] * 2
        assert here.pin_prefix(missing.chunks[:3], 0) is None, "no worker can go on there"
        pin = here.pin_prefix(missing.chunks, 0)
        assert pin is not None
        assert pin.num_chunks == 6
        pin.end()
        assert hits_of(asker.engine, asked, path) == 384
        assert hits_of(asker.engine, request(230, 5), path) == 0


def test_what_only_this_worker_has_in_full_is_no_copy(path_of: Callable[[str], Path]) -> None:
    engine = load(path_of("Gemma3Text"), num_blocks=40, block_size=16, enable_prefix_caching=True)
    live = engine.add(request(400, 0), handover=True)
    while engine.loop.has_work:
        engine.loop.step()
    live.handed_over = True
    engine.cancel(live)
    assert (engine.stats().blocks_free, engine.stats().blocks_spare) == (40, 40 - 256 // 16)


@pytest.mark.all
@pytest.mark.parametrize("step", [2048, 64], ids=["", "few-windows"])
def test_a_tier_keeps_what_came(
    path_of: Callable[[str], Path], step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`step`: tokens of a step. If they are few, layers with windows have fewer blocks."""
    monkeypatch.setattr(OffloadTier, "pays", lambda *_: True)
    path = path_of("Gemma3Text")
    prefill = side(path, block_size=16, num_blocks=99)
    decode = side(path, block_size=16, num_blocks=40, host_cache_size=1 << 25, max_num_batched_tokens=step)
    assert (decode.engine.window_blocks is None) is (step == 2048)
    with closing(prefill), closing(decode):
        engine, [pump] = decode.engine, offload_pumps(decode.engine, EngineConfig("tiny"))
        wave = [request(400, 0)]
        assert Pair(prefill, decode).run(wave) == expected(path, wave)

        def compute(asked: EngineRequest) -> list[int]:
            for _ in range(20):
                pump.pump()
            tokens: list[int] = []
            engine.add(asked)
            while engine.loop.has_work or pump.copies:
                tokens += [output.token for output in engine.loop.step().outputs]
                pump.pump()
            return tokens

        def hits(asked: EngineRequest) -> int:
            before = engine.stats().prefix_cache_hits
            assert [compute(asked)] == expected(path, [asked])
            return engine.stats().prefix_cache_hits - before

        def evict(first: int) -> None:
            for own in range(first, first + 7):
                compute(request(0, own))

        evict(90)
        assert hits(request(400, 9)) == 400, "which the tier had"
        evict(100)
        assert hits(request(230, 5)) == 0
        evict(110)
        assert hits(request(400, 10)) == 400, "from both"
        assert hits(request(230, 6)) == 224
        pump.close()


@pytest.mark.parametrize(
    ("architecture", "sizes", "most", "share"),
    [
        ("Gemma4ForCausalLM", {}, 1.02, 0.34),
        (
            "Gemma4ForCausalLM",
            {
                "num_hidden_layers": 60, "num_attention_heads": 32, "num_key_value_heads": 16,
                "num_global_key_value_heads": 4, "attention_k_eq_v": True, "sliding_window": 1024,
            },
            1.04, 0.22,
        ),
        (
            "Gemma3ForCausalLM",
            {
                "num_hidden_layers": 62, "hidden_size": 5376, "intermediate_size": 21504,
                "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024,
            },
            1.03, 0.28,
        ),
    ],
)  # fmt: skip
def test_the_bytes_of_a_handover_of_8000_tokens(
    architecture: str, sizes: dict[str, Any], most: float, share: float
) -> None:
    """Over what full layers and windows need, and over all."""
    config = model_config_from_hf({"architectures": [architecture], **sizes}, {}, "shape")
    layout = KVLayout.of([spec.arrays for spec in cache_spec(config, torch.bfloat16)])
    exact = sum(
        array.bytes * len(layers) * (min(8000, array.window.length - 1) if array.window else 8000)
        for array, layers in layout.token_arrays
    )
    sent = needed(layout, 0, 8000)
    assert exact < sent <= most * exact
    assert sent <= share * 8000 * layout.bytes_per_token


@pytest.mark.all
@pytest.mark.parametrize("kind", ["Gemma3Text", "GptOss"])
def test_drafts_of_steps_that_overlap(
    path_of: Callable[[str], Path], late_engine: Callable[..., Engine], kind: str
) -> None:
    """A step does not know where the one before it ends in the window blocks of its requests."""
    path, sampling = path_of(kind), replace(SAMPLING, max_tokens=40)
    asked = [replace(request(shared, 300 - shared), sampling=sampling) for shared in (0, 150)]
    answers = expected(path, asked)
    engine = late_engine(
        model=str(path), num_blocks=140, block_size=16, max_num_batched_tokens=64, max_num_seqs=2,
        max_model_len=512, speculative_config=SpeculativeConfig(),
    )  # fmt: skip
    windows = engine.lives.pool.windows
    assert windows is not None
    draft_always(engine, {each.id: answer for each, answer in zip(asked, answers, strict=True)}, 0.3)
    assert tokens_of(engine, asked) == answers
    assert engine.stats().speculation is not None


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-oss-20b": (
        "GptOssForCausalLM",
        {
            "num_hidden_layers": 24, "hidden_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8,
            "head_dim": 64, "sliding_window": 128, "intermediate_size": 2880, "num_local_experts": 32,
            "num_experts_per_tok": 4, "vocab_size": 201088, "max_position_embeddings": 131072,
            "layer_types": ["sliding_attention", "full_attention"] * 12,
        },
    ),
    "gemma-4": ("Gemma4ForCausalLM", {}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "shares"), [("gpt-oss-20b", True), ("bamba-9b", True), ("llama-3.1-8b", False)]
)
def test_what_shares_its_memory_by_default(name: str, shares: bool) -> None:
    sizes = SHAPES[name][1] if name in SHAPES else bench.SHAPES[name]
    architectures = [SHAPES[name][0]] if name in SHAPES else sizes["architectures"]
    config = model_config_from_hf({**sizes, "architectures": architectures}, {}, "shape")
    limits = CacheLimits(torch.bfloat16, 128, 131072, cache_spec(config, torch.bfloat16))
    default = EngineConfig(name)
    assert moves_memory(default, limits) == shares
    assert not moves_memory(replace(default, elastic_memory=False), limits)


@pytest.mark.parametrize(("name", "before", "after"), [("gpt-oss-20b", 162, 288), ("gemma-4", 55, 125)])
def test_seats_for_requests_of_8000_tokens(name: str, before: int, after: int) -> None:
    """In 60 GiB of KV, in blocks of 128."""
    architecture, sizes = SHAPES[name]
    config = model_config_from_hf({"architectures": [architecture], **sizes}, {}, "shape")
    limits = CacheLimits(torch.bfloat16, 128, 131072, cache_spec(config, torch.bfloat16))
    room, each = 60 << 30, -(-8001 // 128)
    blocks = limits.blocks_in(room, 2048)
    windows = limits.window_blocks(blocks, 2048)
    assert windows is not None
    assert room * 0.99 < limits.pool_bytes(blocks, windows) <= room
    owner = WindowBlocks(blocks, windows, 128, limits.windows, 2048)
    assert room // (128 * limits.token_bytes) // each == before
    assert min(blocks // each, owner.free // owner.need(each)) == after


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["Gemma3Text", "Gemma4Text", "GptOss", "Llama4Text"])
def test_blocks_behind_windows_are_free(path_of: Callable[[str], Path], kind: str) -> None:
    """So many requests are held, and decode together, that their blocks would not find room in layers with
    windows."""
    path, asked = path_of(kind), [request(shared, 400 - shared) for shared in (0, 100, 200, 300, 400)]
    engine = load(
        path, num_blocks=140, block_size=16, max_num_batched_tokens=64, max_num_seqs=5, device=DEVICE
    )
    windows = engine.lives.pool.windows
    assert windows is not None
    kept = [
        sum(x.nbytes for plane in spec.planes(cache) for x in plane)
        for spec, cache in zip(engine.cache_spec, engine.caches, strict=True)
    ]
    assert sum(kept) == 16 * sum(
        array.bytes * (140 if array.window is None else windows.present)
        for arrays in engine.cache_arrays for array in arrays
    )  # fmt: skip
    tokens = {each.id: list[int]() for each in asked}
    lives = [engine.add(each, handover=True) for each in asked]
    while engine.loop.has_work:
        engine.loop.step()
    assert sum(len(live.blocks) for live in lives) > windows.present
    for live in lives:
        first = engine.resume(live, live.id)
        assert first is not None
        tokens[live.id].append(first.token)
    while engine.loop.has_work:
        for output in engine.loop.step().outputs:
            tokens[output.id].append(output.token)
    assert engine.stats().preemptions == 0
    engine.assert_whole()
    assert [*tokens.values()] == expected(path, asked)


def test_rehearsed_steps_stay_within_window_blocks(path_of: Callable[[str], Path]) -> None:
    limits: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 5}
    engine = load(path_of("GptOss"), num_blocks=140, block_size=16, device=DEVICE, **limits)
    windows, config = engine.lives.pool.windows, EngineConfig("m", **limits)
    assert windows is not None
    rehearsal = rehearsal_in(PoolSize(140, 512, window_blocks=windows.present), config, 16)
    for step in rehearsal.steps(engine.runner.cache.table_width):
        assert len(step.window_slots) == len(step.slots)
        assert {*step.window_slots // 16} <= {*range(1, windows.present)}
    warm_up(engine.runner, rehearsal, lambda *_: None)


@pytest.mark.parametrize(
    ("window", "position", "first"),
    [
        (Window(20), 0, 0), (Window(20), 147, 128), (Window(20), 146, 0), (Window(128), 8000, 7808),
        (Window(160, chunked=True), 320, 256), (Window(8192, chunked=True), 8191, 0),
        (Window(8192, chunked=True), 8192, 8192),
    ],
)  # fmt: skip
def test_what_a_token_reads_begins_with_a_tile(window: Window, position: int, first: int) -> None:
    assert window.first_read(position) == first
    assert (first_read([window], position), last_unread([window], position)) == (first, first)
    assert (first_read([], position), last_unread([], position)) == (position, 0)
