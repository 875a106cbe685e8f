"""Residual add and RMSNorm in one pass over memory.

    residual ← residual + delta
    out      = residual / sqrt(mean(residual²) + eps) · weight

Two kernels would read the residual stream twice; one reads it once. One program per row, which stays in
registers. The mean is computed in float32 from the sum as rounded to the residual's dtype, since the next
layer sees the rounded sum. The result can be quantized before it is stored, or be stored in both forms.
"""

import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels import Both, Quantized
from baton.engine.kernels.fp8 import empty_like, group_columns, store_quantized
from baton.engine.kernels.launch import inputs_ready, launch_options, next_may_begin
from baton.engine.kernels.moe.combine import sum_of_terms
from baton.engine.kernels.moe.experts import Terms

MAX_WARPS = 8
ELEMENTS_PER_WARP = 512  # 16 per thread: two or four 16-byte loads


def add_rms_norm(
    residual: Tensor,
    delta: Tensor | Terms | None,
    weight: Tensor,
    eps: float,
    grouped: bool | None = None,
    *,
    both: bool = False,
) -> Tensor | Quantized | Both:
    rows, size = residual.shape
    assert residual.stride(1) == 1, "the kernel assumes dense rows"
    added, *terms = delta if isinstance(delta, Terms) else (delta, None, None, False)
    assert added is None or (added.shape[1] == size and added.is_contiguous() and residual.is_contiguous()), (
        "the kernel adds element by element"
    )
    out, scales = empty_like(residual, size, grouped=grouped)
    plain = out if scales is None else residual.new_empty(rows, size) if both else None
    block = triton.next_power_of_2(size)
    warps = min(MAX_WARPS, max(1, block // ELEMENTS_PER_WARP))
    _add_rms_norm[(rows,)](
        residual,
        residual if added is None else added,
        *terms[:2],
        weight,
        plain,
        out,
        scales,
        residual.stride(0),
        size,
        eps,
        BLOCK=block,
        GROUP=group_columns(block, grouped=grouped),
        ADD=delta is not None,
        CHOSEN=delta.weights.shape[1] if isinstance(delta, Terms) else 0,
        WEIGHTED=terms[2],
        num_warps=warps,
        **launch_options(),
    )
    if scales is None:
        return out
    quantized = Quantized(out, scales)
    return quantized if plain is None else Both(plain, quantized)


@triton.jit
def _add_rms_norm(
    residual,
    delta,
    term_weights,
    shared,
    weight,
    plain,
    out,
    scales,
    stride,
    size,
    eps,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    ADD: tl.constexpr,
    CHOSEN: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    if CHOSEN or not ADD:  # experts made the sum, or it is a norm of latents: short products follow
        next_may_begin()
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    inputs_ready()
    row = tl.program_id(0).to(tl.int64)
    at = row * size + columns
    x = tl.load(residual + row * stride + columns, mask=inside, other=0.0)
    if ADD:
        if CHOSEN:
            added = sum_of_terms(delta, term_weights, shared, row, columns, size, CHOSEN, WEIGHTED)
        else:
            added = tl.load(delta + at, mask=inside, other=0.0)
        x = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)
        tl.store(residual + at, x, mask=inside)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / size + eps)
    y = x * scale * factors
    if plain is not None:
        y = y.to(plain.dtype.element_ty)
        tl.store(plain + at, y, mask=inside)
    if scales is not None:
        # Beside `plain`, threads have the columns that they have without FP8, so they add in that order.
        width: tl.constexpr = 16 if plain is None else 128 // plain.dtype.element_ty.primitive_bitwidth
        store_quantized(y.to(tl.float32), out, scales, row, 0, size, GROUP, width)
