"""Multi-head latent attention (DeepSeek-V2, 2024): plain torch that defines it and runs on a CPU.

The cache of a layer is [1, num_blocks, block_size, 1, rank + rope_dim]: for each token a latent c, and the
rotated part r of the key that all heads share. Head h makes its key and its value of them:

    k(h) = (up_k(h) c, r)        v(h) = up_v(h) c        up(h) = up_k(h), up_v(h) [nope_dim + value_dim, rank]

So there are two ways to the same result, which differ by rounding only:

    expanded    keys and values of all heads are made of the latents; then each head attends for itself
    absorbed    q · k = (up_kᵀ q_nope, q_rope) · (c, r), and Σ p v = up_v Σ p c. So all query heads attend to
                one key (c, r), and its value is c: the cache is read as it is

A decode is absorbed: it is bound by reading the cache. A chunk of a prompt is expanded from
`LatentConfig.least_expanded` queries on: its products of queries and keys are smaller, and pay for making
keys and values.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.kernels.attention.paged import (
    PrefillGroup,
    TorchPlan,
    attend,
    decode_group,
    gathered,
    prefill_group,
)


class LatentHeads(NamedTuple):
    """What the heads of a rank make of a latent."""

    up: Tensor  # [heads, nope_dim + value_dim, rank]
    nope_dim: int
    scale: float  # multiplies the products of queries and keys

    def absorb(self, q: Tensor) -> Tensor:
        """q [tokens, heads, nope_dim + rope_dim] → [tokens, heads, rank + rope_dim]: queries of the cache."""
        nope, rope = q.split((self.nope_dim, q.shape[2] - self.nope_dim), dim=2)
        queries = torch.bmm(nope.transpose(0, 1), self.up[:, : self.nope_dim])
        return torch.cat((queries.transpose(0, 1), rope), dim=2)

    def values(self, latents: Tensor) -> Tensor:
        """Weighted sums of latents [tokens, heads, rank] → of values [tokens, heads, value_dim]."""
        of_heads = torch.bmm(latents.transpose(0, 1), self.up[:, self.nope_dim :].transpose(1, 2))
        return of_heads.transpose(0, 1)

    def expand(self, cached: Tensor) -> tuple[Tensor, Tensor]:
        """[positions, rank + rope_dim] → keys [positions, heads, nope_dim + rope_dim], and values [positions,
        heads, value_dim]."""
        heads, _, rank = self.up.shape
        made = F.linear(cached[:, :rank], self.up.flatten(0, 1)).unflatten(1, (heads, -1))
        shared = cached[:, None, rank:].expand(-1, heads, -1)
        return torch.cat((made[..., : self.nope_dim], shared), dim=2), made[..., self.nope_dim :]


class LatentPlan(NamedTuple):
    """The plan for `latent_attention`, the same for all layers of a step."""

    groups: TorchPlan
    least_expanded: int


def write_latent(
    q: Tensor, latent: Tensor, shared: Tensor, rotary: Tensor, kv: Tensor, slots: Tensor
) -> None:
    """Rotates the last `rope_dim` numbers of each head of q [tokens, heads, …] in place. Writes latent
    [tokens, rank] and shared [tokens, rope_dim], the rotated part of the keys, to the cache.

    Neighbours are a pair that is rotated. rotary is `Rotary.at(positions)`; slots [tokens] int64."""
    size = shared.shape[1]
    cos, sin = rotary[:, 0, : size // 2, None].to(q.dtype), rotary[:, 1, size // 2 :, None].to(q.dtype)
    turned = torch.cat((q[..., -size:], shared[:, None]), dim=1).unflatten(2, (-1, 2))
    even, odd = turned[:, :, :, :1], turned[:, :, :, 1:]
    cos, sin = cos[:, None], sin[:, None]
    turned = torch.cat((even * cos - odd * sin, odd * cos + even * sin), dim=3).flatten(2)
    q[..., -size:] = turned[:, :-1]
    kv.flatten(0, 3).index_copy_(0, slots, torch.cat((latent, turned[:, -1]), dim=1))


def latent_attention(q: Tensor, kv: Tensor, plan: LatentPlan, heads: LatentHeads) -> Tensor:
    """See `Kernels.latent_attention`."""
    rank = heads.up.shape[2]
    parts = []
    for group in plan.groups.decodes:
        latents = decode_group(heads.absorb(q[group.rows]), kv, group, None, heads.scale)
        parts.append(heads.values(latents[..., :rank]))
    for group in plan.groups.prefills:
        if len(q[group.rows]) >= plan.least_expanded:
            parts.append(_expanded(q[group.rows], kv, group, heads))
        else:
            latents = prefill_group(heads.absorb(q[group.rows]), kv, group, None, heads.scale)
            parts.append(heads.values(latents[..., :rank]))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _expanded(q: Tensor, kv: Tensor, group: PrefillGroup, heads: LatentHeads) -> Tensor:
    seen = gathered(kv, group.blocks, q.dtype).flatten(0, 2)[: group.padded, 0]
    seen[group.length :] = 0
    keys, values = heads.expand(seen)
    size = values.shape[2]
    values = F.pad(values, (0, keys.shape[2] - size))  # the kernel takes keys and values of one size
    q, keys, values = (x.transpose(0, 1)[None] for x in (q, keys, values))
    return attend(q, keys, values, group.mask, None, heads.scale)[0].transpose(0, 1)[..., :size]
