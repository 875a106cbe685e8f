"""The step that both attention kernels repeat for each tile of keys and values from the paged cache.

For each row (a query) a kernel keeps, over all tiles so far: the largest score m, the sum `total` of
exp(score − m), and the sum `acc` of values weighted by exp(score − m). If a tile has a larger m, the earlier
sums are scaled down (Milakov & Gimelshein 2018). Scores are multiplied by log₂ e, since exp2 is one
instruction. A sink is where a kernel starts: its logit is the first m, and the first `total` is 1.

A tile within one block of the cache is a rectangle in memory, [positions, head_dim] of one head. Hopper's
copy engine fetches it by itself (`whole_tile`). Otherwise each row is looked up (`any_tile`).

A cache in FP8 is converted tile by tile, without its scales: those of keys multiply the scores, and those of
values the weights (`kv_cache`). The products are in float16, since one instruction converts two FP8 numbers
to it. So that float16 holds the other factors, too, the queries are divided by a power of two (`normalized`),
and `acc` counts in units of a power of two near the largest scale of values so far.

Values past `stop` are masked when they are loaded: these slots may hold NaN, which a weight of zero would not
remove. Products of float32 take three passes of the tensor cores (TF32 and its rounding errors), because TF32
alone has 10 bits of mantissa.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.model_config import Span

LOG2_E = tl.constexpr(1.4426950408889634)
LEAST_UNIT = tl.constexpr(2.0**-120)  # less than any scale


def cache_tiles(kv: Tensor, block_n: int) -> TensorDescriptor:
    """The cache as a matrix with one row per slot, first of all keys, then of all values. A load fetches
    `block_n` rows of one head."""
    _, num_blocks, block_size, kv_heads, head_dim = kv.shape
    rows = kv.view(2 * num_blocks * block_size, kv_heads * head_dim)
    return TensorDescriptor.from_tensor(rows, [block_n, head_dim])


def span_options(span: Span | None) -> dict[str, Any]:
    """The arguments of kernels that call `first_seen`."""
    return {"SPAN": span.length if span else 0, "CHUNKED": span.chunked if span else False}


@triton.jit
def first_seen(position, SPAN: tl.constexpr, CHUNKED: tl.constexpr):
    """The first position that a query at this position sees. SPAN 0: the layer has no span."""
    first = position * 0
    if CHUNKED:
        first = tl.maximum(position, 0) // SPAN * SPAN
    elif SPAN:
        first = tl.maximum(position + 1 - SPAN, 0)
    return first


@triton.jit
def whole_tile(
    tiles,
    scales,
    table,
    start,
    slots,
    kv_head,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FP8: tl.constexpr,
):
    """Keys and values of one tile of `cache_tiles` from position `start` on, all in one block, and the scales
    of both. `scales` is that of `Fp8KV`; without FP8 a scale is 1."""
    block = tl.load(table + start // BLOCK_SIZE)
    row = block * BLOCK_SIZE + start % BLOCK_SIZE
    k_scale, v_scale = 1.0, 1.0
    if FP8:
        of_keys = scales + (block.to(tl.int64) * KV_HEADS + kv_head) * BLOCK_SIZE
        of_keys += start % BLOCK_SIZE + tl.arange(0, BLOCK_N)
        k_scale, v_scale = tl.load(of_keys), tl.load(of_keys + slots.to(tl.int64) * KV_HEADS)
    k, v = tiles.load([row, kv_head * HEAD_DIM]), tiles.load([row + slots, kv_head * HEAD_DIM])
    return k, v, k_scale, v_scale


@triton.jit
def any_tile(
    kv,
    scales,
    table,
    start,
    stop,
    slots,
    kv_head,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FP8: tl.constexpr,
):
    """Keys and values of positions [start, start + BLOCK_N), the scales of both, and whether each position is
    before `stop`. Positions from `stop` on have value 0 and any key."""
    offsets = tl.arange(0, BLOCK_N)
    positions = start + offsets
    inside = positions < stop
    if BLOCK_SIZE % BLOCK_N == 0:  # start is a multiple of BLOCK_N: one block has all positions
        block = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
        rows = block * BLOCK_SIZE + start % BLOCK_SIZE + offsets
    else:
        block = tl.load(table + positions // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        rows = block * BLOCK_SIZE + positions % BLOCK_SIZE
    keys = kv + kv_head * HEAD_DIM
    values = keys + slots.to(tl.int64) * (KV_HEADS * HEAD_DIM)
    at = rows[:, None] * (KV_HEADS * HEAD_DIM) + tl.arange(0, HEAD_DIM)[None, :]
    k = tl.load(keys + at)
    v = tl.load(values + at, mask=inside[:, None], other=0.0)
    k_scale, v_scale = 1.0, 1.0
    if FP8:
        of_keys = scales + (block * (KV_HEADS - 1) + kv_head) * BLOCK_SIZE + rows
        k_scale = tl.load(of_keys)
        v_scale = tl.load(of_keys + slots.to(tl.int64) * KV_HEADS, mask=inside, other=0.0)
    return k, v, k_scale, v_scale, inside


@triton.jit
def power_of_two(x):
    """The largest power of two up to x, positive float32."""
    return (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


COMPILED = tl.constexpr(isinstance(power_of_two, JITFunction))


@triton.jit
def normalized(queries, scale, FP8: tl.constexpr):
    """With FP8, the queries divided by a power of two, and `scale` multiplied by it: exact, and near 1. They
    become float16, unless they are float32."""
    if FP8:
        element: tl.constexpr = tl.float32 if queries.dtype == tl.float32 else tl.float16
        largest = tl.max(tl.max(tl.abs(queries.to(tl.float32)), axis=1), axis=0)
        unit = power_of_two(tl.maximum(largest, LEAST_UNIT))
        queries, scale = (queries.to(tl.float32) / unit).to(element), scale * unit
    return queries, scale


@triton.jit
def _float16(values):
    """FP8 values as float16. The compiler would move a cast to where each thread has its operand of the
    product. There a thread would load values byte by byte, since the product adds up rows."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
            "=r,=r,r", [values.to(tl.int8, bitcast=True)], dtype=tl.float16, is_pure=False, pack=4,
        )  # fmt: skip
    return values.to(tl.float16)


@triton.jit
def attend(
    queries, k, v, k_scale, v_scale, seen, m, total, acc, unit, scale, MASKED: tl.constexpr, FP8: tl.constexpr
):
    """Adds a tile. With MASKED, a query sees only the keys in `seen` [queries, keys]. Returns the new m,
    total, acc and its unit. Without FP8 the unit stays 1."""
    if FP8:
        k = k.to(queries.dtype)
        v = _float16(v) if queries.dtype == tl.float16 else v.to(queries.dtype)
    scores = tl.dot(queries, tl.trans(k), input_precision="tf32x3")
    if FP8:
        scores *= k_scale[None, :]
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    new_m = tl.maximum(m, tl.max(scores, axis=1) * scale)
    weights = tl.exp2(scores * scale - new_m[:, None])
    shrink = tl.exp2(m - new_m)
    total = total * shrink + tl.sum(weights, axis=1)
    if FP8:
        new_unit = tl.maximum(unit, power_of_two(tl.max(v_scale, axis=0)))
        inverse = 1.0 / new_unit  # exact
        weights *= (v_scale * inverse)[None, :]
        shrink *= unit * inverse
        unit = new_unit
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="tf32x3")
    return new_m, total, acc, unit
