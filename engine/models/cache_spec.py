"""What a layer caches, for each kind in `content.cache_kinds`. Pools, memory sizing and the layout on the
wire read only the arrays."""

from dataclasses import dataclass

import torch

from baton.content.cache_kinds import KINDS, CacheArray
from baton.engine.kernels import FP8, KV, Fp8KV, LayerState, parts
from baton.engine.model_config import Span


@dataclass(frozen=True, slots=True)
class AttentionCache:
    """An attention layer: one K and one V vector for each token and KV head, or one latent.

    The cache keeps all tokens of a request, also those before the span of its next query."""

    num_kv_heads: int
    """Of this rank, or the heads of a latent."""
    head_dim: int
    dtype: torch.dtype
    """Type of the cache, which may be FP8. The weights may have another."""
    span: Span | None = None
    """The keys that a query sees. None: all up to its own."""
    kind: str = "attention"
    """A key of `KINDS` with one array."""

    @property
    def rows(self) -> int:
        """K and V, or one latent."""
        rows = KINDS[self.kind].rows
        assert rows is not None, "a kind with KV has one array"
        return rows

    @property
    def arrays(self) -> tuple[CacheArray, ...]:
        return (CacheArray(self.kind, "kv", self.rows, self.num_kv_heads, self.head_dim, _name(self.dtype)),)

    def allocate(self, num_blocks: int, block_size: int, device: torch.device) -> KV:
        """Returns [rows, num_blocks, block_size, num_kv_heads, head_dim], not initialised. No kernel
        reads a slot before it is written, and the system maps a page only when it is first written."""
        heads = self.num_kv_heads
        shape = (self.rows, num_blocks, block_size, heads, self.head_dim)
        values = torch.empty(shape, dtype=self.dtype, device=device)
        if self.dtype is not FP8:
            return values
        return Fp8KV(values, torch.empty((self.rows, num_blocks, heads, block_size), device=device))

    def split(self, kv: KV) -> list[torch.Tensor]:
        """Values, and scales in FP8. They share the memory of `kv`."""
        return [part for part in parts(kv) if part is not None]


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
    dtype: torch.dtype
    """Of the inputs of the convolution. The state of a head is float32: rounding it would add up over the
    tokens."""

    @property
    def arrays(self) -> tuple[CacheArray, ...]:
        """The last inputs of the convolution, and the state of each head."""
        x, each, dtype = self.num_heads * self.head_dim, self.state_size, _name(self.dtype)
        groups = (self.channels - x) // (2 * each)
        return (
            CacheArray("state", "x", self.conv_inputs, self.num_heads, self.head_dim, dtype),
            CacheArray("state", "B", self.conv_inputs, groups, each, dtype),
            CacheArray("state", "C", self.conv_inputs, groups, each, dtype),
            CacheArray("state", "ssm", 1, self.num_heads, self.head_dim * each, "float32"),
        )

    def allocate(self, num_slots: int, device: torch.device) -> LayerState:
        """Returns the states of `num_slots` requests, not initialised: no kernel reads what an earlier
        request left."""
        conv = torch.empty(num_slots, self.conv_inputs, self.channels, dtype=self.dtype, device=device)
        heads = num_slots, self.num_heads, self.head_dim, self.state_size
        return LayerState(conv, torch.empty(heads, device=device))

    def split(self, state: LayerState) -> list[torch.Tensor]:
        """Each array, [slots, rows, heads, head_dim]. They share the memory of `state`."""
        *inputs, _ = self.arrays
        conv = state.conv.split([array.heads * array.head_dim for array in inputs], dim=2)
        parts = [x.unflatten(2, (-1, array.head_dim)) for x, array in zip(conv, inputs, strict=True)]
        return [*parts, state.ssm.flatten(2)[:, None]]


CacheSpec = AttentionCache | StateCache


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
