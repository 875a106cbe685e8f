"""Paged attention: its metadata, and plain torch that defines it and runs on a CPU.

KV of one layer is [2 (K, V), num_blocks, block_size, num_kv_heads, head_dim]: plain, or in FP8 with a scale
for each token and head.

    written    values = x / scale, rounded to FP8;  scale = largest |x| of the head / 448
    read       scores = (q · values of K) · scale of K;  out = Σ (probability · scale of V) · values of V

A scale depends on its token alone. So what a request computes does not depend on other requests, chunks or
block sizes. If a head of a token has NaN or an infinite number, only requests that see this token get NaN.

Position p of a request is in slot block_table[p // block_size] * block_size + p % block_size of the same
tensor seen as [2, slots, …].
A layer that caches latents has one row in place of K and V: keys and values are the same. Its KV heads are
parts of the latent, and together one KV head (`latent`).
Slots outside a request's context are never multiplied, not even by zero: they may hold NaN.

A layer may have a span (`engine.model_config.Span`), which hides the first keys of a request: kernels skip
whole blocks or tiles of them. A layer may have a *sink* for each head (Xiao 2023): a logit that takes part in
the softmax like a key, but has no value.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.kernels.attention.tiles import NO_IMAGES, SHORT, Images, Run, Shape, runs_of
from baton.engine.model_config import Span

KEYS = 16
"""The number of keys is padded to a multiple of this. So the kernel has no rest of a vector, which it would
sum in another order: in bfloat16 a query has the same result in any chunk of its prompt."""

MOST_QUERIES = 512
"""Queries of a prompt at a time. From 768 on the kernel computes in other blocks, which also changes the
order of sums."""

EXACT_QUERIES = 16
"""Queries at a time in the exact mode. They begin at a multiple of this position, and those that a step does
not have are zeros. So the shapes of all operands depend on the position alone, for decodes as well, and with
them the order of sums. A decode computes 16 queries in place of one."""


class IndexQueries(NamedTuple):
    """Queries of an index (`index`)."""

    values: Tensor  # [tokens, heads, head_dim], in FP8 if keys are
    weights: Tensor  # [tokens, heads] float32, with all scales but those of keys


class Fp8KV(NamedTuple):
    """It stands for values times scales."""

    values: Tensor  # [2 (K, V), num_blocks, block_size, num_kv_heads, head_dim] FP8
    scales: Tensor  # [2, num_blocks, num_kv_heads, block_size] float32: attention reads neighbours of a head


KV = Tensor | Fp8KV
"""A plain cache is a tensor in the shape of `Fp8KV.values`."""


def parts(kv: KV) -> tuple[Tensor, Tensor | None]:
    """The values, and the scales if the cache has some."""
    return (kv, None) if isinstance(kv, Tensor) else kv


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMSNorm of each query and key head before it is rotated (Qwen3)."""

    scale: Tensor  # [num_heads + num_kv_heads, head_dim]
    eps: float


@dataclass(frozen=True, slots=True)
class Apart:
    """What chunks of latents read and write between two graphs. Their kernels depend on the lengths of the
    chunks, which a graph does not know. All layers share the memory."""

    q: Tensor  # [rows, heads, nope_dim + rope_dim]: the graph before writes it
    out: Tensor  # [rows, heads, value_dim]: the graph after reads it
    layers: dict[int, Callable[[Any], Any]] = field(default_factory=dict)
    """Attention of each layer, as a function of its tiling."""
    index: IndexQueries | None = None
    """Of all rows, where a model has an index."""

    def keep(self, queries: IndexQueries) -> IndexQueries:
        """Copies the queries of an index to where chunks read them."""
        assert self.index is not None, "the model has an index"
        for kept, made in zip(self.index, queries, strict=True):
            kept[: len(made)] = made
        return self.index


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where one step reads and writes KV. Queries that decode come first, in the rows [0, num_decodes), each
    as a request of its own. The chunks of prefills follow, one after the other.

    The tensors are on the engine's device. A captured graph has static tensors: made for the largest batch,
    sliced for a smaller one, and overwritten before each replay. Padding rows have slot −1 and context 0;
    padding tiles are zeros. In a graph, `num_decodes` is an upper bound: further rows up to it have context 0
    and may belong to chunks. The torch reference supports no graphs."""

    block_size: int
    slots: Tensor  # [rows] int64: where the KV of each row goes
    block_tables: Tensor  # [requests, blocks] int32; any block past a request's own
    contexts: Tensor  # [num_decodes or more] int32: positions that each query that decodes sees
    num_decodes: int
    prefills: Sequence[tuple[int, int]]  # (start, stop) positions of each chunk, on the host
    places: Tensor | None = None
    """[num_decodes or more] int32: 0 for the first query of a request that decodes, and 1, 2, … for those
    after it. None: each request that decodes has one."""
    tiles: Tensor | None = None
    """[pieces, TILE_FIELDS] int32, from `tile_work` with `Kernels.tile_programs`; replaces `prefills` in a
    graph."""
    tile_shape: Shape = SHORT
    """Of `tiles`. Those of layers with windows are `SHORT`."""
    apart: Apart | None = None
    """In a graph of a model with latents, where the chunks are. None: there is no graph, or no chunk."""
    state_slots: Tensor | None = None  # [requests] int32: their states; None: no layer has states
    scans: Tensor | None = None  # [chunks, 6] int32, from `scan_work`; replaces `prefills` for states
    state_copies: Tensor | None = None
    """[rows] int32: 1 + the slot that gets a copy of the states after this row of a prompt; 0: none. Only
    rows that end a chunk of `Kernels.chunk_tokens` have one. None: there are no copies."""
    window_slots: Tensor | None = None
    """As `slots`, of layers with windows, whose blocks are in the second half of `block_tables`. None: all
    layers have the same blocks."""
    window_tiles: Tensor | None = None
    """As `tiles`, of layers with windows. None: all layers have the same tiles."""
    images: Images = field(default_factory=lambda: NO_IMAGES)
    """Of the chunks. Empty in a graph, and if a token of an image sees only those before it."""

    def of_layers(self, *, windowed: bool) -> "AttentionMetadata":
        """As layers with windows, or those without, read and write their blocks."""
        tiles, shape = self.tiles, self.tile_shape
        if windowed and self.window_tiles is not None:
            tiles, shape = self.window_tiles, SHORT
        slots, tables = self.slots, self.block_tables
        if self.window_slots is not None:
            half = self.block_tables.shape[1] // 2
            slots, first = (self.window_slots, half) if windowed else (self.slots, 0)
            tables = self.block_tables[:, first : first + half]
        return replace(
            self,
            slots=slots,
            block_tables=tables,
            tiles=tiles,
            tile_shape=shape,
            window_slots=None,
            window_tiles=None,
        )


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Requests of similar length with one query each, padded to the same number of blocks."""

    rows: slice
    blocks: Tensor  # [requests * blocks] int32, padded with any block
    hidden: Tensor  # [hidden positions] int64: indices among the gathered positions
    mask: Tensor  # [requests, 1, 1, length], 0 or -inf


@dataclass(frozen=True, slots=True)
class PrefillGroup:
    """Queries of one request, at successive positions."""

    rows: slice
    blocks: Tensor  # [blocks] int32
    length: int  # positions in these blocks, up to the last one that a query sees
    mask: Tensor | None  # [queries, padded length], 0 or -inf; None: the queries start the sequence
    before: int = 0
    """Queries that are padded with zeros before the rows. The mask tells how many there are after them."""
    hidden: int = 0
    """Positions in these blocks before the first one that a query sees."""

    @property
    def padded(self) -> int:
        return _padded(self.length) if self.mask is None else self.mask.shape[1]


@dataclass(frozen=True, slots=True)
class TorchTiling:
    """The tiling for `paged_attention`, the same for all layers of a step that have the same span."""

    decodes: Sequence[DecodeGroup]
    prefills: Sequence[PrefillGroup]


def first_seen(positions: Tensor, span: Span | None) -> Tensor:
    """The first position that the query at each of these positions sees."""
    if span is None:
        return torch.zeros_like(positions)
    if span.chunked:
        return positions // span.length * span.length
    return (positions + 1 - span.length).clamp_min(0)


def tile_attention(
    metadata: AttentionMetadata, span: Span | None, dtype: torch.dtype, *, exact: bool = False
) -> TorchTiling:
    if exact:
        return TorchTiling((), _exact_groups(metadata, span, dtype))
    block_size, tables = metadata.block_size, metadata.block_tables
    contexts = metadata.contexts[: metadata.num_decodes, None].long()
    first = first_seen(contexts - 1, span)
    first_block = first // block_size
    counts = (-(-contexts // block_size) - first_block).flatten().tolist()  # blocks of each request

    decodes = []
    # Grouped by a count that is rounded up to a power of two. So padding is at most half of a group.
    for _, members in groupby(range(metadata.num_decodes), key=lambda i: (counts[i] - 1).bit_length()):
        group = list(members)
        rows = slice(group[0], group[-1] + 1)
        width = max(counts[request] for request in group)
        blocks = first_block[rows] + torch.arange(width)
        positions = first_block[rows] * block_size + torch.arange(width * block_size)
        hidden = (positions < first[rows]) | (positions >= contexts[rows])
        decodes.append(
            DecodeGroup(
                rows=rows,
                blocks=tables[rows].gather(1, blocks.clamp_max(tables.shape[1] - 1)).flatten(),
                hidden=hidden.flatten().nonzero()[:, 0],
                mask=_minus_infinity(hidden, dtype)[:, None, None],
            )
        )

    prefills = []
    row = metadata.num_decodes
    # Few queries at a time, so that most of the keys in a group's blocks are seen.
    most = min(span.length, MOST_QUERIES) if span else MOST_QUERIES
    for chunk, bounds in enumerate(metadata.prefills):
        table = tables[metadata.num_decodes + chunk]
        for run in runs_of(bounds, metadata.images.get(chunk, ())):
            for begin in range(run.start, run.stop, most):
                queries = range(begin, min(begin + most, run.stop))
                group = group_of_rows(table, queries, block_size, row, span, dtype, seen=run.seen)
                prefills.append(group)
                row += len(queries)
    return TorchTiling(decodes, prefills)


def _exact_groups(
    metadata: AttentionMetadata, span: Span | None, dtype: torch.dtype
) -> Sequence[PrefillGroup]:
    """The decodes and chunks of a step, EXACT_QUERIES positions at a time."""
    contexts = metadata.contexts[: metadata.num_decodes].tolist()
    of_requests = [[Run(context - 1, context, 0)] for context in contexts]
    of_requests += [
        list(runs_of(bounds, metadata.images.get(chunk, ())))
        for chunk, bounds in enumerate(metadata.prefills)
    ]
    groups, row = [], 0
    for request, runs in enumerate(of_requests):
        for start, stop, seen in runs:
            for first in range(start // EXACT_QUERIES * EXACT_QUERIES, stop, EXACT_QUERIES):
                queries = range(first, first + EXACT_QUERIES)
                table = metadata.block_tables[request]
                group = group_of_rows(
                    table, queries, metadata.block_size, 0, span, dtype, masked=True, seen=seen
                )
                begin, end = max(start, first), min(stop, queries.stop)
                rows = slice(row, row + end - begin)
                length = group.length - (max(queries.stop, seen) - max(end, seen))
                groups.append(replace(group, rows=rows, length=length, before=begin - first))
                row = rows.stop
    return groups


def group_of_rows(
    table: Tensor,
    queries: range,
    block_size: int,
    row: int,
    span: Span | None,
    dtype: torch.dtype,
    *,
    masked: bool = False,
    seen: int = 0,
) -> PrefillGroup:
    """`masked`: with a mask also where the queries start the sequence. `seen`: as in `Run`."""
    at = torch.arange(queries.start, queries.stop)[:, None]
    first = first_seen(at, span)
    first_block = int(first[0]) // block_size
    start, mask = first_block * block_size, None
    length = max(queries.stop, seen) - start
    if masked or seen or queries.start or first[-1]:
        keys = torch.arange(start, start + _padded(length))
        mask = _minus_infinity((keys < first) | (keys > at.clamp_min(seen - 1)), dtype)
    blocks = torch.arange(first_block, first_block - (-_padded(length) // block_size))
    rows = slice(row, row + len(queries))
    hidden = int(first[0]) - start
    return PrefillGroup(rows, table[blocks.clamp_max(len(table) - 1)], length, mask, hidden=hidden)


def _padded(length: int) -> int:
    return -(-length // KEYS) * KEYS


def _minus_infinity(where: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(where.shape, dtype=dtype).masked_fill_(where, float("-inf"))


def paged_attention(
    q: Tensor,
    kv: KV,
    tiling: TorchTiling,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Every query of q [tokens, num_heads, head_dim] attends to the positions of its request that it sees.
    The layer's cache `kv` holds all of them already. sinks [num_heads]: a logit for each head. `scale`
    multiplies the products of queries and keys. Returns [tokens, num_heads, head_dim]."""
    parts = [decode_group(q[group.rows], kv, group, sinks, scale, softcap) for group in tiling.decodes]
    parts += [prefill_group(q[group.rows], kv, group, sinks, scale, softcap) for group in tiling.prefills]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def decode_group(
    q: Tensor,
    kv: KV,
    group: DecodeGroup,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    requests, num_heads, head_dim = q.shape
    seen = _seen(kv, group.blocks, q)
    num_kv_heads = seen.shape[2]
    if len(group.hidden):
        seen.index_fill_(1, group.hidden, 0)
    seen = seen.view(len(seen), requests, -1, num_kv_heads, head_dim).transpose(2, 3)
    keys, values = seen[0], seen[-1]
    # The query heads that share a KV head become several queries of one head.
    grouped = q.reshape(requests, num_kv_heads, -1, head_dim)
    of_query = None if sinks is None else sinks.view(num_kv_heads, -1)
    out = attend(grouped, keys, values, group.mask, of_query, scale, softcap)
    return out.reshape(requests, num_heads, head_dim)


def prefill_group(
    q: Tensor,
    kv: KV,
    group: PrefillGroup,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    seen = _seen(kv, group.blocks, q)[:, : group.padded]
    seen[:, : group.hidden] = 0
    seen[:, group.length :] = 0
    seen = seen.transpose(1, 2)
    keys, values = seen[0], seen[-1]
    of_query = None if sinks is None else sinks[:, None]
    rows = slice(group.before, group.before + len(q))
    if group.mask is not None:
        q = F.pad(q, (0, 0, 0, 0, group.before, len(group.mask) - rows.stop))
    queries = q.transpose(0, 1)[None]
    out = attend(queries, keys[None], values[None], group.mask, of_query, scale, softcap)
    return out[0].transpose(0, 1)[rows]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """q [batch, heads, queries, head_dim]; sinks like [heads, queries]. Without a mask, it is causal."""
    if softcap is not None:
        return by_scores(q, k, v, mask, sinks, scale, softcap)
    # What `scaled_dot_product_attention` calls on a CPU, and the logarithm of the softmax's sum as well.
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, logsumexp = flash(q, k, v, is_causal=mask is None, attn_mask=mask, scale=scale)
    if sinks is not None:  # the sum grows by exp(sink)
        out *= torch.sigmoid(logsumexp - sinks)[..., None]
    return out


def by_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """As `attend`, on any device, also with bounded products, for which torch has no kernel."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = (q @ k.mT).float().mul_(scale)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if mask is None:
        scores += torch.full(scores.shape[-2:], float("-inf")).triu_(1)
    else:
        scores += mask
    logsumexp = scores.logsumexp(-1)
    if sinks is not None:
        logsumexp = torch.logaddexp(logsumexp, sinks.float().expand_as(logsumexp))
    return scores.sub_(logsumexp[..., None]).exp_().to(v.dtype) @ v


def _seen(kv: KV, blocks: Tensor, q: Tensor) -> Tensor:
    """New memory with the positions of these blocks: [rows, positions, KV heads, head_dim of q]. The heads of
    a latent are one KV head."""
    return gathered(kv, blocks, q.dtype).flatten(3).unflatten(3, (-1, q.shape[2])).flatten(1, 2)


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
