"""Attention of one query per request over the paged cache, with the same bits as in any chunk of a prompt.

It differs from `decode_attention` in the order of sums (*exact*, `online_softmax`). The contexts are cut into
pieces of whole segments. How many segments a piece has depends on the batch, but the segments do not. If a
request has one piece, its program folds the segments as it goes. Otherwise each segment has a result, and
the program that finishes last for a KV head folds them all, in their order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels import KV
from baton.engine.kernels.attention.online_softmax import (
    EXACT_N,
    LEAST,
    LOG2_E,
    SEGMENTS,
    any_tile,
    attend_exactly,
    cache_of,
    fold,
    no_sums,
    whole_tile,
)
from baton.engine.kernels.attention.pieces import EXACT_FIELDS, Pieces
from baton.engine.kernels.launch import finishes_last, inputs_ready, launch_options
from baton.engine.model_config import Span

# Measured on an H200.
WARPS = 2
STAGES = 7
LARGEST_HEAD = 256  # numbers; of a larger one, fewer tiles fit into shared memory, and sums need more threads
ROWS = 8
"""Least number of query heads of a group, padded. With so few, Triton takes `mma.sync` in place of `wgmma`.
Both add 16 products at a time in the same way: a test compares their bits."""


def exact_decode_attention(
    q: Tensor,
    kv: KV,
    block_tables: Tensor,
    pieces: Pieces,
    out: Tensor,
    span: Span | None,
    sinks: Tensor | None,
    scale: float,
) -> None:
    """As `decode_attention`, for pieces that are exact."""
    requests, num_heads, head_dim = q.shape
    shape, cache, slots = cache_of(kv, EXACT_N)
    group = num_heads // shape.kv_heads
    # A request of several pieces takes one of those that exceed the number of requests.
    results = (len(pieces.work) - requests) * SEGMENTS.value
    partial = torch.empty((results, num_heads, head_dim), dtype=torch.float32, device=q.device)
    weights = torch.empty((results, num_heads, 2), dtype=torch.float32, device=q.device)
    _decode[(shape.kv_heads, len(pieces.work))](
        q,
        *cache,
        block_tables,
        pieces.work,
        pieces.first,
        partial,
        weights,
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
        BLOCK_N=EXACT_N,
        SPAN=span is not None,
        SINKS=sinks is not None,
        num_warps=WARPS if head_dim <= LARGEST_HEAD else 2 * WARPS,
        num_stages=STAGES if head_dim <= LARGEST_HEAD else STAGES // 2,
        **launch_options(),
    )


@triton.jit(do_not_specialize=["table_stride"])
def _decode(
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
    weights,
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
    BLOCK_N: tl.constexpr,
    SPAN: tl.constexpr,
    SINKS: tl.constexpr,
):
    inputs_ready()
    HEAD_DIM: tl.constexpr = SHAPE.head_dim
    kv_head = tl.program_id(0)  # the heads of a piece run at once, since they are neighbours in memory
    work += tl.program_id(1) * EXACT_FIELDS
    request = tl.load(work).to(tl.int64)
    if request < 0:
        return
    begin, stop, pieces, segment = tl.load(work + 1), tl.load(work + 2), tl.load(work + 3), tl.load(work + 4)
    first_result, result = tl.load(first + request), tl.load(first + request) + tl.load(work + 5)
    group, dims = tl.arange(0, ROWS), tl.arange(0, HEAD_DIM)
    used, heads = group < GROUP, kv_head * GROUP + group
    in_row = heads[:, None] * HEAD_DIM + dims[None, :]
    queries = tl.trans(tl.load(q + request * q_stride + in_row, mask=used[:, None], other=0.0))

    cache = keys, values, key_tiles, value_tiles, kv_scales, slots, kv_head
    table = block_tables + request * table_stride
    results = partial, weights, heads, used, SHAPE.kv_heads * GROUP
    m, total, acc = no_sums(ROWS, HEAD_DIM, 0)
    seg_m, seg_total, seg_acc = no_sums(ROWS, HEAD_DIM, 0)
    if SINKS:
        m = tl.load(sinks + heads, mask=used, other=0.0).to(tl.float32) * LOG2_E
        total += 1.0
    if SPAN:
        unaligned = begin % BLOCK_N
        if unaligned != 0:
            end = begin - unaligned + BLOCK_N
            tile, inside = any_tile(cache, table, begin - unaligned, stop, SHAPE, BLOCK_N)
            seen = (inside & (tl.arange(0, BLOCK_N) >= unaligned))[:, None]
            seg_m, seg_total, seg_acc = attend_exactly(
                queries, tile, seen, seg_m, seg_total, seg_acc, scale, 0
            )
            ends = (end <= stop) & (end % segment == 0)
            m, total, acc, seg_m, seg_total, seg_acc, result = _end_segment(
                m, total, acc, seg_m, seg_total, seg_acc, result, ends, pieces, results
            )
            begin = tl.minimum(end, stop)
    last = begin + (stop - begin) // BLOCK_N * BLOCK_N
    for start in tl.range(begin, last, BLOCK_N):
        tile = whole_tile(cache, table, start, stop, SHAPE, BLOCK_N)
        seg_m, seg_total, seg_acc = attend_exactly(queries, tile, None, seg_m, seg_total, seg_acc, scale, 0)
        ends = (start + BLOCK_N) % segment == 0
        m, total, acc, seg_m, seg_total, seg_acc, result = _end_segment(
            m, total, acc, seg_m, seg_total, seg_acc, result, ends, pieces, results
        )
    if last < stop:
        tile, inside = any_tile(cache, table, last, stop, SHAPE, BLOCK_N)
        seg_m, seg_total, seg_acc = attend_exactly(
            queries, tile, inside[:, None], seg_m, seg_total, seg_acc, scale, 0
        )
    m, total, acc, seg_m, seg_total, seg_acc, result = _end_segment(
        m, total, acc, seg_m, seg_total, seg_acc, result, stop % segment != 0, pieces, results
    )
    to_row = out + request * out_stride
    if pieces == 1:
        y = _normalized(tl.trans(acc), tl.max(total, axis=0))
        tl.store(to_row + in_row, y.to(out.dtype.element_ty), mask=used[:, None])
    else:
        place = request * SHAPE.kv_heads + kv_head
        if finishes_last(finished, place, pieces):
            tl.store(finished + place, 0)
            segments = tl.load(first + request + 1) - first_result
            y = _fold_results(results, first_result, segments, sinks + heads, HEAD_DIM, SINKS)
            tl.store(to_row + in_row, y.to(out.dtype.element_ty), mask=used[:, None])


@triton.jit
def _end_segment(m, total, acc, seg_m, seg_total, seg_acc, result, ends, pieces, results):
    """If a segment `ends`, folds its sums, or stores them as its result if the request has several pieces.
    The sums of the next segment begin at zero."""
    if ends:
        if pieces == 1:
            m, total, acc = fold(m, total, acc, seg_m, seg_total, seg_acc, 0)
        else:
            partial, weights, heads, used, num_heads = results
            to = result.to(tl.int64) * num_heads + heads
            in_result = to[:, None] * seg_acc.shape[0] + tl.arange(0, seg_acc.shape[0])[None, :]
            tl.store(partial + in_result, tl.trans(seg_acc), mask=used[:, None])
            tl.store(weights + to * 2, seg_m, mask=used)
            tl.store(weights + to * 2 + 1, tl.max(seg_total, axis=0), mask=used)
        seg_m, seg_total, seg_acc = no_sums(seg_acc.shape[1], seg_acc.shape[0], 0)
        result += 1
    return m, total, acc, seg_m, seg_total, seg_acc, result


@triton.jit
def _fold_results(results, first, segments, sinks, HEAD_DIM: tl.constexpr, SINKS: tl.constexpr):
    """Attention of the heads of a group, from the results of all their segments."""
    partial, weights, heads, used, num_heads = results
    m = tl.full(heads.shape, LEAST, tl.float32)
    total = tl.zeros([heads.shape[0], 1], tl.float32)
    acc = tl.zeros([heads.shape[0], HEAD_DIM], tl.float32)
    if SINKS:
        m = tl.load(sinks, mask=used, other=0.0).to(tl.float32) * LOG2_E
        total += 1.0
    for i in tl.static_range(SEGMENTS):  # so all loads are under way at once
        at = (first + i).to(tl.int64) * num_heads + heads
        is_segment = used & (i < segments)
        seg_m = tl.load(weights + at * 2, mask=is_segment, other=LEAST, cache_modifier=".cg")
        seg_total = tl.load(weights + at * 2 + 1, mask=is_segment, other=0.0, cache_modifier=".cg")
        in_result = at[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
        seg_acc = tl.load(partial + in_result, mask=is_segment[:, None], other=0.0, cache_modifier=".cg")
        m, total, acc = fold(m, total, acc, seg_m, seg_total[:, None], seg_acc, 1)
    return _normalized(acc, tl.max(total, axis=1))


@triton.jit
def _normalized(acc, total):
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]  # 0: a padding request
