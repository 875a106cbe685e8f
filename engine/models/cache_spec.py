"""What a layer caches: arrays of the kinds in `kv_names.cache_kinds`, and the tensors that its kernels take
for them. Pools, memory sizing, tiers and the layout on the wire read only the arrays and their `planes`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from baton.engine.api.pools import Pool
from baton.engine.kernels import FP8, KV, Fp8KV, IndexedLatents, LayerState, parts
from baton.engine.model_config import Span
from baton.kv_names.cache_kinds import ATTENTION, HEAD_STATE, INDEX, STATE, CacheArray, CacheKind, Window


class Places(NamedTuple):
    """How much a cache has room for."""

    num_blocks: int
    block_size: int
    num_slots: int = 0
    """Requests, and copies of what layers keep of a request. 0: no layer keeps an array of a request."""
    window_blocks: int | None = None
    """Blocks of layers with windows. None: they have those of all layers."""


class CacheMemory(Protocol):
    """Where a cache lies: `DeviceTensors`, or memory whose pages move (`engine.execution.elastic_cache`)."""

    def tensor(self, pool: Pool, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns [rows, places of the pool, …], not initialised."""
        ...


class DeviceTensors(NamedTuple):
    """Each tensor has memory of torch, for all places."""

    device: torch.device

    def tensor(self, pool: Pool, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=self.device)


class Asked(NamedTuple):
    """A tensor that a layer wants: [rows, places of the pool, …]."""

    pool: Pool
    shape: Sequence[int]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class _Noted:
    """Has no memory, and notes what layers want."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []

    def tensor(self, pool: Pool, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        self.asked.append(Asked(pool, shape, dtype))
        return torch.empty(*shape, dtype=dtype, device="meta")


class CacheSpec(Protocol):
    """What one layer caches on a rank. Specs with the same arrays are alike."""

    @property
    def arrays(self) -> tuple[CacheArray, ...]: ...

    def allocate(self, places: Places, memory: CacheMemory) -> Any:
        """Returns what the kernels of the layer take, not initialised. No kernel reads a place before it is
        written for its request, and the system maps a page only when it is first written."""

    def planes(self, cache: Any) -> Sequence[Sequence[Tensor]]:
        """Of each array, its values, and in FP8 its scales: [rows, blocks, positions of a block, heads,
        head_dim], as `kv_transfer.PagedKV` has them. They share the memory of `cache`, which `allocate`
        returned."""
        ...

    def slots(self, cache: Any) -> Sequence[Tensor]:
        """Tensors [slots, …] that together are the arrays of requests, for copies between slots."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionCache:
    """An attention layer: one K and one V vector for each token and KV head, one latent, or one index key.

    Tokens before the span of the next query are not sent, so another worker may lack them."""

    num_kv_heads: int
    """Of this rank, or the heads of a latent. 1: of an index key."""
    head_dim: int
    dtype: torch.dtype
    """Type of the cache, which may be FP8. The weights may have another."""
    span: Span | None = None
    """The keys that a query sees. None: all up to its own."""
    kind: CacheKind = ATTENTION
    """Or `LATENT` or `INDEX`."""

    @property
    def rows(self) -> int:
        """K and V, or one vector."""
        return 2 if self.kind == ATTENTION else 1

    @property
    def arrays(self) -> tuple[CacheArray, ...]:
        name = "index" if self.kind == INDEX else "kv"
        size = self.rows, self.num_kv_heads, self.head_dim
        window = None if self.span is None else Window(self.span.length, self.span.chunked)
        return (CacheArray(self.kind, name, *size, _name(self.dtype), window),)

    def allocate(self, places: Places, memory: CacheMemory) -> KV:
        """[rows, num_blocks, block_size, num_kv_heads, head_dim]."""
        block_size, heads, num_blocks = places.block_size, self.num_kv_heads, places.num_blocks
        pool = Pool.BLOCKS
        if self.span is not None and places.window_blocks is not None:
            num_blocks, pool = places.window_blocks, Pool.WINDOWS
        values = memory.tensor(pool, (self.rows, num_blocks, block_size, heads, self.head_dim), self.dtype)
        if self.dtype is not FP8:
            return values
        scales = memory.tensor(pool, (self.rows, num_blocks, heads, block_size), torch.float32)
        return Fp8KV(values, scales)

    def planes(self, cache: KV) -> Sequence[Sequence[Tensor]]:
        values, scales = parts(cache)
        return [[values] if scales is None else [values, scales.transpose(2, 3).unsqueeze(4)]]

    def slots(self, cache: KV) -> Sequence[Tensor]:
        return ()


@dataclass(frozen=True, slots=True)
class IndexedLatentCache:
    """A layer with a latent and an index key for each token."""

    latents: AttentionCache
    index: AttentionCache

    @property
    def arrays(self) -> tuple[CacheArray, ...]:
        return self.latents.arrays + self.index.arrays

    def allocate(self, places: Places, memory: CacheMemory) -> IndexedLatents:
        return IndexedLatents(self.latents.allocate(places, memory), self.index.allocate(places, memory))

    def planes(self, cache: IndexedLatents) -> Sequence[Sequence[Tensor]]:
        return [*self.latents.planes(cache.latents), *self.index.planes(cache.index)]

    def slots(self, cache: IndexedLatents) -> Sequence[Tensor]:
        return ()


@dataclass(frozen=True, slots=True)
class SharedCache:
    """An attention layer that reads the cache of another one, and keeps nothing."""

    source: int
    """The layer with the cache."""
    span: Span | None = None
    """As in `AttentionCache`."""

    @property
    def arrays(self) -> tuple[CacheArray, ...]:
        return ()

    def allocate(self, places: Places, memory: CacheMemory) -> None:
        return None

    def planes(self, cache: None) -> Sequence[Sequence[Tensor]]:
        return ()

    def slots(self, cache: None) -> Sequence[Tensor]:
        return ()


@dataclass(frozen=True, slots=True)
class StateCache:
    """A layer with a state of fixed size for each request (`engine.kernels.state.mamba2`)."""

    conv_inputs: int
    """Inputs of the convolution that a request keeps."""
    channels: int
    """Of the convolution: those of the heads (x), then as many of B as of C, which belong to groups of
    heads."""
    num_heads: int
    head_dim: int
    state_size: int
    """0: a layer has the convolution alone, of x."""
    dtype: torch.dtype
    """Of the inputs of the convolution."""
    state_dtype: torch.dtype = torch.float32
    """Of the states of heads. A step computes in float32 and rounds once."""

    @property
    def arrays(self) -> tuple[CacheArray, ...]:
        """The last inputs of the convolution, and the state of each head."""
        x, each, dtype = self.num_heads * self.head_dim, self.state_size, _name(self.dtype)
        inputs = CacheArray(STATE, "x", self.conv_inputs, self.num_heads, self.head_dim, dtype)
        if not each:
            return (inputs,)
        groups = (self.channels - x) // (2 * each)
        return (
            inputs,
            CacheArray(STATE, "B", self.conv_inputs, groups, each, dtype),
            CacheArray(STATE, "C", self.conv_inputs, groups, each, dtype),
            CacheArray(HEAD_STATE, "ssm", 1, self.num_heads, self.head_dim * each, _name(self.state_dtype)),
        )

    def allocate(self, places: Places, memory: CacheMemory) -> LayerState:
        num_slots = places.num_slots
        conv = memory.tensor(Pool.SLOTS, (1, num_slots, self.conv_inputs, self.channels), self.dtype)
        heads = 1, num_slots, self.num_heads, self.head_dim, self.state_size
        return LayerState(conv[0], memory.tensor(Pool.SLOTS, heads, self.state_dtype)[0])

    def planes(self, cache: LayerState) -> Sequence[Sequence[Tensor]]:
        inputs = self.arrays[:3]
        conv = cache.conv.split([array.heads * array.head_dim for array in inputs], dim=2)
        split = [x.unflatten(2, (-1, array.head_dim)) for x, array in zip(conv, inputs, strict=True)]
        heads = [cache.ssm.flatten(2)[:, None]] if self.state_size else []
        return [[of_slots(x)] for x in (*split, *heads)]

    def slots(self, cache: LayerState) -> Sequence[Tensor]:
        return cache if self.state_size else cache[:1]


@dataclass(frozen=True, slots=True)
class ModuleStateCache:
    """A layer with tensors of any shape for each request, which a module of transformers keeps."""

    states: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    """The name, shape and type of each."""

    @property
    def arrays(self) -> tuple[CacheArray, ...]:
        """Those with three dimensions have a matrix for each head. Others have one head."""
        return tuple(
            CacheArray(STATE, name, 1, heads, math.prod(shape) // heads, _name(dtype))
            for name, shape, dtype in self.states
            for heads in (shape[0] if len(shape) > 2 else 1,)
        )

    def allocate(self, places: Places, memory: CacheMemory) -> Sequence[Tensor]:
        slots = 1, places.num_slots
        return [memory.tensor(Pool.SLOTS, (*slots, *shape), dtype)[0] for _, shape, dtype in self.states]

    def planes(self, cache: Sequence[Tensor]) -> Sequence[Sequence[Tensor]]:
        heads = [array.heads for array in self.arrays]
        return [[of_slots(x.view(len(x), 1, n, -1))] for x, n in zip(cache, heads, strict=True)]

    def slots(self, cache: Sequence[Tensor]) -> Sequence[Tensor]:
        return cache


def asked_by(cache: Sequence[CacheSpec], places: Places) -> Sequence[Asked]:
    """All tensors that these layers want for so many places."""
    noted = _Noted()
    for layer in cache:
        layer.allocate(places, noted)
    return noted.asked


def of_slots(x: Tensor) -> Tensor:
    """An array of requests as a plane: [slots, rows, heads, head_dim] → [rows, slots, heads, 1, head_dim]."""
    return x.transpose(0, 1).unsqueeze(3)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
