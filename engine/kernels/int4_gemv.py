"""y = x Wᵀ + b for up to 2 rows of x and W in 4 bits, without tensor cores.

`int4_linear` defines the layout of W. A program handles some rows of W, and its threads share their columns.
A thread loads 16 bytes of each row, the codes of 32 columns, straight into registers. So a multiprocessor has
many small loads under way, and nothing waits for shared memory. One reduction at the end adds up the threads.

Instructions bound this kernel as much as bytes, so it saves them: 1.6 for each weight with one row of x.

    codes    A word of 32 bits, masked, is two numbers in float16: code · 2⁻²⁴, or 16 times as much.
    x        Each thread divides its 32 columns by a power of two, so that float16 holds them.
    sums     One instruction multiplies two codes by x and adds them up in float16, over at most 32 columns.
    scales   They multiply sums of groups, in float32: Σ x w = scale · (Σ x code − 8 Σ x) + zero · Σ x.

The sums in float16 have a relative error of 0.001. That is less than what the weights have that other kernels
round to bfloat16.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import JITFunction

from engine.kernels import overlap
from engine.kernels.online_softmax import power_of_two
from engine.kernels.overlap import inputs_ready

MAX_ROWS = 2
BLOCK_N = {1: 8, 2: 16}
"""Rows of W of a program, by the rows of x."""
WIDE = 8192
"""Columns of W from which on a program has 8 warps, else 4."""
COLUMNS = 32
"""Of a thread, in each row of W."""
LEAST = tl.constexpr(2.0**-100)  # counts as the largest of columns that are zeros


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
    block_n = BLOCK_N[padded]
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    _int4_gemv[(triton.cdiv(size, block_n),)](
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
        BLOCK_N=block_n,
        BLOCK_K=COLUMNS * 32 * warps,
        WORDS=words,
        COMPILED=isinstance(_int4_gemv, JITFunction),
        num_warps=warps,
        **overlap.options(),
    )
    return out


@triton.jit
def _pair(numbers, DTYPE: tl.constexpr):
    """The two numbers of 16 bits in each word of 32 bits, in float32."""
    if tl.bfloat16 == DTYPE:
        return (numbers << 16).to(tl.float32, bitcast=True), (numbers & -65536).to(tl.float32, bitcast=True)
    lower, upper = numbers.to(tl.int16), (numbers >> 16).to(tl.int16)
    return lower.to(DTYPE, bitcast=True).to(tl.float32), upper.to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _packed(lower, upper, COMPILED: tl.constexpr):
    """Two numbers as float16 in each word of 32 bits. The compiler would convert each of them for itself."""
    if COMPILED:
        words = tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [lower, upper], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        lower = lower.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        upper = upper.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        words = (lower & 0xFFFF) | (upper << 16)
    return words


@triton.jit
def _by_thread(values, LARGEST: tl.constexpr):
    """The sum, or the largest, of what a thread has of each row: [m, n, words] → [m, n, words / 4]."""
    parts = tl.reshape(values, (values.shape[0], values.shape[1], values.shape[2] // 4, 4))
    return tl.max(parts, axis=3) if LARGEST else tl.sum(parts, axis=3)


@triton.jit
def _quarters(words):
    """The four words of each thread: [m, n, words] → four times [m, n, words / 4]."""
    even, odd = tl.split(tl.reshape(words, (words.shape[0], words.shape[1], words.shape[2] // 4, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.constexpr_function
def add_product(mask: int) -> str:
    return f"{{ .reg .b32 t; and.b32 t, $1, {mask}; fma.rn.f16x2 $0, t, $2, $3; }}"


@triton.jit
def _add(sums, words, numbers, factor, MASK: tl.constexpr, DTYPE: tl.constexpr, COMPILED: tl.constexpr):
    """Adds the masked codes of each word times x · factor to the two numbers of a sum."""
    lower, upper = _pair(numbers, DTYPE)
    x = _packed(lower * factor, upper * factor, COMPILED)
    if COMPILED:
        sums = tl.inline_asm_elementwise(
            add_product(MASK), "=r,r,r,r", [words, x, sums], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        c0, c1 = _pair(words & MASK, tl.float16)
        x0, x1 = _pair(x, tl.float16)
        sum0, sum1 = _pair(sums, tl.float16)
        sums = _packed(c0 * x0 + sum0, c1 * x1 + sum1, COMPILED)
    return sums


@triton.jit
def _columns_of_x(x, at, m, rows, inner, PLANE: tl.constexpr, PAIRS: tl.constexpr):
    """The columns of x that the words at `at` have in a plane."""
    pair = (at // PAIRS * 4 + PLANE) * PAIRS + at % PAIRS
    return tl.load(x + m * (inner // 2) + pair, mask=(m < rows) & (pair < inner // 2), other=0)


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
    DTYPE: tl.constexpr = out.dtype.element_ty
    inputs_ready(OVERLAP)
    for first in tl.range(0, length, BLOCK_K // 8):
        at = first + word
        words = tl.load(packed + of_n.to(tl.int64) * length + at, mask=(of_n < size) & (at < length), other=0)
        w0, w1, w2, w3 = _quarters(words)
        largest = tl.full([BLOCK_M, 1, BLOCK_K // 32], LEAST, tl.float32)
        for i in tl.static_range(4):
            lower, upper = _pair(_columns_of_x(x, at, m, rows, inner, i, PAIRS), DTYPE)
            largest = tl.maximum(largest, _by_thread(tl.maximum(tl.abs(lower), tl.abs(upper)), True))
        unit = power_of_two(largest)
        inverse = 1.0 / unit
        sums = tl.zeros([BLOCK_M, BLOCK_N, BLOCK_K // 32], tl.int32)
        total = tl.zeros([BLOCK_M, 1, BLOCK_K // 32], tl.float32)
        for i in tl.static_range(4):
            numbers = _columns_of_x(x, at, m, rows, inner, i, PAIRS)
            lower, upper = _pair(numbers, DTYPE)
            total += _by_thread(lower + upper, False)
            # Masked codes are code · 2⁻²⁴ in even planes, and 16 times as much in odd ones.
            factor = inverse * 2.0 ** (14 - 4 * (i % 2))
            if i == 2:
                w0, w1, w2, w3 = w0 >> 8, w1 >> 8, w2 >> 8, w3 >> 8
            x0, x1, x2, x3 = _quarters(numbers)
            sums = _add(sums, w0, x0, factor, 0xF000F << 4 * (i % 2), DTYPE, COMPILED)
            sums = _add(sums, w1, x1, factor, 0xF000F << 4 * (i % 2), DTYPE, COMPILED)
            sums = _add(sums, w2, x2, factor, 0xF000F << 4 * (i % 2), DTYPE, COMPILED)
            sums = _add(sums, w3, x3, factor, 0xF000F << 4 * (i % 2), DTYPE, COMPILED)
            if (i + 1) * WORDS % GROUP == 0:
                lower, upper = _pair(sums, tl.float16)
                column = ((first // 4 + chunk) // (WORDS // 8) * 4 + i) * WORDS
                of_scale = column // GROUP * stride + of_n
                in_group = (of_n < size) & (column < inner)
                scale = tl.load(scales + of_scale, mask=in_group, other=0.0).to(tl.float32)
                acc += scale * ((lower + upper) * (unit * 2.0**10) - 8.0 * total)
                if zeros is not None:
                    zero = tl.load(zeros + of_scale, mask=in_group, other=0.0).to(tl.float32)
                    acc += zero * total
                sums = tl.zeros([BLOCK_M, BLOCK_N, BLOCK_K // 32], tl.int32)
                total = tl.zeros([BLOCK_M, 1, BLOCK_K // 32], tl.float32)
    y = tl.sum(acc, axis=2)
    row = tl.arange(0, BLOCK_M)
    if bias is not None:
        y += tl.load(bias + n, mask=n < size, other=0.0).to(tl.float32)[None, :]
    y = y.to(out.dtype.element_ty)
    tl.store(out + row[:, None] * size + n[None, :], y, mask=(row < rows)[:, None] & (n < size)[None, :])
