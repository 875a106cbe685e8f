"""From logits to tokens on the GPU alone: no kernel waits for the host, and no shape depends on a value.

Sampling is a race (`Kernels.draw`): the token with the least E[i] / p[i] wins, for exponentially distributed
E. Token i then has the probability p[i] = softmax(x / T)[i]. Without a sum over the row, the same token has
the largest

    x[i] / T − log E[i]      (greedy, T = 0: the largest x[i])

E is a hash of (key, column), as in `sampling.reference`. One program finds the best of BLOCK columns, and a
second kernel finds the best of a row. Of equal tokens the first wins.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # columns of one program
WARPS = 4


def draw(
    logits: Tensor,
    temperature: Tensor | None = None,
    keys: Tensor | None = None,
    probs: Tensor | None = None,
    cutoffs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `Kernels.draw`; logits, of any float dtype, and probs need dense rows only. keys are those of
    `draw_keys`. `temperature` None: as `Kernels.greedy`."""
    rows, vocabulary = logits.shape
    parts, device = triton.cdiv(vocabulary, BLOCK), logits.device
    assert logits.stride(1) == 1, "the kernel assumes dense rows"
    assert probs is None or probs.stride(1) == 1, "the kernel assumes dense rows"
    best = torch.empty(rows, parts, dtype=torch.float32, device=device)
    where = torch.empty(rows, parts, dtype=torch.int32, device=device)
    part_finite = torch.empty(rows, parts, dtype=torch.int32, device=device)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    finite = torch.empty(rows, dtype=torch.bool, device=device)
    _best_of_part[(rows, parts)](
        logits,
        temperature,
        keys,
        probs,
        cutoffs,
        best,
        where,
        part_finite,
        vocabulary,
        logits.stride(0),
        0 if probs is None else probs.stride(0),
        DRAWN=temperature is not None,
        LIMITED=probs is not None,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    _best_of_row[(rows,)](
        best, where, part_finite, tokens, finite, parts, PARTS=triton.next_power_of_2(parts), num_warps=1
    )
    return tokens, finite


@triton.jit
def _best_of_part(
    logits,
    temperatures,
    keys,
    probs,
    thresholds,
    best,
    where,
    part_finite,
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
    finite = tl.abs(x) < float("inf")  # false for NaN, too
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
    tl.store(part_finite + to, tl.min(finite.to(tl.int32), axis=0))


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
    # −log(1 − u). For small u, which decides the race, 1 − u would lose its bits: the first terms instead.
    series = uniform * (1 + uniform * (1 / 2 + uniform * (1 / 3 + uniform * (1 / 4))))
    return tl.where(uniform < 1 / 64, series, -tl.log(1 - uniform))


@triton.jit
def _best_of_row(best, where, part_finite, tokens, finite, parts, PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    inside = part < parts
    _, winner = tl.max(
        tl.load(best + row * parts + part, mask=inside, other=float("-inf")), axis=0, return_indices=True
    )
    tl.store(tokens + row, tl.load(where + row * parts + winner).to(tl.int64))
    all_finite = tl.min(tl.load(part_finite + row * parts + part, mask=inside, other=1), axis=0)
    tl.store(finite + row, all_finite != 0)
