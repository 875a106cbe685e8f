"""The norm of Mamba-2 before its output product, in one pass.

    out = RMSNorm(x · silu(gate)) · weight

Each group of columns has its own norm. Computed in float32 and rounded once.
"""

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import overlap
from engine.kernels.norm import ELEMENTS_PER_WARP, MAX_WARPS
from engine.kernels.overlap import inputs_ready


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int) -> Tensor:
    rows, size = x.shape[0], x.shape[1] // groups
    out = x.new_empty(x.shape)
    block = triton.next_power_of_2(size)
    _gated_rms_norm[(rows, groups)](
        x,
        gate,
        weight,
        out,
        gate.stride(0),
        size,
        eps,
        BLOCK=block,
        num_warps=min(MAX_WARPS, max(1, block // ELEMENTS_PER_WARP)),
        **overlap.options(),
    )
    return out


@triton.jit
def _gated_rms_norm(x, gate, weight, out, gate_stride, size, eps, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    inputs_ready(OVERLAP)
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    at = group * size + columns
    to = row * size * tl.num_programs(1) + at
    gates = tl.load(gate + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(x + to, mask=inside, other=0.0).to(tl.float32) * gates * tl.sigmoid(gates)
    y *= tl.rsqrt(tl.sum(y * y, axis=0) / size + eps)
    y *= tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + to, y.to(out.dtype.element_ty), mask=inside)
