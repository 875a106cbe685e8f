"""Adds up the rows of a token's experts.

    out[token] = Σ weight[token, i] · y[token, i] + shared[token]

The terms are added in float32, in the order of the choices, and rounded once. A pair of weight 0 adds nothing
and its row is not read: an expert that another rank holds.
"""

import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.launch import inputs_ready, launch_options

BLOCK = 1024  # columns of a program


def combine(y: Tensor, weights: Tensor, shared: Tensor | None, *, weighted: bool) -> Tensor:
    """y [pairs, size], weights [tokens, chosen], shared [tokens, size]. Returns [tokens, size]. If
    not `weighted`, the weights only say which rows to add."""
    (tokens, chosen), size = weights.shape, y.shape[1]
    out = y.new_empty(tokens, size)
    _combine[(tokens, triton.cdiv(size, BLOCK))](
        y,
        weights,
        shared,
        out,
        size,
        CHOSEN=chosen,
        WEIGHTED=weighted,
        BLOCK=BLOCK,
        num_warps=4,
        **launch_options(),
    )
    return out


@triton.jit
def _combine(
    y,
    weights,
    shared,
    out,
    size,
    CHOSEN: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    inputs_ready()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    acc = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(CHOSEN):
        pair = token * CHOSEN + i
        weight = tl.load(weights + pair) + tl.zeros([BLOCK], tl.float32)
        row = tl.load(y + pair * size + column, mask=inside & (weight > 0), other=0.0).to(tl.float32)
        acc += row * weight if WEIGHTED else row
    if shared is not None:
        acc += tl.load(shared + token * size + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * size + column, acc.to(out.dtype.element_ty), mask=inside)
