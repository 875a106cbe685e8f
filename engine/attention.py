"""Paged attention in plain torch: the definition, and what runs on a CPU.

KV of one layer is [2 (K, V), num_blocks, block_size, num_kv_heads, head_dim]. Position p of a request is in
slot block_table[p // block_size] * block_size + p % block_size of the same tensor seen as [2, slots, …].
Stale or foreign slots are never multiplied, not even by a zero: a NaN in there would come through.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """One request's chunk: queries rows[...] are the positions [context - len(rows), context)."""

    rows: slice
    blocks: Tensor  # [blocks] int64, those of positions [0, context)
    context: int
    mask: Tensor | None  # [queries, context], 0 or -inf; None: the chunk starts the sequence


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Requests of similar length with one query each, padded to the same number of blocks."""

    rows: slice
    blocks: Tensor  # [requests * blocks] int64, padded with any block
    padding: Tensor  # [padded positions] int64: which of the requests * length gathered positions are none
    mask: Tensor  # [requests, 1, 1, length], 0 or -inf


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Where one step writes and reads KV; the same for all layers."""

    slots: Tensor  # [tokens] int64: where the KV of each token of the step goes
    decodes: Sequence[DecodeGroup]
    prefills: Sequence[PrefillSpan]


def paged_attention(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, plan: AttentionPlan) -> Tensor:
    """Writes k and v [tokens, num_kv_heads, head_dim] of this step into the layer's cache `kv`, in place;
    then every query of q [tokens, num_heads, head_dim] attends to its request up to its own position.
    Returns [tokens, num_heads, head_dim]."""
    slots = kv.flatten(1, 2)
    slots[0].index_copy_(0, plan.slots, k)
    slots[1].index_copy_(0, plan.slots, v)
    out = torch.empty_like(q)
    for group in plan.decodes:
        out[group.rows] = _decode(q[group.rows], kv, group)
    for span in plan.prefills:
        out[span.rows] = _prefill(q[span.rows], kv, span)
    return out


def _decode(q: Tensor, kv: Tensor, group: DecodeGroup) -> Tensor:
    requests, num_heads, head_dim = q.shape
    num_kv_heads = kv.shape[3]
    keys, values = _gather(kv, group.blocks, group.padding).unflatten(1, (requests, -1)).transpose(2, 3)
    # The query heads that share a KV head are to it what several queries are.
    grouped = q.view(requests, num_kv_heads, num_heads // num_kv_heads, head_dim)
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=group.mask)
    return out.reshape(requests, num_heads, head_dim)


def _prefill(q: Tensor, kv: Tensor, span: PrefillSpan) -> Tensor:
    keys, values = kv.index_select(1, span.blocks).flatten(1, 2)[:, : span.context].transpose(1, 2)
    causal = span.mask is None
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys[None], values[None], span.mask, is_causal=causal, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def _gather(kv: Tensor, blocks: Tensor, padding: Tensor) -> Tensor:
    """[2, blocks * block_size, num_kv_heads, head_dim], zero where padded."""
    return kv.index_select(1, blocks).flatten(1, 2).index_fill_(1, padding, 0)
