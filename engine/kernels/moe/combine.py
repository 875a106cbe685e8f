"""Adds up the rows of a token's experts. The norm after them does so, too (`engine.kernels.norm`).

    out[token] = Σ weight[token, i] · y[token, i] + shared[token]

The terms are added in float32, in the order of the choices, and rounded once. A pair of weight 0 adds nothing
and its row is not read: an expert that another rank holds.
"""

import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.launch import inputs_ready, launch_options
from baton.engine.kernels.moe.experts import Terms

BLOCK = 1024  # columns of a program


def combine(terms: Terms) -> Tensor:
    """Returns [tokens, size]."""
    (tokens, chosen), size = terms.weights.shape, terms.rows.shape[1]
    out = terms.rows.new_empty(tokens, size)
    _combine[(tokens, triton.cdiv(size, BLOCK))](
        *terms[:3],
        out,
        size,
        CHOSEN=chosen,
        WEIGHTED=terms.weighted,
        BLOCK=BLOCK,
        num_warps=4,
        **launch_options(),
    )
    return out


@triton.jit
def _combine(
    y, weights, shared, out, size, CHOSEN: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):
    inputs_ready()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = sum_of_terms(y, weights, shared, token, column, size, CHOSEN, WEIGHTED)
    tl.store(out + token * size + column, total, mask=column < size)


@triton.jit
def sum_of_terms(rows, weights, shared, token, column, size, CHOSEN: tl.constexpr, WEIGHTED: tl.constexpr):
    """Some columns of the sum of a token's terms, rounded."""
    inside = column < size
    acc = tl.zeros(column.shape, tl.float32)
    for i in tl.static_range(CHOSEN):
        pair = token * CHOSEN + i
        weight = tl.load(weights + pair) + tl.zeros(column.shape, tl.float32)
        row = tl.load(rows + pair * size + column, mask=inside & (weight > 0), other=0.0).to(tl.float32)
        acc += row * weight if WEIGHTED else row
    if shared is not None:
        acc += tl.load(shared + token * size + column, mask=inside, other=0.0).to(tl.float32)
    return acc.to(rows.dtype.element_ty)
