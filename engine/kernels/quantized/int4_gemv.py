"""y = x Wᵀ + b for up to 2 rows of x and W in 4 bits, without tensor cores.

`FourBits` defines the layout of W. A program handles some rows of W, and its threads share their columns.
A thread loads 16 bytes of each row, the codes of 32 columns, straight into registers. So a multiprocessor has
many small loads under way, and nothing waits for shared memory. One reduction at the end adds up the threads.
With one row of x, a program loads its first codes and scales before its inputs are ready, so that they are on
their way while the kernel before ends (`overlap`).

If the rows of W are those of gate and up, a program can handle the same rows of both, and store
silu(gate) · up.

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

from baton.engine.kernels import FourBits
from baton.engine.kernels.fp8 import power_of_two
from baton.engine.kernels.launch import COMPILED, inputs_ready, launch_options
from baton.engine.kernels.silu import swiglu
from baton.engine.kernels.split_k import add_bias

MAX_ROWS = 2
BLOCK_N, FEWER = 16, 8
"""Rows of W of a program. The fewer ones are for one row of x, if registers for more would be short: with 8
warps, or with groups of less than a block of columns."""
WIDE = 8192
"""With at least so many columns of W a program has 8 warps, otherwise 4."""
COLUMNS = 32
"""Columns that a thread loads of each row of W."""
LEAST = tl.constexpr(2.0**-100)  # counts as the largest of columns that are zeros


def gemv(x: Tensor, weight: FourBits, bias: Tensor | None, *, gated: bool) -> Tensor:
    """x [rows, in], contiguous; weight of integers; bias [size]. Returns [rows, size], or if `gated`,
    `activate` of that."""
    assert x.is_contiguous(), "the kernel assumes dense rows"
    assert not weight.floats, "the kernel multiplies integers"
    (rows, inner), size, words, group = x.shape, weight.size, weight.block, weight.group
    padded = triton.next_power_of_2(rows)
    warps = 8 if inner >= WIDE else 4
    fewer = padded == 1 and (warps == 8 or group < 4 * words)
    block_n, block_k = FEWER if fewer else BLOCK_N, COLUMNS * 32 * warps
    length, columns = weight.words.shape[1] // 2, size // 2 if gated else size
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    _int4_gemv[(triton.cdiv(columns, block_n // 2 if gated else block_n),)](
        x.view(torch.int32),
        weight.words.view(torch.int32),
        weight.scales,
        weight.zeros,
        bias,
        out,
        rows,
        columns,
        inner,
        length,
        weight.scales.stride(0),
        GROUP=group,
        BLOCK_M=padded,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        PASSES=triton.cdiv(8 * length, block_k),
        WORDS=words,
        GATED=gated,
        EARLY=padded == 1,
        num_warps=warps,
        **launch_options(),
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
def _packed(lower, upper):
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
def _add(sums, words, numbers, factor, MASK: tl.constexpr, DTYPE: tl.constexpr):
    """Adds the masked codes of each word times x · factor to the two numbers of a sum."""
    lower, upper = _pair(numbers, DTYPE)
    x = _packed(lower * factor, upper * factor)
    if COMPILED:
        sums = tl.inline_asm_elementwise(
            add_product(MASK), "=r,r,r,r", [words, x, sums], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        c0, c1 = _pair(words & MASK, tl.float16)
        x0, x1 = _pair(x, tl.float16)
        sum0, sum1 = _pair(sums, tl.float16)
        sums = _packed(c0 * x0 + sum0, c1 * x1 + sum1)
    return sums


@triton.jit
def _columns_of_x(x, at, m, rows, inner, PLANE: tl.constexpr, PAIRS: tl.constexpr):
    """The columns of x that the words at `at` have in a plane."""
    pair = (at // PAIRS * 4 + PLANE) * PAIRS + at % PAIRS
    return tl.load(x + m * (inner // 2) + pair, mask=(m < rows) & (pair < inner // 2), other=0)


@triton.jit
def _unit(x, at, m, rows, inner, PAIRS: tl.constexpr, DTYPE: tl.constexpr):
    """A power of two up to the largest number that each thread has of a row of x: [m, 1, words / 4]."""
    largest = tl.full([m.shape[0], 1, at.shape[2] // 4], LEAST, tl.float32)
    for i in tl.static_range(4):
        lower, upper = _pair(_columns_of_x(x, at, m, rows, inner, i, PAIRS), DTYPE)
        largest = tl.maximum(largest, _by_thread(tl.maximum(tl.abs(lower), tl.abs(upper)), True))
    return power_of_two(largest)


@triton.jit
def _of_group(
    values,
    n,
    used,
    first,
    chunks,
    inner,
    stride,
    PLANE: tl.constexpr,
    GROUP: tl.constexpr,
    WORDS: tl.constexpr,
):
    """The scales or zeros of the groups that end in a plane: [1, n, chunks]. If none ends there: 0."""
    if values is None or (PLANE + 1) * WORDS % GROUP != 0:
        numbers = 0.0
    else:
        column = ((first // 4 + chunks) // (WORDS // 8) * 4 + PLANE) * WORDS
        at = values + column // GROUP * stride + n[None, :, None]
        numbers = tl.load(at, mask=used[None, :, None] & (column < inner), other=0.0)
    return numbers


@triton.jit
def _of_groups(values, n, used, first, chunks, inner, stride, GROUP: tl.constexpr, WORDS: tl.constexpr):
    """`_of_group` of all planes."""
    return (
        _of_group(values, n, used, first, chunks, inner, stride, 0, GROUP, WORDS),
        _of_group(values, n, used, first, chunks, inner, stride, 1, GROUP, WORDS),
        _of_group(values, n, used, first, chunks, inner, stride, 2, GROUP, WORDS),
        _of_group(values, n, used, first, chunks, inner, stride, 3, GROUP, WORDS),
    )


@triton.jit
def _read(
    packed, scales, zeros, n, used, first, length, inner, stride,
    GROUP: tl.constexpr, BLOCK_K: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Loads BLOCK_K / 8 words of each of the rows n of W, from word `first` on, with scales and zeros."""
    at = first + tl.arange(0, BLOCK_K // 8)[None, None, :]
    chunks = tl.arange(0, BLOCK_K // 32)[None, None, :]
    of_row = packed + n[None, :, None].to(tl.int64) * length
    words = tl.load(of_row + at, mask=used[None, :, None] & (at < length), other=0)
    of_scales = _of_groups(scales, n, used, first, chunks, inner, stride, GROUP, WORDS)
    return words, of_scales, _of_groups(zeros, n, used, first, chunks, inner, stride, GROUP, WORDS)


@triton.jit
def _add_columns(
    acc,
    words,
    scales,
    zeros,
    x,
    at,
    m,
    rows,
    inner,
    ZEROS: tl.constexpr,
    GROUP: tl.constexpr,
    WORDS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Adds the products of the columns in `words`, which are at the places `at` of a row of W."""
    PAIRS: tl.constexpr = WORDS // 2  # words of 32 bits, in a block of columns
    w0, w1, w2, w3 = _quarters(words)
    unit = _unit(x, at, m, rows, inner, PAIRS, DTYPE)
    inverse = 1.0 / unit
    sums = tl.zeros(acc.shape, tl.int32)
    total = tl.zeros(unit.shape, tl.float32)
    for i in tl.static_range(4):
        numbers = _columns_of_x(x, at, m, rows, inner, i, PAIRS)
        lower, upper = _pair(numbers, DTYPE)
        total += _by_thread(lower + upper, False)
        # Masked codes are code · 2⁻²⁴ in even planes, and 16 times as much in odd ones.
        factor = inverse * 2.0 ** (14 - 4 * (i % 2))
        if i == 2:
            w0, w1, w2, w3 = w0 >> 8, w1 >> 8, w2 >> 8, w3 >> 8
        x0, x1, x2, x3 = _quarters(numbers)
        sums = _add(sums, w0, x0, factor, 0xF000F << 4 * (i % 2), DTYPE)
        sums = _add(sums, w1, x1, factor, 0xF000F << 4 * (i % 2), DTYPE)
        sums = _add(sums, w2, x2, factor, 0xF000F << 4 * (i % 2), DTYPE)
        sums = _add(sums, w3, x3, factor, 0xF000F << 4 * (i % 2), DTYPE)
        if (i + 1) * WORDS % GROUP == 0:
            lower, upper = _pair(sums, tl.float16)
            acc += scales[i].to(tl.float32) * ((lower + upper) * (unit * 2.0**10) - 8.0 * total)
            if ZEROS:
                acc += zeros[i].to(tl.float32) * total
            sums = tl.zeros(acc.shape, tl.int32)
            total = tl.zeros(unit.shape, tl.float32)
    return acc


@triton.jit(do_not_specialize=["rows"])
def _int4_gemv(
    x,
    packed,
    scales,
    zeros,
    bias,
    out,
    rows,
    columns,
    inner,
    length,
    stride,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PASSES: tl.constexpr,
    WORDS: tl.constexpr,
    GATED: tl.constexpr,
    EARLY: tl.constexpr,
):
    DTYPE: tl.constexpr = out.dtype.element_ty
    OUT_COLUMNS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N  # columns of the result
    m = tl.arange(0, BLOCK_M)[:, None, None]
    # If gated, the first half of the rows of W is of gate, and the others are the same rows of up.
    column = tl.program_id(0) * OUT_COLUMNS + tl.arange(0, BLOCK_N) % OUT_COLUMNS
    n, used = tl.arange(0, BLOCK_N) // OUT_COLUMNS * columns + column, column < columns
    at = tl.arange(0, BLOCK_K // 8)[None, None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N, BLOCK_K // 32], tl.float32)
    ZEROS: tl.constexpr = zeros is not None
    if EARLY:
        words, scale, zero = _read(
            packed, scales, zeros, n, used, 0, length, inner, stride, GROUP, BLOCK_K, WORDS
        )
        inputs_ready()
        for i in tl.static_range(PASSES):
            codes, code_scale, code_zero = words, scale, zero
            if i + 1 < PASSES:
                first = (i + 1) * (BLOCK_K // 8)
                words, scale, zero = _read(
                    packed, scales, zeros, n, used, first, length, inner, stride, GROUP, BLOCK_K, WORDS
                )
            now = i * (BLOCK_K // 8) + at
            acc = _add_columns(
                acc, codes, code_scale, code_zero, x, now, m, rows, inner, ZEROS, GROUP, WORDS, DTYPE
            )
    else:
        inputs_ready()
        for first in tl.range(0, length, BLOCK_K // 8):
            words, scale, zero = _read(
                packed, scales, zeros, n, used, first, length, inner, stride, GROUP, BLOCK_K, WORDS
            )
            acc = _add_columns(
                acc, words, scale, zero, x, first + at, m, rows, inner, ZEROS, GROUP, WORDS, DTYPE
            )
    y = tl.sum(acc, axis=2)
    y = add_bias(y, bias, n, used, 0).to(DTYPE)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(y, (BLOCK_M, 2, OUT_COLUMNS)), (0, 2, 1)))
        y = swiglu(gate.to(tl.float32), up.to(tl.float32), None, None).to(DTYPE)
    row, column = tl.arange(0, BLOCK_M), tl.program_id(0) * OUT_COLUMNS + tl.arange(0, OUT_COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(out + row[:, None] * columns + column[None, :], y, mask=inside)
