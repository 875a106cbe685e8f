"""What both attention kernels share: tiles of keys and values from the paged cache, and the online softmax.

For each row (a query) a kernel keeps, over all tiles so far: the largest score m, the sum `total` of
exp(score − m), and the sum `acc` of values weighted by exp(score − m). If a tile has a larger m, the earlier
sums are scaled down (Milakov & Gimelshein 2018). Scores are multiplied by log₂ e, since exp2 is one
instruction. A sink is where a kernel starts: its logit is the first m, and the first `total` is 1.

A tile within one block of the cache is a rectangle in memory, [positions, head_dim] of one head. Hopper's
copy engine fetches it by itself (`whole_tile`). Otherwise each row is looked up (`any_tile`).

A cache in FP8 is converted tile by tile, without its scales (`kv_cache`): those of keys multiply the scores.
The logarithm of the scale of a value is added to its score. So a weight is exp(score) · scale, divided by the
largest one, and `total` sums weights divided by their scales. The products are in float16, since one
instruction converts two FP8 numbers to it. So that float16 holds the queries, too, they are divided by a
power of two (`normalized`).

Values are read as *pairs* of two FP8 numbers in 16 bits. The transposing loads of the tensor core's operands
move 16 bits, so they can move pairs, and a thread converts them in its registers.

Values past `stop` are masked when they are loaded: these slots may hold NaN, which a weight of zero would not
remove. Products of float32 take three passes of the tensor cores (TF32 and its rounding errors), because TF32
alone has 10 bits of mantissa.

*Exact*: a query gets the same bits as a decode and in any chunk of its prompt. Its keys form tiles of EXACT_N
and segments (`segment_of`), which begin at fixed positions and depend on the position of the query alone. The
sums of a segment begin at zero, and `fold` adds segments in their order. Within a segment, the tensor cores
add all sums, that of the weights, too (`attend_exactly`): from one key to the next, whatever the shape of a
tile. A program reduces nothing across threads but the largest score, which has no order. Each product that is
added is an explicit `fma`, since the compiler may fuse one kernel's additions and leave another's. Keys and
values in FP8 become the numbers that `gather_kv` writes, since long chunks read those.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from baton.engine.kernels.attention.paged import KV, parts
from baton.engine.kernels.fp8 import power_of_two
from baton.engine.kernels.launch import COMPILED
from baton.engine.model_config import Span

LOG2_E = tl.constexpr(1.4426950408889634)
LEAST_QUERY = tl.constexpr(2.0**-120)  # counts as the largest number of queries that are zeros


EXACT_N = 64
"""Keys of a tile in the exact mode."""
SEGMENT = tl.constexpr(256)
"""Positions of the shortest segment."""
SEGMENTS = tl.constexpr(16)
"""The most segments of a context: those of a longer one are twice as long."""
LEAST = tl.constexpr(-1e30)  # of m: −∞ would give NaN where a query has seen no key
ONES = tl.constexpr(16)  # rows or columns of ones that sum weights: the least that the tensor cores take


class CacheShape(NamedTuple):
    """What a kernel knows of the cache, and of scores, when it is compiled."""

    block_size: int
    kv_heads: int
    head_dim: int
    value_dim: int
    fp8: bool
    softcap: float = 0.0
    """Of scores; 0: none."""


class Expanded(NamedTuple):
    """Keys and values in place of a cache, with head dims of their own."""

    keys: Tensor  # [1, blocks, block_size, heads, head_dim]
    values: Tensor  # [1, blocks, block_size, heads, value_dim]


def cache_of(kv: KV | Expanded, block_n: int) -> tuple[CacheShape, tuple[Any, ...], int]:
    """The shape of the cache, the arguments of a kernel that reads it with tiles of `block_n` keys, and the
    number of slots of keys before the values. The arguments: keys, values, tiles of both, and scales.

    Values in FP8 are pairs, int16. Tiles are those of a matrix with one row per slot, first of all keys, then
    of all values. A load fetches `block_n` rows of one head. If a tile may be in two blocks, the copy engine
    cannot load it: then they are the cache itself."""
    if isinstance(kv, Expanded):
        _, _, block_size, heads, head_dim = kv.keys.shape
        shape = CacheShape(block_size, heads, head_dim, kv.values.shape[4], False)
        return shape, (*kv, *(_tiles(x, block_n) for x in kv), kv.keys), 0
    keys, scales = parts(kv)
    values = keys if scales is None else keys.view(torch.int16)
    _, num_blocks, block_size, kv_heads, head_dim = keys.shape
    shape = CacheShape(block_size, kv_heads, head_dim, head_dim, scales is not None)
    tiles = _tiles(keys, block_n), _tiles(values, block_n)
    return shape, (keys, values, *tiles, keys if scales is None else scales), num_blocks * block_size


def _tiles(kv: Tensor, block_n: int) -> Tensor | TensorDescriptor:
    _, _, block_size, kv_heads, width = kv.shape
    if block_size % block_n:
        return kv
    return TensorDescriptor.from_tensor(kv.view(-1, kv_heads * width), [block_n, width])


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
def any_tile(cache, table, start, stop, SHAPE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Positions [start, start + BLOCK_N) of a KV head: keys, values, and the scales of both; and whether each
    position is before `stop`. Positions from `stop` on have value 0 and any key.

    `cache` has the arguments and the slots of `cache_of`, and the KV head. Without FP8 a scale is 1. If a
    tile is in one block, `start` is a multiple of BLOCK_N."""
    keys, values, _, _, scales, slots, kv_head = cache
    BLOCK_SIZE: tl.constexpr = SHAPE.block_size
    KV_HEADS: tl.constexpr = SHAPE.kv_heads
    HEAD_DIM: tl.constexpr = SHAPE.head_dim
    WIDTH: tl.constexpr = SHAPE.value_dim // 2 if SHAPE.fp8 else SHAPE.value_dim
    offsets = tl.arange(0, BLOCK_N)
    positions = start + offsets
    inside = positions < stop
    if BLOCK_SIZE % BLOCK_N == 0:
        block = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
        rows = block * BLOCK_SIZE + start % BLOCK_SIZE + offsets
    else:
        block = tl.load(table + positions // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        rows = block * BLOCK_SIZE + positions % BLOCK_SIZE
    keys += rows[:, None] * (KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM
    values += (rows + slots)[:, None] * (KV_HEADS * WIDTH) + kv_head * WIDTH
    k = tl.load(keys + tl.arange(0, HEAD_DIM)[None, :])
    v = tl.load(values + tl.arange(0, WIDTH)[None, :], mask=inside[:, None], other=0)
    k_scale, v_scale = 1.0, 1.0
    if SHAPE.fp8:
        of_keys = scales + (block * (KV_HEADS - 1) + kv_head) * BLOCK_SIZE + rows
        k_scale = tl.load(of_keys)
        v_scale = tl.load(of_keys + slots.to(tl.int64) * KV_HEADS, mask=inside, other=1.0)
    return (k, v, k_scale, v_scale), inside


@triton.jit
def whole_tile(cache, table, start, stop, SHAPE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Keys, values and scales as `any_tile`, of positions that are all before `stop`. The copy engine loads
    them, if a tile is in one block."""
    BLOCK_SIZE: tl.constexpr = SHAPE.block_size
    if BLOCK_SIZE % BLOCK_N == 0:
        _, _, key_tiles, value_tiles, scales, slots, kv_head = cache
        PACKED: tl.constexpr = 2 if SHAPE.fp8 else 1
        block = tl.load(table + start // BLOCK_SIZE)
        row = block * BLOCK_SIZE + start % BLOCK_SIZE
        k_scale, v_scale = 1.0, 1.0
        if SHAPE.fp8:
            of_keys = scales + (block.to(tl.int64) * SHAPE.kv_heads + kv_head) * BLOCK_SIZE
            of_keys += start % BLOCK_SIZE + tl.arange(0, BLOCK_N)
            k_scale, v_scale = tl.load(of_keys), tl.load(of_keys + slots.to(tl.int64) * SHAPE.kv_heads)
        k = key_tiles.load([row, kv_head * SHAPE.head_dim])
        v = value_tiles.load([row + slots, kv_head * (SHAPE.value_dim // PACKED)])
        tile = k, v, k_scale, v_scale
    else:
        tile, _ = any_tile(cache, table, start, stop, SHAPE, BLOCK_N)
    return tile


@triton.jit
def normalized(queries, scale, FP8: tl.constexpr):
    """With FP8, divides the queries by a power of two and multiplies `scale` by it. This is exact, and brings
    the queries near 1. They become float16, unless they are float32."""
    if FP8:
        element: tl.constexpr = tl.float32 if queries.dtype == tl.float32 else tl.float16
        largest = tl.max(tl.max(tl.abs(queries.to(tl.float32)), axis=1), axis=0)
        unit = power_of_two(tl.maximum(largest, LEAST_QUERY))
        queries, scale = (queries.to(tl.float32) * (1.0 / unit)).to(element), scale * unit
    return queries, scale


@triton.jit
def of_pairs(pairs, dtype: tl.constexpr):
    """The lower and the upper FP8 number of each pair, in `dtype`."""
    if COMPILED:
        lower, upper = tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $2, 0, 0x3120; mov.b32 {a, b}, t;"
            "cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
            "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        lower = (pairs & 0xFF).to(tl.int8).to(tl.float8e4nv, bitcast=True)
        upper = (pairs >> 8).to(tl.int8).to(tl.float8e4nv, bitcast=True)
    return lower.to(dtype), upper.to(dtype)


@triton.jit
def logarithm(scale, FP8: tl.constexpr):
    """The logarithm to base 2 of a scale, and the inverse of the number that it is of. The compiler's own
    logarithm has a dozen instructions. Without FP8 a scale is 1."""
    shift, inverse = 0.0, 1.0
    if FP8 and COMPILED:
        shift, inverse = tl.inline_asm_elementwise(
            "{ .reg .f32 t; lg2.approx.ftz.f32 t, $2; mov.b32 $0, t; neg.f32 t, t;"
            "ex2.approx.ftz.f32 $1, t; }",
            "=r,=r,r", [scale], dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    elif FP8:
        shift, inverse = tl.log2(scale), 1.0 / scale
    return shift, inverse


@triton.jit
def bounded(scores, SHAPE: tl.constexpr):
    """Scores times log₂ e, with softcap · tanh(score / softcap) in place of each score."""
    SOFTCAP: tl.constexpr = SHAPE.softcap
    if SOFTCAP > 0:
        scores = (SOFTCAP * LOG2_E) * (1 - 2 / (1 + tl.exp2(scores * (2 / SOFTCAP))))
    return scores


@triton.jit
def weigh(scores, new_m, m, total, inverse, AXIS: tl.constexpr):
    """The weights of a tile of scores, the new total, and the factor on the sums so far. AXIS: of the scores,
    the one that is not of queries. `inverse` [keys]: as `logarithm` returns it; None: without FP8."""
    weights = tl.exp2(scores - tl.expand_dims(new_m, AXIS))
    shrink = tl.exp2(m - new_m)
    added = weights if inverse is None else weights * tl.expand_dims(inverse, 1 - AXIS)
    return weights, total * shrink + tl.sum(added, axis=AXIS), tl.expand_dims(shrink, AXIS)


@triton.jit
def segment_of(context):
    """Positions of a segment, for queries that see so many positions."""
    size = context * 0 + SEGMENT
    for _ in tl.static_range(14):
        size = tl.where(context > size * SEGMENTS, size * 2, size)
    return size


@triton.jit
def no_sums(queries: tl.constexpr, dims: tl.constexpr, AXIS: tl.constexpr):
    """m [queries], total and acc of no key. AXIS: of total and acc, the one that is not of queries."""
    m = tl.full([queries], LEAST, tl.float32)
    total = tl.zeros([ONES, queries] if AXIS == 0 else [queries, ONES], tl.float32)
    return m, total, tl.zeros([dims, queries] if AXIS == 0 else [queries, dims], tl.float32)


@triton.jit
def _plain(tile, dtype: tl.constexpr):
    """The keys and values of a tile. Those in FP8 are multiplied by their scales, and rounded to `dtype`."""
    k, v, k_scale, v_scale = tile
    if k.dtype.is_fp8():
        lower, upper = of_pairs(v, tl.float32)
        k = _as_loaded((k.to(tl.float32) * k_scale[:, None]).to(dtype))
        v = _as_loaded((tl.interleave(lower, upper) * v_scale[:, None]).to(dtype))
    return k, v


@triton.jit
def _as_loaded(x):
    """Hides from the compiler that x was loaded in 8 bits. A product by `mma.sync` would else add its columns
    in another order, so that each thread can use all numbers that it has loaded."""
    if COMPILED and x.dtype.primitive_bitwidth == 16:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return x


@triton.jit
def attend_exactly(queries, tile, seen, m, total, acc, scale, AXIS: tl.constexpr):
    """Adds a tile of EXACT_N keys, of which those in `seen` count; None: all. AXIS 1: queries [queries,
    head_dim] and seen [queries, keys]. AXIS 0: both transposed. Returns the new m, total and acc."""
    k, v = _plain(tile, queries.dtype)
    if AXIS == 0:
        scores = tl.dot(k, queries, input_precision="tf32x3")
    else:
        scores = tl.dot(queries, tl.trans(k), input_precision="tf32x3")
    if seen is not None:
        scores = tl.where(seen, scores, float("-inf"))
    new_m = tl.maximum(m, tl.max(scores, axis=AXIS) * scale)
    largest = tl.broadcast_to(tl.expand_dims(-new_m, AXIS), scores.shape)
    weights = tl.exp2(tl.fma(scores, tl.full(scores.shape, scale, tl.float32), largest)).to(v.dtype)
    shrink = tl.expand_dims(tl.exp2(m - new_m), AXIS)
    if AXIS == 0:
        ones = tl.full([ONES, weights.shape[0]], 1.0, v.dtype)
        total = tl.dot(ones, weights, total * shrink, input_precision="tf32x3")
        acc = tl.dot(tl.trans(v), weights, acc * shrink, input_precision="tf32x3")
    else:
        ones = tl.full([weights.shape[1], ONES], 1.0, v.dtype)
        total = tl.dot(weights, ones, total * shrink, input_precision="tf32x3")
        acc = tl.dot(weights, v, acc * shrink, input_precision="tf32x3")
    return new_m, total, acc


@triton.jit
def fold(m, total, acc, of_m, of_total, of_acc, AXIS: tl.constexpr):
    """Adds the sums of a segment to those of the segments before it."""
    new_m = tl.maximum(m, of_m)
    shrink, weight = tl.expand_dims(tl.exp2(m - new_m), AXIS), tl.expand_dims(tl.exp2(of_m - new_m), AXIS)
    total = tl.fma(total, tl.broadcast_to(shrink, total.shape), of_total * weight)
    acc = tl.fma(acc, tl.broadcast_to(shrink, acc.shape), of_acc * weight)
    return new_m, total, acc
