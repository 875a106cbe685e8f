"""Attention of one query per request over the paged cache, split along the context.

    out = Σ softmax(q · k(j) · scale) v(j),   first ≤ j < context

`first` is 0, or the first position in the layer's span.

Only the query heads of one group share keys (GQA packing), and a few successive queries of one request: a
token and its drafts. So the time goes into reading the cache once. The whole GPU reads it, also if contexts
are few or of unequal length (Flash-Decoding, Dao 2023):

1. `partition`, once per step: cuts the contexts of the batch into pieces (`pieces`). A long context gets many
   pieces, a short one only one.
2. `_split`, one program per (piece, KV head): attention over the keys of the piece alone, and the logarithm
   to base 2 of its softmax sum, lse(i). The first piece of a request has the sink in its sum.
3. The pieces of a request are combined, in their order. A request of one piece has its result already. Few
   requests have many pieces each, so `combine` has a program for each of their query heads. With more
   requests, the program of `_split` that finishes last for a KV head combines, which saves a launch.

The number of pieces depends on batch size and device alone, and programs read their work on the device. So a
captured graph serves contexts of any length. A padding request, of context 0, has an empty piece and gets 0.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels import KV, parts
from baton.engine.kernels.attention.online_softmax import (
    LEAST,
    LOG2_E,
    any_tile,
    bounded,
    cache_of,
    logarithm,
    normalized,
    of_pairs,
    weigh,
    whole_tile,
)
from baton.engine.kernels.attention.pieces import BLOCK_N, Pieces, Sharing, combine, of_query, queries_from
from baton.engine.kernels.attention.tiles import MOST_IN_LONG
from baton.engine.kernels.launch import finishes_last, inputs_ready, launch_options
from baton.engine.model_config import Span

# Measured on an H200.
BYTES_PER_WARP = 256  # of a key
WIDE_WARPS = 4  # at least, for heads of more than MOST_IN_LONG numbers: their sums are of 32 bits
STAGES = 7
STAGED_BYTES = 192 << 10  # at most, of the keys and values of all stages but one
ROWS = 8  # least size of a side of a tensor core product; a group of query heads is padded to it
SHARED_ROWS = 16  # padded query heads of all queries that share keys

COMBINED_LAST = 16  # results that the last program takes at once, of all query heads of a group
FEW_REQUESTS = 32  # up to these, `combine` runs


def queries_that_share(group: int) -> int:
    """The most queries of a request that share keys, with so many heads each."""
    return max(1, SHARED_ROWS // triton.next_power_of_2(group))


def decode_attention(
    q: Tensor,
    kv: KV,
    block_tables: Tensor,
    pieces: Pieces,
    out: Tensor,
    span: Span | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
) -> None:
    """Writes out. q and out [requests, num_heads, head_dim] have dense heads; block_tables [requests, blocks]
    int32; `span` is that of `pieces`; sinks [num_heads]. `scale` multiplies the products of queries and
    keys, and `softcap` bounds them. Requests share pieces only without a span."""
    requests, num_heads, head_dim = q.shape
    shape, cache, slots = cache_of(kv, BLOCK_N)
    shape = shape._replace(softcap=softcap or 0.0)
    group = num_heads // shape.kv_heads
    count = len(pieces.work)
    queries, places, contexts = pieces.sharing or Sharing(1, pieces.first, pieces.first)
    partial = torch.empty((count, queries, num_heads, head_dim), dtype=torch.float32, device=q.device)
    lse = torch.empty((count, queries, num_heads), dtype=torch.float32, device=q.device)
    few, head_bytes = requests <= FEW_REQUESTS, head_dim * parts(kv)[0].itemsize
    _split[(shape.kv_heads, count)](
        q,
        *cache,
        block_tables,
        pieces.work,
        pieces.first,
        contexts,
        places,
        partial,
        lse,
        pieces.finished,
        out,
        q if sinks is None else sinks,
        scale * LOG2_E.value,
        q.stride(0),
        out.stride(0),
        block_tables.stride(0),
        slots,
        requests,
        SHAPE=shape,
        GROUP=group,
        QUERIES=queries,
        ROWS=max(ROWS, queries * triton.next_power_of_2(group)),
        COMBINED=0 if few else max(1, COMBINED_LAST // triton.next_power_of_2(group)),
        BLOCK_N=BLOCK_N,
        SPAN=span is not None,
        SINKS=sinks is not None,
        num_warps=max(1, head_bytes // BYTES_PER_WARP, WIDE_WARPS if head_dim > MOST_IN_LONG else 1),
        num_stages=min(STAGES, 1 + STAGED_BYTES // (2 * BLOCK_N * head_bytes)),
        **launch_options(),
    )
    if few:
        combine(partial, lse, pieces, out)


@triton.jit(do_not_specialize=["table_stride", "requests"])
def _split(
    q,
    keys,
    values,
    key_tiles,
    value_tiles,
    kv_scales,
    block_tables,
    work,
    first,
    contexts,
    places,
    partial,
    lse,
    finished,
    out,
    sinks,
    scale,
    q_stride,
    out_stride,
    table_stride,
    slots,
    requests,
    SHAPE: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    COMBINED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPAN: tl.constexpr,
    SINKS: tl.constexpr,
):
    HEAD_DIM: tl.constexpr = SHAPE.head_dim
    # The heads of a piece run at once, since they are neighbours in memory.
    kv_head, piece = tl.program_id(0), tl.program_id(1)
    request = tl.load(work + piece * 3).to(tl.int64)
    begin, stop = tl.load(work + piece * 3 + 1), tl.load(work + piece * 3 + 2)
    inputs_ready()
    if request < 0:
        return
    shared = queries_from(places, request, requests, QUERIES) if QUERIES > 1 else 1
    query, heads, used = _queries(kv_head, shared, GROUP, QUERIES, ROWS)
    in_row = heads[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    queries = tl.load(q + (request + query)[:, None] * q_stride + in_row, mask=used[:, None], other=0.0)
    first_piece = tl.load(first + request)
    pieces = tl.load(first + request + 1) - first_piece

    cache = keys, values, key_tiles, value_tiles, kv_scales, slots, kv_head
    table = block_tables + request * table_stride
    m, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    WIDTH: tl.constexpr = HEAD_DIM // 2 if SHAPE.fp8 else HEAD_DIM
    # With FP8 these are for the lower and the upper numbers of pairs, else `acc` has all.
    acc, upper_acc = tl.zeros([WIDTH, ROWS], tl.float32), tl.zeros([WIDTH, ROWS], tl.float32)
    queries, scale = normalized(queries, scale, SHAPE.fp8)
    queries = tl.trans(queries)
    if SINKS:
        sink = tl.load(sinks + heads, mask=used, other=0.0).to(tl.float32) * LOG2_E
        m, total = tl.where(piece == first_piece, sink, m), tl.where(piece == first_piece, 1.0, total)
    if SPAN:
        unaligned = begin % BLOCK_N
        if unaligned != 0:
            tile, inside = any_tile(cache, table, begin - unaligned, stop, SHAPE, BLOCK_N)
            seen = inside & (tl.arange(0, BLOCK_N) >= unaligned)
            m, total, acc, upper_acc = attend(
                queries, tile, seen[:, None], m, total, acc, upper_acc, scale, SHAPE
            )
            begin = tl.minimum(begin - unaligned + BLOCK_N, stop)
    # Each query sees all positions before this one.
    unmasked = tl.maximum(tl.minimum(tl.load(contexts + request), stop), begin) if QUERIES > 1 else stop
    last = begin + (unmasked - begin) // BLOCK_N * BLOCK_N
    for start in tl.range(begin, last, BLOCK_N):
        tile = whole_tile(cache, table, start, stop, SHAPE, BLOCK_N)
        m, total, acc, upper_acc = attend(queries, tile, None, m, total, acc, upper_acc, scale, SHAPE)
    for start in tl.range(last, stop, BLOCK_N, num_stages=1):
        tile, inside = any_tile(cache, table, start, stop, SHAPE, BLOCK_N)
        seen = inside[:, None]
        if QUERIES > 1:
            seen &= (start + tl.arange(0, BLOCK_N))[:, None] < (tl.load(contexts + request) + query)[None, :]
        m, total, acc, upper_acc = attend(queries, tile, seen, m, total, acc, upper_acc, scale, SHAPE)
    result = tl.interleave(tl.trans(acc), tl.trans(upper_acc)) if SHAPE.fp8 else tl.trans(acc)
    total = tl.where(total == 0.0, 1.0, total)  # 0: no key, as for a padding request
    result /= total[:, None]
    if pieces == 1:
        to = out + (request + query)[:, None] * out_stride + in_row
        tl.store(to, result.to(out.dtype.element_ty), mask=used[:, None])
    else:
        at = (piece.to(tl.int64) * QUERIES + query) * SHAPE.kv_heads * GROUP
        tl.store(partial + at[:, None] * HEAD_DIM + in_row, result, mask=used[:, None])
        tl.store(lse + at + heads, m + tl.log2(total), mask=used)
        if COMBINED:
            _combine_last(
                partial,
                lse,
                finished + request * SHAPE.kv_heads + kv_head,
                out + request * out_stride,
                out_stride,
                first_piece,
                pieces,
                shared,
                kv_head,
                QUERIES,
                SHAPE.kv_heads,
                GROUP,
                HEAD_DIM,
                COMBINED,
            )


@triton.jit
def _queries(kv_head, shared, GROUP: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr):
    """The query and the query head of each row of a program, and whether there is such a row."""
    row = tl.arange(0, ROWS)
    query, in_group = row // (ROWS // QUERIES), row % (ROWS // QUERIES)
    return query, kv_head * GROUP + in_group, (in_group < GROUP) & (query < shared)


@triton.jit
def _combine_last(
    partial,
    lse,
    count,
    to_row,
    out_stride,
    first,
    pieces,
    shared,
    kv_head,
    QUERIES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COMBINED: tl.constexpr,
):
    """Counts a piece. The program that finishes last combines all of them."""
    if finishes_last(count, 0, pieces):
        tl.store(count, 0)
        in_group = tl.arange(0, triton.next_power_of_2(GROUP))
        heads, used = kv_head * GROUP + in_group, in_group < GROUP
        HEADS: tl.constexpr = KV_HEADS * GROUP
        for query in range(shared):
            to = to_row + query * out_stride
            of_query(partial, lse, to, first, pieces, query, heads, used, QUERIES, HEADS, HEAD_DIM, COMBINED)


@triton.jit
def attend(queries, tile, seen, m, total, acc, upper_acc, scale, SHAPE: tl.constexpr):
    """Adds a tile, for queries [head_dim, rows]. Keys and dimensions are the large sides of the products, so
    that few rows waste little of them. Only the keys in `seen` [keys, rows or 1] count; None: all. Returns
    the new m, total, acc and upper_acc."""
    FP8: tl.constexpr = SHAPE.fp8
    k, v, k_scale, v_scale = tile
    shift, inverse = logarithm(v_scale, FP8)
    upper = v
    if FP8:
        k = k.to(queries.dtype)
        v, upper = of_pairs(v, queries.dtype)
        k_scale *= scale
    scores = tl.dot(k, queries, input_precision="tf32x3")
    if FP8:
        scores = bounded(scores * k_scale[:, None], SHAPE) + shift[:, None]
    else:
        scores = bounded(scores * scale, SHAPE)
    if seen is not None:
        scores = tl.where(seen, scores, float("-inf"))
    new_m = tl.maximum(tl.maximum(m, tl.max(scores, axis=0)), LEAST)
    weights, total, shrink = weigh(scores, new_m, m, total, inverse if FP8 else None, 0)
    weights = weights.to(v.dtype)
    acc = tl.dot(tl.trans(v), weights, acc * shrink, input_precision="tf32x3")
    if FP8:
        upper_acc = tl.dot(tl.trans(upper), weights, upper_acc * shrink, input_precision="tf32x3")
    return new_m, total, acc, upper_acc
