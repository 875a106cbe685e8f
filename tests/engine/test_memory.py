"""Memory sizing: the arithmetic for imaginary GPUs, and measurements on a real one."""

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.cluster.tools.sizing import MODELS
from baton.engine import Engine, EngineConfig, Hooks, build_engine
from baton.engine.execution.cache_limits import (
    GIB,
    CacheLimits,
    check_weights_fit,
    choose_kv_dtype,
    kept_format,
)
from baton.engine.execution.graphs import LayerDone
from baton.engine.execution.memory_sizing import MemoryUse, PoolSize, memory_for, size_pool
from baton.engine.execution.runner import Launched, ModelRunner
from baton.engine.execution.warmup import TIMED_RUNS, Rehearsal, first_steps, measure_times, warm_up
from baton.engine.kernels import FP8
from baton.engine.kernels.blocks_of_rows import size_for
from baton.engine.layers.linear import PlainLinear
from baton.engine.layers.ranks import Ranks
from baton.engine.loader.families import cache_spec
from baton.engine.loader.hf_config import model_config_from_hf, read_config
from baton.engine.loader.int_formats import stored_groups
from baton.engine.model_config import ModelConfig
from baton.engine.models.cache_spec import StateCache
from baton.engine.step import Step
from baton.steps.learned_steps import row_sizes, token_sizes
from baton.system.kept_pages import KeptMemory
from tests.engine.conftest import MakeEngine, request_of, run, save_tiny
from tests.memory import anonymous_bytes

LLAMA = ModelConfig(
    "LlamaForCausalLM", 32, 4096, 14336, 32, 8, 128, 128256, 131072, 1e-5, 5e5, None, False, False, (), None
)
BLOCK_BYTES = 128 * 2 * 2 * 32 * 8 * 128
CACHE = cache_spec(LLAMA, torch.bfloat16)
LIMITS = CacheLimits(torch.bfloat16, 128, 131072, CACHE)


def use(free: float = 60, *, weights: float = 15) -> MemoryUse:
    """Of a GPU of 80 GiB. The arguments are in GiB."""
    total, left, of_weights, step, graphs = (int(size * GIB) for size in (80, free, weights, 2, 0.5))
    return MemoryUse(total, left, of_weights, step, graphs)


def pool(memory: MemoryUse | None, limits: CacheLimits = LIMITS, **config: Any) -> PoolSize:
    return size_pool(EngineConfig("llama", max_num_seqs=256, **config), LLAMA, limits, memory, Ranks())


def test_the_pool_takes_the_rest_of_this_process_share() -> None:
    # 0.9 · 80 − 1 (CUDA) − 15 − 2 − 0.5
    assert pool(use()).num_blocks == int(53.5 * GIB) // BLOCK_BYTES
    assert pool(use(), gpu_memory_utilization=0.45).num_blocks == int(17.5 * GIB) // BLOCK_BYTES
    # Other processes use more than the rest: only the free memory counts, without that of steps.
    assert pool(use(free=20)).num_blocks == int(17.5 * GIB) // BLOCK_BYTES
    # A second worker with the same share changes nothing.
    assert pool(use(free=30), gpu_memory_utilization=0.45) == pool(use(), gpu_memory_utilization=0.45)


def test_memory_outside_the_engine_is_part_of_the_share() -> None:
    memory = replace(use(), other=2 * GIB)
    assert pool(memory).num_blocks == int(51.5 * GIB) // BLOCK_BYTES
    assert str(memory).endswith(", outside the engine 2.00 GiB")


def test_the_pool_holds_nearly_twice_the_tokens_in_fp8() -> None:
    limits = replace(LIMITS, cache=cache_spec(LLAMA, torch.bfloat16, FP8))
    assert limits.token_bytes == LIMITS.token_bytes * (128 + 4) // (2 * 128)
    plain, fp8 = (pool(use(), limits).num_blocks for limits in (LIMITS, limits))
    assert fp8 == pytest.approx(plain * 256 / 132, rel=1e-3)


STATES = StateCache(3, 8448, 128, 64, 128, torch.bfloat16)
BAMBA = replace(LIMITS, max_model_len=4096, cache=(CACHE[0],) * 3 + (STATES,) * 29)
"""Its states take as much memory as the KV of 9,967 tokens."""


def test_states_and_kv_share_the_memory(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "baton.engine")
    assert BAMBA.state_bytes == 29 * (4 * 128 * 64 * 128 + 2 * 3 * 8448)
    sizes = pool(use(), BAMBA), pool(use(free=20), BAMBA)
    assert "; states of 256 requests 29.35 GiB" in caplog.messages[1]
    for size, room in zip(sizes, (53.5, 17.5), strict=True):
        used = size.num_blocks * 128 * BAMBA.token_bytes + size.num_slots * BAMBA.state_bytes
        assert used <= room * GIB
        assert size.num_slots == 256 or (size.num_slots + 1) * BAMBA.state_bytes > 0.8 * room * GIB
        assert size.num_blocks * 128 >= 2048 * size.num_slots, "each has some KV beside its states"
    assert pool(use(), BAMBA, num_blocks=64) == PoolSize(64, 4096, 256)
    cached = pool(use(), BAMBA, enable_prefix_caching=True)
    spare = int(53.5 * GIB) - 256 * (BAMBA.state_bytes + 2048 * BAMBA.token_bytes)
    assert cached.num_copies == spare // 4 // BAMBA.state_bytes > 30
    few = pool(use(), BAMBA, enable_prefix_caching=True, num_blocks=40)
    assert few.num_copies == 40, "each copy is at the end of a block"
    tight = pool(use(free=20), BAMBA, enable_prefix_caching=True)
    used = tight.num_blocks * 128 * BAMBA.token_bytes
    assert used + (tight.num_slots + tight.num_copies) * BAMBA.state_bytes <= 17.5 * GIB
    assert tight.num_blocks * 128 >= 2048 * tight.num_slots
    with pytest.raises(
        ValueError, match=r"there is room for 0\.00 GiB, 0 blocks beside the states of 256 req"
    ):
        pool(use(free=10), BAMBA, num_blocks=64)
    with pytest.raises(
        ValueError, match=r"the states of one request take 117\.4 MiB, .* there is room for 76"
    ):
        pool(use(free=2.575), BAMBA)


@pytest.mark.parametrize(("capability", "fits"), [((9, 0), True), ((8, 9), True), ((8, 0), False)])
def test_kv_in_fp8_needs_a_gpu_that_reads_it(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], fits: bool
) -> None:
    config, gpu = EngineConfig("llama", kv_cache_dtype="fp8"), torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    if fits:
        assert choose_kv_dtype(config, torch.bfloat16, gpu) is FP8
    else:
        with pytest.raises(ValueError, match=r"--kv-cache-dtype fp8: .* capability 8\.0 cannot read FP8"):
            choose_kv_dtype(config, torch.bfloat16, gpu)
    with pytest.raises(ValueError, match="--kv-cache-dtype 'fp4': choose one of auto, fp8"):
        EngineConfig("llama", kv_cache_dtype="fp4")


def test_the_log_says_how_memory_is_used(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "baton.engine")
    size = pool(use())
    assert caplog.messages == [
        "memory: weights 15.00 GiB, activations of the largest step 2.00 GiB, CUDA graphs 0.50 GiB, CUDA "
        f"itself 1.00 GiB, KV pool 53.50 GiB: {size.num_blocks} blocks of 128, {size.num_blocks * 128} tokens"
    ]


def test_few_seats_and_short_contexts_leave_the_rest_of_the_pool_to_the_prefix_cache() -> None:
    short = CacheLimits(torch.bfloat16, 128, 1000, CACHE)
    assert pool(use(), short) == PoolSize(int(53.5 * GIB) // BLOCK_BYTES, 1000)
    config = EngineConfig("llama", max_num_seqs=1, enable_prefix_caching=True)
    few = size_pool(config, LLAMA, BAMBA, use(), Ranks())
    assert few.num_copies > 64
    assert few.num_blocks * 128 * BAMBA.token_bytes > 30 * GIB


def test_a_pool_on_a_cpu_takes_a_gib_whatever_is_free() -> None:
    assert pool(None).num_blocks == GIB // BLOCK_BYTES


def test_a_small_pool_shortens_the_default_context_but_not_a_configured_one() -> None:
    blocks = int(11.5 * GIB) // BLOCK_BYTES
    assert pool(use(free=14)) == PoolSize(blocks, blocks * 128)
    with pytest.raises(
        ValueError,
        match=r"--max-model-len 131072: one request of that length needs 16\.00 GiB of KV, and the KV pool "
        r"holds 94208 tokens, 11\.50 GiB; lower it, or raise --gpu-memory-utilization, lower "
        r"--max-num-batched-tokens or .*weights 15\.00 GiB, activations of the largest step 2\.00 GiB, CUDA "
        r"graphs 0\.50 GiB.*--max-num-batched-tokens 2048, .*other processes use about 50\.00 GiB",
    ):
        pool(use(free=14), max_model_len=131072)
    with pytest.raises(ValueError, match=r"the KV pool holds 0 tokens, .*weights 69\.00 GiB"):
        pool(use(free=10, weights=69))


def test_configured_blocks_must_fit_the_free_memory() -> None:
    assert pool(use(free=10), gpu_memory_utilization=0.1, num_blocks=8) == PoolSize(8, 1024)
    with pytest.raises(
        ValueError, match=r"--advanced.num-blocks 999: 15\.61 GiB of KV, .* room for 7\.50 GiB, 480 b"
    ):
        pool(use(free=10), num_blocks=999)


def test_weights_that_cannot_fit_are_refused_before_they_are_loaded() -> None:
    config = EngineConfig("llama", gpu_memory_utilization=0.5)
    check_weights_fit(config, 15 * GIB, 20 * GIB, 80 * GIB)
    for weights, free in ((21, 20), (40, 70)):
        with pytest.raises(ValueError, match=rf"--model llama: its weights take {weights}\.00 GiB; of the"):
            check_weights_fit(config, weights * GIB, free * GIB, 80 * GIB)


def test_weights_that_cannot_fit_the_machine_are_refused(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(str(tiny_path), dtype="float32", num_blocks=64)
    monkeypatch.setattr("baton.engine.execution.cache_limits.available_memory", lambda: 500_000)
    build_engine(config)
    monkeypatch.setattr("baton.engine.execution.cache_limits.available_memory", lambda: 400_000)
    with pytest.raises(
        ValueError, match=r"its weights take 0\.00 GiB in torch\.float32, and 0\.00 GiB of mem"
    ):
        build_engine(config)


def test_an_engine_has_no_more_threads_than_usable_cpus(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it is told to. torch knows no quota of a container."""
    monkeypatch.setattr("baton.engine.execution.threads.usable_cpus", lambda: 1)
    before = torch.get_num_threads()
    try:
        for told, found in ((None, 1), (2, 2)):
            torch.set_num_threads(3)
            build_engine(EngineConfig(str(tiny_path), num_blocks=64, num_threads=told))
            assert torch.get_num_threads() == found
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Qwen3", {}),
        ("Qwen3Moe", {"mlp_only_layers": [1]}),
        ("Llama4Text", {"interleave_moe_layer_step": 2}),
        ("GptOss", {}),
        ("DeepseekV2", {}),
        ("DeepseekV3", {}),
        ("GlmMoeDsa", {}),
        ("Gemma4Text", {"use_double_wide_mlp": True}),
        ("Gemma4Text", {"num_kv_shared_layers": 0, "attention_k_eq_v": True}),
    ],
)
def test_the_weights_of_a_plan_are_those_of_the_model(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    parameters = save_tiny(tmp_path, kind, **changes).named_parameters()
    vectors = ("norm.weight", "bias", "sinks")
    matrices = sum(parameter.numel() for name, parameter in parameters if not name.endswith(vectors))
    assert read_config(tmp_path).num_parameters == matrices


def test_an_out_of_memory_error_names_purpose_and_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB, 80 * GIB))
    with (
        pytest.raises(ValueError, match=r"no GPU memory is left for the weights: .* 1\.00 GiB of 80\.00 GiB"),
        memory_for(torch.device("cuda"), "the weights", "choose a smaller --model"),
    ):
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")


@pytest.mark.parametrize("kept", [False, True])
def test_a_cpu_without_memory_names_purpose_and_remedy(tiny_engine: MakeEngine, kept: bool) -> None:
    """Whether torch or Baton has asked the system for it."""
    files = [KeptMemory.create()] if kept else []
    with pytest.raises(
        ValueError, match=r"no memory is left for the KV pool; lower --advanced.num-blocks, or stop"
    ):
        tiny_engine(device="cpu", num_blocks=10**13, enable_prefix_caching=True, kept_files=files)
    for each in files:
        each.close()


def test_context_and_pool_must_fit_each_other(tiny_engine: MakeEngine) -> None:
    assert tiny_engine(num_blocks=4, block_size=8).model_config.max_model_len == 32
    assert tiny_engine(num_blocks=99).model_config.max_model_len == 256
    with pytest.raises(
        ValueError, match=r"--max-model-len 40: .* holds 32 tokens, .* or raise --advanced.num-blocks"
    ):
        tiny_engine(num_blocks=4, block_size=8, max_model_len=40)
    with pytest.raises(ValueError, match="--max-model-len 257: the model's context is 256"):
        tiny_engine(max_model_len=257)


# The rehearsal


def computed(step: Step) -> tuple[int, int, int]:
    """Numbers of decodes, prompt tokens and sampled tokens of a step."""
    return step.num_decodes, len(step.token_ids) - step.num_decodes, len(step.sampled_rows)


@pytest.mark.parametrize(
    ("seats", "budget", "context"),
    [(8, 64, 256), (8, 64, 40), (5, 5, 64), (1, 1, 40), (1, 64, 256), (64, 2048, 4)],
)
def test_a_rehearsal_runs_the_largest_steps_within_all_limits(
    tiny_engine: MakeEngine, seats: int, budget: int, context: int
) -> None:
    limits = EngineConfig("m", max_num_seqs=seats, max_num_batched_tokens=budget)
    rehearsal = Rehearsal(limits, context, 4)
    engine = tiny_engine(
        num_blocks=max(rehearsal.num_blocks, context // 4), max_num_seqs=seats,
        max_num_batched_tokens=budget, max_model_len=context,
    )  # fmt: skip
    stages: list[tuple[str, float]] = []
    warm_up(engine.runner, rehearsal, lambda stage, done: stages.append((stage, done)))
    assert stages[-1] == ("warming up", 1.0)
    assert stages == sorted(stages)

    steps = list(rehearsal.steps(None))
    assert len(steps) == len(stages)
    for step in steps:
        assert len(step.token_ids) <= budget
        assert len(step.block_tables) <= seats
        assert step.contexts.max() <= context
        assert step.slots.max() < 4 * rehearsal.num_blocks
        assert len(set(step.slots)) == len(step.slots), "each token has a slot of its own"
    first = steps[0]
    assert len(first.token_ids) == min(budget, seats * max(1, context - seats.bit_length() - 3))
    assert len(first.sampled_rows) == seats
    decodes = {step.num_decodes for step in steps if not step.prefills}
    assert decodes >= {seats >> shift for shift in range(seats.bit_length())}
    if (seats, budget, context) == (8, 64, 256):
        assert computed(first) == (0, 64, 8)
        assert (1, 63, 1) in map(computed, steps), "a decode beside a full chunk"
        assert (1, 33, 2) in map(computed, steps), "and beside the rest of the prompt"
        ends = {1 << power for power in range(7)}
        assert {(0, tokens, 0) for tokens in ends} <= {*map(computed, steps)}, "latents have kernels for each"


def test_a_rehearsal_on_a_small_pool_stays_within_it(tiny_engine: MakeEngine) -> None:
    limits = EngineConfig("m", max_num_seqs=8, max_num_batched_tokens=64)
    rehearsal = Rehearsal(limits, 48, 4, pool=12)
    assert rehearsal.num_blocks > 12
    steps = list(rehearsal.steps(None))
    assert {int(step.slots.max()) // 4 for step in steps} <= set(range(12))
    assert max(int(step.block_tables.max()) for step in steps) == 11
    engine = tiny_engine(num_blocks=12, max_num_seqs=8, max_num_batched_tokens=64)
    warm_up(engine.runner, rehearsal, lambda *_: None)


@pytest.mark.cases(1)
@pytest.mark.parametrize(("seats", "budget", "context"), [(8, 64, 256), (1, 1, 40), (4, 2048, 24)])
def test_timed_steps_stay_within_all_limits(
    tiny_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, seats: int, budget: int, context: int
) -> None:
    engine = tiny_engine(max_num_seqs=seats, max_num_batched_tokens=budget, max_model_len=context)
    runner, steps = engine.runner, list[Step]()

    def run(step: Step, layer_done: LayerDone) -> Launched:
        steps.append(step)
        return ModelRunner.run(runner, step, layer_done)

    monkeypatch.setattr(runner, "run", run)
    limits = EngineConfig("m", max_num_seqs=seats, max_num_batched_tokens=budget)
    model = measure_times(runner, limits, PoolSize(12, context), 99, math.inf)
    assert model.rows == row_sizes(seats)
    assert model.tokens == (sizes := token_sizes(min(budget, context // 2)))
    assert max(model.decode_seconds) > 0 < max(model.prompt_seconds)
    for step in steps:
        assert len(step.block_tables) <= seats
        assert len(step.token_ids) <= max(seats, budget)
        assert step.contexts.max() <= context
        assert step.slots.max() < 12 * 4
    prompts = [step for step in steps if len(step.token_ids) > 16]
    assert all(len(set(step.token_ids)) > 8 for step in prompts), "equal tokens choose the same experts"
    assert (seats, 0, seats) in map(computed, steps)
    steps.clear()
    model = measure_times(runner, limits, PoolSize(12, context), 99, 0.0)
    assert len(steps) <= 4 * TIMED_RUNS, "the first size twice, the smallest prompt and the largest one"
    assert model.tokens == tuple(sorted({sizes[0], sizes[-1]}))


@pytest.mark.parametrize(
    ("budget", "most", "context", "tokens"),
    [
        (0.0, 2048, 256, 16),
        (0.1, 2048, 256, 80),  # 8 times as many as decodes
        (100.0, 2048, 256, 100),  # as many as show the speed
        (100.0, 48, 256, 48),
        (100.0, 2048, 40, 20),
        (0.0, 2048, 1, 1),
    ],
)
def test_a_cpu_computes_a_prompt_at_its_start_that_fits_its_time(
    tiny_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    budget: float,
    most: int,
    context: int,
    tokens: int,
) -> None:
    limits: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": most}
    runner = tiny_engine(**limits).runner
    monkeypatch.setattr(Launched, "seconds", 0.01)
    monkeypatch.setattr("baton.engine.execution.warmup.LARGE", 100)
    steps = first_steps(runner, EngineConfig("m", **limits), PoolSize(12, context), 99, budget)
    assert steps == ((1, 1.0, 0, 0.0, 0.01), (0, 0.0, tokens, 0.0, 0.01))


@pytest.mark.parametrize(
    ("timed", "fastest"),
    [([0.04, 0.01, 0.03, 0.03, 0.02, 0.04], [0.01, 0.02]), ([0.06, 0.02, 0.08], [0.06, 0.02])],
    ids=["three runs", "long ones are the last"],
)
def test_a_pause_in_the_first_steps_of_a_cpu_does_not_count(
    tiny_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, timed: list[float], fastest: list[float]
) -> None:
    runner, left = tiny_engine().runner, iter(timed)
    monkeypatch.setattr(Launched, "seconds", property(lambda _: next(left)))
    steps = first_steps(runner, EngineConfig("m"), PoolSize(12, 256), 99, 0.0)
    assert [step.seconds for step in steps] == fastest
    assert not [*left]


def test_an_engine_learns_what_its_steps_cost(tiny_engine: MakeEngine) -> None:
    engine = tiny_engine(max_num_seqs=4, max_num_batched_tokens=16)
    measured = engine.stats().step_table
    assert measured is not None, "steps are measured before the first request"
    assert measured.tokens[-1] == 16, "one has prompt tokens, which would count as a decode each"
    assert engine.stats().gap_target_seconds > 0
    engine.add(request_of(1, range(1, 9), max_tokens=4))
    engine.add(request_of(2, range(1, 31), max_tokens=4))
    engine.loop.step()
    stats = engine.stats()
    assert stats.step_table is not None
    assert stats.tokens_waiting > 0
    while engine.stats().tokens_waiting:
        engine.loop.step()
    stats = engine.stats()
    decoding = [live for live in engine.lives.running if live.decodes]
    assert stats.decode_context == sum(len(live.token_ids) - 1 for live in decoding) > 0
    while engine.loop.has_work:
        engine.loop.step()
    stats = engine.stats()
    assert stats.decode_context == 0
    assert stats.step_table is not None
    assert stats.step_table.decode(2, 40) > 0


def test_a_rehearsal_refuses_logits_that_are_not_finite(tiny_engine: MakeEngine) -> None:
    rehearsal = Rehearsal(EngineConfig("m", max_num_seqs=2, max_num_batched_tokens=8), 32, 4)
    runner = tiny_engine(num_blocks=rehearsal.num_blocks).runner
    runner.model.embedding.weight = runner.model.embedding.weight * torch.nan
    with pytest.raises(ValueError, match="the model's logits are not finite numbers"):
        warm_up(runner, rehearsal, lambda *_: None)


# On a GPU


@pytest.mark.gpu
def test_a_started_engine_stays_within_its_share_and_compiles_nothing_more(embedded_model_path: Path) -> None:
    """Two engines on one GPU."""
    from triton import knobs

    total = torch.cuda.mem_get_info()[1]
    engines = []
    for share in (0.1, 0.2):  # this process has both
        stages: list[str] = []
        config = EngineConfig(
            str(embedded_model_path), device="cuda", gpu_memory_utilization=share, max_num_seqs=256,
            max_num_batched_tokens=8192, enable_prefix_caching=True,
        )  # fmt: skip
        engines.append(
            build_engine(config, hooks=Hooks(progress=lambda stage, _, seen=stages: seen.append(stage)))
        )
        assert list(dict.fromkeys(stages)) == [
            "loading weights",
            "measuring memory",
            "warming up",
            "capturing graphs",
        ]
    compiled: list[str] = []
    knobs.compilation.listener = lambda **about: compiled.append(about["src"].name)
    try:
        for engine in engines:
            lengths = [1, 2, 15, 16, 17, 127, 128, 129, 500, 1000, 4000, 8000] * 40
            requests = [
                request_of(n, [(7 * n + 13 * i) % 4000 for i in range(length)], ignore_eos=True,
                           max_tokens=1 + n % 50, temperature=n % 3, top_k=n % 5, seed=n)
                for n, length in enumerate(lengths)
            ]  # fmt: skip
            assert all(result.outputs[-1].finish_reason for result in run(engine, requests).values())
            engine.assert_whole()
    finally:
        knobs.compilation.listener = None
    assert compiled == []
    assert torch.cuda.max_memory_reserved() <= 0.2 * total
    assert torch.cuda.max_memory_reserved() >= 0.15 * total, "and uses it"


@pytest.mark.gpu
def test_the_error_of_a_full_gpu_lists_the_memory_that_each_part_needs(embedded_model_path: Path) -> None:
    def start(**config: Any) -> Engine:
        return build_engine(EngineConfig(str(embedded_model_path), device="cuda", **config))

    with pytest.raises(
        ValueError, match=r"--advanced.num-blocks 9000000: .* weights 0\.\d+ GiB, activations of the l"
    ):
        start(num_blocks=9_000_000)
    with pytest.raises(ValueError, match=r"--gpu-memory-utilization 0\.001 allows -?\d"):
        start(gpu_memory_utilization=0.001)
    free = torch.cuda.mem_get_info()[0]
    neighbour = torch.empty(free - GIB // 2, dtype=torch.uint8, device="cuda")
    with pytest.raises(ValueError, match=r"KV pool|largest step"):
        start(max_num_seqs=1024, max_num_batched_tokens=16384)
    del neighbour
    torch.cuda.empty_cache()
    start(num_blocks=64)


@pytest.mark.cases(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_numbers_of_rows_take_no_more_memory(dtype: torch.dtype) -> None:
    """On a CPU oneDNN keeps code for each number of rows that it has seen: 0.6 MiB."""
    product = PlainLinear(torch.randn(960, 576, dtype=dtype))
    x = torch.randn(192, 576, dtype=dtype)
    sizes = sorted({size_for(rows) for rows in range(1, len(x) + 1)})
    assert all(rows <= size_for(rows) <= rows * 9 / 8 for rows in range(1, 5000))
    assert len(sizes) == 44
    for rows in sizes:
        product(x[:rows])
    before = anonymous_bytes()
    for rows in range(1, len(x) + 1):
        assert len(product(x[:rows])) == rows
    assert anonymous_bytes() - before < 16 << 20, "each number would take 90 MiB"


def test_a_standby_takes_what_the_engine_takes_and_a_page() -> None:
    room = replace(use(), stands_by=True).room(0.9)
    # As above, less 1 (CUDA) + 15 + 2 + 0.5 of the standby
    assert room == (use().room(0.9) - int(18.5 * GIB)) * 64 // 65
    assert "the standby 18.50 GiB" in str(replace(use(), stands_by=True))


INT8 = stored_groups("t", 8, 128, "m", lambda *_: pytest.fail("reads no weights"), torch.device("cuda"))


@pytest.mark.parametrize(
    ("gib", "packed", "config"),
    [
        (40, False, {}),  # 15.0 of weights, 16 of KV and 4 of steps, of 36
        (38, True, {}),
        (22, False, {"max_model_len": 4096}),  # 0.5 of KV
        (21, True, {"max_model_len": 4096}),
        (27, False, {"max_model_len": 4096, "stands_by": True}),  # steps of two processes
        (26, True, {"max_model_len": 4096, "stands_by": True}),
        (24, False, {"max_model_len": 4096, "other_bytes": 2 * GIB}),
        (23, True, {"max_model_len": 4096, "other_bytes": 2 * GIB}),
        (24, False, {"num_blocks": 128}),  # 2 of KV
        (23, True, {"num_blocks": 128}),
        (28, False, {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.75}),  # half of weights and KV
        (25, True, {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.75}),
        (4, False, {"batch_invariant": True}),  # no exact product reads packed ones
    ],
)
def test_a_gpu_keeps_int8_packed_only_where_it_would_else_lack_room(
    gib: float, packed: bool, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.engine.layers.grouped_linear.from_hopper_on", lambda device: True)
    engine = EngineConfig("llama", **config)
    length = engine.max_model_len or LLAMA.max_model_len
    cache = cache_spec(LLAMA.of_rank(engine.tensor_parallel_size), torch.bfloat16)
    limits = CacheLimits(torch.bfloat16, 128, length, cache)
    kept = kept_format(engine, LLAMA, INT8, limits, int(gib * GIB))
    assert (kept is INT8) == packed
    assert kept.bytes_per_parameter(torch.bfloat16) == (1 + 8 / 128 if packed else 2)


def test_memory_sizing_counts_experts_in_8_bits_as_dequantized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.engine.layers.grouped_linear.from_hopper_on", lambda device: True)
    model = model_config_from_hf(MODELS["qwen3-30b-a3b"], {}, "qwen3-30b-a3b")
    experts = 48 * 128 * 3 * 2048 * 768
    assert model.expert_parameters == experts
    assert LLAMA.expert_parameters == 0
    others = model.matrix_parameters - experts
    assert INT8.matrix_bytes(model, torch.bfloat16) * model.matrix_parameters == pytest.approx(
        2 * experts + (1 + 8 / 128) * others
    )
