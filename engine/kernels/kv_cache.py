"""The KV cache of one layer: plain, or in FP8 with a scale for each token and head.

    written    values = x / scale, rounded to FP8;  scale = largest |x| of the head / 448
    read       scores = (q · values of K) · scale of K;  out = Σ (probability · scale of V) · values of V

A scale depends on its token alone. So what a request computes does not depend on other requests, chunks or
block sizes. If a head of a token has NaN or an infinite number, only requests that see this token get NaN.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor


class Fp8KV(NamedTuple):
    """It stands for values times scales."""

    values: Tensor  # [2 (K, V), num_blocks, block_size, num_kv_heads, head_dim] FP8
    scales: Tensor  # [2, num_blocks, num_kv_heads, block_size] float32: attention reads neighbours of a head


KV = Tensor | Fp8KV
"""A plain cache is a tensor in the shape of `Fp8KV.values`."""


def parts(kv: KV) -> tuple[Tensor, Tensor | None]:
    """The values, and the scales if the cache has some."""
    return (kv, None) if isinstance(kv, Tensor) else kv


def gathered(kv: KV, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """New memory with these blocks of a plain cache, or with those of an FP8 cache converted to `dtype`:
    [2, len(blocks), block_size, num_kv_heads, head_dim]."""
    if isinstance(kv, Tensor):
        return kv.index_select(1, blocks)
    scales = kv.scales.index_select(1, blocks).transpose(2, 3)[..., None]
    bits = kv.values.view(torch.uint8).index_select(1, blocks)
    # A table is four times as fast as torch's conversion on a CPU.
    values = _numbers(dtype).index_select(0, bits.flatten().int()).view(bits.shape)
    return values.mul_(scales)


@functools.cache
def _numbers(dtype: torch.dtype) -> Tensor:
    """All FP8 numbers, by their bits."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(dtype)
