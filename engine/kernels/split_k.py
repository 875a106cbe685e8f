"""What the products y = x Wᵀ + b of few rows share.

The rows of W are the large side of the tensor core product (yᵀ = W xᵀ), so few rows of x waste little of it.
A program handles a tile of yᵀ, and one of several parts of its inner dimension. So enough programs read W at
once. Each loads several tiles ahead and stores its part. The program that finishes last for a tile adds up
all parts. It adds them in a fixed order, so timing never changes the sum.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from baton.engine.kernels.fp8 import group_scales, outer_scales, times_scales
from baton.engine.kernels.launch import (
    finishes_last,
    inputs_ready,
    launch_options,
    multiprocessors,
    next_may_begin,
)
from baton.engine.kernels.scratch import Scratch

SHARED_BYTES = 208 << 10  # of a multiprocessor, for tiles that are loaded ahead
MAX_SPLITS = 8


class Tiling(NamedTuple):
    block_m: int  # rows of x, padded
    block_n: int  # rows of W
    block_k: int  # columns of W, at a time
    splits: int  # parts of the columns of W
    warps: int
    stages: int  # tiles loaded ahead

    def options(self) -> dict[str, Any]:
        """Of a launch, but for the splits."""
        blocks = {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k}
        return {**blocks, "num_warps": self.warps, "num_stages": self.stages}


def partials_of(out: Tensor, splits: int, tiles: int, block_n: int, block_m: int) -> Tensor:
    """Scratch memory for the partial sums. Without splits the kernel has no use for it."""
    if splits == 1:
        return out
    return torch.empty(splits, tiles, block_n, block_m, dtype=torch.float32, device=out.device)


def counters(tiles: int, device: torch.device) -> Scratch:
    """How many parts of each tile are finished: 0 between calls."""
    return Scratch(torch.zeros(tiles, dtype=torch.int32, device=device))


def splits(tiles: int, steps: int, multiprocessors: int) -> int:
    """Into how many parts to cut the columns, if the result has `tiles` tiles of `steps` steps each.

    Programs on half of the multiprocessors already read memory at its full speed. Adding up more parts costs
    more than it saves (measured on an H200)."""
    return max(1, min(multiprocessors // (2 * tiles), steps, MAX_SPLITS))


def operands(
    x: Tensor, weight: Tensor, scales: tuple[Tensor, Tensor] | None, shape: Tiling
) -> tuple[TensorDescriptor, Tensor | None, TensorDescriptor, Tensor | None]:
    """The first arguments of a kernel: tiles of x and of W, and the scales of each."""
    of_x, of_w = scales or (None, None)
    x_tiles = TensorDescriptor.from_tensor(x, [shape.block_m, shape.block_k])
    return x_tiles, of_x, TensorDescriptor.from_tensor(weight, [shape.block_n, shape.block_k]), of_w


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    shape: Tiling,
    finished: Tensor,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """x Wᵀ + b [rows, out] of `dtype`, for x [rows, in] and W [out, in]. `finished`: counters for the tiles.
    `scales` of x and W, if both are in FP8: as `Quantized.scales`, and as in `Kernels.fp8_linear`."""
    (rows, inner), size = x.shape, len(weight)
    assert shape.splits == 1 or rows <= shape.block_m, "tiles of other rows would share the partial sums"
    grouped = scales is not None and len(scales[1]) > 1
    tiles = triton.cdiv(size, shape.block_n)
    out = torch.empty(rows, size, dtype=dtype, device=x.device)
    _linear[(triton.cdiv(rows, shape.block_m), tiles, shape.splits)](
        *operands(x, weight, scales, shape),
        bias,
        partials_of(out, shape.splits, tiles, shape.block_n, shape.block_m),
        finished,
        out,
        rows,
        size,
        inner,
        GROUPED=grouped,
        BLOCKS=scales is not None and grouped and scales[1].shape[1] < size,
        EARLY=weight.nbytes <= multiprocessors(weight.device) * SHARED_BYTES,
        SPLITS=shape.splits,
        **shape.options(),
        **launch_options(),
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x_tiles,
    x_scales,
    weight_tiles,
    weight_scales,
    bias,
    partials,
    finished,
    out,
    rows,
    size,
    inner,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCKS: tl.constexpr,
    EARLY: tl.constexpr,
    SPLITS: tl.constexpr,
):
    if EARLY:
        next_may_begin()
    inputs_ready()
    # Programs of the same rows of W are neighbours, so that W is read once.
    first_row = tl.program_id(0) * BLOCK_M
    tile, split = tl.program_id(1), tl.program_id(2)
    row, column = first_row + tl.arange(0, BLOCK_M), tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = row < rows, column < size
    steps = tl.cdiv(inner, BLOCK_K)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    begin, end = split * steps // SPLITS, (split + 1) * steps // SPLITS
    of_group_w = size // BLOCK_K if BLOCKS else size  # scales
    x_at_group, w_at_group, of_x, of_w = 0, 0, 0, 0
    if GROUPED:
        x_at_group = x_scales + row * steps + begin
        first_w = tile * BLOCK_N // BLOCK_K if BLOCKS else column
        w_at_group = weight_scales + begin * of_group_w + first_w
        of_x, of_w = group_scales(x_at_group, w_at_group, True, is_row, is_column, BLOCKS)
    for step in tl.range(begin, end):
        w = weight_tiles.load([tile * BLOCK_N, step * BLOCK_K])  # past the end: zeros
        x = x_tiles.load([first_row, step * BLOCK_K])
        if GROUPED:
            scales = outer_scales(of_x, of_w, True, BLOCKS)
            x_at_group += 1
            w_at_group += of_group_w
            of_x, of_w = group_scales(x_at_group, w_at_group, step + 1 < end, is_row, is_column, BLOCKS)
            acc += tl.dot(w, tl.trans(x)) * scales
        else:
            acc = tl.dot(w, tl.trans(x), acc)
    is_last = True
    if SPLITS > 1:
        acc, is_last = add_partials(acc, partials, finished, tile, tl.num_programs(1), split, SPLITS)
    if is_last:
        if weight_scales is not None and not GROUPED:
            acc = times_scales(acc, x_scales + row, weight_scales + column, is_row, is_column, True)
        store_tile(acc, bias, out, first_row, tile * BLOCK_N, rows, size, True)


@triton.jit
def add_partials(acc, partials, finished, tile, tiles, split, SPLITS: tl.constexpr):
    """Returns the sum of all partial sums of a tile, and whether this program is the last one and has it.

    acc [n, m] float32: this program's. partials [splits, tiles, n, m] float32: scratch memory. finished
    [tiles] int32: 0 before and after."""
    n, m = tl.arange(0, acc.shape[0]), tl.arange(0, acc.shape[1])
    part = tiles * acc.shape[0] * acc.shape[1]
    of_tile = partials + tile * acc.shape[0] * acc.shape[1] + n[:, None] * acc.shape[1] + m[None, :]
    tl.store(of_tile + split * part, acc)
    is_last = finishes_last(finished, tile, SPLITS)
    if is_last:
        tl.store(finished + tile, 0)
        acc = tl.zeros(acc.shape, tl.float32)
        for i in tl.static_range(SPLITS):
            acc += tl.load(of_tile + i * part, cache_modifier=".cg")
    return acc, is_last


@triton.jit
def add_bias(y, bias, n, used, AXIS: tl.constexpr):
    """y + b, for the rows n of W that are `used`. AXIS: of y, the one that is not of n. bias None: y."""
    if bias is not None:
        y += tl.expand_dims(tl.load(bias + n, mask=used, other=0.0).to(tl.float32), AXIS)
    return y


@triton.jit
def store_tile(acc, bias, out, first_m, first_n, rows, size, SWAPPED: tl.constexpr):
    """Adds the bias to a tile [m, n] of y, or [n, m] of yᵀ, and stores it in out [rows, size]."""
    if SWAPPED:
        n, m = first_n + tl.arange(0, acc.shape[0]), first_m + tl.arange(0, acc.shape[1])
        acc = tl.trans(add_bias(acc, bias, n, n < size, 1)).to(out.dtype.element_ty)
    else:
        m, n = first_m + tl.arange(0, acc.shape[0]), first_n + tl.arange(0, acc.shape[1])
        acc = add_bias(acc, bias, n, n < size, 0)
    to = out + m[:, None].to(tl.int64) * size + n[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=(m < rows)[:, None] & (n < size)[None, :])
