"""Attention of one query per request over the paged cache, split along the context.

    out = Σ softmax(q · k(j) · scale) v(j),   first ≤ j < context

`first` is 0, or the first position in the layer's span.

Only the query heads of one group share keys (GQA packing). So the time goes into reading the cache once. The
whole GPU reads it, also if contexts are few or of unequal length (Flash-Decoding, Dao 2023):

1. `_partition`, once per step: cuts the contexts of the batch into at most `pieces` pieces of equal length.
   It takes the shortest length that allows this. A long context gets many pieces, a short one only one.
2. `_split`, one program per (piece, KV head): attention over the keys of the piece alone, and the logarithm
   to base 2 of its softmax sum, lse(i). The first piece of a request has the sink in its sum.
3. The pieces of a request are combined, in their order:
   out = Σ 2^(lse(i) − max) · out(i) / Σ 2^(lse(i) − max). A request of one piece has its result already. Few
   requests have many pieces each, so `_combine` has a program for each of their query heads. With more
   requests, the program of `_split` that finishes last for a KV head combines, which saves a launch.

The number of pieces depends on batch size and device alone, and programs read their work on the device. So a
captured graph serves contexts of any length. A padding request, of context 0, has an empty piece and gets 0.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels import KV, parts
from baton.engine.kernels.attention.online_softmax import (
    EXACT_N,
    LEAST,
    LOG2_E,
    any_tile,
    cache_of,
    first_seen,
    logarithm,
    normalized,
    of_pairs,
    segment_of,
    span_options,
    whole_tile,
)
from baton.engine.kernels.launch import inputs_ready, launch_options
from baton.engine.model_config import Span

# Measured on an H200.
PIECES_PER_SM = 4  # programs of `_split` for each multiprocessor, if the requests alone give fewer
BLOCK_N = 32  # keys of a tile; pieces are cut at multiples of it
BYTES_PER_WARP = 256  # of a key
STAGES = 7
ROWS = 8  # least size of a side of a tensor core product; a group of query heads is padded to it

PARTITION_PIECES = 32  # pieces that one program of `_partition` assigns
COMBINED = 32  # results of `_split` that a program of `_combine` takes at once
MOST_HEAD = 256  # a program takes fewer results of larger heads, and has more warps
COMBINED_LAST = 16  # that the last program of `_split` takes at once, of all query heads of a group
FEW_REQUESTS = 32  # up to these, `_combine` runs
FIELDS = 3  # of the work of a piece
EXACT_FIELDS = tl.constexpr(6)


@dataclass(frozen=True, slots=True)
class Pieces:
    """The work of each program in one decode step, the same for all layers with the same span."""

    work: Tensor  # [pieces, 3] int32: request, first position, last position + 1; request −1: no work
    first: Tensor
    """[requests + 1] int32: request i has the pieces [first[i], first[i + 1])."""
    finished: Tensor  # [requests, KV heads] int32: pieces that are finished; 0 between layers


def most_pieces(requests: int, num_kv_heads: int, multiprocessors: int) -> int:
    return requests + -(-PIECES_PER_SM * multiprocessors // num_kv_heads)


def partition(
    contexts: Tensor,
    num_kv_heads: int,
    pieces: int,
    span: Span | None = None,
    *,
    block_n: int = BLOCK_N,
    exact: bool = False,
) -> Pieces:
    """Cuts contexts [requests] int32 into up to so many pieces, at multiples of `block_n`, from the first
    position in the span on.

    `exact`: pieces are whole segments (`online_softmax`). Their work has three more fields: the number of
    pieces of the request, the positions of a segment, and the piece's first segment, counted from the first
    one of the request. `first` counts the segments of the requests that have several pieces."""
    requests = len(contexts)
    new = contexts.new_empty
    fields = EXACT_FIELDS.value if exact else FIELDS
    result = Pieces(new(pieces, fields), new(requests + 1), new(requests, num_kv_heads))
    _partition[(triton.cdiv(pieces, PARTITION_PIECES),)](
        contexts,
        result.work,
        result.first,
        result.finished,
        requests,
        pieces,
        KV_HEADS=num_kv_heads,
        BLOCK_N=EXACT_N if exact else block_n,
        FIELDS=fields,
        EXACT=exact,
        REQUESTS=max(16, triton.next_power_of_2(requests)),
        PIECES=PARTITION_PIECES,
        **span_options(span),
        num_warps=4,
    )
    return result


def decode_attention(
    q: Tensor,
    kv: KV,
    block_tables: Tensor,
    pieces: Pieces,
    out: Tensor,
    span: Span | None,
    sinks: Tensor | None,
    scale: float,
) -> None:
    """Writes out. q and out [requests, num_heads, head_dim] have dense heads; block_tables [requests, blocks]
    int32; `span` is that of `pieces`; sinks [num_heads]. `scale` multiplies the products of queries and
    keys."""
    requests, num_heads, head_dim = q.shape
    shape, cache, slots = cache_of(kv, BLOCK_N)
    group = num_heads // shape.kv_heads
    count = len(pieces.work)
    partial = torch.empty((count, num_heads, head_dim), dtype=torch.float32, device=q.device)
    lse = torch.empty((count, num_heads), dtype=torch.float32, device=q.device)
    few = requests <= FEW_REQUESTS
    _split[(shape.kv_heads, count)](
        q,
        *cache,
        block_tables,
        pieces.work,
        pieces.first,
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
        SHAPE=shape,
        GROUP=group,
        ROWS=max(ROWS, triton.next_power_of_2(group)),
        COMBINED=0 if few else max(1, COMBINED_LAST // triton.next_power_of_2(group)),
        BLOCK_N=BLOCK_N,
        SPAN=span is not None,
        SINKS=sinks is not None,
        num_warps=max(1, head_dim * parts(kv)[0].itemsize // BYTES_PER_WARP),
        num_stages=STAGES,
        **launch_options(),
    )
    if few:
        combine(partial, lse, pieces, out)


def combine(partial: Tensor, lse: Tensor, pieces: Pieces, out: Tensor) -> None:
    """Writes out [requests, heads, size], for requests of several pieces. partial [pieces, heads, size] and
    lse [pieces, heads] float32 have their results."""
    requests, heads, size = out.shape
    _combine[(requests, heads)](
        partial,
        lse,
        pieces.first,
        out,
        out.stride(0),
        HEADS=heads,
        HEAD_DIM=size,
        COMBINED=max(1, COMBINED * MOST_HEAD // max(MOST_HEAD, size)),
        num_warps=1 if size <= MOST_HEAD else 4,
        **launch_options(),
    )


@triton.jit(do_not_specialize=["requests", "pieces"])
def _partition(
    contexts,
    work,
    first,
    finished,
    requests,
    pieces,
    KV_HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FIELDS: tl.constexpr,
    EXACT: tl.constexpr,
    REQUESTS: tl.constexpr,
    PIECES: tl.constexpr,
    SPAN: tl.constexpr,
    CHUNKED: tl.constexpr,
):
    requests_of = tl.arange(0, REQUESTS)
    context = tl.load(contexts + requests_of, mask=requests_of < requests, other=0)
    unit = segment_of(context) if EXACT else context * 0 + BLOCK_N
    units = tl.cdiv(context, unit) - first_seen(context - 1, SPAN, CHUNKED) // unit
    units = tl.where(requests_of < requests, tl.maximum(units, 1), 0)
    # Bisection for the shortest length, in tiles, that gives at most `pieces` pieces.
    low = 1
    high = tl.maximum(tl.max(units * (unit // BLOCK_N), axis=0), 1)
    while low < high:
        middle = (low + high) // 2
        if tl.sum(tl.cdiv(units, tl.cdiv(middle * BLOCK_N, unit)), axis=0) <= pieces:
            high = middle
        else:
            low = middle + 1
    count = tl.cdiv(units, tl.cdiv(high * BLOCK_N, unit))
    ends = tl.cumsum(count, axis=0)

    own = tl.program_id(0) * PIECES + tl.arange(0, PIECES)
    past = ends[None, :] <= own[:, None]  # [pieces, requests]: all pieces of the request come before this one
    request = tl.sum(past.to(tl.int32), axis=1)
    before = tl.sum(tl.where(past, count[None, :], 0), axis=1)
    taken = request < REQUESTS
    last = tl.load(contexts + request, mask=taken & (request < requests), other=0)
    seen = first_seen(last - 1, SPAN, CHUNKED)
    unit = segment_of(last) if EXACT else BLOCK_N
    length = tl.cdiv(high * BLOCK_N, unit) * unit
    start = seen // unit * unit + (own - before) * length
    stop = tl.minimum(start + length, last)
    start = tl.minimum(tl.maximum(start, seen), last)
    inside = own < pieces
    tl.store(work + own * FIELDS, tl.where(taken, request, -1), mask=inside)
    tl.store(work + own * FIELDS + 1, start, mask=inside)
    tl.store(work + own * FIELDS + 2, stop, mask=inside)
    if EXACT:
        of_request = tl.maximum(tl.cdiv(tl.cdiv(last, unit) - seen // unit, length // unit), 1)
        tl.store(work + own * FIELDS + 3, of_request, mask=inside)
        tl.store(work + own * FIELDS + 4, unit, mask=inside)
        tl.store(work + own * FIELDS + 5, (own - before) * (length // unit), mask=inside)
        count = tl.where(count > 1, units, 0)
        ends = tl.cumsum(count, axis=0)
    if tl.program_id(0) == 0:
        tl.store(first + requests_of, ends - count, mask=requests_of < requests)
        tl.store(first + requests, tl.sum(count, axis=0))
        for head in tl.static_range(KV_HEADS):
            tl.store(finished + requests_of * KV_HEADS + head, 0, mask=requests_of < requests)


@triton.jit(do_not_specialize=["table_stride"])
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
    SHAPE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COMBINED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPAN: tl.constexpr,
    SINKS: tl.constexpr,
):
    inputs_ready()
    HEAD_DIM: tl.constexpr = SHAPE.head_dim
    kv_head = tl.program_id(0)  # the heads of a piece run at once, since they are neighbours in memory
    piece = tl.program_id(1)
    request = tl.load(work + piece * 3).to(tl.int64)
    if request < 0:
        return
    begin, stop = tl.load(work + piece * 3 + 1), tl.load(work + piece * 3 + 2)
    rows_of_q = tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_DIM)
    used = rows_of_q < GROUP
    heads = kv_head * GROUP + rows_of_q
    in_row = heads[:, None] * HEAD_DIM + dims[None, :]
    queries = tl.load(q + request * q_stride + in_row, mask=used[:, None], other=0.0)
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
        m = tl.where(piece == first_piece, sink, m)
        total = tl.where(piece == first_piece, 1.0, total)
    if SPAN:
        unaligned = begin % BLOCK_N
        if unaligned != 0:
            tile, inside = any_tile(cache, table, begin - unaligned, stop, SHAPE, BLOCK_N)
            seen = inside & (tl.arange(0, BLOCK_N) >= unaligned)
            m, total, acc, upper_acc = attend(queries, tile, seen, m, total, acc, upper_acc, scale, SHAPE.fp8)
            begin = tl.minimum(begin - unaligned + BLOCK_N, stop)
    last = begin + (stop - begin) // BLOCK_N * BLOCK_N
    for start in tl.range(begin, last, BLOCK_N):
        tile = whole_tile(cache, table, start, stop, SHAPE, BLOCK_N)
        m, total, acc, upper_acc = attend(queries, tile, None, m, total, acc, upper_acc, scale, SHAPE.fp8)
    if last < stop:
        tile, inside = any_tile(cache, table, last, stop, SHAPE, BLOCK_N)
        m, total, acc, upper_acc = attend(queries, tile, inside, m, total, acc, upper_acc, scale, SHAPE.fp8)
    result = tl.interleave(tl.trans(acc), tl.trans(upper_acc)) if SHAPE.fp8 else tl.trans(acc)
    result /= tl.where(total == 0.0, 1.0, total)[:, None]  # 0: the piece of a padding request
    to_row, count = out + request * out_stride, finished + request * SHAPE.kv_heads + kv_head
    if pieces == 1:
        tl.store(to_row + in_row, result.to(out.dtype.element_ty), mask=used[:, None])
    else:
        to = piece.to(tl.int64) * SHAPE.kv_heads * GROUP
        tl.store(partial + to * HEAD_DIM + in_row, result, mask=used[:, None])
        tl.store(lse + to + heads, m + tl.log2(total), mask=used)
        if COMBINED:
            _combine_last(
                partial,
                lse,
                count,
                to_row,
                first_piece,
                pieces,
                kv_head,
                SHAPE.kv_heads,
                GROUP,
                HEAD_DIM,
                COMBINED,
            )


@triton.jit
def _combine_last(
    partial,
    lse,
    count,
    to_row,
    first,
    pieces,
    kv_head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COMBINED: tl.constexpr,
):
    """Counts a piece. The program that finishes last combines all of them."""
    tl.debug_barrier()  # all threads have stored before the program counts as finished
    if tl.atomic_add(count, 1, sem="acq_rel") == pieces - 1:
        tl.store(count, 0)
        own = tl.arange(0, triton.next_power_of_2(GROUP))
        heads, used = kv_head * GROUP + own, own < GROUP
        _add_up(partial, lse, to_row, first, pieces, heads, used, KV_HEADS * GROUP, HEAD_DIM, COMBINED)


@triton.jit
def attend(queries, tile, seen, m, total, acc, upper_acc, scale, FP8: tl.constexpr):
    """Adds a tile, for queries [head_dim, rows]. Keys and dimensions are the large sides of the products, so
    that few rows waste little of them. Only the keys in `seen` [keys] count; None: all. Returns the new m,
    total, acc and upper_acc."""
    k, v, k_scale, v_scale = tile
    shift, inverse = logarithm(v_scale, FP8)
    upper = v
    if FP8:
        k = k.to(queries.dtype)
        v, upper = of_pairs(v, queries.dtype)
        k_scale *= scale
    scores = tl.dot(k, queries, input_precision="tf32x3")
    if FP8:
        scores = scores * k_scale[:, None] + shift[:, None]
    else:
        scores *= scale
    if seen is not None:
        scores = tl.where(seen[:, None], scores, float("-inf"))
    new_m = tl.maximum(m, tl.max(scores, axis=0))
    weights = tl.exp2(scores - new_m[None, :])
    shrink = tl.exp2(m - new_m)
    total = total * shrink + tl.sum(weights * inverse[:, None] if FP8 else weights, axis=0)
    weights = weights.to(v.dtype)
    acc = tl.dot(tl.trans(v), weights, acc * shrink[None, :], input_precision="tf32x3")
    if FP8:
        upper_acc = tl.dot(tl.trans(upper), weights, upper_acc * shrink[None, :], input_precision="tf32x3")
    return new_m, total, acc, upper_acc


@triton.jit
def _combine(
    partial,
    lse,
    first,
    out,
    out_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COMBINED: tl.constexpr,
):
    inputs_ready()
    request = tl.program_id(0)
    begin = tl.load(first + request)
    pieces = tl.load(first + request + 1) - begin
    if pieces > 1:
        head = tl.program_id(1) + tl.arange(0, 1)
        to_row = out + request.to(tl.int64) * out_stride
        _add_up(partial, lse, to_row, begin, pieces, head, head < HEADS, HEADS, HEAD_DIM, COMBINED)


@triton.jit
def _add_up(
    partial,
    lse,
    to_row,
    first,
    pieces,
    heads,
    used,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COMBINED: tl.constexpr,
):
    """Writes the `heads` of a request that are `used`, from its pieces, COMBINED of them at a time."""
    dims = tl.arange(0, HEAD_DIM)
    m = tl.full(heads.shape, float("-inf"), tl.float32)
    total = tl.zeros(heads.shape, tl.float32)
    acc = tl.zeros([heads.shape[0], HEAD_DIM], tl.float32)
    for start in tl.range(first, first + pieces, COMBINED):
        own = start + tl.arange(0, COMBINED)
        there = (own < first + pieces)[:, None] & used[None, :]
        at = own.to(tl.int64)[:, None] * HEADS + heads[None, :]
        weight = tl.load(lse + at, mask=there, other=float("-inf"), cache_modifier=".cg")
        of_heads = partial + at[:, :, None] * HEAD_DIM + dims[None, None, :]
        values = tl.load(of_heads, mask=there[:, :, None], other=0.0, cache_modifier=".cg")
        new_m = tl.maximum(tl.maximum(m, tl.max(weight, axis=0)), LEAST)
        weight = tl.exp2(weight - new_m[None, :])
        shrink = tl.exp2(m - new_m)
        total = total * shrink + tl.sum(weight, axis=0)
        acc = acc * shrink[:, None] + tl.sum(weight[:, :, None] * values, axis=0)
        m = new_m
    to = to_row + heads[:, None] * HEAD_DIM + dims[None, :]
    result = acc / tl.maximum(total, 1e-30)[:, None]  # 0: a head that is not used
    tl.store(to, result.to(to_row.dtype.element_ty), mask=used[:, None])
