"""The norms of state layers before their output product, in one pass.

    out = RMSNorm(x · silu(gate)) · weight          Mamba-2
    out = RMSNorm(head of x) · weight · silu(gate)  the gated delta rule; KDA has sigmoid(gate)

Each group of columns has its own norm. Computed in float32 and rounded once. Ranks may have parts of a group:
then `gated_squares` gives their terms of the sum of squares, and the norm gets the mean.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.launch import inputs_ready, launch_options
from baton.engine.kernels.norm import ELEMENTS_PER_WARP

MAX_WARPS = 16


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int, squares: Tensor | None = None
) -> Tensor:
    return _launch(x, gate, weight, eps, groups, squares, gated_first=True)


def gated_squares(x: Tensor, gate: Tensor) -> Tensor:
    rows, size = x.shape
    squares = torch.empty(rows, device=x.device)
    _gated_squares[(rows,)](x, gate, squares, gate.stride(0), size, **_options(size))
    return squares


def norm_gate(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, sigmoid: bool = False) -> Tensor:
    groups = x.shape[1] // len(weight)
    return _launch(x, gate, weight, eps, groups, None, gated_first=False, sigmoid=sigmoid)


def _launch(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    groups: int,
    squares: Tensor | None,
    *,
    gated_first: bool,
    sigmoid: bool = False,
) -> Tensor:
    rows, size = x.shape[0], x.shape[1] // groups
    out = x.new_empty(x.shape)
    _norm[(rows, groups)](
        x,
        gate,
        weight,
        squares,
        out,
        gate.stride(0),
        None if squares is None else squares.stride(0),
        size,
        eps,
        GATED_FIRST=gated_first,
        SIGMOID=sigmoid,
        **_options(size),
    )
    return out


def _options(size: int) -> dict[str, Any]:
    block = triton.next_power_of_2(size)
    warps = min(MAX_WARPS, max(1, block // ELEMENTS_PER_WARP))
    return {"BLOCK": block, "num_warps": warps, **launch_options()}


@triton.jit
def _norm(
    x,
    gate,
    weight,
    squares,
    out,
    gate_stride,
    squares_stride,
    size,
    eps,
    BLOCK: tl.constexpr,
    GATED_FIRST: tl.constexpr,
    SIGMOID: tl.constexpr,
):
    inputs_ready()
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    at = group * size + columns
    to = row * size * tl.num_programs(1) + at
    if GATED_FIRST:
        y = _gated(x + to, gate + row * gate_stride + at, inside)
    else:
        y = tl.load(x + to, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(y * y, axis=0) / size if squares is None else tl.load(squares + row * squares_stride)
    y *= tl.rsqrt(mean + eps)
    of_weight = at if GATED_FIRST else columns
    y *= tl.load(weight + of_weight, mask=inside, other=0.0).to(tl.float32)
    if not GATED_FIRST:
        gates = tl.load(gate + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
        y = y * tl.sigmoid(gates) if SIGMOID else y * gates * tl.sigmoid(gates)
    tl.store(out + to, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gated_squares(x, gate, squares, gate_stride, size, BLOCK: tl.constexpr):
    inputs_ready()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    y = _gated(x + row * size + columns, gate + row * gate_stride + columns, columns < size)
    tl.store(squares + row, tl.sum(y * y, axis=0))


@triton.jit
def _gated(x, gate, inside):
    gates = tl.load(gate, mask=inside, other=0.0).to(tl.float32)
    return tl.load(x, mask=inside, other=0.0).to(tl.float32) * gates * tl.sigmoid(gates)
