"""Quantizes rows of activations to FP8 (e4m3), with a scale for each row or for each group of its columns.

    scale  = max |x| / 448          over the row, or over the group
    values = x / scale              rounded to the nearest FP8 number

A scale depends on its row alone, so the other rows of a step do not change the result. If a row has an
infinite number or NaN, its values have NaN, and so has every product with it. Other rows stay as they are.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels import FP8, FP8_GROUP, Quantized
from baton.engine.kernels.launch import inputs_ready, launch_options

LARGEST = tl.constexpr(448.0)  # the largest FP8 number
LEAST = tl.constexpr(2.0**-100)  # counts as the largest value of a row of zeros, so that its scale is not 0

ELEMENTS_PER_WARP = 512
MAX_WARPS = 16


def empty_like(x: Tensor, size: int, *, grouped: bool | None) -> tuple[Tensor, Tensor | None]:
    """Values [rows, size] and scales of a result for the rows of x. `grouped` None: it has no scales."""
    if grouped is None:
        return x.new_empty(len(x), size), None
    groups = triton.cdiv(size, FP8_GROUP) if grouped else 1
    values = torch.empty(len(x), size, dtype=FP8, device=x.device)
    return values, torch.empty(len(x), groups, dtype=torch.float32, device=x.device)


def group_columns(block: int, *, grouped: bool | None) -> int:
    """Columns that share a scale, for programs that handle `block` columns."""
    return min(block, FP8_GROUP) if grouped else block


def quantize(x: Tensor, *, grouped: bool) -> Quantized:
    """x [rows, size], dense rows."""
    assert x.is_contiguous(), "the kernel assumes dense rows"
    rows, size = x.shape
    values, scales = empty_like(x, size, grouped=grouped)
    assert scales is not None, "the result is quantized"
    block = triton.next_power_of_2(size)
    _quantize[(rows,)](
        x,
        values,
        scales,
        size,
        BLOCK=block,
        GROUP=group_columns(block, grouped=grouped),
        num_warps=min(MAX_WARPS, max(1, block // ELEMENTS_PER_WARP)),
        **launch_options(),
    )
    return Quantized(values, scales)


@triton.jit
def _quantize(x, values, scales, size, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    inputs_ready()
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    y = tl.load(x + row * size + columns, mask=columns < size, other=0.0).to(tl.float32)
    store_quantized(y, values, scales, row, 0, size, GROUP)


@triton.jit
def scale_of(largest):
    """The scale of values with this largest magnitude."""
    return tl.maximum(largest, LEAST) / LARGEST


@triton.jit
def power_of_two(x):
    """The largest power of two up to x, positive float32."""
    return (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def store_quantized(y, values, scales, row, first, size, GROUP: tl.constexpr, WIDTH: tl.constexpr = 16):
    """Quantizes and stores y, float32: the columns of a row from `first` on, and zeros after its end."""
    groups = tl.reshape(y, (y.shape[0] // GROUP, GROUP))
    scale = scale_of(tl.max(tl.abs(groups), axis=1))
    quotients = tl.reshape(groups / scale[:, None], (y.shape[0],)).to(values.dtype.element_ty)
    column = first + tl.max_contiguous(tl.arange(0, y.shape[0]), WIDTH)  # of a thread
    tl.store(values + row * size + column, quotients, mask=column < size)
    group = first // GROUP + tl.arange(0, y.shape[0] // GROUP)
    tl.store(scales + row * tl.cdiv(size, GROUP) + group, scale, mask=group * GROUP < size)


@triton.jit
def group_scales(x_scales, weight_scales, exists, real, used, BLOCKS: tl.constexpr):
    """The scales of rows of x that are `real`, and of rows of W that are `used`, for a group of columns. With
    BLOCKS W has one for all its rows here. A product loads them while it computes the group before, since a
    load takes as long. Past the last group they are zeros."""
    of_x = tl.load(x_scales, mask=real & exists, other=0.0)
    of_w = tl.load(weight_scales, mask=exists if BLOCKS else used & exists, other=0.0)
    return of_x, of_w


@triton.jit
def outer_scales(of_x, of_w, SWAPPED: tl.constexpr, BLOCKS: tl.constexpr):
    """The scales of a tile of x Wᵀ, or of W xᵀ."""
    if BLOCKS:
        scales = of_x * of_w
        scales = scales[None, :] if SWAPPED else scales[:, None]
    else:
        scales = of_w[:, None] * of_x[None, :] if SWAPPED else of_x[:, None] * of_w[None, :]
    return scales


@triton.jit
def times_scales(y, x_scales, weight_scales, real, used, SWAPPED: tl.constexpr):
    """A tile of x Wᵀ, or of W xᵀ, times the scales of its rows of x, which are `real`, and of W, `used`."""
    of_x, of_w = group_scales(x_scales, weight_scales, True, real, used, False)
    return y * outer_scales(of_x, of_w, SWAPPED, False)
