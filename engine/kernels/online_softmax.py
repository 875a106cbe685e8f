"""The step that both attention kernels repeat: one tile of keys and values out of the paged cache.

For each row (a query) it keeps, over all tiles so far, the largest score m, the sum l of exp(score − m), and
the sum of values weighted by exp(score − m). A tile with a larger m shrinks what was summed before it
(Milakov & Gimelshein 2018). Scores are taken times log₂ e: exp2 is one instruction.

Values past `stop` are masked when they are loaded, not only by their weight: slots of the cache that are
stale or somebody else's may hold NaN, which would come through a weight of zero. Products of float32 take
three passes of the tensor cores, TF32 and what it leaves out: TF32 alone has 10 bits.
"""

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@triton.jit
def cache_rows(table, start, stop, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Which rows of the cache, int64 [BLOCK_N], hold the positions from `start`, a multiple of BLOCK_N; for
    those from `stop` on, any."""
    offsets = tl.arange(0, BLOCK_N)
    if BLOCK_SIZE % BLOCK_N == 0:  # the tile lies within one block: one lookup
        block = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
        rows = block * BLOCK_SIZE + start % BLOCK_SIZE + offsets
    else:
        positions = start + offsets
        block = tl.load(table + positions // BLOCK_SIZE, mask=positions < stop, other=0).to(tl.int64)
        rows = block * BLOCK_SIZE + positions % BLOCK_SIZE
    return rows


@triton.jit
def attend_tile(
    queries,
    keys,
    values,
    rows,
    start,
    stop,
    query_positions,
    m,
    total,
    acc,
    scale,
    ROW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Takes in the positions [start, start + BLOCK_N), which are at `rows` of the cache, ROW elements each.
    Returns the new m, total and acc. Without MASKED every query sees all of them."""
    at = rows[:, None] * ROW + tl.arange(0, HEAD_DIM)[None, :]
    positions = start + tl.arange(0, BLOCK_N)
    k = tl.load(keys + at)
    v = tl.load(values + at, mask=(positions < stop)[:, None], other=0.0) if MASKED else tl.load(values + at)
    scores = tl.dot(queries, tl.trans(k), input_precision="tf32x3") * scale
    if MASKED:
        seen = (positions[None, :] <= query_positions[:, None]) & (positions < stop)[None, :]
        scores = tl.where(seen, scores, float("-inf"))
    new_m = tl.maximum(m, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_m[:, None])
    shrink = tl.exp2(m - new_m)
    total = total * shrink + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="tf32x3")
    return new_m, total, acc
