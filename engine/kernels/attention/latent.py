"""Multi-head latent attention (DeepSeek-V2, 2024): plain torch that defines it and runs on a CPU.

The cache of a layer is [1, num_blocks, block_size, heads, head_dim], plain or in FP8 (`paged`). Together the
heads of a token are a latent c of `rank` numbers, and the rotated part r of the key that all query heads
share. Query head h makes its key and its value of them:

    k(h) = (up_k(h) c, r) = keys(h) (c, r)        v(h) = values(h) c

So there are two ways to the same result, which differ by rounding only:

    expanded    keys and values of all heads are made of the latents; then each head attends for itself
    absorbed    q · k = keysᵀ q · (c, r), and Σ p v = values Σ p c. So all query heads attend to one key
                (c, r), and its value is c: the cache is read as it is

A decode is absorbed: it is bound by reading the cache. A chunk of a prompt is expanded from
`LatentConfig.min_expanded_queries` on: its products of queries and keys are smaller, and pay for making keys
and values.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.kernels.attention.paged import (
    KV,
    PrefillGroup,
    TorchTiling,
    attend,
    decode_group,
    gathered,
    prefill_group,
)
from baton.engine.kernels.quantized.reference import quantize
from baton.engine.model_config import LatentConfig


class LatentHeads(NamedTuple):
    """Weights that make the keys and values of a rank's heads of what the cache has for a token."""

    keys: Tensor  # [heads, key_dim, rank + rope_dim], of (c, r)
    values: Tensor  # [heads, value_dim, rank], of c
    scale: float  # multiplies the products of queries and keys

    @staticmethod
    def of(up: Tensor, shape: LatentConfig) -> "LatentHeads":
        """From up [heads, nope_dim + value_dim, rank]. The rows of `keys` are up_k, then the identity, which
        gives r, and then zeros."""
        nope, rope = shape.nope_dim, shape.rope_dim
        keys = up.new_zeros(len(up), shape.key_dim, shape.size)
        keys[:, :nope, : shape.rank] = up[:, :nope]
        keys[:, nope : nope + rope, shape.rank :] = torch.eye(rope)
        return LatentHeads(keys, up[:, nope:].contiguous(), shape.scale)

    def absorb(self, q: Tensor) -> Tensor:
        """q [tokens, heads, nope_dim + rope_dim] → [tokens, heads, rank + rope_dim]: queries of the cache."""
        return torch.bmm(q.transpose(0, 1), self.keys[:, : q.shape[2]]).transpose(0, 1)

    def values_of(self, latents: Tensor) -> Tensor:
        """Weighted sums of latents [tokens, heads, rank] → of values [tokens, heads, value_dim]."""
        return torch.bmm(latents.transpose(0, 1), self.values.mT).transpose(0, 1)

    def expand(self, cached: Tensor, key_dim: int) -> tuple[Tensor, Tensor]:
        """[positions, rank + rope_dim] → keys [positions, heads, key_dim], without the zeros, and values
        [positions, heads, value_dim]."""
        heads, _, rank = self.values.shape
        keys = F.linear(cached, self.keys[:, :key_dim].flatten(0, 1))
        values = F.linear(cached[:, :rank], self.values.flatten(0, 1))
        return keys.unflatten(1, (heads, -1)), values.unflatten(1, (heads, -1))


class LatentNorm(NamedTuple):
    weight: Tensor  # [rank]
    eps: float


@dataclass(slots=True)
class LatentTiling:
    """The tiling for `latent_attention`, the same for all layers of a step."""

    groups: TorchTiling
    """Where a model has an index: with masks of what the newest layer with an index chose."""
    min_expanded_queries: float
    """Queries of a group; ∞ in the exact mode: all are absorbed."""
    unmasked: TorchTiling
    """What the queries may choose from."""
    most_chosen: int | None
    """As in `IndexConfig`. None: the model has no index."""


def write_latent(
    q: Tensor, latent: Tensor, shared: Tensor, norm: LatentNorm, rotary: Tensor, kv: KV, slots: Tensor
) -> None:
    """Rotates the last `rope_dim` numbers of each head of q [tokens, heads, …] in place. Writes to the cache
    the norm of latent [tokens, rank], and shared [tokens, rope_dim], rotated: the part of the keys that all
    heads share.

    Rows of these three may be apart. Neighbours are a pair that is rotated. rotary is `Rotary.at(positions)`;
    slots [tokens] int64."""
    latent = F.rms_norm(latent, norm.weight.shape, norm.weight, norm.eps)
    size = shared.shape[1]
    cos, sin = rotary[:, 0, : size // 2, None].to(q.dtype), rotary[:, 1, size // 2 :, None].to(q.dtype)
    turned = torch.cat((q[..., -size:], shared[:, None]), dim=1).unflatten(2, (-1, 2))
    even, odd = turned[:, :, :, :1], turned[:, :, :, 1:]
    cos, sin = cos[:, None], sin[:, None]
    turned = torch.cat((even * cos - odd * sin, odd * cos + even * sin), dim=3).flatten(2)
    q[..., -size:] = turned[:, :-1]
    written = torch.cat((latent, turned[:, -1]), dim=1)
    if isinstance(kv, Tensor):
        kv.flatten(0, 2).flatten(1).index_copy_(0, slots, written)
        return
    heads, size = kv.values.shape[3:]
    rows, block_size = quantize(written.view(-1, size), grouped=False), kv.values.shape[2]
    kv.values.flatten(0, 2)[slots] = rows.values.view(-1, heads, size)
    kv.scales[0].transpose(1, 2)[slots // block_size, slots % block_size] = rows.scales.view(-1, heads)


def latent_attention(q: Tensor, kv: KV, tiling: LatentTiling, heads: LatentHeads) -> Tensor:
    """See `Kernels.latent_attention`."""
    rank = heads.values.shape[2]
    parts = []
    for group in tiling.groups.decodes:
        latents = decode_group(heads.absorb(q[group.rows]), kv, group, None, heads.scale)
        parts.append(heads.values_of(latents[..., :rank]))
    for group in tiling.groups.prefills:
        if len(q[group.rows]) >= tiling.min_expanded_queries:
            parts.append(_expanded(q[group.rows], kv, group, heads))
        else:
            parts.append(_absorbed(q[group.rows], kv, group, heads))
    return torch.cat(parts)  # dense rows, also of one part and one head


def _absorbed(q: Tensor, kv: KV, group: PrefillGroup, heads: LatentHeads) -> Tensor:
    """The products have the padded queries, as attention has. So in the exact mode their shapes depend on the
    position alone."""
    rows, padded = (
        slice(group.before, group.before + len(q)),
        len(q) if group.mask is None else len(group.mask),
    )
    q = F.pad(q, (0, 0, 0, 0, group.before, padded - rows.stop))
    latents = prefill_group(heads.absorb(q), kv, replace(group, before=0), None, heads.scale)
    return heads.values_of(latents[..., : heads.values.shape[2]])[rows]


def _expanded(q: Tensor, kv: KV, group: PrefillGroup, heads: LatentHeads) -> Tensor:
    seen = gathered(kv, group.blocks, q.dtype).flatten(0, 2).flatten(1)[: group.padded]
    seen[group.length :] = 0
    keys, values = heads.expand(seen, q.shape[2])
    size = values.shape[2]
    values = F.pad(values, (0, keys.shape[2] - size))  # the kernel takes keys and values of one size
    q, keys, values = (x.transpose(0, 1)[None] for x in (q, keys, values))
    return attend(q, keys, values, group.mask, None, heads.scale)[0].transpose(0, 1)[..., :size]
