"""What a layer caches. Pools, memory planning and the layout on the wire read only this."""

from dataclasses import dataclass

import torch

from baton.engine.kernels import FP8, KV, Fp8KV, LayerState
from baton.engine.model_config import Span

SCALE_BYTES = 4
"""Of each K and V vector in FP8."""


@dataclass(frozen=True, slots=True)
class AttentionCache:
    """An attention layer: one K and one V vector for each token and KV head.

    The cache keeps all tokens of a request, also those before the span of its next query."""

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    """Type of the cache, which may be FP8. The weights may have another."""
    span: Span | None = None
    """The keys that a query sees. None: all up to its own."""

    @property
    def bytes_per_token(self) -> int:
        scale = SCALE_BYTES if self.dtype is FP8 else 0
        return 2 * self.num_kv_heads * (self.head_dim * self.dtype.itemsize + scale)

    def allocate(self, num_blocks: int, block_size: int, device: torch.device) -> KV:
        """Returns [2 (K, V), num_blocks, block_size, num_kv_heads, head_dim], not initialised. No kernel
        reads a slot before it is written, and the system maps a page only when it is first written."""
        heads = self.num_kv_heads
        shape = (2, num_blocks, block_size, heads, self.head_dim)
        values = torch.empty(shape, dtype=self.dtype, device=device)
        if self.dtype is not FP8:
            return values
        return Fp8KV(values, torch.empty((2, num_blocks, heads, block_size), device=device))


@dataclass(frozen=True, slots=True)
class StateCache:
    """A layer with a state of fixed size for each request (`engine.kernels.state.mamba2`)."""

    conv_inputs: int
    """Inputs of the convolution that a request keeps."""
    channels: int
    num_heads: int
    head_dim: int
    state_size: int
    dtype: torch.dtype
    """Of the inputs of the convolution. The state of a head is float32: rounding it would add up over the
    tokens."""

    @property
    def bytes_per_request(self) -> int:
        ssm = self.num_heads * self.head_dim * self.state_size
        return self.conv_inputs * self.channels * self.dtype.itemsize + ssm * torch.float32.itemsize

    def allocate(self, num_slots: int, device: torch.device) -> LayerState:
        """Returns the states of `num_slots` requests, not initialised: no kernel reads what an earlier
        request left."""
        conv = torch.empty(num_slots, self.conv_inputs, self.channels, dtype=self.dtype, device=device)
        heads = num_slots, self.num_heads, self.head_dim, self.state_size
        return LayerState(conv, torch.empty(heads, device=device))


CacheSpec = AttentionCache | StateCache
