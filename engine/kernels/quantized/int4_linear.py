"""y = x Wᵀ + b with W in 4 bits (`FourBits`).

    up to 2 rows   `int4_gemv` multiplies the codes, and then the sums of groups by their scales.
    few rows       The kernel below writes W into registers, in x's dtype. Tensor cores multiply it.
    many rows      W is written to memory in x's dtype, and cuBLAS multiplies.

In between, the faster of the last two computes. They multiply the same numbers, rounded once to x's dtype, so
the number of rows changes only the order of the sum. The first rounds no weight. Scales and zeros are in x's
dtype, too.

A program handles a tile of y, and one of SPLITS parts of the columns (`split_k`).
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from baton.engine.kernels import FourBits, Kernels, LinearMethod
from baton.engine.kernels.fastest import fastest
from baton.engine.kernels.launch import inputs_ready, launch_options
from baton.engine.kernels.quantized import int4_gemv
from baton.engine.kernels.quantized.four_bits import add_block, of_planes, tiles, values
from baton.engine.kernels.split_k import MAX_SPLITS, Tiling, add_parts, counters, parts_of, store_transposed

MAX_FEW_ROWS = 256
MAX_MEASURED_ROWS = 1024
"""Between these, measurements choose between the kernel and cuBLAS (`fastest`)."""
MAX_BLOCK_M = 128
NARROW, WIDE = 64, 128
"""Rows of W of a program."""
FEW_ROWS, SOME_ROWS = 32, 64
MAX_STAGES = 6
MULTIPROCESSOR_BYTES, PROGRAM_BYTES = 228 << 10, 1200
"""Shared memory of a multiprocessor, and what a program takes of it beside its tiles."""


def tiling(rows: int, weight: FourBits, multiprocessors: int) -> Tiling:
    """The tiling for x of these rows, measured on an H200 with the products of an 8B model."""
    rows = max(16, triton.next_power_of_2(rows))  # as `fastest` counts them
    block_m, words, warps = min(rows, MAX_BLOCK_M), weight.block, 4
    narrow, tiles = (rows // block_m * triton.cdiv(weight.size, n) for n in (NARROW, WIDE))
    # `each`: programs that share a multiprocessor. While one waits, the others use the tensor cores.
    if block_m <= FEW_ROWS:
        block_n, each = (NARROW, 3) if narrow <= 2 * multiprocessors else (WIDE, 2 if words > 32 else 4)
    elif block_m > SOME_ROWS and narrow <= multiprocessors:
        block_n, each = NARROW, 1
    elif tiles <= multiprocessors:
        block_n, warps, each = WIDE, 8, 1
    else:
        block_n, warps, each, words = WIDE, 8 if block_m > SOME_ROWS else 4, 2, min(words, 32)
    tiles = narrow if block_n == NARROW else tiles
    splits = max(1, min(each * multiprocessors // tiles, weight.words.shape[1] // words, MAX_SPLITS))
    sharing = min(each, triton.cdiv(tiles * splits, multiprocessors))
    # Bytes of a stage. Of W there is one less.
    scales = max(1, 4 * weight.block // weight.group) * (1 if weight.zeros is None else 2)
    of_x, of_w = 8 * block_m * words, 2 * block_n * (words + scales)
    stages = (MULTIPROCESSOR_BYTES // sharing - PROGRAM_BYTES + of_w) // (of_x + of_w)
    return Tiling(block_m, block_n, words, splits, warps, max(2, min(MAX_STAGES, stages)))


class Int4Linear(LinearMethod):
    """A linear product with weights in 4 bits. Its calls must be in one stream."""

    def __init__(self, weight: FourBits, bias: Tensor | None, multiprocessors: int) -> None:
        """bias [out]."""
        self.weight, self._bias, self._multiprocessors = weight, bias, multiprocessors
        tiles = MAX_MEASURED_ROWS // MAX_BLOCK_M * triton.cdiv(weight.size, NARROW)
        self._finished = counters(tiles, weight.words.device)
        self._name = f"int4 {weight.size} x {weight.inner} in groups of {weight.group}"

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in], contiguous. Returns [rows, out]."""
        if len(x) <= int4_gemv.MAX_ROWS:
            return int4_gemv.gemv(x, self.weight, self._bias, gated=False)
        if len(x) <= MAX_FEW_ROWS:
            return self.triton(x)
        if len(x) > MAX_MEASURED_ROWS:
            return self.cublas(x)
        return fastest(self._name, x, len(x), {"cublas": self.cublas, "triton": self.triton})

    def silu_mul(self, x: Tensor, kernels: Kernels) -> Tensor:
        if len(x) <= int4_gemv.MAX_ROWS:
            return int4_gemv.gemv(x, self.weight, self._bias, gated=True)
        return super().silu_mul(x, kernels)

    def cublas(self, x: Tensor) -> Tensor:
        """The product by cuBLAS, of all values of W."""
        return F.linear(x, values(self.weight), self._bias)

    def triton(self, x: Tensor) -> Tensor:
        """The product by the kernel alone."""
        assert x.is_contiguous(), "the kernel assumes dense rows"
        rows, weight = len(x), self.weight
        shape = tiling(rows, weight, self._multiprocessors)
        row_tiles, columns = triton.cdiv(rows, shape.block_m), triton.cdiv(weight.size, shape.block_n)
        out = torch.empty(rows, weight.size, dtype=x.dtype, device=x.device)
        _int4_linear[(row_tiles, columns, shape.splits)](
            TensorDescriptor.from_tensor(x, [shape.block_m, shape.block_k]),
            *tiles(weight, shape.block_n, shape.block_k),
            self._bias,
            parts_of(out, shape.splits, row_tiles * columns, shape.block_n, shape.block_m),
            self._finished,
            out,
            rows,
            weight.size,
            weight.words.shape[1] // shape.block_k,
            GROUP=weight.group,
            FLOATS=weight.floats,
            WORDS=weight.block,
            **shape.options(),
            **launch_options(),
        )
        return out


@triton.jit(do_not_specialize=["rows", "steps"])
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
    steps,
    GROUP: tl.constexpr,
    FLOATS: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """BLOCK_K: words at a time, of a block of WORDS."""
    inputs_ready()
    # Programs of the same rows of W are neighbours, so that W is read once.
    first_m, first_n, split = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N, tl.program_id(2)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in tl.range(split * steps // SPLITS, (split + 1) * steps // SPLITS):
        block = BLOCK_K * step // WORDS
        column, group = BLOCK_K * step + 3 * WORDS * block, 4 * WORDS * block // GROUP
        words = word_tiles.load([first_n, BLOCK_K * step])  # past the end: zeros
        scales = of_planes(scale_tiles, group, first_n, GROUP, BLOCK_N, WORDS)
        zeros = of_planes(zero_tiles, group, first_n, GROUP, BLOCK_N, WORDS)
        x0 = x_tiles.load([first_m, column])
        x1 = x_tiles.load([first_m, column + WORDS])
        x2 = x_tiles.load([first_m, column + 2 * WORDS])
        x3 = x_tiles.load([first_m, column + 3 * WORDS])
        acc = add_block(acc, words, scales, zeros, x0, x1, x2, x3, FLOATS)
    is_last = True
    if SPLITS > 1:
        tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        acc, is_last = add_parts(
            acc, parts, finished, tile, tl.num_programs(0) * tl.num_programs(1), split, SPLITS
        )
    if is_last:
        store_transposed(acc, bias, out, first_m, first_n, rows, size)
