"""SwiGLU's pointwise half in one pass.

    out = silu(gate) · up,   silu(x) = x / (1 + exp(−x))

gate and up are the halves of a row, as the fused gate-up product writes them. Computed in float32 and rounded
once.
"""

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import overlap
from engine.kernels.overlap import inputs_ready

BLOCK = 1024  # elements of a program


def silu_mul(gate_up: Tensor) -> Tensor:
    rows, both = gate_up.shape
    assert gate_up.is_contiguous(), "the kernel assumes dense rows"
    out = gate_up.new_empty(rows, both // 2)
    _silu_mul[(rows, triton.cdiv(both // 2, BLOCK))](
        gate_up, out, both // 2, BLOCK=BLOCK, num_warps=4, **overlap.options()
    )
    return out


@triton.jit
def _silu_mul(gate_up, out, size, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    inputs_ready(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gate = tl.load(gate_up + row * 2 * size + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + columns, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)
