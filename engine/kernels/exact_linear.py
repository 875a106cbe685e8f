"""y = x Wᵀ + b with the same bits for any number of rows of x: the products of the exact mode.

    y[m, n] = b[n] + Σ x[m, k] W[n, k], times the scales of x and W if both are in FP8

The tensor cores of Hopper (`wgmma`) add 16 products, 32 of FP8, at a time to a float32 accumulator. The bits
of a sum depend on the order of these additions alone, and neither on the shape of a tile nor on which operand
is the large one. So every sum takes all columns from the first to the last, in one accumulator: no parts of
columns (`split_k` with one split), whatever the number of rows. All tiles must make Triton choose `wgmma`:
four or more warps, and 64 or more rows of the first operand. A test compares the bits of all tiles.

Small tiles have the kernel of `split_k`. Large ones have the kernel below: its programs compute one tile
after the other, and load the next one while they store. Programs that run side by side compute a few tiles of
x for all rows of W, so they share what they read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels import skinny_linear
from baton.engine.kernels.fp8 import times_scales
from baton.engine.kernels.launch import inputs_ready, launch_options
from baton.engine.kernels.split_k import Tiling, multiply, operands, store_tile

# Measured on an H200.
COSTS = {(64, 64): 20, (128, 64): 22, (128, 128): 30, (128, 256): 48}
"""Microseconds in which every multiprocessor computes a tile: so many rows of x and of W, 4,096 columns."""
SMALL = {64: 6, 128: 8}
"""Stages of the small tiles, by rows of x."""
LARGE = {128: 6, 256: 4}
"""Stages of the large ones, by rows of W."""
GROUP = 8
"""Tiles of x that programs compute side by side."""
LINE = 128  # bytes of a row of a large tile


def tiling(rows: int, inner: int, size: int, itemsize: int, multiprocessors: int) -> Tiling:
    """For x [rows, inner] and W [size, inner], with the least cost."""
    if rows <= 64:
        few = skinny_linear.tiling(rows, inner * itemsize // 2, size, multiprocessors)
        return few._replace(block_k=few.block_k * 2 // itemsize, splits=1)

    def cost(tile: tuple[int, int]) -> int:
        tiles = triton.cdiv(rows, tile[0]) * triton.cdiv(size, tile[1])
        return triton.cdiv(tiles, multiprocessors) * COSTS[tile]

    height, width = min(COSTS, key=cost)
    if width > 64:
        return Tiling(height, width, LINE // itemsize, 1, 8, LARGE[width])
    return Tiling(height, width, 2 * LINE * 64 // height // itemsize, 1, 4, SMALL[height])


class ExactLinear(skinny_linear.SkinnyLinear):
    """A linear product of the exact mode, for any number of rows."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in], contiguous. Returns [rows, out]."""
        counts = self._finished.tensor
        return exact_linear(x, self._weight, self._bias, x.dtype, self._multiprocessors, counts)


def exact_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    multiprocessors: int,
    finished: Tensor,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """As `split_k.multiply`. `scales`: one of each row of x and W, if they are in FP8."""
    assert x.is_contiguous(), "the kernel assumes dense rows"
    (rows, inner), size = x.shape, len(weight)
    shape = tiling(rows, inner, size, x.itemsize, multiprocessors)
    if shape.block_n == skinny_linear.BLOCK_N:
        return multiply(x, weight, bias, dtype, shape, finished, scales)
    out = torch.empty(rows, size, dtype=dtype, device=x.device)
    tiles = triton.cdiv(rows, shape.block_m) * triton.cdiv(size, shape.block_n)
    _large[(min(tiles, multiprocessors),)](
        *operands(x, weight, scales, shape),
        bias,
        out,
        rows,
        size,
        inner,
        GROUP=GROUP,
        **shape.options(),
        **launch_options(),
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def _large(
    x_tiles,
    x_scales,
    weight_tiles,
    weight_scales,
    bias,
    out,
    rows,
    size,
    inner,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    inputs_ready()
    height, width = tl.cdiv(rows, BLOCK_M), tl.cdiv(size, BLOCK_N)  # in tiles
    for tile in tl.range(tl.program_id(0), height * width, tl.num_programs(0), flatten=True):
        first_tile = tile // (GROUP * width) * GROUP
        in_group = tile % (GROUP * width)
        side_by_side = tl.minimum(height - first_tile, GROUP)
        first_row = (first_tile + in_group % side_by_side) * BLOCK_M
        first_column = in_group // side_by_side * BLOCK_N
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in tl.range(0, inner, BLOCK_K):
            x = x_tiles.load([first_row, k])  # past the end: zeros
            w = weight_tiles.load([first_column, k])
            acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
        if weight_scales is not None:
            row, column = first_row + tl.arange(0, BLOCK_M), first_column + tl.arange(0, BLOCK_N)
            is_row, is_column = row < rows, column < size
            acc = times_scales(acc, x_scales + row, weight_scales + column, is_row, is_column, False)
        store_tile(acc, bias, out, first_row, first_column, rows, size, False)
