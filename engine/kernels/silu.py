"""SwiGLU's pointwise half in one pass.

    out = silu(gate) · up,   silu(x) = x / (1 + exp(−x))

or the `ClampedSwiGLU` of gpt-oss, or GeGLU, which has gelu in place of silu:

    gelu(x) ≈ x · (1 + tanh(z)) / 2 = x / (1 + exp(−2 z)),   z = √(2/π) · (x + 0.044715 · x³)

gate and up are the halves of a row, as the fused gate-up product writes
them. Computed in float32 and rounded once. The result can be quantized before it is stored.
"""

import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels import Quantized
from baton.engine.kernels.fp8 import (
    ELEMENTS_PER_WARP,
    MAX_WARPS,
    empty_quantized,
    group_columns,
    store_quantized,
)
from baton.engine.kernels.launch import inputs_ready, launch_options
from baton.engine.model_config import ClampedSwiGLU

BLOCK = 1024  # columns of a program
TWICE_ROOT = tl.constexpr(1.5957691216057308)  # 2 · √(2/π)


def silu_mul(gate_up: Tensor, clamped: ClampedSwiGLU | None = None) -> Tensor:
    rows, both = gate_up.shape
    out = gate_up.new_empty(rows, both // 2)
    _launch(gate_up, out, None, BLOCK, BLOCK, clamped)
    return out


def gelu_mul(gate_up: Tensor) -> Tensor:
    rows, both = gate_up.shape
    out = gate_up.new_empty(rows, both // 2)
    _launch(gate_up, out, None, BLOCK, BLOCK, None, gelu=True)
    return out


def silu_mul_quantized(gate_up: Tensor, clamped: ClampedSwiGLU | None = None, *, grouped: bool) -> Quantized:
    rows, both = gate_up.shape
    out = empty_quantized(rows, both // 2, gate_up.device, grouped=grouped)
    # A scale of the whole row needs the whole row in one program.
    block = BLOCK if grouped else triton.next_power_of_2(both // 2)
    _launch(gate_up, *out, block, group_columns(block, grouped=grouped), clamped)
    return out


def _launch(
    gate_up: Tensor,
    out: Tensor,
    scales: Tensor | None,
    block: int,
    group: int,
    clamped: ClampedSwiGLU | None,
    *,
    gelu: bool = False,
) -> None:
    assert gate_up.is_contiguous(), "the kernel assumes dense rows"
    rows, size = out.shape
    _silu_mul[(rows, triton.cdiv(size, block))](
        gate_up,
        out,
        scales,
        size,
        BLOCK=block,
        GROUP=group,
        ALPHA=clamped.alpha if clamped else None,
        LIMIT=clamped.limit if clamped else None,
        GELU=gelu,
        num_warps=min(MAX_WARPS, max(4, block // ELEMENTS_PER_WARP)),
        **launch_options(),
    )


@triton.jit
def _silu_mul(
    gate_up,
    out,
    scales,
    size,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    GELU: tl.constexpr,
):
    inputs_ready()
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    columns = first + tl.arange(0, BLOCK)
    inside = columns < size
    gate = tl.load(gate_up + row * 2 * size + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + columns, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        y = gate * tl.sigmoid((gate + 0.044715 * gate * gate * gate) * TWICE_ROOT) * up
    else:
        y = swiglu(gate, up, ALPHA, LIMIT)
    if scales is None:
        tl.store(out + row * size + columns, y.to(out.dtype.element_ty), mask=inside)
    else:
        store_quantized(y, out, scales, row, first, size, GROUP)


@triton.jit
def swiglu(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """LIMIT None: plain."""
    if LIMIT is None:
        y = gate * tl.sigmoid(gate) * up
    else:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        y = gate * tl.sigmoid(gate * ALPHA) * (up + 1)
    return y
