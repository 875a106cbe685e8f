"""Sizes the cache once the weights are loaded: the number of KV blocks and states, and the context length.

choose_limits (`cache_limits`) ─▶ load the weights ─▶ measure a step (`warmup`) ─▶ size_pool
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from baton.engine.api.config import EngineConfig, TierCells
from baton.engine.api.pools import Pool
from baton.engine.execution.cache_limits import CPU_POOL_BYTES, CUDA_BYTES, GIB, MIB, CacheLimits, gib
from baton.engine.execution.elastic_cache import ElasticPlan, PoolPlan, page_size, plan
from baton.engine.layers.ranks import Ranks
from baton.engine.model_config import ModelConfig
from baton.engine.models import cache_bytes_per_token, state_bytes_per_request
from baton.engine.models.cache_spec import CacheSpec
from baton.system.kept_pages import MOST_PAGES

log = logging.getLogger(__name__)

COPY_TOKENS = 2048
"""Positions between two copies of the states of a request that the prefix cache keeps."""
COPY_SHARE = 0.25
"""Largest share of memory for copies of states: of what is left beside the states of requests, and
`TOKENS_BESIDE_STATES` tokens of KV for each request."""
_HOST_ALLOCATOR = "DefaultCPUAllocator"
"""In the text of a `RuntimeError` of torch without memory of the host: it has no class of its own."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of one GPU, once the weights are loaded. All but `total` and `free` are this engine's."""

    total: int
    free: int
    """Allocated by no process."""
    weights: int
    activations: int
    """Peak of the largest step, sampling included."""
    graphs: int
    """What the captured graphs will keep."""
    other: int = 0
    """As `EngineConfig.other_bytes`."""
    encoder: int = 0
    """Peak of the encoder of images, beside its weights."""
    stands_by: bool = False
    """As `EngineConfig.stands_by`."""
    shared: int = 0
    """Weights that the process which stands by has in the same memory."""
    loading: int = 0
    """Peak of that process while it loads weights, beside these."""

    exchange: int = 0
    """What that process takes from its start, to exchange tensors with other ranks."""

    @property
    def standby(self) -> int:
        """Bytes of the standby: those of this engine, without KV and the weights that both share."""
        if not self.stands_by:
            return self.exchange
        steps = self.weights - self.shared + self.activations + self.graphs + self.encoder
        return CUDA_BYTES + self.exchange + max(self.loading, steps)

    def room(self, share: float) -> int:
        """Bytes for KV if this process may use `share` of the GPU. Less if other processes leave less."""
        usable = min(int(share * self.total) - CUDA_BYTES - self.weights, self.free)
        room = usable - self.activations - self.graphs - self.other - self.encoder - self.standby
        return room * MOST_PAGES // (MOST_PAGES + 1) if self.stands_by else room

    def __str__(self) -> str:
        return (
            f"weights {gib(self.weights)}, activations of the largest step {gib(self.activations)}, "
            f"CUDA graphs {gib(self.graphs)}, CUDA itself {gib(CUDA_BYTES)}"
            + (f", outside the engine {gib(self.other)}" if self.other else "")
            + (f", the largest image {gib(self.encoder)}" if self.encoder else "")
            + (f", the standby {gib(self.standby)}" if self.stands_by else "")
        )


@dataclass(frozen=True, slots=True)
class PoolSize:
    num_blocks: int
    max_model_len: int
    num_slots: int = 0
    """Requests that have states at the same time. 0: no layer has states."""
    num_copies: int = 0
    """Copies of states for the prefix cache, in the slots behind those of the requests."""
    window_blocks: int | None = None
    """Blocks of layers with windows, and one that stands for none. None: they have those of all layers."""
    elastic: ElasticPlan | None = None
    """Blocks share memory with slots or window blocks, and the numbers above are the most that there could
    ever be of each. None: all have memory of their own."""

    def of(self, pool: Pool) -> PoolPlan:
        """Without copies of states."""
        if self.elastic is not None:
            return self.elastic.of(pool)
        places = (self.num_blocks, self.num_slots, self.window_blocks or 0)[pool]
        return PoolPlan(places, unit=max(1, places), present=places)


def size_pool(
    config: EngineConfig,
    model: ModelConfig,
    limits: CacheLimits,
    use: MemoryUse | None,
    ranks: Ranks,
    page_bytes: int | None = None,
) -> PoolSize:
    """Divides the room for the cache. The states of all requests of a step come first, each with some KV
    beside them. Copies of states get a share of what is left, and the KV pool gets the rest.
    `--advanced.num-blocks` fixes the KV pool instead. If the device can map pages of `page_bytes`, this is
    only how states, windows and KV begin.

    The rank with the least room decides for all. `use` None: on a CPU. Raises `ValueError` with the memory
    that each part needs."""
    share, step_tokens = config.gpu_memory_utilization, config.max_num_batched_tokens
    elastic: ElasticPlan | None = None
    room = CPU_POOL_BYTES // ranks.size if use is None else ranks.minimum(use.room(share))
    if config.num_blocks is None:
        num_slots = _num_slots(config, limits, room)
        room -= num_slots * limits.state_bytes
        num_copies = _num_copies(config, limits, room - num_slots * limits.min_kv_bytes)
        num_blocks = limits.blocks_in(room - num_copies * limits.state_bytes, step_tokens)
        if page_bytes is not None and (num_slots or limits.windows):
            elastic = _elastic(config, limits, room + num_slots * limits.state_bytes, page_bytes, use)
    else:
        num_slots = _most_slots(config) if limits.state_bytes else 0
        num_blocks = config.num_blocks
        windows = limits.window_blocks(num_blocks, step_tokens)
        taken = num_slots * limits.state_bytes + limits.pool_bytes(num_blocks, windows)
        num_copies = _num_copies(config, limits, room - taken)
        if use is not None and taken > (gpu_room := ranks.minimum(use.room(1.0))):
            raise _blocks_do_not_fit(config, limits, use, num_slots, gpu_room)
    if elastic is not None:
        num_blocks, num_slots = elastic.blocks.places, elastic.slots.places
        num_copies = elastic.copies.places
    capacity = max(0, num_blocks) * limits.block_size
    if capacity < (config.max_model_len or 1):
        raise _no_request_fits(config, limits, use, capacity)
    windows = limits.window_blocks(num_blocks, step_tokens)
    if elastic is not None:
        windows = elastic.windows.places or None
    max_model_len = min(limits.max_model_len, capacity)
    size = PoolSize(num_blocks, max_model_len, num_slots, num_copies, windows, elastic)
    _log(config, model, limits, use, size)
    return size


def _elastic(
    config: EngineConfig, limits: CacheLimits, room: int, page_bytes: int, use: MemoryUse | None
) -> ElasticPlan | None:
    """None: the room is too small to be divided anew."""
    most_slots = most_copies = 0
    if limits.state_bytes:
        most_slots = _most_slots(config)
        if config.enable_prefix_caching:
            most_copies = max(2, int(COPY_SHARE * room) // limits.state_bytes)
    return plan(
        limits.cache,
        limits.block_size,
        room,
        page_size(page_bytes, room, on_gpu=use is not None),
        most_slots=most_slots,
        most_copies=most_copies,
        min_blocks=-(-limits.min_kv_bytes // limits.block_bytes),
        min_windows=limits.min_window_blocks(config.max_num_batched_tokens) if limits.windows else 0,
    )


def tier_places(
    config: EngineConfig, pool: PoolSize, cache: Sequence[CacheSpec], block_size: int, ranks: int
) -> dict[TierCells, int]:
    """How many blocks, and how many copies of states, each tier below the device has room for. There are as
    many positions for each copy as on the device, but no fewer than between two copies of a request. A tier
    that has no room for two copies is left out."""
    token_bytes, state_bytes = cache_bytes_per_token(cache) * ranks, state_bytes_per_request(cache) * ranks
    positions = max(COPY_TOKENS, pool.num_blocks * block_size // max(1, pool.num_copies))
    places: dict[TierCells, int] = {}
    for tier, size in config.offload_sizes.items():
        copies = size // (positions * token_bytes + state_bytes) if pool.num_copies else 0
        blocks = (size - copies * state_bytes) // (block_size * token_bytes)
        if state_bytes and copies > 1:
            places |= {TierCells(tier, False): blocks, TierCells(tier, True): copies}
        elif blocks and not state_bytes:
            places[TierCells(tier, False)] = blocks
    return places


def _most_slots(config: EngineConfig) -> int:
    """States for all requests of a step, and those before their drafts."""
    return config.max_num_seqs * (1 if config.speculative_config is None else 2)


def _num_slots(config: EngineConfig, limits: CacheLimits, room: int) -> int:
    """States for all requests of a step, if there is room for them and for some KV of each."""
    if not limits.state_bytes:
        return 0
    num_slots = min(_most_slots(config), room // (limits.state_bytes + limits.min_kv_bytes))
    if num_slots < 1:
        raise ValueError(
            f"the states of one request take {limits.state_bytes / MIB:.1f} MiB, and its KV beside them "
            f"{limits.min_kv_bytes / MIB:.1f} MiB; there is room for {max(0, room) / MIB:.1f} MiB. Choose a "
            "smaller model"
        )
    return num_slots


def _num_copies(config: EngineConfig, limits: CacheLimits, room: int) -> int:
    """Copies of states for the prefix cache. `room`: bytes that requests could do without. Each copy
    belongs to the last block before it, so there are no more copies than blocks."""
    if not limits.state_bytes or not config.enable_prefix_caching:
        return 0
    blocks = config.num_blocks or room // (limits.block_bytes + limits.state_bytes)
    return max(0, min(int(COPY_SHARE * room) // limits.state_bytes, blocks))


def _blocks_do_not_fit(
    config: EngineConfig, limits: CacheLimits, use: MemoryUse, num_slots: int, room: int
) -> ValueError:
    """`room`: for states and KV, with all of the GPU."""
    assert config.num_blocks is not None
    room = max(0, room - num_slots * limits.state_bytes)
    states = f" beside the states of {num_slots} requests" if num_slots else ""
    step_tokens = config.max_num_batched_tokens
    windowed = limits.window_blocks(config.num_blocks, step_tokens)
    return ValueError(
        f"--advanced.num-blocks {config.num_blocks}: "
        f"{gib(limits.pool_bytes(config.num_blocks, windowed))} of KV, and there is room for "
        f"{gib(room)}, {limits.blocks_in(room, step_tokens)} blocks{states}. "
        f"{_needs(config, use)}"
    )


def _no_request_fits(
    config: EngineConfig, limits: CacheLimits, use: MemoryUse | None, capacity: int
) -> ValueError:
    """`capacity`: tokens of the KV pool."""
    remedy = "lower --max-num-batched-tokens or --max-num-seqs, or choose a smaller model"
    if config.num_blocks or use is None:
        remedy = "raise --advanced.num-blocks"
    elif config.gpu_memory_utilization < 1:
        remedy = f"raise --gpu-memory-utilization, {remedy}"
    return ValueError(
        f"--max-model-len {limits.max_model_len}: one request of that length needs "
        f"{gib(limits.max_model_len * limits.token_bytes)} of KV, and the KV pool holds {capacity} tokens, "
        f"{gib(capacity * limits.token_bytes)}; lower it, or {remedy}."
        + (f" {_needs(config, use)}" if use else "")
    )


def _log(
    config: EngineConfig, model: ModelConfig, limits: CacheLimits, use: MemoryUse | None, size: PoolSize
) -> None:
    if size.max_model_len < (config.max_model_len or model.max_model_len):
        log.warning("requests can have %d tokens: the model's context of %d does not fit the KV pool",
                    size.max_model_len, model.max_model_len)  # fmt: skip
    states, copies = size.num_slots * limits.state_bytes, size.num_copies * limits.state_bytes
    windows = size.window_blocks

    def other_caches(slots: int, windows: int | None) -> str:
        return f"states of {slots} requests" if windows is None else f"{windows} of layers with windows"

    if (elastic := size.elastic) is not None:
        log.info(
            "memory: %s%s share %s: at most %d blocks of %d, %d tokens, or %s; "
            "%d blocks and %s have memory now",
            f"{use}, " if use else "", "KV and states" if windows is None else "all layers",
            gib(elastic.num_pages * elastic.page_bytes), size.num_blocks, limits.block_size,
            size.num_blocks * limits.block_size, other_caches(size.num_slots, windows),
            elastic.blocks.present, other_caches(elastic.slots.present, windows and elastic.windows.present),
        )  # fmt: skip
        return
    log.info(
        "memory: %sKV pool %s: %d blocks of %d, %d tokens%s%s%s",
        f"{use}, " if use else "", gib(limits.pool_bytes(size.num_blocks, windows)), size.num_blocks,
        limits.block_size, size.num_blocks * limits.block_size,
        f"; layers with windows {windows} blocks" if windows is not None else "",
        f"; states of {size.num_slots} requests {gib(states)}" if states else "",
        f"; {size.num_copies} copies of states {gib(copies)}" if copies else "",
    )  # fmt: skip


@contextmanager
def memory_for(device: torch.device, what: str, remedy: str) -> Iterator[None]:
    """Turns an out-of-memory error, of `device` or of the host, into a `ValueError` with the purpose and the
    remedy."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        of_host = _HOST_ALLOCATOR in str(error)
        if not (of_host or isinstance(error, torch.OutOfMemoryError | MemoryError)):
            raise
        if of_host or device.type != "cuda":
            text = f"no memory is left for {what}; {remedy}, or stop other processes ({error})"
        else:
            free, total = torch.cuda.mem_get_info(device)
            text = (
                f"no GPU memory is left for {what}: {gib(torch.cuda.memory_allocated(device))} are in use "
                f"here, {gib(free)} of {gib(total)} are free; {remedy}, or stop other processes on the GPU "
                f"({error})"
            )
        raise ValueError(text) from error


def _needs(config: EngineConfig, use: MemoryUse) -> str:
    """For error messages: the memory that each part needs."""
    elsewhere = use.total - use.free - use.weights - CUDA_BYTES
    processes = f"; other processes use about {gib(elsewhere)}" if elsewhere > GIB else ""
    return (
        f"Of the GPU's {gib(use.total)}, --gpu-memory-utilization {config.gpu_memory_utilization} allows "
        f"{gib(int(config.gpu_memory_utilization * use.total))}: {use} "
        f"(--max-num-batched-tokens {config.max_num_batched_tokens}, "
        f"--max-num-seqs {config.max_num_seqs}){processes}"
    )
