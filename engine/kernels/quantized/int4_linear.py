"""y = x Wᵀ + b with W in 4 bits (`FourBits`).

    up to 2 rows   `int4_gemv` multiplies the codes, and then the sums of groups by their scales.
    few rows       The kernel below writes W into registers, in x's dtype. Tensor cores multiply it.
    many rows      W is written to memory in x's dtype, and cuBLAS multiplies.

The last two multiply the same numbers, rounded once to x's dtype, so the number of rows changes only the
order of the sum. The first rounds no weight. Scales and zeros are in x's dtype, too.

A program handles a tile of y, and one of SPLITS parts of the columns (`split_k`).
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from baton.engine.kernels import FourBits, Kernels, LinearMethod
from baton.engine.kernels.launch import inputs_ready, launch_options
from baton.engine.kernels.quantized import int4_gemv
from baton.engine.kernels.quantized.four_bits import add_block, of_planes, tiles, values
from baton.engine.kernels.split_k import SHARED_BYTES, Tiling, add_parts, counters, parts_of, store_transposed

MAX_FEW_ROWS = 256
MAX_BLOCK_M = 128
FEW, SOME, MANY = (64, 4, 4), (128, 4, 2), (128, 8, 1)
"""Rows of W of a program, its warps, and programs that share a multiprocessor: for tiles of up to FEW_ROWS
rows of x, up to SOME_ROWS, and more."""
FEW_ROWS, SOME_ROWS = 16, 64
MAX_SPLITS = 8
MAX_STAGES = 6


def tiling(rows: int, blocks: int, words: int, size: int, multiprocessors: int) -> Tiling:
    """The tiling for x of these rows and W of `size` rows, with `blocks` blocks of columns."""
    block_m = max(16, triton.next_power_of_2(min(rows, MAX_BLOCK_M)))
    block_n, warps, each = FEW if block_m <= FEW_ROWS else SOME if block_m <= SOME_ROWS else MANY
    tiles = triton.cdiv(rows, block_m) * triton.cdiv(size, block_n)
    splits = max(1, min(each * multiprocessors // tiles, blocks, MAX_SPLITS))
    sharing = min(each, triton.cdiv(tiles * splits, multiprocessors))
    stages = SHARED_BYTES // sharing // (2 * words * (block_n + 4 * block_m))
    return Tiling(block_m, block_n, words, splits, warps, max(2, min(MAX_STAGES, stages)))


class Int4Linear(LinearMethod):
    """A linear product with weights in 4 bits. Its calls must be in one stream."""

    def __init__(self, weight: FourBits, bias: Tensor | None, multiprocessors: int) -> None:
        """bias [out]."""
        self.weight, self._bias, self._multiprocessors = weight, bias, multiprocessors
        least = min(block_n for block_n, _, _ in (FEW, SOME, MANY))
        tiles = triton.cdiv(weight.size, least) * triton.cdiv(MAX_FEW_ROWS, 16)
        self._finished = counters(tiles, weight.words.device)

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in], contiguous. Returns [rows, out]."""
        if len(x) <= int4_gemv.MAX_ROWS:
            return int4_gemv.gemv(x, self.weight, self._bias, gated=False)
        if len(x) <= MAX_FEW_ROWS:
            return self.triton(x)
        return F.linear(x, values(self.weight), self._bias)

    def silu_mul(self, x: Tensor, kernels: Kernels) -> Tensor:
        if len(x) <= int4_gemv.MAX_ROWS:
            return int4_gemv.gemv(x, self.weight, self._bias, gated=True)
        return super().silu_mul(x, kernels)

    def triton(self, x: Tensor) -> Tensor:
        """The product by the kernel alone."""
        assert x.is_contiguous(), "the kernel assumes dense rows"
        rows, weight = len(x), self.weight
        blocks = weight.words.shape[1] // weight.block
        shape = tiling(rows, blocks, weight.block, weight.size, self._multiprocessors)
        row_tiles, columns = triton.cdiv(rows, shape.block_m), triton.cdiv(weight.size, shape.block_n)
        out = torch.empty(rows, weight.size, dtype=x.dtype, device=x.device)
        _int4_linear[(row_tiles, columns, shape.splits)](
            TensorDescriptor.from_tensor(x, [shape.block_m, shape.block_k]),
            *tiles(weight, shape.block_n),
            self._bias,
            parts_of(out, shape.splits, row_tiles * columns, shape.block_n, shape.block_m),
            self._finished,
            out,
            rows,
            weight.size,
            blocks,
            GROUP=weight.group,
            FLOATS=weight.floats,
            **shape.options(),
            **launch_options(),
        )
        return out


@triton.jit(do_not_specialize=["rows", "blocks"])
def _int4_linear(
    x_tiles,
    word_tiles,
    scale_tiles,
    zero_tiles,
    bias,
    parts,
    finished,
    out,
    rows,
    size,
    blocks,
    GROUP: tl.constexpr,
    FLOATS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """BLOCK_K: words at a time."""
    inputs_ready()
    # Programs of the same rows of W are neighbours, so that W is read once.
    first_m, first_n, split = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N, tl.program_id(2)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for block in tl.range(split * blocks // SPLITS, (split + 1) * blocks // SPLITS):
        first = 4 * BLOCK_K * block
        words = word_tiles.load([first_n, BLOCK_K * block])  # past the end: zeros
        scales = of_planes(scale_tiles, first // GROUP, first_n, GROUP, BLOCK_N, BLOCK_K)
        zeros = of_planes(zero_tiles, first // GROUP, first_n, GROUP, BLOCK_N, BLOCK_K)
        x0 = x_tiles.load([first_m, first])
        x1 = x_tiles.load([first_m, first + BLOCK_K])
        x2 = x_tiles.load([first_m, first + 2 * BLOCK_K])
        x3 = x_tiles.load([first_m, first + 3 * BLOCK_K])
        acc = add_block(acc, words, scales, zeros, x0, x1, x2, x3, FLOATS)
    is_last = True
    if SPLITS > 1:
        tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        acc, is_last = add_parts(
            acc, parts, finished, tile, tl.num_programs(0) * tl.num_programs(1), split, SPLITS
        )
    if is_last:
        store_transposed(acc, bias, out, first_m, first_n, rows, size)
