"""From logits to tokens on the GPU alone: no kernel here waits for the host, or takes a shape from a value.

**The race** (`draw`, `greedy`). Token i of a row wins with probability softmax(x / T)[i] if it has the least
of E[i] / p[i], E exponentially distributed (`engine.sampler._draw`); or, without any sum over the row, if it
has the largest of

    x[i] / T − log E[i]      (T = 0, greedy: of x[i])

E is the hash of (key, column) of `engine.sampler.exponentials`. Many programs per row each find the best of
BLOCK columns, a second kernel the best of those. Of equals the first wins.

**The thresholds** of top-k, top-p and min-p: the probability of the least likely token that stays, found
without sorting. What is above v, in number and in sum, falls as v rises, so the answer is the least v with

    |{p > v}| < top_k   and   Σ {p > v} < top_p · Σ {the top_k largest}

Positive floats are ordered as their bits are, taken as integers: between 0 and the largest p it is searched
by cutting the range of bits in PIVOTS + 1 equal parts per pass over the row, until few values of the row are
left in it. These are put together, and the search goes on among them, in registers, until one is left.
(Rejection by two pivots in FlashInfer, Ye 2025, is a kin of this.)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # columns that one program of the race looks at
WARPS = 4

PIVOTS = 4  # what a pass of the search tries
SEARCH_BLOCK = 4096  # columns at a time, and how many values are few
SEARCH_WARPS = 16
SEARCH_STAGES = 4


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Of logits [rows, vocabulary], any float dtype, rows dense: the column of the largest [rows] int64, and
    whether all of the row is finite [rows] bool; of a row that is not, any column."""
    return _race(logits, None, None, None, None)


def draw(
    logits: Tensor,
    temperatures: Tensor,
    keys: Tensor,
    probs: Tensor | None = None,
    thresholds: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `greedy`, drawn at temperatures [rows] float32 (0: greedy) with keys [rows] int32 (the 32 bits of
    `draw_key`), where thresholds [rows] are given only among columns with probs[row, column] at least that;
    probs [rows, vocabulary] float32."""
    return _race(logits, temperatures, keys, probs, thresholds)


def thresholds(probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """[rows] float32: what a probability must reach for its token to stay in probs [rows, vocabulary]
    float32, rows dense. top_k [rows] int32, at least 1 (vocabulary: no limit); top_p [rows] float32 (above
    1: no limit), of what top_k leaves; min_p [rows] float32, of the largest."""
    rows, vocabulary = probs.shape
    assert probs.stride(1) == 1, "rows are read as one"
    out = torch.empty(rows, dtype=torch.float32, device=probs.device)
    few = torch.empty(rows, SEARCH_BLOCK, dtype=torch.float32, device=probs.device)
    _thresholds[(rows,)](
        probs,
        top_k,
        top_p,
        min_p,
        few,
        out,
        vocabulary,
        probs.stride(0),
        BLOCK=SEARCH_BLOCK,
        PIVOTS=PIVOTS,
        STAGES=SEARCH_STAGES,
        num_warps=SEARCH_WARPS,
    )
    return out


def _race(
    logits: Tensor,
    temperatures: Tensor | None,
    keys: Tensor | None,
    probs: Tensor | None,
    least: Tensor | None,
) -> tuple[Tensor, Tensor]:
    rows, vocabulary = logits.shape
    parts, device = triton.cdiv(vocabulary, BLOCK), logits.device
    assert logits.stride(1) == 1, "rows are read as one"
    assert probs is None or probs.stride(1) == 1, "rows are read as one"
    best = torch.empty(rows, parts, dtype=torch.float32, device=device)
    where = torch.empty(rows, parts, dtype=torch.int32, device=device)
    sound = torch.empty(rows, parts, dtype=torch.int32, device=device)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    finite = torch.empty(rows, dtype=torch.bool, device=device)
    _heats[(rows, parts)](
        logits,
        temperatures,
        keys,
        probs,
        least,
        best,
        where,
        sound,
        vocabulary,
        logits.stride(0),
        0 if probs is None else probs.stride(0),
        DRAWN=temperatures is not None,
        LIMITED=probs is not None,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    _final[(rows,)](
        best, where, sound, tokens, finite, parts, PARTS=triton.next_power_of_2(parts), num_warps=1
    )
    return tokens, finite


@triton.jit
def _heats(
    logits,
    temperatures,
    keys,
    probs,
    thresholds,
    best,
    where,
    sound,
    vocabulary,
    stride,
    probs_stride,
    DRAWN: tl.constexpr,
    LIMITED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocabulary
    x = tl.load(logits + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    finite = tl.abs(x) < float("inf")  # not so for NaN either
    score = tl.where(inside & (x == x), x, float("-inf"))
    if DRAWN:
        temperature = tl.load(temperatures + row)
        if temperature > 0:
            key = tl.load(keys + row).to(tl.uint32, bitcast=True)
            score = score / tl.maximum(temperature, 1e-5) - tl.log(_exponential(key, columns))
            if LIMITED:
                p = tl.load(probs + row * probs_stride + columns, mask=inside, other=0.0)
                score = tl.where(p < tl.load(thresholds + row), float("-inf"), score)
    value, winner = tl.max(score, axis=0, return_indices=True)
    to = row * tl.num_programs(1) + part
    tl.store(best + to, value)
    tl.store(where + to, part * BLOCK + winner)
    tl.store(sound + to, tl.min(finite.to(tl.int32), axis=0))


@triton.jit
def _exponential(key, columns):
    x = key ^ (columns.to(tl.uint32) * 0x9E3779B1)
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    uniform = (x.to(tl.int32, bitcast=True).to(tl.float32) + 0.5) * (1 / (1 << 32))
    uniform -= tl.floor(uniform)
    # −log(1 − u): the first terms where 1 − u would drop the bits of u, which are those that decide.
    series = uniform * (1 + uniform * (1 / 2 + uniform * (1 / 3 + uniform * (1 / 4))))
    return tl.where(uniform < 1 / 64, series, -tl.log(1 - uniform))


@triton.jit
def _final(best, where, sound, tokens, finite, parts, PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    own = tl.arange(0, PARTS)
    inside = own < parts
    _, winner = tl.max(
        tl.load(best + row * parts + own, mask=inside, other=float("-inf")), axis=0, return_indices=True
    )
    tl.store(tokens + row, tl.load(where + row * parts + winner).to(tl.int64))
    tl.store(finite + row, tl.min(tl.load(sound + row * parts + own, mask=inside, other=1), axis=0) != 0)


@triton.jit
def _thresholds(
    probs,
    top_k,
    top_p,
    min_p,
    few,
    out,
    vocabulary,
    stride,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    program = tl.program_id(0)
    row = probs + program.to(tl.int64) * stride
    few += program.to(tl.int64) * BLOCK
    k, share = tl.load(top_k + program), tl.load(top_p + program)
    best = _largest(row, vocabulary, BLOCK, STAGES)
    low = best * 0 - 1  # below every bit pattern; what is sought is above
    total, least = 1.0, 0.0
    if k < vocabulary:
        kth, count, above = _least(row, vocabulary, few, low, best, k, float("inf"), BLOCK, PIVOTS, STAGES)
        least = kth.to(tl.float32, bitcast=True)
        total = above + (k - count) * least
        low = kth - 1
    if share <= 1:
        last, _, _ = _least(row, vocabulary, few, low, best, k, share * total, BLOCK, PIVOTS, STAGES)
        least = last.to(tl.float32, bitcast=True)
    tl.store(out + program, tl.maximum(least, tl.load(min_p + program) * best.to(tl.float32, bitcast=True)))


@triton.jit
def _least(
    row, vocabulary, few, low, high, k, mass, BLOCK: tl.constexpr, PIVOTS: tl.constexpr, STAGES: tl.constexpr
):
    """Bits of the least value in (low, high] with fewer than k above it, that sum up to less than mass; how
    many these are, and their sum. high is a value of the row. 0 if all of the row may stay."""
    above_low, above_high, sum_high = vocabulary, 0, 0.0
    while (high - low > 1) & (above_low - above_high > BLOCK):
        pivots = _cuts(low, high, PIVOTS)
        count = tl.zeros([PIVOTS, BLOCK], tl.int32)
        total = tl.zeros([PIVOTS, BLOCK], tl.float32)
        for start in tl.range(0, vocabulary, BLOCK, num_stages=STAGES):
            columns = start + tl.arange(0, BLOCK)
            p = tl.load(row + columns, mask=columns < vocabulary, other=-1.0)
            above = _bits(p)[None, :] > pivots[:, None]
            count += above.to(tl.int32)
            total += tl.where(above, p[None, :], 0.0)
        low, high, above_low, above_high, sum_high = _narrower(
            low, high, above_low, above_high, sum_high, pivots, tl.sum(count, 1), tl.sum(total, 1), k, mass
        )
    least = high  # if low is next to it: many are equal
    if above_low - above_high <= BLOCK:
        found = 0
        for start in tl.range(0, vocabulary, BLOCK, num_stages=STAGES):
            columns = start + tl.arange(0, BLOCK)
            p = tl.load(row + columns, mask=columns < vocabulary, other=-1.0)
            inside = ((_bits(p) > low) & (_bits(p) <= high)).to(tl.int32)
            tl.store(few + found + tl.cumsum(inside, 0) - inside, p, mask=inside != 0)
            found += tl.sum(inside, 0)
        tl.debug_barrier()  # they were stored by other threads
        p = tl.load(few + tl.arange(0, BLOCK), mask=tl.arange(0, BLOCK) < found, other=-1.0)
        above_low, count_out, sum_out = above_high + found, above_high, sum_high
        while (high - low > 1) & (above_low - above_high > 1):
            pivots = _cuts(low, high, PIVOTS)
            above = _bits(p)[None, :] > pivots[:, None]
            count = count_out + tl.sum(above.to(tl.int32), 1)
            total = sum_out + tl.sum(tl.where(above, p[None, :], 0.0), 1)
            low, high, above_low, above_high, sum_high = _narrower(
                low, high, above_low, above_high, sum_high, pivots, count, total, k, mass
            )
        least = tl.maximum(tl.max(tl.where(_bits(p) <= high, _bits(p), 0), 0), 0)
        tl.debug_barrier()  # before `few` is written again
    return least, above_high, sum_high


@triton.jit
def _cuts(low, high, PIVOTS: tl.constexpr):
    """Bit patterns that cut (low, high] in equal parts."""
    step = (high - low + PIVOTS) // (PIVOTS + 1)
    return tl.minimum(low + step * (1 + tl.arange(0, PIVOTS)), high - 1)


@triton.jit
def _narrower(low, high, above_low, above_high, sum_high, pivots, count, total, k, mass):
    """The part of (low, high] in which the condition becomes true; how many values are above low, how many
    above high, and the sum of the latter."""
    reached = (count < k) & (total < mass)  # false up to some pivot, then true
    above_high = tl.maximum(above_high, tl.max(tl.where(reached, count, 0), 0))
    sum_high = tl.maximum(sum_high, tl.max(tl.where(reached, total, 0.0), 0))
    above_low = tl.minimum(above_low, tl.min(tl.where(reached, above_low, count), 0))
    new_high = tl.minimum(high, tl.min(tl.where(reached, pivots, high), 0))
    low = tl.maximum(low, tl.max(tl.where(reached, low, pivots), 0))
    return low, new_high, above_low, above_high, sum_high


@triton.jit
def _largest(row, vocabulary, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Bits of the largest value of a row."""
    largest = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, vocabulary, BLOCK, num_stages=STAGES):
        columns = start + tl.arange(0, BLOCK)
        p = tl.load(row + columns, mask=columns < vocabulary, other=-1.0)
        largest = tl.maximum(largest, _bits(p))
    return tl.max(largest, 0)


@triton.jit
def _bits(p):
    """Ordered as the positive floats they are of; −1.0, which stands for no value, is below all."""
    return p.to(tl.int32, bitcast=True)
