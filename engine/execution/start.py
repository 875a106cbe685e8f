"""One rank from the user's configuration to a runner that is ready.

    open the checkpoint ─▶ choose limits ─▶ load the weights ─▶ measure the largest steps ─▶ make the KV cache
    ─▶ compile kernels ─▶ capture graphs ─▶ measure what steps cost

A CPU measures two steps, and skips all else that measures, compiles or captures. All ranks take these steps
together, since the steps that they measure, compile and capture have sums over ranks.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch

from baton.engine.api.config import EngineConfig, MemoryTag, versioned
from baton.engine.execution.cache_limits import CacheLimits, choose_limits, layer_caches
from baton.engine.execution.elastic_cache import ElasticCache, ElasticPlan, memory_of
from baton.engine.execution.graphs import largest_graph
from baton.engine.execution.image_encoder import rehearse
from baton.engine.execution.kept_cache import (
    Keep,
    KeptCache,
    Measured,
    can_keep,
    kept_cache,
    measured,
    releasable_cache,
)
from baton.engine.execution.load_weights import load_weights
from baton.engine.execution.memory_sizing import MemoryUse, PoolSize, memory_for, size_pool
from baton.engine.execution.numerics import numerics_of
from baton.engine.execution.rank_memory import RankMemory, Releasable
from baton.engine.execution.runner import ModelRunner
from baton.engine.execution.shared_weights import SharedWeights
from baton.engine.execution.threads import set_threads
from baton.engine.execution.warmup import (
    Rehearsal,
    TimedStep,
    first_steps,
    measure_steps,
    measure_times,
    rehearsal_in,
    warm_up,
)
from baton.engine.kernels import kernels_for
from baton.engine.layers.ranks import Ranks
from baton.engine.layers.weights import Checkpoint, PlainFormat
from baton.engine.loader import draft_head, open_checkpoint, planned_format
from baton.engine.loader.draft_heads import FoundHead
from baton.engine.loader.live_weights import LoadedModel
from baton.engine.model_config import ModelConfig
from baton.engine.models.cache_spec import CacheSpec
from baton.kv_names import content_root
from baton.kv_names.cache_kinds import CacheArray
from baton.steps.step_model import StepModel
from baton.vision.embeddings import EmbeddingFormat
from baton.vision.encoder import Encoder

log = logging.getLogger(__name__)
T = TypeVar("T")

MEASURED = 0.05
"""Share of the time of the start that it may take to measure what steps cost, beside three of them."""
MEASURED_ON_CPU, MOST_MEASURED = 0.5, 1.0
"""Share of the time of the start that a prompt may take on a CPU, and at most so many seconds. Its start has
less to do, so the share is larger."""


@dataclass(frozen=True, slots=True)
class Started:
    """A rank that is ready."""

    runner: ModelRunner
    model_config: ModelConfig
    """The shape of the whole model. `max_model_len` is what the KV cache allows."""
    model_fingerprint: str
    content_root: Callable[[str], bytes]
    """By the fingerprint of the model: the root of all that KV depends on beside the tokens and their salt
    (`kv_names`)."""
    numerics: str
    """What bits depend on beside the model. Empty: they also depend on the batch (`numerics_of`)."""
    source: str
    """The checkpoint's file or directory."""
    cache_spec: Sequence[CacheSpec]
    """What each layer caches on this rank."""
    cache_arrays: Sequence[Sequence[CacheArray]]
    """What each layer caches over all ranks."""
    pool: PoolSize
    loaded: LoadedModel
    """The model, whose weights can be replaced."""
    encoder: Encoder | None
    """Of images. None: the model takes none, transformers is not installed, other workers encode, or this is
    not rank 0."""
    embeddings: EmbeddingFormat | None
    """Of images that other workers encode. None: they encode none."""
    steps: StepModel | None
    """What steps cost, as far as it was measured. None: on a CPU."""
    first_steps: Sequence[TimedStep]
    """Of a CPU, from which it learns what steps cost. Empty on a GPU."""
    kept: KeptCache | None
    """The memory of KV that outlives this engine. None: it ends with the engine."""
    memory: RankMemory
    """What can be given back to the device."""


def start_rank(
    config: EngineConfig,
    device: torch.device,
    ranks: Ranks,
    progress: Callable[[str, float], None],
    keep: Keep,
) -> Started:
    """Loads this rank's part of the model and makes it ready. Raises `ValueError` for mistakes that the user
    can mend. `progress(stage, fraction)` tells how far the start is. `keep`: memory for KV that outlives the
    engine, if such a cache can be kept. An engine that waits for its turn loads weights at a low priority
    before. On a GPU it does all but to map and verify KV before, if the one before has left what it measured;
    else it takes no memory of the GPU before."""
    began = time.monotonic()
    set_threads(config, ranks)
    on_gpu = device.type == "cuda"
    wait_for_turn = keep.wait_for_turn or _nothing
    known = _known(keep, ranks) if on_gpu else None
    if on_gpu and known is None:
        wait_for_turn()
        wait_for_turn = _nothing
    checkpoint = open_checkpoint(config, device, progress)
    checkpoint.config.check_step(config.max_num_batched_tokens, config.max_num_seqs)
    stands_by = wait_for_turn is not _nothing
    kept_weights = keep.memory[0].weights if keep.memory and config.stands_by else None
    if kept_weights is not None and not stands_by:
        kept_weights.clear()  # an engine before has left them, and no other process has them any more
    loaded = kept_weights is not None and stands_by
    limits, weight_format, head, dequantizes_int8 = _planned(config, checkpoint, device, ranks, loaded=loaded)
    model, drafter, fingerprint, encoder, tower, embeddings, of_weights = load_weights(
        config,
        checkpoint,
        limits,
        weight_format,
        head,
        device,
        ranks,
        progress,
        kept_weights,
        stands_by=stands_by,
    )
    fingerprint = versioned(fingerprint, config.weights_version)
    model_config = replace(checkpoint.config, max_model_len=limits.max_model_len)
    of_model = layer_caches(model_config, limits.dtype, limits.kv_dtype, drafts=head is not None)
    # Where no step is launched before the tokens of the last one are known, drafts cost no step anything. A
    # head needs to know on the device which of them are right.
    looks_ahead = head is not None or (not limits.state_bytes and (on_gpu or bool(config.overlap)))
    runner = ModelRunner(
        model,
        kernels_for(device, model_config.kernel_head_dim, exact=config.batch_invariant),
        model_config.of_rank(ranks.size),
        limits.cache,
        dtype=limits.dtype,
        block_size=limits.block_size,
        max_sampled_rows=config.max_decode_rows,
        device=device,
        ranks=ranks,
        ahead=config.ahead if looks_ahead else 1,
        head=None if drafter is None or head is None else (drafter, head.config.of_rank(ranks.size)),
    )
    encoding = 0
    if on_gpu and encoder is not None and model_config.vision is not None:
        with memory_for(device, "the largest image", "choose a smaller --model"):
            encoding = rehearse(encoder, model_config.vision.settings, device)
    sizing = Sizing(config, runner, limits, model_config, known, progress)
    pool = sizing.pool(encoding, of_weights, keep)
    root_of = partial(
        content_root,
        weight_format=str(limits.dtype),
        kv_dtype=limits.formats,
        numerics=numerics_of(config, limits, weight_format, device) if config.batch_invariant else "",
    )
    share = " or --gpu-memory-utilization" if on_gpu else ""
    with memory_for(device, "the KV pool", f"lower --advanced.num-blocks{share}"):
        kept = kept_cache(keep, config, limits, pool, device, ranks, stands_by=stands_by)
        memory = _elastic_cache(pool.elastic, device) or kept
        memory = memory or releasable_cache(config, limits, pool, device)
        runner.cache.open(
            pool.num_blocks,
            pool.num_slots + pool.num_copies,
            window_blocks=pool.window_blocks,
            memory=memory,
        )
        steps = sizing.rehearsed(pool, kept, began) if on_gpu else None
        cpu_steps = () if on_gpu else sizing.first_steps(pool, began)
        wait_for_turn()
        if keep.memory:
            progress("mapping KV", 0.0)
        _take_over(of_weights, ranks)
        if kept is not None:
            kept.open(root_of(fingerprint), ranks)
            if on_gpu:
                kept.remember(Measured(pool, steps))
        if runner.expert_load is not None:
            runner.expert_load.clear()
    return Started(
        runner,
        replace(model_config, max_model_len=pool.max_model_len),
        fingerprint,
        root_of,
        root_of.keywords["numerics"],
        checkpoint.source,
        limits.cache,
        [layer.arrays for layer in of_model],
        pool,
        LoadedModel(
            config,
            checkpoint.config,
            limits.max_model_len,
            limits.dtype,
            device,
            ranks,
            model,
            drafter,
            tower=tower,
            dequantizes_int8=dequantizes_int8,
            writing=nullcontext if of_weights is None else of_weights.writing,
        ),
        encoder,
        embeddings,
        steps,
        cpu_steps,
        kept,
        RankMemory(_releasable(config, {"kv_cache": memory, "weights": of_weights})),
    )


def _planned(
    config: EngineConfig, checkpoint: Checkpoint, device: torch.device, ranks: Ranks, *, loaded: bool
) -> tuple[CacheLimits, PlainFormat, FoundHead | None, bool]:
    """The limits, the format of the weights, the draft head, and whether integers of 8 bits are dequantized.
    `loaded`: as in `choose_limits`."""
    stored = planned_format(config, checkpoint, device)
    head = draft_head(config, checkpoint, stored)
    limits, kept = choose_limits(
        config, checkpoint.config, stored, device, ranks, drafts=head is not None, loaded=loaded
    )
    if head is not None and head.weight_format is stored:
        head = replace(head, weight_format=kept)
    return limits, kept, head, kept is not stored


def _nothing() -> None:
    pass


def _known(keep: Keep, ranks: Ranks) -> Measured | None:
    """What an engine before has measured. It may have ended before all its ranks had written that."""
    known = measured(keep)
    return known if ranks.minimum(int(known is not None)) else None


def _take_over(of_weights: SharedWeights | None, ranks: Ranks) -> None:
    if of_weights is not None and not ranks.minimum(int(of_weights.take_over())):
        raise ValueError("the weights in memory were changed while this engine process stood by")


@dataclass(frozen=True, slots=True)
class Sizing:
    """How much memory a rank with weights has for KV, and how it computes its first steps."""

    config: EngineConfig
    runner: ModelRunner
    limits: CacheLimits
    model_config: ModelConfig
    known: Measured | None
    """By an engine before, whose KV fills the GPU."""
    progress: Callable[[str, float], None]

    def pool(self, encoding: int, of_weights: SharedWeights | None, keep: Keep) -> PoolSize:
        """`encoding`: bytes of the GPU that the largest image takes. `of_weights`: has the weights."""
        if self.known is not None:
            return self.known.pool
        config, limits, ranks, device = self.config, self.limits, self.runner.ranks, self.runner.device
        use = None
        if device.type == "cuda":
            use = self._measure(encoding)
            if config.stands_by:
                use = replace(use, exchange=ranks.device_bytes)
            if of_weights is not None:
                nbytes, loading = of_weights.nbytes, of_weights.loading_bytes
                use = replace(use, weights=use.weights + nbytes, shared=nbytes, loading=loading)
        moves = moves_memory(config, limits) and not (keep.memory and can_keep(config, limits))
        pages = _pages(device, ranks) if moves else None
        return size_pool(config, self.model_config, limits, use, ranks, pages)

    def rehearsed(self, pool: PoolSize, kept: KeptCache | None, began: float) -> StepModel:
        """Makes a GPU ready for its first step. Returns what steps cost. A process that stands by cannot
        measure it: another one computes beside it. `began`: the start of the rank, time.monotonic()."""
        config, runner, progress = self.config, self.runner, self.progress
        if kept is not None:
            kept.warm_up()
        warm_up(runner, rehearsal_in(pool, config, self.limits.block_size), progress)
        if config.cuda_graphs:
            self.capture()
        if self.known is not None and self.known.steps is not None:
            return self.known.steps
        budget = MEASURED * (time.monotonic() - began)
        return measure_times(runner, config, pool, self.model_config.vocab_size, budget)

    def first_steps(self, pool: PoolSize, began: float) -> Sequence[TimedStep]:
        """What the first steps of a CPU cost. `began`: as in `rehearsed`."""
        budget = min(MOST_MEASURED, MEASURED_ON_CPU * (time.monotonic() - began))
        return first_steps(self.runner, self.config, pool, self.model_config.vocab_size, budget)

    def capture(self) -> None:
        """Modules of transformers may do what no graph can repeat. Then steps run without."""
        config, modules, progress = self.config, self.model_config.modules, self.progress
        try:
            self.runner.capture(
                config.max_num_batched_tokens, lambda done: progress("capturing graphs", done)
            )
        except RuntimeError as error:
            if modules is None or isinstance(error, torch.OutOfMemoryError):
                raise
            name, what = self.model_config.architecture, (str(error) or repr(error)).splitlines()[0]
            log.warning("CUDA graphs cannot capture the modules of %s, so steps run without: %s", name, what)

    def _measure(self, encoding: int) -> MemoryUse:
        """The memory of the largest step beside the weights. All layers of a kind share one small cache
        meanwhile."""
        config, runner, limits = self.config, self.runner, self.limits
        num_slots = config.max_num_seqs if limits.state_bytes else 0
        rehearsal = Rehearsal(config, limits.max_model_len, limits.block_size, num_slots=num_slots)
        device = runner.device
        weights = torch.cuda.memory_allocated(device)
        with memory_for(device, "the largest step", "lower --max-num-batched-tokens or --max-num-seqs"):
            runner.cache.open(rehearsal.num_blocks, num_slots, shared=True)
            most, decode = measure_steps(runner, rehearsal, self.progress)
        runner.cache.close()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        # Where no KV can be kept, the standby takes memory when it is needed.
        stands_by = config.stands_by and can_keep(config, limits)
        graphs = 0
        if config.cuda_graphs:
            # All graphs share one memory pool, which must hold a step of decodes and the largest one with
            # chunks.
            rows = largest_graph(self.model_config.full_step, config.max_num_batched_tokens)
            graphs = decode + most * rows // config.max_num_batched_tokens
        return MemoryUse(
            total, free, weights, most, graphs, config.other_bytes, encoding, stands_by=stands_by
        )


def moves_memory(config: EngineConfig, limits: CacheLimits) -> bool:
    """Whether KV shares its memory with states or window blocks."""
    return config.elastic_memory is not False and bool(limits.state_bytes or limits.windows)


def _pages(device: torch.device, ranks: Ranks) -> int | None:
    """The smallest page that the devices of all ranks can map. None: one of them can map none."""
    try:
        page_bytes = memory_of(device, 1).page_bytes
    except MemoryError as error:
        log.info("states, windows and KV keep the memory that they begin with: %s", error)
        page_bytes = 0
    return ranks.minimum(page_bytes) or None


def _elastic_cache(planned: ElasticPlan | None, device: torch.device) -> ElasticCache | None:
    if planned is None:
        return None
    return ElasticCache(memory_of(device, planned.page_bytes), planned, device)


def _releasable(
    config: EngineConfig, memory: Mapping[MemoryTag, Releasable | None]
) -> Mapping[MemoryTag, Releasable]:
    if not config.enable_memory_saver:
        return {}
    return {tag: owner for tag, owner in memory.items() if owner is not None}
