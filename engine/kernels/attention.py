"""Paged attention: its metadata, and plain torch that defines it and runs on a CPU.

KV of one layer is [2 (K, V), num_blocks, block_size, num_kv_heads, head_dim]. Position p of a request is in
slot block_table[p // block_size] * block_size + p % block_size of the same tensor seen as [2, slots, …].
Slots outside a request's context are never multiplied, not even by zero: they may hold NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where one step reads and writes KV. Decoding requests come first, with one query each, in the rows
    [0, num_decodes). The chunks of prefills follow, one after the other.

    The tensors are on the engine's device. A captured graph has static tensors: made for the largest batch,
    sliced for a smaller one, and overwritten before each replay. Padding rows have slot −1 and context 0;
    padding tiles are zeros. In a graph, `num_decodes` is an upper bound: further rows up to it have context 0
    and may belong to chunks. The torch reference supports no graphs."""

    block_size: int
    slots: Tensor  # [rows] int64: where the KV of each row goes
    block_tables: Tensor  # [requests, blocks] int32; any block past a request's own
    contexts: Tensor  # [requests] int32: positions of each request, those of this step included
    num_decodes: int
    prefills: Sequence[tuple[int, int]]  # (start, stop) positions of each chunk, on the host
    tiles: Tensor | None = None  # [tiles, 4] int32, from `tile_work`; replaces `prefills` in a graph


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Requests of similar length with one query each, padded to the same number of blocks."""

    rows: slice
    blocks: Tensor  # [requests * blocks] int32, padded with any block
    padding: Tensor  # [padded positions] int64: indices of padding among the gathered positions
    mask: Tensor  # [requests, 1, 1, length], 0 or -inf


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """A chunk of one request. Its queries, `rows`, are at positions [context - len(rows), context)."""

    rows: slice
    blocks: Tensor  # [blocks] int32, of positions [0, context)
    context: int
    mask: Tensor | None  # [queries, context], 0 or -inf; None: the chunk starts the sequence


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """The plan for `paged_attention`, the same for all layers of a step."""

    decodes: Sequence[DecodeGroup]
    prefills: Sequence[PrefillSpan]


def plan_attention(metadata: AttentionMetadata, dtype: torch.dtype) -> TorchPlan:
    block_size, tables = metadata.block_size, metadata.block_tables
    contexts = metadata.contexts.tolist()

    def padded_length(request: int) -> int:
        """Number of blocks, rounded up to a power of two. So padding is at most half of a group."""
        return 1 << (-(-contexts[request] // block_size) - 1).bit_length()

    decodes = []
    for _, members in groupby(range(metadata.num_decodes), key=padded_length):
        group = list(members)
        rows = slice(group[0], group[-1] + 1)
        width = max(-(-contexts[request] // block_size) for request in group)
        padded = torch.arange(width * block_size) >= metadata.contexts[rows, None]
        decodes.append(
            DecodeGroup(
                rows=rows,
                blocks=tables[rows, :width].flatten(),
                padding=padded.flatten().nonzero()[:, 0],
                mask=_minus_infinity(padded, dtype)[:, None, None],
            )
        )

    prefills = []
    row = metadata.num_decodes
    for request, (start, stop) in enumerate(metadata.prefills, metadata.num_decodes):
        mask = None
        if start:
            mask = _minus_infinity(torch.arange(stop) > torch.arange(start, stop)[:, None], dtype)
        blocks = tables[request, : -(-stop // block_size)]
        prefills.append(PrefillSpan(slice(row, row := row + stop - start), blocks, stop, mask))
    return TorchPlan(decodes, prefills)


def _minus_infinity(where: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(where.shape, dtype=dtype).masked_fill_(where, float("-inf"))


def paged_attention(q: Tensor, kv: Tensor, plan: TorchPlan) -> Tensor:
    """Every query of q [tokens, num_heads, head_dim] attends to the positions of its request up to its own.
    The layer's cache `kv` holds all of them already. Returns [tokens, num_heads, head_dim]."""
    out = torch.empty(q.shape, dtype=q.dtype)
    for group in plan.decodes:
        out[group.rows] = _decode(q[group.rows], kv, group)
    for span in plan.prefills:
        out[span.rows] = _prefill(q[span.rows], kv, span)
    return out


def _decode(q: Tensor, kv: Tensor, group: DecodeGroup) -> Tensor:
    requests, num_heads, head_dim = q.shape
    num_kv_heads = kv.shape[3]
    keys, values = _gather(kv, group.blocks, group.padding).unflatten(1, (requests, -1)).transpose(2, 3)
    # The query heads that share a KV head become several queries of one head.
    grouped = q.unflatten(1, (num_kv_heads, -1))
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
