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
from baton.engine.kernels.fp8 import ELEMENTS_PER_WARP, MAX_WARPS, empty_like, group_columns, store_quantized
from baton.engine.kernels.launch import inputs_ready, launch_options
from baton.engine.model_config import ClampedSwiGLU, GeLU

BLOCK = 1024  # columns of a program
TWICE_ROOT = tl.constexpr(1.5957691216057308)  # 2 · √(2/π)


def activate(
    gate_up: Tensor, grouped: bool | None = None, activation: ClampedSwiGLU | GeLU | None = None
) -> Tensor | Quantized:
    """As `Kernels.activate`."""
    clamped = activation if isinstance(activation, ClampedSwiGLU) else None
    assert gate_up.is_contiguous(), "the kernel assumes dense rows"
    rows, size = len(gate_up), gate_up.shape[1] // 2
    out, scales = empty_like(gate_up, size, grouped=grouped)
    # A scale of the whole row needs the whole row in one program.
    block = triton.next_power_of_2(size) if grouped is False else BLOCK
    _silu_mul[(rows, triton.cdiv(size, block))](
        gate_up,
        out,
        scales,
        size,
        BLOCK=block,
        GROUP=group_columns(block, grouped=grouped),
        ALPHA=clamped.alpha if clamped else None,
        LIMIT=clamped.limit if clamped else None,
        GELU=isinstance(activation, GeLU),
        num_warps=min(MAX_WARPS, max(4, block // ELEMENTS_PER_WARP)),
        **launch_options(),
    )
    return out if scales is None else Quantized(out, scales)


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
    """LIMIT None: plain. ALPHA None: silu(gate) and up are bounded."""
    if LIMIT is None:
        y = gate * tl.sigmoid(gate) * up
    elif ALPHA is None:
        y = tl.minimum(gate * tl.sigmoid(gate), LIMIT) * tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    else:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        y = gate * tl.sigmoid(gate * ALPHA) * (up + 1)
    return y
