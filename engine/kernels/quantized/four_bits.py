"""What products with weights in 4 bits share (`FourBits`).

A *plane* has the codes of WORDS adjacent columns. A shift and a mask take it from the words. A register of
32 bits holds two codes (as in Marlin, https://github.com/IST-DASLab/marlin), and becomes two numbers of 16
bits without a conversion: integers are the lowest bits of the mantissa of 2ⁿ + code, floats the lowest bits
of the exponent and the highest one of the mantissa of value · 2⁻ⁿ.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from baton.engine.kernels import FP8, FourBits
from baton.engine.kernels.launch import COMPILED

BLOCK_N = 64
"""Rows of a program of `values`."""


def tiles(
    weight: FourBits, block_n: int, block_k: int
) -> tuple[TensorDescriptor, TensorDescriptor, TensorDescriptor | None]:
    """What the copy engine needs for tiles of words, scales and zeros of `block_n` rows. `block_k`: words."""
    words, scales = weight.words.flatten(0, -2), weight.scales.flatten(0, -2)
    zeros = None if weight.zeros is None else weight.zeros.flatten(0, -2)
    return (
        TensorDescriptor.from_tensor(words, [block_n, block_k]),
        TensorDescriptor.from_tensor(scales, [1, block_n]),
        None if zeros is None else TensorDescriptor.from_tensor(zeros, [1, block_n]),
    )


def values(weight: FourBits, row_scales: Tensor | None = None) -> Tensor:
    """One matrix [out, in] in x's dtype; or in FP8, if its rows have scales [1, out]."""
    words, scales, zeros, size, inner, group, floats, block = weight
    dtype = scales.dtype if row_scales is None else FP8
    out = torch.empty(size, inner, dtype=dtype, device=words.device)
    _values[(triton.cdiv(size, BLOCK_N), words.shape[1] // block)](
        words,
        scales,
        zeros,
        row_scales,
        out,
        size,
        inner,
        scales.stride(0),
        GROUP=group,
        FLOATS=floats,
        BLOCK_N=BLOCK_N,
        WORDS=block,
    )
    return out


@triton.constexpr_function
def from_integers(plane: int, base: int) -> str:
    """PTX that takes the codes of a plane from two words, and makes them the lowest bits of two numbers. The
    compiler would take an instruction more."""
    return (
        f"{{ .reg .b32 t; shr.b32 t, $1, {4 * plane}; lop3.b32 $0, t, 0xF000F, {base << 16 | base}, 0xEA; }}"
    )


@triton.constexpr_function
def from_floats(plane: int, at: int) -> str:
    """PTX that takes the codes of a plane from two words: the sign, and three bits that begin at bit `at`."""
    shift = at - 4 * plane
    moved = f"shl.b32 t, $1, {shift}" if shift > 0 else f"shr.b32 t, $1, {-shift}"
    mask = 7 << at
    return (
        f"{{ .reg .b32 s, t; shl.b32 s, $1, {12 - 4 * plane}; and.b32 s, s, 0x80008000; {moved}; "
        f"lop3.b32 $0, t, {mask << 16 | mask}, s, 0xEA; }}"
    )


@triton.jit
def plane(words, scales, zeros, PLANE: tl.constexpr, FLOATS: tl.constexpr):
    """The values of a plane of codes, in the dtype of the scales [n] of each plane. The compiler would shift
    each word for itself, and the interpreter has no PTX."""
    scale = scales[PLANE]
    BFLOAT16: tl.constexpr = scale.dtype == tl.bfloat16
    if FLOATS:
        AT: tl.constexpr = 6 if BFLOAT16 else 9  # of the last bit of three
        if COMPILED:
            numbers = tl.inline_asm_elementwise(
                from_floats(PLANE, AT), "=r,r", [words], dtype=scale.dtype, is_pure=True, pack=2
            )
        else:
            code = words >> 4 * PLANE
            numbers = ((code & 7) << AT | (code & 8) << 12).to(tl.int16).to(scale.dtype, bitcast=True)
        numbers *= 2.0**126 if BFLOAT16 else 2.0**14
    else:
        # As integers these are 2ⁿ, of which the last bit of the mantissa is 1.
        BASE: tl.constexpr = 0x4300 if BFLOAT16 else 0x6400
        if COMPILED:
            numbers = tl.inline_asm_elementwise(
                from_integers(PLANE, BASE), "=r,r", [words], dtype=scale.dtype, is_pure=True, pack=2
            )
        else:
            numbers = ((words >> 4 * PLANE) & 15 | BASE).to(scale.dtype, bitcast=True)
        numbers -= 136.0 if BFLOAT16 else 1032.0
    if zeros is None:
        numbers *= scale[:, None]
    else:
        numbers = tl.fma(numbers, scale[:, None], zeros[PLANE][:, None])
    return numbers


@triton.jit
def by_row(scales, row_scales):
    """Scales or zeros [n] of W in FP8, whose rows have scales: in float16. `row_scales` None: as they are."""
    if row_scales is not None:
        scales = (scales.to(tl.float32) / row_scales).to(tl.float16)
    return scales


@triton.jit
def _of_plane(
    tiles,
    row,
    first_n,
    row_scales,
    PLANE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr,
):
    return by_row(tl.reshape(tiles.load([row + PLANE * WORDS // GROUP, first_n]), (BLOCK_N,)), row_scales)


@triton.jit
def of_planes(
    tiles, row, first_n, row_scales, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, WORDS: tl.constexpr
):
    """The scales or zeros of the planes of a block, from row `row` on, `by_row`. Planes of one group share
    theirs."""
    if tiles is None:
        numbers = None
    else:
        at0 = _of_plane(tiles, row, first_n, row_scales, 0, GROUP, BLOCK_N, WORDS)
        at1, at2 = at0, at0
        if WORDS % GROUP == 0:
            at1 = _of_plane(tiles, row, first_n, row_scales, 1, GROUP, BLOCK_N, WORDS)
        if 2 * WORDS % GROUP == 0:
            at2 = _of_plane(tiles, row, first_n, row_scales, 2, GROUP, BLOCK_N, WORDS)
        at3 = at2
        if WORDS % GROUP == 0:
            at3 = _of_plane(tiles, row, first_n, row_scales, 3, GROUP, BLOCK_N, WORDS)
        numbers = at0, at1, at2, at3
    return numbers


@triton.jit
def add_block(acc, words, scales, zeros, x0, x1, x2, x3, FLOATS: tl.constexpr):
    """acc + W xᵀ for columns of W in `words` [n, k], and for those of x of each plane, in x0 to x3 [m, k].
    All loads come before: then a program waits for them once."""
    acc = tl.dot(plane(words, scales, zeros, 0, FLOATS), tl.trans(x0), acc)
    acc = tl.dot(plane(words, scales, zeros, 1, FLOATS), tl.trans(x1), acc)
    acc = tl.dot(plane(words, scales, zeros, 2, FLOATS), tl.trans(x2), acc)
    acc = tl.dot(plane(words, scales, zeros, 3, FLOATS), tl.trans(x3), acc)
    return outside_loop(acc)


@triton.jit
def outside_loop(acc):
    """The same sum. If Triton saw that it goes round the loop, it would cut each product into instructions,
    and wait for each. Now planes are converted while the tensor cores multiply those before them."""
    if COMPILED:
        acc = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [acc], tl.float32, is_pure=True, pack=1)
    return acc


@triton.jit
def two_planes(words, scales, zeros, FIRST: tl.constexpr, FLOATS: tl.constexpr, DTYPE: tl.constexpr):
    """Adjacent planes [n, 2 · k] of words [n, k]. No number moves: in the layout of an operand, a thread has
    all of them."""
    a = plane(words, scales, zeros, FIRST, FLOATS).to(DTYPE)
    b = plane(words, scales, zeros, FIRST + 1, FLOATS).to(DTYPE)
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (words.shape[0], 2 * words.shape[1]))


@triton.jit
def _values(
    words,
    scales,
    zeros,
    row_scales,
    out,
    size,
    inner,
    stride,
    GROUP: tl.constexpr,
    FLOATS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr,
):
    block = tl.program_id(1)
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, WORDS)
    in_w, row = n < size, n[:, None].to(tl.int64)
    at = words + row * (tl.num_programs(1) * WORDS) + block * WORDS + k[None, :]
    codes = tl.load(at, mask=in_w[:, None], other=0)
    of_rows = None
    if row_scales is not None:
        of_rows = tl.load(row_scales + n, mask=in_w, other=1.0)
    for i in tl.static_range(4):
        column = (4 * block + i) * WORDS
        in_group = in_w & (column < inner)
        at = column // GROUP * stride + n
        scale = by_row(tl.load(scales + at, mask=in_group, other=0.0), of_rows)
        zero = None
        if zeros is not None:
            zero = _four(by_row(tl.load(zeros + at, mask=in_group, other=0.0), of_rows))
        w = plane(codes, _four(scale), zero, i, FLOATS).to(out.dtype.element_ty)
        tl.store(out + row * inner + column + k[None, :], w, mask=in_group[:, None])


@triton.jit
def _four(of_all):
    return of_all, of_all, of_all, of_all
