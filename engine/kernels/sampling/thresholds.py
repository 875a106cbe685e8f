"""Top-k, top-p and min-p without sorting: finds the smallest probability that a token may have.

The number and the sum of the probabilities above v fall as v rises. So top-k followed by top-p keeps all
values from v on, for the least v with

    |{p > v}| < top_k   and   Σ {p > v} < top_p · Σ {the top_k largest}

Positive floats have the same order as their bits, read as integers. A search starts with the whole range of
bits. Each pass cuts the range into PIVOTS + 1 equal parts and keeps one of them, until one value is left. The
first search finds the k-th largest value, the second the value for top_p. The number of passes is fixed.
(FlashInfer's rejection by two pivots, Ye 2025, is similar.)

In a pass each program handles a part of a row. The program that finishes last adds the results of all parts,
in the order of the parts, and narrows the row's range. With more rows the parts are larger, so sums round
differently. Where a sum is that close to top_p, a row may keep one token more or less in another batch. In
the exact mode the parts are those of EXACT_ROWS rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.launch import inputs_ready, launch_options

BLOCK = 2048  # columns at a time
PIVOTS = 8
WARPS = 8
PROGRAMS = 512  # of a pass: little more than the GPU runs at once, since launching them takes time
PARTS = 64  # most parts of a row
EXACT_ROWS = 32

HIGHEST = tl.constexpr(0x40000000)  # bits of 2.0: above every probability


def passes(pivots: int) -> int:
    """Passes that narrow the range (−1, HIGHEST] to one value."""
    width, count = HIGHEST.value + 1, 0
    while width > 1:
        width, count = -(-width // (pivots + 1)), count + 1
    return count


def thresholds(probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, *, exact: bool = False) -> Tensor:
    """As `Kernels.thresholds`; probs need dense rows only. top_k is at least 1."""
    rows, vocabulary = probs.shape
    assert probs.stride(1) == 1, "the kernel assumes dense rows"
    tiles, device = triton.cdiv(vocabulary, BLOCK), probs.device
    tiles_each = triton.cdiv(tiles, min(PARTS, max(1, PROGRAMS // (EXACT_ROWS if exact else rows))))
    parts = triton.cdiv(tiles, tiles_each)
    out = torch.empty(rows, dtype=torch.float32, device=device)
    # Range (low, high] and the largest probability, as bits; number of programs that finished.
    bounds = torch.empty(rows, 4, dtype=torch.int32, device=device)
    # Number and sum of the probabilities above high; the limit of the search.
    sums = torch.empty(rows, 3, dtype=torch.float32, device=device)
    # Number and sum of the probabilities above each pivot, in each part.
    pivot_sums = torch.empty(rows, 2, parts, PIVOTS, dtype=torch.float32, device=device)

    def set_bounds(stage: int) -> None:
        _set_bounds[(rows,)](
            bounds, sums, top_k, top_p, min_p, out, vocabulary, STAGE=stage, num_warps=1, **launch_options()
        )

    def search(*, by_number: bool) -> None:
        for done in range(passes(PIVOTS)):
            _narrow[(rows, parts)](
                probs,
                bounds,
                sums,
                pivot_sums,
                vocabulary,
                probs.stride(0),
                tiles_each,
                BY_NUMBER=by_number,
                FIRST=by_number and done == 0,
                BLOCK=BLOCK,
                PIVOTS=PIVOTS,
                PARTS=PARTS,
                num_warps=WARPS,
                **launch_options(),
            )

    set_bounds(0)
    search(by_number=True)
    set_bounds(1)
    search(by_number=False)
    set_bounds(2)
    return out


@triton.jit
def _set_bounds(bounds, sums, top_k, top_p, min_p, out, vocabulary, STAGE: tl.constexpr):
    """Stage 0 prepares the first search, stage 1 the second. Stage 2 writes the result."""
    inputs_ready()
    row = tl.program_id(0)
    bounds += row * 4
    sums += row * 3
    k = tl.load(top_k + row)
    if STAGE == 0:
        tl.store(bounds, -1)
        tl.store(bounds + 1, tl.where(k < vocabulary, HIGHEST, 0))
        tl.store(bounds + 2, 0)
        tl.store(bounds + 3, 0)
        tl.store(sums + 2, k.to(tl.float32))
    else:
        high = tl.load(bounds + 1)  # the value that the search found
        value = high.to(tl.float32, bitcast=True)
        if STAGE == 1:
            total = tl.load(sums + 1) + (k - tl.load(sums)) * value
            share = tl.load(top_p + row)
            tl.store(bounds, high - 1)
            tl.store(bounds + 1, tl.where(share <= 1, HIGHEST, high))
            tl.store(sums + 2, share * tl.where(k < vocabulary, total, 1.0))
        else:
            best = tl.load(bounds + 2).to(tl.float32, bitcast=True)
            tl.store(out + row, tl.maximum(tl.minimum(value, best), tl.load(min_p + row) * best))
    if STAGE < 2:
        tl.store(sums, 0.0)
        tl.store(sums + 1, 0.0)


@triton.jit(do_not_specialize=["tiles_each"])
def _narrow(
    probs,
    bounds,
    sums,
    pivot_sums,
    vocabulary,
    stride,
    tiles_each,
    BY_NUMBER: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
    PARTS: tl.constexpr,
):
    inputs_ready()
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    bounds += row * 4
    sums += row * 3
    low, high = tl.load(bounds), tl.load(bounds + 1)
    begin = part * tiles_each * BLOCK
    end = tl.minimum(begin + tiles_each * BLOCK, vocabulary)
    probs += row * stride
    if FIRST:
        largest = tl.zeros([BLOCK], tl.float32)
        for start in tl.range(begin, end, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            largest = tl.maximum(largest, tl.load(probs + columns, mask=columns < end, other=0.0))
        tl.atomic_max(bounds + 2, tl.max(largest, 0).to(tl.int32, bitcast=True))
    if high - low > 1:
        i = tl.arange(0, PIVOTS)
        pivots = tl.minimum(low + (high - low + PIVOTS) // (PIVOTS + 1) * (1 + i), high - 1)
        numbers = tl.zeros([PIVOTS, BLOCK], tl.int32)
        totals = tl.zeros([PIVOTS, BLOCK], tl.float32)
        for start in tl.range(begin, end, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            p = tl.load(probs + columns, mask=columns < end, other=-1.0)  # padding: below all pivots
            is_above = p.to(tl.int32, bitcast=True)[None, :] > pivots[:, None]
            totals += tl.where(is_above, p[None, :], 0.0)
            if BY_NUMBER:
                numbers += is_above.to(tl.int32)
        parts = tl.num_programs(1)
        number = pivot_sums + row * (2 * PIVOTS) * parts
        total = number + parts * PIVOTS
        tl.store(total + part * PIVOTS + i, tl.sum(totals, 1))
        if BY_NUMBER:
            tl.store(number + part * PIVOTS + i, tl.sum(numbers, 1).to(tl.float32))
        tl.debug_barrier()  # all threads have stored before the program counts as finished
        if tl.atomic_add(bounds + 3, 1, sem="acq_rel") == parts - 1:
            tl.store(bounds + 3, 0)
            all_parts = tl.arange(0, PARTS)[:, None]
            at = all_parts * PIVOTS + i[None, :]
            sums_above = tl.sum(
                tl.load(total + at, mask=all_parts < parts, other=0.0, cache_modifier=".cg"), 0
            )
            limited = sums_above
            if BY_NUMBER:
                limited = tl.sum(
                    tl.load(number + at, mask=all_parts < parts, other=0.0, cache_modifier=".cg"), 0
                )
            reached = limited < tl.load(sums + 2)  # false up to some pivot, then true
            tl.store(bounds, tl.maximum(low, tl.max(tl.where(reached, low, pivots), 0)))
            tl.store(bounds + 1, tl.minimum(high, tl.min(tl.where(reached, pivots, high), 0)))
            if BY_NUMBER:  # the new high is the least pivot that reached the limit: most is above it
                tl.store(sums, tl.maximum(tl.load(sums), tl.max(tl.where(reached, limited, 0.0), 0)))
                tl.store(
                    sums + 1, tl.maximum(tl.load(sums + 1), tl.max(tl.where(reached, sums_above, 0.0), 0))
                )
