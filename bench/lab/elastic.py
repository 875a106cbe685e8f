"""Elastic memory: states and KV of a hybrid share one budget, and pages move between them in one engine.

Many short requests need states, then a few long ones need KV, then short ones come again, without a restart.
A count of requests that run at the same time is compared with what a pool would hold that is split for this
load alone. On a GPU with 33 GB for states and KV, on the shape of Bamba-9B. On a CPU with a tiny model.

    elastic.NAME.short       short requests at the same time, before long ones
    elastic.NAME.long        long requests at the same time, after short ones
    elastic.NAME.short_again short requests at the same time, after long ones
    elastic.NAME.move        time of a move of 1 GB from states to KV, or back
    elastic.NAME.step        a decode step, against one of an engine with a fixed split

NAME is `cuda` or `cpu`. With `--only memory` or `--only step` a part is measured. `--short` computes no long
request: they only take their memory.
"""

import gc
import json
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from baton.bench.lab.driver import MIN_PAIRS, Bench, Option, Run
from baton.bench.lab.engine.drive import drain, greedy, prompt, steady
from baton.bench.lab.shapes import BAMBA, SHAPES, write_shape
from baton.bench.report import Row
from baton.engine import Engine, EngineConfig, build_engine
from baton.engine.api.pools import Pool
from baton.engine.core.elastic import Amounts, Budget
from baton.engine.execution import memory_sizing
from baton.engine.execution.cache_limits import TOKENS_BESIDE_STATES
from baton.engine.loader.families import cache_spec
from baton.engine.loader.hf_config import read_config
from baton.engine.models import cache_bytes_per_token, state_bytes_per_request

GB = 10**9
STEP_BATCHES = (1, 64)
TINY = SHAPES[BAMBA] | {
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "attn_layer_indices": [1], "mamba_n_heads": 16, "mamba_d_head": 16,
    "mamba_d_state": 128, "vocab_size": 40_000, "max_position_embeddings": 4096, "torch_dtype": "float32",
    "eos_token_id": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Load:
    """Requests at the same time, and their tokens."""

    requests: int
    prompt: int
    answer: int


@dataclass(frozen=True)
class Workload:
    room: int
    """Bytes for states and KV, where memory moves."""
    short: Load
    long: Load
    config: dict[str, Any]


ON_GPU = Workload(
    33 * GB,
    Load(256, 64, 16),
    Load(8, 128_000, 4),
    {"dtype": "bfloat16", "device": "cuda", "max_model_len": 131072, "max_num_batched_tokens": 8192},
)
ON_CPU = Workload(
    20_000_000,
    Load(64, 16, 4),
    Load(20, 1_500, 2),
    {"dtype": "float32", "device": "cpu", "block_size": 16, "max_num_batched_tokens": 512},
)


def engine_of(case: Workload, path: Path, room: int, **config: Any) -> Engine:
    """An engine with so many bytes for states and KV, whatever the device has."""
    gc.collect()
    memory_sizing.CPU_POOL_BYTES = room
    memory_sizing.MemoryUse.room = lambda self, share: room  # pyrefly: ignore[bad-assignment]
    settings: dict[str, Any] = {
        "load_format": "dummy",
        "max_num_seqs": case.short.requests,
        "itl_target": 60.0,
    }
    return build_engine(EngineConfig(str(path), elastic_memory=True, **settings | case.config | config))


def held_by_split(budget: Budget, load: Load, block_size: int) -> int:
    """Requests of a load that a pool would hold if its memory were split for that load."""
    stats, blocks = budget.stats, -(-(load.prompt + load.answer) // block_size)
    total_bytes = stats.kv_memory_bytes + stats.state_memory_bytes + stats.free_bytes
    each = budget.place_bytes(Pool.SLOTS) + blocks * budget.place_bytes(Pool.BLOCKS)
    return min(load.requests, int(total_bytes / each))


def run_load(engine: Engine, load: Load, seed: int, *, computed: bool) -> int:
    """Starts as many requests of the load as there is room for. Computes them if `computed`. Returns their
    number. The pools are whole afterwards."""
    started = 0
    for number in range(load.requests):
        live = engine.start(greedy(prompt(load.prompt, seed + number), load.answer))
        started += live is not None
    if not computed:
        for live in list(engine.lives):
            engine.cancel(live)
    tokens = drain(engine)
    engine.assert_whole()
    assert tokens == started * load.answer * computed, "each request has all its tokens"
    assert engine.blocks_free == engine.num_blocks, "all memory can become KV again"
    return started


def measure_memory(run: Run, case: Workload, path: Path) -> None:
    engine = engine_of(case, path, case.room, enable_prefix_caching=True)
    budget, name = engine.lives.budget, f"elastic.{run.device}"
    assert budget is not None, "the model has states, and the device can map pages"
    for row, load, seed in (
        ("short", case.short, 0), ("long", case.long, 10_000), ("short_again", case.short, 20_000)
    ):  # fmt: skip
        before, began = budget.stats, time.perf_counter()
        requests = run_load(engine, load, seed, computed=not run.short or load is case.short)
        moved = budget.stats
        split = held_by_split(budget, load, engine.block_size)
        to = {"ratio": requests / split, "ratio_to": "a split for them alone", "goal": 0.9}
        run.add(Row(f"{name}.{row}", requests, "requests", better="higher", **to))
        run.detail[row] = {
            "seconds": time.perf_counter() - began,
            "moved_bytes": moved.moved_bytes - before.moved_bytes,
            "moving_seconds": moved.moving_seconds - before.moving_seconds,
            "preemptions": engine.stats().preemptions,
        }
    run.add_median(f"{name}.move", moves(engine, budget), "ms", scale=1e3)
    engine.close()


def moves(engine: Engine, budget: Budget) -> list[float]:
    """Seconds for 1 GB, of moves of up to 1 GB from states to KV and back."""
    pool, states = engine.lives.pool, engine.lives.states
    assert states is not None
    seconds: list[float] = []
    for _ in range(MIN_PAIRS):
        stats = budget.stats
        most = min(GB, (stats.state_memory_bytes + stats.free_bytes) // 2)
        blocks = pool.free + min(int(most / budget.place_bytes(Pool.BLOCKS)), budget.more_blocks)
        for wants in (Amounts(blocks), Amounts(slots=len(states.units.all_places))):
            while wants.slots and not budget.has_room(wants):
                wants = Amounts(slots=wants.slots - 1)
            before = budget.stats
            budget.provide(wants)
            after = budget.stats
            if moved := after.moved_bytes - before.moved_bytes:
                seconds.append((after.moving_seconds - before.moving_seconds) / moved * GB)
    return seconds


def measure_steps(run: Run, case: Workload, path: Path) -> None:
    """Both engines are in this process, and take turns. The elastic one has moved memory before."""
    room, blocks = step_room(case, path)
    elastic = engine_of(case, path, room, max_num_seqs=max(STEP_BATCHES))
    planned, budget = elastic.lives.pool.num_blocks, elastic.lives.budget
    assert budget is not None, "the model has states, and the device can map pages"
    moves(elastic, budget)
    fixed = engine_of(case, path, room, max_num_seqs=max(STEP_BATCHES), num_blocks=min(planned, blocks))
    assert fixed.lives.budget is None, "its blocks are fixed"
    context, steps = (1064, 32 if run.short else 96) if run.on_gpus else (64, 16)
    for batch in STEP_BATCHES if run.on_gpus else STEP_BATCHES[:1]:

        def seconds(engine: Engine, batch: int = batch) -> float:
            return steady(engine, batch, context, steps, 2 * steps + 24)[1]

        run.compare(
            f"elastic.{run.device}.step.b{batch}", partial(seconds, elastic), "ms", partial(seconds, fixed),
            "a fixed split", pairs=MIN_PAIRS if run.short else 9, scale=1e3, goal=1.01,
        )  # fmt: skip
    for engine in (elastic, fixed):
        engine.close()


def step_room(case: Workload, path: Path) -> tuple[int, int]:
    """Bytes for states and KV of each of the two engines, and the blocks that a fixed split has then. There
    are states for the largest batch, and twice the KV that an engine wants beside them."""
    config = read_config(path)
    block_size = case.config.get("block_size", 128)
    cache = cache_spec(config, getattr(torch, case.config["dtype"]))
    blocks_each = -(-2 * TOKENS_BESIDE_STATES // block_size)
    state_bytes, block_bytes = state_bytes_per_request(cache), block_size * cache_bytes_per_token(cache)
    blocks = max(STEP_BATCHES) * blocks_each
    return max(STEP_BATCHES) * state_bytes + blocks * block_bytes, blocks


def measure(run: Run) -> None:
    case = ON_GPU if run.on_gpus else ON_CPU
    run.parameters["room"] = case.room
    if run.on_gpus:
        path = write_shape(BAMBA, run.directory)
    else:
        path = run.directory
        (path / "config.json").write_text(json.dumps(TINY))
        torch.set_num_threads(1)
    if run.args.only != "step":
        measure_memory(run, case, path)
    if run.args.only != "memory":
        measure_steps(run, case, path)


BENCH = Bench(
    "elastic", measure, __doc__, options=(Option("--only", "measure this part", choices=("memory", "step")),)
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
