"""The index of sparse attention (DeepSeek-V3.2, 2025): plain torch that defines it and runs on a CPU.

A token has a key of `head_dim` numbers beside its latent. A query has some heads and a weight for each. It
attends to the `most_chosen` positions with the largest scores, of equal ones to the first:

    score(position) = Σ over heads h of weight(h) · max(0, q(h) · key(position))

A query that sees no more positions attends to all of them. With a model in float32, keys are float32. Else
keys and query heads are in FP8, each with a scale. They are multiplied by a Hadamard matrix before, which
changes no product, and leaves no number that is much larger than the others.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.kernels.attention.paged import (
    KV,
    DecodeGroup,
    Fp8KV,
    IndexQueries,
    PrefillGroup,
    TorchTiling,
    gathered,
)
from baton.engine.kernels.quantized.reference import quantize

NORM_EPS = 1e-6
QUERIES = 16
"""Queries of a prompt at a time."""


class IndexLayer(NamedTuple):
    """What an index of a layer has beside its products."""

    norm: Tensor  # [head_dim]: weights of the layer norm of keys
    norm_bias: Tensor  # [head_dim]
    interleaved: bool  # as in `IndexConfig`
    turn: Tensor | None  # [head_dim, head_dim]: the Hadamard matrix. None: keys are not in FP8


class Index(NamedTuple):
    """The products of the tokens of a step."""

    queries: Tensor  # [tokens, heads, head_dim]
    keys: Tensor  # [tokens, head_dim]
    weights: Tensor  # [tokens, heads]
    layer: IndexLayer


class IndexedLatents(NamedTuple):
    """What a layer caches."""

    latents: KV
    index: KV  # [1, num_blocks, block_size, 1, head_dim]


def hadamard(size: int) -> Tensor:
    """[size, size] float32, orthogonal; size is a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / size**0.5


def write_index(index: Index, rotary: Tensor, cache: KV, slots: Tensor) -> IndexQueries:
    """Writes the keys of the tokens to the cache. rotary is `Rotary.at(positions)`; slots [tokens] int64."""
    q, keys, weights, layer = index
    keys = F.layer_norm(keys, keys.shape[1:], layer.norm, layer.norm_bias, NORM_EPS)
    turned = _rotated(torch.cat((q, keys[:, None]), dim=1), rotary, interleaved=layer.interleaved)
    weights = (
        weights.to(torch.promote_types(weights.dtype, torch.float32)) * (q.shape[1] * q.shape[2]) ** -0.5
    )
    if isinstance(cache, Tensor):
        cache.flatten(0, 3).index_copy_(0, slots, turned[:, -1])
        return IndexQueries(turned[:, :-1], weights)
    assert layer.turn is not None, "keys in FP8 are turned"
    rows = quantize((turned @ layer.turn).flatten(0, 1), grouped=False)
    values, scales = rows.values.view(turned.shape), rows.scales.view(turned.shape[:2])
    cache.values.flatten(0, 3)[slots] = values[:, -1]
    cache.scales.flatten()[slots] = scales[:, -1]
    return IndexQueries(values[:, :-1], weights * scales[:, :-1])


def _rotated(x: Tensor, rotary: Tensor, *, interleaved: bool) -> Tensor:
    """x [tokens, heads, head_dim] with its first dimensions rotated."""
    size = rotary.shape[2]
    cos, sin = rotary[:, 0, : size // 2], rotary[:, 1, size // 2 :]
    cos, sin = (part.to(x.dtype)[:, None] for part in (cos, sin))
    turned = x[..., :size].unflatten(2, (-1, 2) if interleaved else (2, -1))
    one, other = turned.unbind(-1 if interleaved else -2)
    turned = torch.stack((one * cos - other * sin, other * cos + one * sin), -1 if interleaved else -2)
    return torch.cat((turned.flatten(2), x[..., size:]), dim=2)


def choose(queries: IndexQueries, cache: KV, tiling: TorchTiling, most: int | None) -> TorchTiling:
    """The same rows, with masks of what their queries choose: at most `most` positions each."""
    assert most is not None, "the model has an index"
    decodes = [_of_decodes(queries, cache, group, most) for group in tiling.decodes]
    prefills = [_of_prompt(queries, cache, group, most) for group in tiling.prefills]
    return TorchTiling(decodes, prefills)


def chosen(scores: Tensor, most: int) -> Tensor:
    """Of each row of scores [rows, positions] the `most` largest, of equal ones the first. A row with NaN has
    none."""
    least = scores.topk(most, dim=1).values[:, -1:]
    larger, equal = scores > least, scores == least
    return larger | (equal & (equal.cumsum(1) <= most - larger.sum(1, keepdim=True)))


def _of_decodes(queries: IndexQueries, cache: KV, group: DecodeGroup, most: int) -> DecodeGroup:
    length = group.mask.shape[3]
    if length <= most:
        return group
    keys = _keys(cache, group.blocks).view(-1, length, queries.values.shape[2])
    values, weights = (part[group.rows] for part in queries)
    scores = torch.bmm(values.to(keys.dtype), keys.mT).relu_()
    scores = torch.bmm(weights[:, None].to(keys.dtype), scores)[:, 0]
    return replace(group, mask=_masked(scores, group.mask[:, 0, 0], most)[:, None, None])


def _of_prompt(queries: IndexQueries, cache: KV, group: PrefillGroup, most: int) -> PrefillGroup:
    """The products have the padded queries, QUERIES at a time. So in the exact mode their shapes depend on
    the position alone."""
    if group.padded <= most:
        return group
    keys = _keys(cache, group.blocks)[: group.padded]
    values, weights = (part[group.rows].to(keys.dtype) for part in queries)
    count = len(values)
    around = group.before, -(group.before + count) % QUERIES
    values, weights = F.pad(values, (0, 0, 0, 0, *around)), F.pad(weights, (0, 0, *around))
    scores = torch.cat([
        torch.bmm(of[:, None], (q.flatten(0, 1) @ keys.T).relu_().unflatten(0, q.shape[:2]))[:, 0]
        for q, of in zip(values.split(QUERIES), weights.split(QUERIES), strict=True)
    ])  # fmt: skip
    mask = group.mask
    if mask is None:  # the queries start the sequence
        after = torch.arange(group.padded) > torch.arange(count)[:, None]
        mask = torch.zeros(after.shape).masked_fill_(after, float("-inf"))
    mask, before = mask.clone(), slice(group.before, group.before + count)
    mask[before] = _masked(scores[before], mask[before], most)
    return replace(group, mask=mask)


def _masked(scores: Tensor, mask: Tensor, most: int) -> Tensor:
    """The mask, which is 0 or -inf, with -inf also where no query chooses."""
    scores = scores.masked_fill(mask == float("-inf"), float("-inf"))
    return mask.masked_fill(~chosen(scores, most), float("-inf"))


def _keys(cache: KV, blocks: Tensor) -> Tensor:
    """[positions, head_dim] of these blocks, in float32 if they are in FP8."""
    dtype = torch.float32 if isinstance(cache, Fp8KV) else cache.dtype
    return gathered(cache, blocks, dtype).flatten(0, 3)
