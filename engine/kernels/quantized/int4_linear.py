"""y = x Wᵀ + b with W in 4 bits, in groups of columns that share a scale: w = (code − 8) · scale + zero.

    up to 2 rows   `int4_gemv` multiplies the codes, and then the sums of groups by their scales.
    few rows       The kernel below writes W into registers, in x's dtype. Tensor cores multiply it.
    many rows      W is written to memory in x's dtype, and cuBLAS multiplies.

The last two multiply the same numbers, rounded once to x's dtype, so the number of rows changes only the
order of the sum. The first rounds no weight. Scales and zeros are in x's dtype, too.

A word of 16 bits holds the codes of four columns: i, i + WORDS, i + 2 WORDS and i + 3 WORDS of a block of
4 WORDS columns. So one shift and one mask give a *plane*: the codes of WORDS adjacent columns. A register of
32 bits holds two of them (as in Marlin, https://github.com/IST-DASLab/marlin). The code is the lowest bits
of the mantissa of 2ⁿ + code, which needs no conversion.

A program handles a tile of y, and one of SPLITS parts of the columns (`split_k`).
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from baton.engine.kernels import Kernels, LinearMethod
from baton.engine.kernels.launch import COMPILED, inputs_ready, launch_options
from baton.engine.kernels.quantized import int4_gemv
from baton.engine.kernels.split_k import SHARED_BYTES, Tiling, add_parts, counters, parts_of, store_transposed

MAX_FEW_ROWS = 256
MAX_BLOCK_M = 128
MAX_WORDS = 32  # and at most a group, so that a plane of codes has one scale
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
    """A linear product with INT4 weights. Its calls must be in one stream."""

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        multiprocessors: int,
    ) -> None:
        """codes [out, in] uint8 of 0 to 15; scales and zeros [out, groups]; bias [out]. dtype: of x and y."""
        self._size, self._inner = codes.shape
        self._group = self._inner // scales.shape[1]
        self._words = min(self._group, MAX_WORDS)
        self._packed = _packed(codes, self._words)
        self._scales = _by_group(scales.to(dtype))
        self._zeros = _by_group(zeros.to(dtype)) if zeros.any() else None
        self._bias, self._multiprocessors = bias, multiprocessors
        least = min(block_n for block_n, _, _ in (FEW, SOME, MANY))
        tiles = triton.cdiv(self._size, least) * triton.cdiv(MAX_FEW_ROWS, MAX_BLOCK_M)
        self._finished = counters(tiles, codes.device)

    @staticmethod
    def suits(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> bool:
        """Whether the kernel supports these groups."""
        return dtype in (torch.float16, torch.bfloat16) and codes.shape[1] // scales.shape[1] in (32, 64, 128)

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in], contiguous. Returns [rows, out]."""
        if len(x) <= int4_gemv.MAX_ROWS:
            return self._gemv(x, gated=False)
        if len(x) <= MAX_FEW_ROWS:
            return self.triton(x)
        return F.linear(x, self.dequantized(), self._bias)

    def silu_mul(self, x: Tensor, kernels: Kernels) -> Tensor:
        if len(x) <= int4_gemv.MAX_ROWS:
            return self._gemv(x, gated=True)
        return super().silu_mul(x, kernels)

    def _gemv(self, x: Tensor, *, gated: bool) -> Tensor:
        weight = self._packed, self._scales, self._zeros, self._bias
        return int4_gemv.gemv(x, *weight, words=self._words, group=self._group, size=self._size, gated=gated)

    def triton(self, x: Tensor) -> Tensor:
        """The product by the kernel alone."""
        assert x.is_contiguous(), "the kernel assumes dense rows"
        rows, words = len(x), self._words
        blocks = self._packed.shape[1] // words
        shape = tiling(rows, blocks, words, self._size, self._multiprocessors)
        row_tiles, tiles = triton.cdiv(rows, shape.block_m), triton.cdiv(self._size, shape.block_n)
        out = torch.empty(rows, self._size, dtype=x.dtype, device=x.device)
        parts = parts_of(out, shape.splits, row_tiles * tiles, shape.block_n, shape.block_m)
        _int4_linear[(row_tiles, tiles, shape.splits)](
            TensorDescriptor.from_tensor(x, [shape.block_m, words]),
            TensorDescriptor.from_tensor(self._packed, [shape.block_n, words]),
            TensorDescriptor.from_tensor(self._scales, [1, shape.block_n]),
            None if self._zeros is None else TensorDescriptor.from_tensor(self._zeros, [1, shape.block_n]),
            self._bias,
            parts,
            self._finished,
            out,
            rows,
            self._size,
            blocks,
            GROUP=self._group,
            **shape.options(),
            **launch_options(),
        )
        return out

    def dequantized(self) -> Tensor:
        """W [out, in]."""
        out = torch.empty(self._size, self._inner, dtype=self._scales.dtype, device=self._packed.device)
        grid = (triton.cdiv(self._size, FEW[0]), self._packed.shape[1] // self._words)
        _dequantize[grid](
            self._packed,
            self._scales,
            self._zeros,
            out,
            self._size,
            self._inner,
            self._scales.stride(0),
            GROUP=self._group,
            BLOCK_N=FEW[0],
            WORDS=self._words,
        )
        return out


def _packed(codes: Tensor, words: int) -> Tensor:
    """[out, in] uint8 → [out, blocks · words] int16."""
    padded = F.pad(codes, (0, -codes.shape[1] % (4 * words)))
    planes = padded.unflatten(1, (-1, 4, words)).to(torch.int16).unbind(2)
    return (planes[0] | planes[1] << 4 | planes[2] << 8 | planes[3] << 12).flatten(1)


def _by_group(values: Tensor) -> Tensor:
    """[out, groups] → [groups, out], in rows of a multiple of 16 bytes, as the copy engine needs them."""
    return F.pad(values.T, (0, -len(values) % 8)).clone(memory_format=torch.contiguous_format)


@triton.constexpr_function
def to_float(plane: int, base: int) -> str:
    """PTX that takes the codes of a plane from two words, and makes them the lowest bits of two numbers. The
    compiler would take an instruction more."""
    return (
        f"{{ .reg .b32 t; shr.b32 t, $1, {4 * plane}; lop3.b32 $0, t, 0xF000F, {base << 16 | base}, 0xEA; }}"
    )


@triton.jit
def _plane(words, scale, zero, PLANE: tl.constexpr):
    """The values of a plane of codes, in the dtype of the scales. The compiler would shift each word for
    itself, and the interpreter has no PTX."""
    # As integers these are 2ⁿ, of which the last bit of the mantissa is 1.
    BASE: tl.constexpr = 0x4300 if scale.dtype == tl.bfloat16 else 0x6400
    MIDDLE: tl.constexpr = 136.0 if scale.dtype == tl.bfloat16 else 1032.0
    if COMPILED:
        numbers = tl.inline_asm_elementwise(
            to_float(PLANE, BASE), "=r,r", [words], dtype=scale.dtype, is_pure=True, pack=2
        )
    else:
        numbers = ((words >> 4 * PLANE) & 15 | BASE).to(scale.dtype, bitcast=True)
    numbers -= MIDDLE
    if zero is None:
        numbers *= scale[:, None]
    else:
        numbers = tl.fma(numbers, scale[:, None], zero[:, None])
    return numbers


@triton.jit(do_not_specialize=["rows"])
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
        words = word_tiles.load([first_n, block * BLOCK_K])  # past the end: zeros
        scale, zero = None, None
        # With `acc` as its operand, each instruction would wait for the one before it.
        product = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for i in tl.static_range(4):
            column = (4 * block + i) * BLOCK_K
            if i * BLOCK_K % GROUP == 0:
                scale = tl.reshape(scale_tiles.load([column // GROUP, first_n]), (BLOCK_N,))
                if zero_tiles is not None:
                    zero = tl.reshape(zero_tiles.load([column // GROUP, first_n]), (BLOCK_N,))
            x = x_tiles.load([first_m, column])
            product = tl.dot(_plane(words, scale, zero, i), tl.trans(x), product)
        acc += product
    is_last = True
    if SPLITS > 1:
        tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        acc, is_last = add_parts(
            acc, parts, finished, tile, tl.num_programs(0) * tl.num_programs(1), split, SPLITS
        )
    if is_last:
        store_transposed(acc, bias, out, first_m, first_n, rows, size)


@triton.jit
def _dequantize(
    packed,
    scales,
    zeros,
    out,
    size,
    inner,
    stride,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr,
):
    block = tl.program_id(1)
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, WORDS)
    in_w, row = n < size, n[:, None].to(tl.int64)
    of_words = packed + row * (tl.num_programs(1) * WORDS) + block * WORDS + k[None, :]
    words = tl.load(of_words, mask=in_w[:, None], other=0)
    zero = None
    for i in tl.static_range(4):
        column = (4 * block + i) * WORDS
        in_group = in_w & (column < inner)
        scale = tl.load(scales + column // GROUP * stride + n, mask=in_group, other=0.0)
        if zeros is not None:
            zero = tl.load(zeros + column // GROUP * stride + n, mask=in_group, other=0.0)
        w = _plane(words, scale, zero, i)
        tl.store(out + row * inner + column + k[None, :], w, mask=in_group[:, None])
