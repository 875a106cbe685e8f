"""What a cache may be, before the weights are loaded: its types, block size and context length."""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch

from baton.engine.api.config import EngineConfig, check_max_model_len
from baton.engine.kernels import FP8
from baton.engine.layers.ranks import Ranks
from baton.engine.layers.weights import PlainFormat
from baton.engine.loader.families import cache_spec
from baton.engine.model_config import ModelConfig
from baton.engine.models import cache_bytes_per_token, state_bytes_per_request, windows_of
from baton.engine.models.cache_spec import AttentionCache, CacheSpec, IndexedLatentCache
from baton.kv_names.cache_kinds import HEAD_STATE, Window, window_blocks
from baton.system import available_memory

log = logging.getLogger(__name__)

GIB, MIB = 1 << 30, 1 << 20
CPU_POOL_BYTES = 1 * GIB
"""KV pool on a CPU. The system maps its pages only when they are first written."""
CUDA_BYTES = 1 * GIB
"""For the CUDA context and the code of kernels: half a GiB and more, which torch's allocator does not count.
It is not measured, because other processes may allocate memory during the measurement."""
STEP_BYTES = 4 * GIB
"""Of a GPU, for activations, graphs and CUDA itself, where they are not measured yet. Measured with models of
8B: 3.7 to 3.9 GiB."""
TOKENS_OF_WINDOW = 4096
"""In a pool of fixed size, layers with windows have room for the window of one request in so many tokens,
whether the request runs or is in the prefix cache. So the cache keeps as many ends of prompts of 2,000 tokens
as without windows, and prompts of 8,000 tokens have more seats. Memory that moves needs no such number."""
TOKENS_BESIDE_STATES = 2048
"""Each request with states must find room for so many tokens of KV. This bounds the number of state slots."""


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """The part of the cache's configuration that is known before the weights are loaded."""

    dtype: torch.dtype
    """Of the weights and activations."""
    block_size: int
    max_model_len: int
    """The configured context length. Default: the model's, or what the largest possible pool here holds."""
    cache: Sequence[CacheSpec]
    """What each layer caches on this rank."""

    @property
    def token_bytes(self) -> int:
        """Bytes of KV for one token on this rank, in all layers."""
        return cache_bytes_per_token(self.cache)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one request on this rank, in all layers."""
        return state_bytes_per_request(self.cache)

    @property
    def block_bytes(self) -> int:
        """Of the layers that the block pool is for."""
        return self.block_size * (self.token_bytes - self.window_token_bytes)

    @property
    def windows(self) -> Collection[Window]:
        """Those of layers that have blocks of their own. Layers with states have those of all layers beside
        them, and so do layers with windows if no other layer has KV."""
        windowed = cache_bytes_per_token(self.cache, windowed=True)
        if self.state_bytes or windowed == self.token_bytes:
            return ()
        return windows_of(layer.arrays for layer in self.cache)

    @property
    def window_token_bytes(self) -> int:
        """The part of `token_bytes` in layers that have blocks of their own."""
        return cache_bytes_per_token(self.cache, windowed=True) if self.windows else 0

    @property
    def min_kv_bytes(self) -> int:
        """Fewest bytes of KV for which a request with states must find room."""
        return min(self.max_model_len, TOKENS_BESIDE_STATES) * self.token_bytes

    def window_blocks(self, num_blocks: int, step_tokens: int) -> int | None:
        """Blocks of layers with windows beside so many others. None: as many. `step_tokens`: most tokens of a
        step."""
        if not self.windows:
            return None
        fixed, share, tokens = self._of_windows(step_tokens)
        count = fixed + num_blocks * share // tokens
        return count if count < num_blocks else None

    def blocks_in(self, room: int, step_tokens: int) -> int:
        """How many blocks so many bytes hold, with those of layers with windows."""
        most = room // (self.block_size * self.token_bytes)
        if not self.windows:
            return most
        window_bytes = self.block_size * self.window_token_bytes
        fixed, share, tokens = self._of_windows(step_tokens)
        return max(
            most, (room - fixed * window_bytes) * tokens // (self.block_bytes * tokens + window_bytes * share)
        )

    def pool_bytes(self, num_blocks: int, window_blocks: int | None) -> int:
        """Of so many blocks, and of those of layers with windows."""
        count = num_blocks if window_blocks is None else window_blocks
        return num_blocks * self.block_bytes + count * self.block_size * self.window_token_bytes

    def _of_windows(self, step_tokens: int) -> tuple[int, int, int]:
        """Blocks of layers with windows: for the largest step and one request, with the one that stands for
        none; and beyond these, how many for how many blocks of other layers."""
        share = window_blocks(self.windows, self.block_size) * self.block_size
        return self.min_window_blocks(step_tokens), share, min(self.max_model_len, TOKENS_OF_WINDOW)

    def min_window_blocks(self, step_tokens: int) -> int:
        """For the largest step and one request, with the one that stands for none."""
        most = window_blocks(self.windows, self.block_size)
        return 1 + -(-step_tokens // self.block_size) + most

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of what each token has: as `dtype`, or FP8."""
        arrays = (array for layer in self.cache for array in layer.arrays)
        return getattr(torch, next(x.dtype for x in arrays if x.per_token and x.kind.converts))

    @property
    def formats(self) -> str:
        """The dtype of what each token has, and that of states if it is not float32: what is cached depends
        on both."""
        states = {a.dtype for layer in self.cache for a in layer.arrays if a.kind == HEAD_STATE}
        return " ".join([str(self.kv_dtype), *sorted(states - {"float32"})])


def choose_limits(
    config: EngineConfig,
    model: ModelConfig,
    weight_format: PlainFormat,
    device: torch.device,
    ranks: Ranks,
    *,
    drafts: bool,
    loaded: bool,
) -> tuple[CacheLimits, PlainFormat]:
    """The limits for this model, equal on all ranks, and the format in which its weights are kept. Raises
    `ValueError` naming the flag that does not fit.

    `device` is that of this rank. `drafts`: the model has a draft head, which caches what a layer caches.
    `loaded`: an engine before has left the weights in memory that this one shares, so they need no other."""
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {config.device}: no CUDA device here; use --device cpu")
    dtype = choose_dtype(config, model, weight_format, device)
    block_size = config.block_size or (128 if device.type == "cuda" else 16)
    max_model_len = config.max_model_len or model.max_model_len
    check_max_model_len(max_model_len, model.max_model_len)
    if config.enable_expert_parallel:
        model.check_expert_parallel(ranks.size)
    kv_dtype = choose_kv_dtype(config, dtype, device)
    cache = layer_caches(model.of_rank(ranks.size), dtype, kv_dtype, drafts=drafts)
    most_bytes = CPU_POOL_BYTES // ranks.size
    limits = CacheLimits(dtype, block_size, max_model_len, cache)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        most_bytes = ranks.minimum(total)
        weight_format = kept_format(config, model, weight_format, limits, most_bytes)
        weights = weight_bytes(model, weight_format, dtype)
        check_weights_fit(config, weights // ranks.size, total if loaded else free, total)
    elif (weights := weight_bytes(model, weight_format, dtype)) > (free := available_memory()) and not loaded:
        raise ValueError(
            f"--model {config.model}: its weights take {gib(weights)} in {dtype}, and {gib(free)} of memory "
            "are available; free some, or choose a smaller model or --dtype"
        )
    states = f"; states: {_states(model, limits)}" if limits.state_bytes else ""
    log.info(
        "weights: %s, %s, %s; KV: %s, %d bytes a token%s",
        weight_format.name, dtype, gib(weights // ranks.size), limits.kv_dtype, limits.token_bytes, states,
    )  # fmt: skip
    bytes_each = limits.token_bytes - limits.window_token_bytes
    capacity = config.num_blocks * block_size if config.num_blocks else most_bytes // bytes_each
    if not config.max_model_len:
        limits = replace(limits, max_model_len=min(max_model_len, capacity))
    return limits, weight_format


def weight_bytes(model: ModelConfig, weight_format: PlainFormat, dtype: torch.dtype) -> int:
    """Of all ranks."""
    output = weight_format.bytes_per_parameter(dtype, output=True)
    return model.weight_bytes(dtype.itemsize, output, weight_format.matrix_bytes(model, dtype))


def kept_format(
    config: EngineConfig, model: ModelConfig, weight_format: PlainFormat, limits: CacheLimits, total: int
) -> PlainFormat:
    """How a GPU of `total` bytes keeps the weights: integers of 8 bits packed only if they would else leave
    no room for the KV of one longest request, since products with packed ones are slower. The exact mode
    has no such product.

    `baton serve` chooses the fewest GPUs that hold the packed weights and as much KV. The free memory does
    not count: engine processes on one GPU share weights, which need one format."""
    plain = weight_format.with_int8_dequantized()
    blocks = config.num_blocks or -(-limits.max_model_len // limits.block_size)
    kv = limits.pool_bytes(blocks, limits.window_blocks(blocks, config.max_num_batched_tokens))
    weights = weight_bytes(model, plain, limits.dtype) // config.tensor_parallel_size
    steps = config.other_bytes + STEP_BYTES * (2 if config.stands_by else 1)
    fits = weights + steps + kv + limits.state_bytes <= int(config.gpu_memory_utilization * total)
    return plain if fits or config.batch_invariant else weight_format


def _states(model: ModelConfig, limits: CacheLimits) -> str:
    """What is said of states at the start."""
    size, shape = f"{limits.state_bytes / MIB:.1f} MiB a request", model.state
    if shape is None or not shape.state_size:
        return size
    said = f"{shape.dtype}, {size}"
    if shape.says_dtype:
        return said
    specs = (
        cache_spec(replace(model, state=replace(shape, dtype=dtype)), limits.dtype, limits.kv_dtype)
        for dtype in (shape.dtype, "bfloat16")
    )
    whole, less = map(state_bytes_per_request, specs)
    remedy = f"--advanced.state-dtype bfloat16 would take {less / whole:.0%} of it"
    return f"{said} (the checkpoint names no dtype; {remedy})"


def layer_caches(
    model: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype, *, drafts: bool
) -> Sequence[CacheSpec]:
    """What each layer of a model of this shape caches, and the layer of its draft head."""
    cache = cache_spec(model, dtype, kv_dtype)
    if not drafts:
        return cache
    if isinstance(cache[0], IndexedLatentCache):
        return *cache, cache[0]  # the head has an index, which the last layer may lack
    attention = next(layer for layer in reversed(cache) if isinstance(layer, AttentionCache))
    return *cache, replace(attention, span=None)


def choose_dtype(
    config: EngineConfig, model: ModelConfig, weight_format: PlainFormat, device: torch.device
) -> torch.dtype:
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    # A CPU computes slowly in float16, in which many quantized checkpoints have their other weights.
    slow = model.dtype == "float16" and weight_format.identity and device.type == "cpu"
    if model.dtype in ("float32", "bfloat16", "float16") and not slow:
        return getattr(torch, model.dtype)
    return torch.bfloat16 if device.type == "cuda" or weight_format.identity else torch.float32


def choose_kv_dtype(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type of the KV cache of a model that computes in `dtype`."""
    if config.kv_cache_dtype == "auto":
        return dtype
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < (8, 9):
        raise ValueError(
            f"--kv-cache-dtype fp8: GPUs of compute capability {capability[0]}.{capability[1]} cannot read "
            "FP8, those from 8.9 on can; leave the flag out"
        )
    return FP8


def check_weights_fit(config: EngineConfig, weights: int, free: int, total: int) -> None:
    """Raises `ValueError` if the weights cannot fit the GPU: before minutes of loading."""
    may = int(config.gpu_memory_utilization * total) - CUDA_BYTES
    if weights > min(may, free):
        raise ValueError(
            f"--model {config.model}: its weights take {gib(weights)}; of the GPU's {gib(total)} "
            f"{gib(free)} are free, and --gpu-memory-utilization {config.gpu_memory_utilization} allows "
            f"{gib(may)}. Free some, raise that, or choose a smaller model or --dtype"
        )


def gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
