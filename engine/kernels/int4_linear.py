"""y = x Wᵀ + b with W in 4 bits, in groups of columns that share a scale: w = (code − 8) · scale + zero.

    few rows    The kernel below. It multiplies the codes as exact numbers of x's dtype, group by group, and
                scales each group's product in float32. The zero of a group multiplies the sum of x.
    many rows   W is written in x's dtype, and cuBLAS multiplies.

A byte holds the codes of columns c and c + in / 2, so that both are next to their neighbours in x. A program
handles BLOCK_N rows of W, and one of SPLITS parts of their groups, as in `skinny_linear`.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import overlap
from engine.kernels.overlap import inputs_ready
from engine.kernels.split_k import add_parts

MAX_FEW_ROWS = 64
BLOCK_N = 64
MAX_SPLITS = 8
PROGRAMS_EACH = 4  # of a multiprocessor, that splitting the groups aims at
STAGES = 4  # groups loaded ahead


class Int4Linear:
    """A linear product with INT4 weights. Its calls must be in one stream."""

    def __init__(
        self, codes: Tensor, scales: Tensor, zeros: Tensor, bias: Tensor | None, multiprocessors: int
    ) -> None:
        """codes [out, in] uint8 of 0 to 15; scales and zeros [out, groups] float32; bias [out]."""
        half = codes.shape[1] // 2
        self._packed = codes[:, :half] | (codes[:, half:] << 4)
        self._scales, self._zeros = scales.T.contiguous(), zeros.T.contiguous()
        self._bias, self._multiprocessors = bias, multiprocessors
        self._group = codes.shape[1] // scales.shape[1]
        tiles = triton.cdiv(len(codes), BLOCK_N)
        self._finished = torch.zeros(tiles, dtype=torch.int32, device=codes.device)  # 0 between calls

    @staticmethod
    def suits(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> bool:
        """Whether the kernel supports these groups: each half of the columns must have whole ones."""
        return (
            dtype in (torch.float16, torch.bfloat16)
            and scales.shape[1] % 2 == 0
            and codes.shape[1] // scales.shape[1] in (32, 64, 128)
        )

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in], contiguous. Returns [rows, out]."""
        if len(x) <= MAX_FEW_ROWS:
            return self.triton(x)
        return F.linear(x, self.dequantized(x.dtype), self._bias)

    def triton(self, x: Tensor) -> Tensor:
        """The product by the kernel: of 1 to 64 rows."""
        assert x.is_contiguous(), "the kernel assumes dense rows"
        (rows, inner), size = x.shape, len(self._packed)
        tiles, block_m = len(self._finished), max(16, triton.next_power_of_2(rows))
        groups = inner // 2 // self._group
        splits = max(1, min(PROGRAMS_EACH * self._multiprocessors // tiles, groups, MAX_SPLITS))
        out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
        parts = out
        if splits > 1:
            parts = torch.empty(splits, tiles, BLOCK_N, block_m, dtype=torch.float32, device=x.device)
        _int4_linear[(tiles, splits)](
            x,
            self._packed,
            self._scales,
            self._zeros,
            self._bias,
            parts,
            self._finished,
            out,
            rows,
            size,
            inner,
            GROUP=self._group,
            BLOCK_M=block_m,
            BLOCK_N=BLOCK_N,
            SPLITS=splits,
            num_warps=4,
            num_stages=STAGES,
            **overlap.options(),
        )
        return out

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """W [out, in]."""
        size, half = self._packed.shape
        out = torch.empty(size, 2 * half, dtype=dtype, device=self._packed.device)
        grid = (triton.cdiv(size, BLOCK_N), half // self._group)
        _dequantize[grid](
            self._packed, self._scales, self._zeros, out, size, half, GROUP=self._group, BLOCK_N=BLOCK_N
        )
        return out


@triton.jit
def _codes(packed):
    """Codes less 8: those of the first half of the columns, and those of the second half."""
    return (packed & 15).to(tl.int8) - 8, (packed >> 4).to(tl.int8) - 8


@triton.jit
def _scaled(codes, x, scale, zero):
    """The product [rows of W, rows of x] of one group, float32."""
    product = tl.dot(codes.to(x.dtype), tl.trans(x))
    return product * scale[:, None] + tl.sum(x.to(tl.float32), axis=1)[None, :] * zero[:, None]


@triton.jit(do_not_specialize=["rows"])
def _int4_linear(
    x,
    packed,
    scales,
    zeros,
    bias,
    parts,
    finished,
    out,
    rows,
    size,
    inner,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    inputs_ready(OVERLAP)
    tile, split = tl.program_id(0), tl.program_id(1)
    half = inner // 2
    groups = half // GROUP
    m, k = tl.arange(0, BLOCK_M), tl.arange(0, GROUP)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    in_w, in_x = n < size, (m < rows)[:, None]
    of_w = packed + n[:, None].to(tl.int64) * half + k[None, :]
    of_x = x + m[:, None] * inner + k[None, :]
    second = groups * size  # where the scales of the second half begin
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for group in tl.range(split * groups // SPLITS, (split + 1) * groups // SPLITS):
        low, high = _codes(tl.load(of_w + group * GROUP, mask=in_w[:, None], other=0))
        scale, zero = scales + group * size + n, zeros + group * size + n
        x_low = tl.load(of_x + group * GROUP, mask=in_x, other=0.0)
        x_high = tl.load(of_x + half + group * GROUP, mask=in_x, other=0.0)
        acc += _scaled(low, x_low, tl.load(scale, mask=in_w, other=0.0), tl.load(zero, mask=in_w, other=0.0))
        acc += _scaled(
            high,
            x_high,
            tl.load(scale + second, mask=in_w, other=0.0),
            tl.load(zero + second, mask=in_w, other=0.0),
        )
    is_last = True
    if SPLITS > 1:
        acc, is_last = add_parts(acc, parts, finished, tile, tl.num_programs(0), split, SPLITS)
    if is_last:
        if bias is not None:
            acc += tl.load(bias + n, mask=in_w, other=0.0).to(tl.float32)[:, None]
        y = tl.trans(acc).to(out.dtype.element_ty)
        tl.store(out + m[:, None] * size + n[None, :], y, mask=in_x & in_w[None, :])


@triton.jit
def _dequantize(packed, scales, zeros, out, size, half, GROUP: tl.constexpr, BLOCK_N: tl.constexpr):
    tile, group = tl.program_id(0), tl.program_id(1)
    n, k = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, GROUP)
    in_w = n < size
    column = group * GROUP + k[None, :]
    row = n[:, None].to(tl.int64)
    low, high = _codes(tl.load(packed + row * half + column, mask=in_w[:, None], other=0))
    scale, zero = scales + group * size + n, zeros + group * size + n
    second = tl.num_programs(1) * size
    first_half = out + row * 2 * half + column
    w = low.to(tl.float32) * tl.load(scale, mask=in_w, other=0.0)[:, None]
    w += tl.load(zero, mask=in_w, other=0.0)[:, None]
    tl.store(first_half, w.to(out.dtype.element_ty), mask=in_w[:, None])
    w = high.to(tl.float32) * tl.load(scale + second, mask=in_w, other=0.0)[:, None]
    w += tl.load(zero + second, mask=in_w, other=0.0)[:, None]
    tl.store(first_half + half, w.to(out.dtype.element_ty), mask=in_w[:, None])
