"""From logits to tokens on the GPU alone: no kernel here waits for the host, or takes a shape from a value.

A race: token i of a row wins with probability softmax(x / T)[i] if it has the least of E[i] / p[i], E
exponentially distributed (`Kernels.draw`); or, without any sum over the row, if it has the largest of

    x[i] / T − log E[i]      (T = 0, greedy: of x[i])

E is the hash of (key, column) of `torch_kernels.exponentials`. Many programs per row each find the best of
BLOCK columns, a second kernel the best of those. Of equals the first wins.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # columns that one program of the race looks at
WARPS = 4


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
    `draw_keys`), where thresholds [rows] are given only among columns with probs[row, column] at least that;
    probs [rows, vocabulary] float32."""
    return _race(logits, temperatures, keys, probs, thresholds)


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
