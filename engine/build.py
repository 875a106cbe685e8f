"""Builds an engine: from the user's configuration to a model that is loaded, measured, warm and captured.

    open the checkpoint ─▶ choose limits ─▶ load the weights ─▶ measure the largest steps ─▶ make the KV pool
    ─▶ compile kernels ─▶ capture graphs ─▶ Engine

A CPU skips measuring, compiling and capturing.
"""

from collections.abc import Callable, Collection
from dataclasses import replace

import torch

from engine.api.config import EngineConfig
from engine.api.request import CacheObserver, KVSink
from engine.engine import Engine
from engine.execution.graphs import LARGEST
from engine.execution.memory import MemoryUse, choose_limits, memory_for, size_pool
from engine.execution.rehearsal import Rehearsal, measure_steps, warm_up
from engine.execution.runner import ModelRunner
from engine.grammar import Grammars
from engine.kernels import kernels_for
from engine.loader import load_model, open_checkpoint


def _nothing(*_: object) -> None:
    pass


def build_engine(
    config: EngineConfig,
    *,
    kv_sink: KVSink | None = None,
    cache_observer: CacheObserver | None = None,
    tick: Callable[[], None] = _nothing,
    computing: Callable[[Collection[bytes]], None] = _nothing,
    progress: Callable[[str, float], None] = _nothing,
) -> Engine:
    """Loads the model and makes it ready. Raises `ValueError` for mistakes that the user can mend.

    `tick`, a sign of life, is called for each tensor loaded and each layer of a step. `computing` is called
    with the ids of all requests under way whenever these change, so that a supervisor can tell which requests
    a crash is about. `progress(stage, fraction)` tells how far the start is."""
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    device = torch.device(config.device)
    on_gpu = device.type == "cuda"

    def starting(stage: str, fraction: float) -> None:
        tick()
        progress(stage, fraction)

    checkpoint = open_checkpoint(config, device)
    limits = choose_limits(config, checkpoint.config, device)
    with memory_for("the weights", "choose a smaller --model"):
        model, fingerprint = load_model(checkpoint, limits.max_model_len, limits.dtype, device, starting)
    model_config = replace(checkpoint.config, max_model_len=limits.max_model_len)
    runner = ModelRunner(
        model,
        kernels_for(device, model_config.head_dim),
        model_config,
        limits.cache,
        dtype=limits.dtype,
        block_size=limits.block_size,
        max_num_seqs=config.max_num_seqs,
        device=device,
    )
    use = (
        _measure(config, runner, _rehearsal(config, limits.max_model_len, runner, None), starting)
        if on_gpu
        else None
    )
    pool = size_pool(config, model_config, limits, use)
    with memory_for("the KV pool", "lower --num-blocks or --gpu-memory-utilization"):
        runner.open(pool.num_blocks)
        if on_gpu:
            warm_up(runner, _rehearsal(config, pool.max_model_len, runner, pool.num_blocks), starting)
        if on_gpu and config.cuda_graphs:
            runner.capture(config.max_num_batched_tokens, lambda done: starting("capturing graphs", done))
    model_config = replace(model_config, max_model_len=pool.max_model_len)
    return Engine(
        config,
        runner,
        Grammars(checkpoint.source, model_config.vocab_size, model_config.eos_ids),
        model_config,
        fingerprint,
        checkpoint.source,
        limits.cache,
        pool.num_blocks,
        overlap=on_gpu if config.overlap is None else config.overlap,
        kv_sink=kv_sink,
        cache_observer=cache_observer,
        tick=tick,
        computing=computing,
    )


def _rehearsal(config: EngineConfig, max_model_len: int, runner: ModelRunner, pool: int | None) -> Rehearsal:
    return Rehearsal(
        seats=config.max_num_seqs,
        budget=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=runner.block_size,
        pool=pool,
    )


def _measure(
    config: EngineConfig,
    runner: ModelRunner,
    rehearsal: Rehearsal,
    progress: Callable[[str, float], None],
) -> MemoryUse:
    """The memory of the largest step beside the weights. All layers share one small cache meanwhile."""
    device = runner.device
    weights = torch.cuda.memory_allocated(device)
    with memory_for("the largest step", "lower --max-num-batched-tokens or --max-num-seqs"):
        runner.open(rehearsal.num_blocks, layers=1)
        step = measure_steps(runner, rehearsal, progress)
    runner.close()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    graphs = 0
    if config.cuda_graphs:
        # All graphs share one memory pool, which must hold a step of decodes and a step of LARGEST rows.
        graphs = step.decode + step.any * LARGEST // max(LARGEST, config.max_num_batched_tokens)
    return MemoryUse(total, free, weights, step.any, graphs)
