"""y = x Wᵀ + b for up to 2 rows of x and W in 4 bits, without tensor cores.

`int4_linear` defines the layout of W. A program handles some rows of W, and its threads share their columns.
A thread loads 16 bytes of each row, the codes of 32 columns, straight into registers. So a multiprocessor has
many small loads under way, and nothing waits for shared memory. One reduction at the end adds up the threads.

Instructions bound this kernel as much as bytes, so it saves them: 3.4 for each weight with one row of x.

    codes    A word of 32 bits, shifted and masked, holds two codes as the lowest bits of two bfloat16
             numbers, 128 + code. Read as float32, the word is the upper number, plus 2⁻¹⁶ times its lower 16
             bits. The lower column's x is reduced by 2⁻¹⁶ of the upper column's x, which makes up for it.
    scales   They multiply sums of groups: Σ x w = scale · (Σ x (128 + code) − 136 Σ x) + zero · Σ x.

All sums are in float32, and no weight is rounded. So results differ from those of `int4_linear` by rounding
only.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import JITFunction

from engine.kernels import overlap
from engine.kernels.overlap import inputs_ready

MAX_ROWS = 2
BLOCK_N = 16
"""Rows of W of a program: their scales for a group fill a sector of memory."""
WIDE = 8192
"""Columns of W from which on a program has 8 warps, else 4."""
COLUMNS = 32
"""Of a thread, in each row of W."""


def gemv(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    words: int,
    group: int,
    size: int,
) -> Tensor:
    """x [rows, in], contiguous. packed [size, in / 4] int16, in blocks of `words` words, padded to whole
    blocks. scales and zeros [groups, size], padded. bias [size]. Returns [rows, size]."""
    assert x.is_contiguous(), "the kernel assumes dense rows"
    rows, inner = x.shape
    padded = triton.next_power_of_2(rows)
    warps = 8 if inner >= WIDE else 4
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    _int4_gemv[(triton.cdiv(size, BLOCK_N),)](
        x.view(torch.int32),
        packed.view(torch.int32),
        scales,
        zeros,
        bias,
        out,
        rows,
        size,
        inner,
        packed.shape[1] // 2,
        scales.stride(0),
        GROUP=group,
        BLOCK_M=padded,
        BLOCK_N=BLOCK_N,
        BLOCK_K=COLUMNS * 32 * warps,
        WORDS=words,
        COMPILED=isinstance(_int4_gemv, JITFunction),
        num_warps=warps,
        **overlap.options(),
    )
    return out


@triton.constexpr_function
def to_float(plane: int, base: int) -> str:
    """PTX that takes the codes of a plane from two words, and makes them the lowest bits of two numbers. The
    compiler would take an instruction more."""
    return (
        f"{{ .reg .b32 t; shr.b32 t, $1, {4 * plane}; lop3.b32 $0, t, 0xF000F, {base << 16 | base}, 0xEA; }}"
    )


@triton.jit
def _pair(numbers, DTYPE: tl.constexpr):
    """The two numbers of 16 bits in each word of 32 bits, in float32."""
    if tl.bfloat16 == DTYPE:
        return (numbers << 16).to(tl.float32, bitcast=True), (numbers & -65536).to(tl.float32, bitcast=True)
    lower, upper = numbers.to(tl.int16), (numbers >> 16).to(tl.int16)
    return lower.to(DTYPE, bitcast=True).to(tl.float32), upper.to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _codes(words, PLANE: tl.constexpr, COMPILED: tl.constexpr):
    if COMPILED:
        return tl.inline_asm_elementwise(
            to_float(PLANE, 0x4300), "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1
        )
    return (words >> 4 * PLANE) & 0x000F000F | 0x43004300


@triton.jit
def _by_thread(values):
    """Adds up what a thread has of each row: [m, n, words] → [m, n, words / 4]."""
    return tl.sum(tl.reshape(values, (values.shape[0], values.shape[1], values.shape[2] // 4, 4)), axis=3)


@triton.jit(do_not_specialize=["rows"])
def _int4_gemv(
    x,
    packed,
    scales,
    zeros,
    bias,
    out,
    rows,
    size,
    inner,
    length,
    stride,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WORDS: tl.constexpr,
    COMPILED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    PAIRS: tl.constexpr = WORDS // 2  # words of 32 bits, in a block of columns
    m = tl.arange(0, BLOCK_M)[:, None, None]
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    word = tl.arange(0, BLOCK_K // 8)[None, None, :]
    chunk = tl.arange(0, BLOCK_K // 32)[None, None, :]
    of_n = n[None, :, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N, BLOCK_K // 32], tl.float32)
    inputs_ready(OVERLAP)
    for first in tl.range(0, length, BLOCK_K // 8):
        at = first + word
        words = tl.load(packed + of_n.to(tl.int64) * length + at, mask=(of_n < size) & (at < length), other=0)
        products = tl.zeros([BLOCK_M, BLOCK_N, BLOCK_K // 8], tl.float32)
        lowers = tl.zeros([BLOCK_M, 1, BLOCK_K // 8], tl.float32)
        uppers = tl.zeros([BLOCK_M, 1, BLOCK_K // 8], tl.float32)
        for i in tl.static_range(4):
            pair = (at // PAIRS * 4 + i) * PAIRS + at % PAIRS
            numbers = tl.load(x + m * (inner // 2) + pair, mask=(m < rows) & (pair < inner // 2), other=0)
            lower, upper = _pair(numbers, out.dtype.element_ty)
            lowers += lower
            uppers += upper
            codes = _codes(words, i, COMPILED)
            products += (codes << 16).to(tl.float32, bitcast=True) * (lower - upper * 2.0**-16)
            products += codes.to(tl.float32, bitcast=True) * upper
            if (i + 1) * WORDS % GROUP == 0:
                # `x` times these offsets is too much in `products`.
                offsets = lowers * 136.0 + uppers * (136.0 + (0x4300 - 128) * 2.0**-16)
                column = ((first // 4 + chunk) // (WORDS // 8) * 4 + i) * WORDS
                of_scale = column // GROUP * stride + of_n
                in_group = (of_n < size) & (column < inner)
                scale = tl.load(scales + of_scale, mask=in_group, other=0.0).to(tl.float32)
                acc += scale * (_by_thread(products) - _by_thread(offsets))
                if zeros is not None:
                    zero = tl.load(zeros + of_scale, mask=in_group, other=0.0).to(tl.float32)
                    acc += zero * _by_thread(lowers + uppers)
                products = tl.zeros([BLOCK_M, BLOCK_N, BLOCK_K // 8], tl.float32)
                lowers = tl.zeros([BLOCK_M, 1, BLOCK_K // 8], tl.float32)
                uppers = tl.zeros([BLOCK_M, 1, BLOCK_K // 8], tl.float32)
    y = tl.sum(acc, axis=2)
    row = tl.arange(0, BLOCK_M)
    if bias is not None:
        y += tl.load(bias + n, mask=n < size, other=0.0).to(tl.float32)[None, :]
    y = y.to(out.dtype.element_ty)
    tl.store(out + row[:, None] * size + n[None, :], y, mask=(row < rows)[:, None] & (n < size)[None, :])
