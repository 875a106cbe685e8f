"""Attention of prefill chunks over the paged cache: to earlier positions, and to the chunk itself.

A query of position p attends to the positions first(p) … p of its request:

    out(p) = Σ softmax(q(p) · k(j) / sqrt(head_dim)) v(j),   first(p) ≤ j ≤ p

first(p) is 0, or the first position in the layer's span. The softmax may have a sink in its sum. One pass
over the keys computes it, tile by tile (FlashAttention, Dao 2022/2023; `online_softmax`).

*GQA packing*: the query heads of one KV head see the same keys. So the rows of a tile are BLOCK_M pairs
(token, head of the group), and each key is loaded once for all.
*Ragged batch*: the grid has no dimension for requests. `Tiles` lists the tokens and the chunk of each
program, longest work first, so that the last wave is short.
*Causal*: keys that the first token of a tile may see need no mask. The few keys after them are masked, in
smaller tiles.
*Span*: tiles of keys that no token sees are skipped. Those that only the last tokens do not see are masked.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import KV, parts
from engine.kernels.online_softmax import (
    LOG2_E,
    any_tile,
    cache_tiles,
    first_seen,
    logarithm,
    normalized,
    of_pairs,
    span_options,
    values_of,
    whole_tile,
)
from engine.kernels.tiles import SHORT, Shape
from engine.model_config import Span

# Measured on an H200 (`python -m bench.kernels --sweep`).
STAGES = 5
MASKED_N = 32  # keys of a tile that the causal mask cuts
LEAST = tl.constexpr(-1e30)  # not −inf, which would give NaN where a query sees no key of its first tile


@dataclass(frozen=True, slots=True)
class Tiles:
    """The work of each program in one step, the same for all layers."""

    work: Tensor  # [tiles, 4] int32, from `tile_work`; a row of zeros: no work
    shape: Shape


def prefill_attention(
    q: Tensor,
    kv: KV,
    block_tables: Tensor,
    tiles: Tiles,
    out: Tensor,
    span: Span | None,
    sinks: Tensor | None,
) -> None:
    """Writes the rows of the chunks in `tiles` to out. q and out [rows, num_heads, head_dim] have dense
    heads; block_tables [requests, blocks] int32; sinks [num_heads]."""
    _, num_heads, head_dim = q.shape
    cache, scales = parts(kv)
    _, num_blocks, block_size, num_kv_heads, _ = cache.shape
    (block_m, block_n, warps), stages = tiles.shape, STAGES
    if q.dtype is torch.float32 or head_dim > 128:  # larger tiles do not fit into shared memory
        block_n, stages = SHORT.block_n, 1
    values = values_of(cache, fp8=scales is not None)
    _prefill[(len(tiles.work), num_kv_heads)](
        q,
        cache,
        values,
        cache_tiles(cache, block_n, block_size),
        cache_tiles(values, block_n, block_size),
        cache if scales is None else scales,
        block_tables,
        tiles.work,
        out,
        q if sinks is None else sinks,
        head_dim**-0.5 * LOG2_E.value,
        q.stride(0),
        out.stride(0),
        block_tables.stride(0),
        num_blocks * block_size,
        BLOCK_SIZE=block_size,
        KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        MASKED_N=MASKED_N,
        FP8=scales is not None,
        SINKS=sinks is not None,
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
    scale,
    q_stride,
    out_stride,
    table_stride,
    slots,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED_N: tl.constexpr,
    FP8: tl.constexpr,
    SINKS: tl.constexpr,
    SPAN: tl.constexpr,
    CHUNKED: tl.constexpr,
):
    tile = tiles + tl.program_id(0) * 4
    kv_head = tl.program_id(1)
    request = tl.load(tile).to(tl.int64)
    row = tl.load(tile + 1).to(tl.int64)
    tokens = tl.load(tile + 2)
    if tokens == 0:
        return
    first = tl.load(tile + 3)
    stop = first + tokens

    packed = tl.arange(0, BLOCK_M)
    token = packed // GROUP
    dims = tl.arange(0, HEAD_DIM)
    used = (token < tokens)[:, None]
    head = kv_head * GROUP + packed % GROUP
    in_row = (head * HEAD_DIM)[:, None] + dims[None, :]
    row_of = (row + token)[:, None]
    queries = tl.load(q + row_of * q_stride + in_row, mask=used, other=0.0)

    whole = (first + 1) // BLOCK_N * BLOCK_N  # the causal mask hides no key before this position
    query_positions = tl.minimum(first + token, stop - 1)
    first_keys = first_seen(query_positions, SPAN, CHUNKED)[:, None]
    begin = 0
    table = block_tables + request * table_stride
    m = tl.full([BLOCK_M], LEAST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    queries, scale = normalized(queries, scale, FP8)
    if SINKS:
        m = tl.load(sinks + head).to(tl.float32) * LOG2_E
        total += 1.0
    if SPAN:
        skipped = first_seen(first, SPAN, CHUNKED) // BLOCK_N * BLOCK_N
        begin = tl.minimum(tl.cdiv(first_seen(stop - 1, SPAN, CHUNKED), BLOCK_N) * BLOCK_N, whole)
        for start in tl.range(skipped, begin, BLOCK_N):
            k, v, k_scale, v_scale, _ = any_tile(
                keys, values, kv_scales, table, start, stop, slots, kv_head,
                BLOCK_SIZE, KV_HEADS, HEAD_DIM, BLOCK_N, FP8,
            )  # fmt: skip
            seen = (start + tl.arange(0, BLOCK_N))[None, :] >= first_keys
            m, total, acc = attend(queries, k, v, k_scale, v_scale, seen, m, total, acc, scale, True, FP8)
    for start in tl.range(begin, whole, BLOCK_N):
        if BLOCK_SIZE % BLOCK_N == 0:
            k, v, k_scale, v_scale = whole_tile(
                key_tiles, value_tiles, kv_scales, table, start, slots, kv_head,
                BLOCK_SIZE, KV_HEADS, HEAD_DIM, BLOCK_N, FP8,
            )  # fmt: skip
        else:
            k, v, k_scale, v_scale, _ = any_tile(
                keys, values, kv_scales, table, start, stop, slots, kv_head,
                BLOCK_SIZE, KV_HEADS, HEAD_DIM, BLOCK_N, FP8,
            )  # fmt: skip
        m, total, acc = attend(queries, k, v, k_scale, v_scale, None, m, total, acc, scale, False, FP8)
    for start in tl.range(whole, stop, MASKED_N):
        k, v, k_scale, v_scale, inside = any_tile(
            keys, values, kv_scales, table, start, stop, slots, kv_head,
            BLOCK_SIZE, KV_HEADS, HEAD_DIM, MASKED_N, FP8,
        )  # fmt: skip
        positions = start + tl.arange(0, MASKED_N)
        seen = (positions[None, :] <= query_positions[:, None]) & inside[None, :]
        if SPAN:
            seen &= positions[None, :] >= first_keys
        m, total, acc = attend(queries, k, v, k_scale, v_scale, seen, m, total, acc, scale, True, FP8)
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + row_of * out_stride + in_row, result, mask=used)


@triton.jit
def attend(
    queries, k, v, k_scale, v_scale, seen, m, total, acc, scale, MASKED: tl.constexpr, FP8: tl.constexpr
):
    """Adds a tile. With MASKED, a query sees only the keys in `seen` [queries, keys]. Returns the new m,
    total and acc."""
    shift, inverse = logarithm(v_scale, FP8)
    if FP8:
        k = k.to(queries.dtype)
        lower, upper = of_pairs(v, queries.dtype)
        v = tl.interleave(lower, upper)
        k_scale *= scale
        scale = 1.0
    scores = tl.dot(queries, tl.trans(k), input_precision="tf32x3")
    if FP8:
        scores = scores * k_scale[None, :] + shift[None, :]
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    new_m = tl.maximum(m, tl.max(scores, axis=1) * scale)
    weights = tl.exp2(scores * scale - new_m[:, None])
    shrink = tl.exp2(m - new_m)
    total = total * shrink + tl.sum(weights * inverse[None, :] if FP8 else weights, axis=1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="tf32x3")
    return new_m, total, acc
