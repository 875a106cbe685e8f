"""Attention of prefill chunks over the paged cache: to earlier positions, and to the chunk itself.

A query of position p attends to the positions first(p) … p of its request:

    out(p) = Σ softmax(q(p) · k(j) · scale) v(j),   first(p) ≤ j ≤ p

A query of an image may see all of it: j ≤ max(p, last position of the image). Its tile has no other queries.
first(p) is 0, or the first position in the layer's span. The softmax may have a sink in its sum. One pass
over the keys computes it, tile by tile (FlashAttention, Dao 2022/2023; `online_softmax`).

*GQA packing*: the query heads of one KV head see the same keys. So the rows of a tile are BLOCK_M pairs
(token, head of the group), and each key is loaded once for all.
*Ragged batch*: the grid has no dimension for requests. `Tiles` lists the tokens and the chunk of each
program, longest work first, so that the last wave is short.
*Causal*: keys that the first token of a tile may see need no mask. The few keys after them are masked, in
smaller tiles.
*Span*: tiles of keys that no token sees are skipped. Those that only the last tokens do not see are masked.
*Few tokens after many*: their tiles would leave most of the GPU idle, in one wave of programs or in the last
one. So the keys of some tiles are cut into pieces (as in `decode_attention`), which `combine_tiles` puts
together, in their order. A layer with a span has few keys. There the program of the last piece does all.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels import KV, Fp8KV
from baton.engine.kernels.attention import prefill_wgmma
from baton.engine.kernels.attention.online_softmax import (
    EXACT_N,
    LEAST,
    LOG2_E,
    Expanded,
    any_tile,
    attend_exactly,
    bounded,
    cache_of,
    first_seen,
    fold,
    logarithm,
    no_sums,
    normalized,
    of_pairs,
    segment_of,
    span_options,
    weigh,
    whole_tile,
)
from baton.engine.kernels.attention.pieces import combine_tiles
from baton.engine.kernels.attention.tiles import MOST_IN_LONG, SHORT, TILE_FIELDS, Shape
from baton.engine.model_config import Span

# Measured on an H200.
STAGES = 5
EXPANDED_STAGES = 2
MASKED_N = 32  # keys of a tile that the causal mask cuts
SUMS_OF_WARP = 4096  # at most, of a tile; with twice as many, registers are spilled
# For heads of more than MOST_IN_LONG numbers. Not measured.
WIDE = 32, 16  # keys of a tile, and of one that the causal mask cuts
WIDE_STAGES = 2
FIELDS = tl.constexpr(TILE_FIELDS)


@dataclass(frozen=True, slots=True)
class Tiles:
    """The work of each program in one step, the same for all layers."""

    work: Tensor  # [pieces, TILE_FIELDS] int32, from `tile_work`; a row of zeros: no work
    shape: Shape
    places: int = 0
    """Of pieces, for which there is scratch memory. 0: each tile is one piece."""
    exact: bool = False
    """As in `online_softmax`. Each tile is one piece."""
    wgmma: bool = False
    """By `prefill_wgmma`."""


def prefill_attention(
    q: Tensor,
    kv: KV | Expanded,
    block_tables: Tensor,
    tiles: Tiles,
    out: Tensor,
    span: Span | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None = None,
) -> None:
    """Writes the rows of the chunks in `tiles` to out [rows, num_heads, value_dim]. It and q [rows,
    num_heads, head_dim] have dense heads; block_tables [requests, blocks] int32; sinks [num_heads]. `scale`
    multiplies the products of queries and keys, and `softcap` bounds them."""
    *_, kv_heads, value_dim = (kv if isinstance(kv, Tensor) else kv.values).shape
    split = tiles.places > 0 and span is None
    partial = lse = out  # not used
    if split:
        rows = tiles.places, tiles.shape.tokens(q.shape[1] // kv_heads), q.shape[1]
        partial = torch.empty((*rows, value_dim), dtype=torch.float32, device=q.device)
        lse = torch.empty(rows, dtype=torch.float32, device=q.device)
    scale *= LOG2_E.value
    if tiles.wgmma and sinks is None and softcap is None and not isinstance(kv, Fp8KV):
        prefill_wgmma.attend(q, kv, block_tables, tiles.work, out, partial, lse, scale)
    else:
        sums = partial, lse, split
        _by_triton(q, kv, block_tables, tiles, out, sums, span, sinks, scale, softcap or 0.0)
    if split:
        combine_tiles(partial, lse, tiles.work, out)


def _by_triton(
    q: Tensor,
    kv: KV | Expanded,
    block_tables: Tensor,
    tiles: Tiles,
    out: Tensor,
    sums: tuple[Tensor, Tensor, bool],
    span: Span | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
) -> None:
    _, num_heads, head_dim = q.shape
    (block_m, block_n, warps, *_), stages = tiles.shape, STAGES
    if tiles.exact:
        block_n = EXACT_N
    if q.dtype is torch.float32 or head_dim > 128:  # larger tiles do not fit into shared memory
        largest = q.dtype is torch.float32 and head_dim > 128
        block_n, stages = MASKED_N if largest and not tiles.exact else min(block_n, SHORT.block_n), 1
        if isinstance(kv, Expanded) and q.dtype.itemsize == 2:
            stages = EXPANDED_STAGES
    warps = max(warps, block_m * head_dim // SUMS_OF_WARP)
    masked_n = MASKED_N
    if head_dim > MOST_IN_LONG and not tiles.exact:
        (block_n, masked_n), stages = WIDE, WIDE_STAGES
    shape, cache, slots = cache_of(kv, block_n)
    partial, lse, split = sums
    _prefill[(len(tiles.work), shape.kv_heads)](
        q,
        *cache,
        block_tables,
        tiles.work,
        out,
        q if sinks is None else sinks,
        partial,
        lse,
        scale,
        q.stride(0),
        out.stride(0),
        block_tables.stride(0),
        slots,
        SHAPE=shape._replace(softcap=softcap),
        GROUP=num_heads // shape.kv_heads,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        MASKED_N=EXACT_N if tiles.exact else masked_n,
        SINKS=sinks is not None,
        SPLIT=split,
        EXACT=tiles.exact,
        **span_options(span),
        num_warps=warps,
        num_stages=stages,
    )


@triton.jit(do_not_specialize=["table_stride"])
def _prefill(
    q,
    keys,
    values,
    key_tiles,
    value_tiles,
    kv_scales,
    block_tables,
    tiles,
    out,
    sinks,
    partial,
    lse,
    scale,
    q_stride,
    out_stride,
    table_stride,
    slots,
    SHAPE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED_N: tl.constexpr,
    SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
    EXACT: tl.constexpr,
    SPAN: tl.constexpr,
    CHUNKED: tl.constexpr,
):
    HEAD_DIM: tl.constexpr = SHAPE.head_dim
    VALUE_DIM: tl.constexpr = SHAPE.value_dim
    work = tiles + tl.program_id(0) * FIELDS
    kv_head = tl.program_id(1)
    request = tl.load(work).to(tl.int64)
    row = tl.load(work + 1).to(tl.int64)
    tokens = tl.load(work + 2)
    first = tl.load(work + 3)
    last = first + tokens - 1
    seen = tl.load(work + 8)
    stop = tl.maximum(last + 1, seen)
    if SPAN:
        tokens = tl.where(tl.load(work + 5) == stop, tokens, 0)
    if tokens == 0:
        return

    packed = tl.arange(0, BLOCK_M)
    token = packed // GROUP
    dims = tl.arange(0, HEAD_DIM)
    used = (token < tokens)[:, None]
    head = kv_head * GROUP + packed % GROUP
    row_of = (row + token)[:, None]
    in_row = (head * HEAD_DIM)[:, None] + dims[None, :]
    in_out = (head * VALUE_DIM)[:, None] + tl.arange(0, VALUE_DIM)[None, :]
    queries = tl.load(q + row_of * q_stride + in_row, mask=used, other=0.0)

    unmasked = tl.maximum(first + 1, seen) // BLOCK_N * BLOCK_N  # no mask hides a key before this position
    begin, end, pieces = 0, stop, 1
    if SPLIT:
        begin, end, pieces = tl.load(work + 4), tl.load(work + 5), tl.load(work + 7)
        unmasked = tl.minimum(unmasked, end)
    m = tl.full([BLOCK_M], LEAST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:  # the first piece has the sink in its sum
        m = tl.where(begin == 0, tl.load(sinks + head).to(tl.float32) * LOG2_E, m)
        total += tl.where(begin == 0, 1.0, 0.0)
    cache = keys, values, key_tiles, value_tiles, kv_scales, slots, kv_head
    table = block_tables + request * table_stride
    query_positions = tl.minimum(first + token, last)
    last_keys = tl.maximum(query_positions, seen - 1)
    m, total, result = _attend_to(
        queries, m, total, cache, table, first, query_positions, last_keys, begin, unmasked, end, stop, scale,
        SHAPE, BLOCK_N, MASKED_N, SPAN, CHUNKED, EXACT,
    )  # fmt: skip
    result /= total[:, None]
    if pieces == 1:
        tl.store(out + row_of * out_stride + in_out, result.to(out.dtype.element_ty), mask=used)
    else:
        HEADS: tl.constexpr = SHAPE.kv_heads * GROUP
        at = (tl.load(work + 6).to(tl.int64) * (BLOCK_M // GROUP) + token) * HEADS
        tl.store(partial + at[:, None] * VALUE_DIM + in_out, result, mask=used)
        tl.store(lse + at + head, m + tl.log2(total), mask=token < tokens)


@triton.jit
def _attend_to(
    queries,
    m,
    total,
    cache,
    table,
    first,
    query_positions,
    last_keys,
    begin,
    unmasked,
    end,
    stop,
    scale,
    SHAPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED_N: tl.constexpr,
    SPAN: tl.constexpr,
    CHUNKED: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Adds the keys [begin, end), of which no mask hides one before `unmasked`, to m and total of the sinks.
    Returns m, total, and the weighted sum of values. EXACT: segment by segment."""
    first_keys = first_seen(query_positions, SPAN, CHUNKED)[:, None]
    segments = 1, 1
    if EXACT:
        seg_m, seg_total, seg_acc = no_sums(queries.shape[0], SHAPE.value_dim, 1)
        sums = m, total[:, None] + tl.zeros_like(seg_total), tl.zeros_like(seg_acc), seg_m, seg_total, seg_acc
        # The segments of a tile's queries have two lengths at most. The shorter one divides the longer one.
        segments = segment_of(query_positions + 1), segment_of(first + 1)
    else:
        VALUE_DIM: tl.constexpr = SHAPE.value_dim
        sums = m, total, tl.zeros([queries.shape[0], VALUE_DIM], tl.float32)
        queries, scale = normalized(queries, scale, SHAPE.fp8)
    if SPAN:
        skipped = first_seen(first, SPAN, CHUNKED) // BLOCK_N * BLOCK_N
        begin = tl.minimum(tl.cdiv(first_seen(stop - 1, SPAN, CHUNKED), BLOCK_N) * BLOCK_N, unmasked)
        for start in tl.range(skipped, begin, BLOCK_N):
            tile, _ = any_tile(cache, table, start, stop, SHAPE, BLOCK_N)
            seen = (start + tl.arange(0, BLOCK_N))[None, :] >= first_keys
            sums = _add(queries, tile, seen, sums, scale, start + BLOCK_N, segments, SHAPE, EXACT)
    for start in tl.range(begin, unmasked, BLOCK_N):
        tile = whole_tile(cache, table, start, stop, SHAPE, BLOCK_N)
        sums = _add(queries, tile, None, sums, scale, start + BLOCK_N, segments, SHAPE, EXACT)
    for start in tl.range(unmasked, end, MASKED_N):
        tile, inside = any_tile(cache, table, start, stop, SHAPE, MASKED_N)
        positions = start + tl.arange(0, MASKED_N)
        seen = (positions[None, :] <= last_keys[:, None]) & inside[None, :]
        if SPAN:
            seen &= positions[None, :] >= first_keys
        sums = _add(queries, tile, seen, sums, scale, start + MASKED_N, segments, SHAPE, EXACT)
    return _all_sums(sums, EXACT)


@triton.jit
def _all_sums(sums, EXACT: tl.constexpr):
    """m, total and acc of all keys, of the sums of `_add`."""
    if EXACT:
        m, total, acc, seg_m, seg_total, seg_acc = sums
        m, total, acc = fold(m, total, acc, seg_m, seg_total, seg_acc, 1)
        total = tl.max(total, axis=1)
    else:
        m, total, acc = sums
    return m, total, acc


@triton.jit
def _add(queries, tile, seen, sums, scale, end, segments, SHAPE: tl.constexpr, EXACT: tl.constexpr):
    """Adds a tile of keys before `end`. The sums: m, total and acc; EXACT: of the segments that have ended,
    then of the one that has not."""
    if EXACT:
        m, total, acc, seg_m, seg_total, seg_acc = sums
        seg_m, seg_total, seg_acc = attend_exactly(queries, tile, seen, seg_m, seg_total, seg_acc, scale, 1)
        segment, shortest = segments
        sums = _end_segments(m, total, acc, seg_m, seg_total, seg_acc, end, segment, shortest)
    else:
        m, total, acc = sums
        sums = attend(queries, tile, seen, m, total, acc, scale, SHAPE)
    return sums


@triton.jit
def _end_segments(m, total, acc, seg_m, seg_total, seg_acc, end, segment, shortest):
    """Folds the segments that end before the position `end`. The sums of the next ones begin at zero."""
    if end % shortest == 0:
        ends = end % segment == 0
        new_m, new_total, new_acc = fold(m, total, acc, seg_m, seg_total, seg_acc, 1)
        m, seg_m = tl.where(ends, new_m, m), tl.where(ends, LEAST, seg_m)
        total, seg_total = tl.where(ends[:, None], new_total, total), tl.where(ends[:, None], 0.0, seg_total)
        acc, seg_acc = tl.where(ends[:, None], new_acc, acc), tl.where(ends[:, None], 0.0, seg_acc)
    return m, total, acc, seg_m, seg_total, seg_acc


@triton.jit
def attend(queries, tile, seen, m, total, acc, scale, SHAPE: tl.constexpr):
    """Adds a tile. A query sees only the keys in `seen` [queries, keys]; None: all. Returns the new m, total
    and acc."""
    FP8: tl.constexpr = SHAPE.fp8
    k, v, k_scale, v_scale = tile
    shift, inverse = logarithm(v_scale, FP8)
    if FP8:
        k = k.to(queries.dtype)
        lower, upper = of_pairs(v, queries.dtype)
        v = tl.interleave(lower, upper)
        k_scale *= scale
        scale = 1.0
    scores = tl.dot(queries, tl.trans(k), input_precision="tf32x3")
    if FP8:
        scores = bounded(scores * k_scale[None, :], SHAPE) + shift[None, :]
    elif SHAPE.softcap > 0:
        scores = bounded(scores * scale, SHAPE)
        scale = 1.0
    if seen is not None:
        scores = tl.where(seen, scores, float("-inf"))
    new_m = tl.maximum(m, tl.max(scores, axis=1) * scale)
    weights, total, shrink = weigh(scores * scale, new_m, m, total, inverse if FP8 else None, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink, input_precision="tf32x3")
    return new_m, total, acc
