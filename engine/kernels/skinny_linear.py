"""y = x Wᵀ + b for few rows of x, as in decode steps. The time goes into reading W [out, in] once.

    y[m, n] = b[n] + Σ x[m, k] W[n, k]

A W with few rows, such as a router's, is too small for many programs even in parts. For one or two rows of x
a program then has whole rows of W, which it loads before its inputs are ready.

Compared with cuBLAS, the products of a layer take 3 % less time up to 64 rows, and 6 % less with launches
that overlap (`overlap`). Both read W at over 4 TB/s and lose some 4 µs around it (docs/lab/engine.md). For
small weights and more than 16 rows cuBLAS may be faster, so there each shape is measured (`FewRowsLinear`).
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels import from_hopper_on
from baton.engine.kernels.fastest import fastest
from baton.engine.kernels.launch import inputs_ready, launch_options, next_may_begin
from baton.engine.kernels.split_k import MAX_SPLITS, SHARED_BYTES, Tiling, counters, multiply, splits

BLOCK_N = 64
MAX_STAGES = 8
FEW_ROWS = 2  # of x, with a small W; measured on an H200
WEIGHTS = 8192  # of a program with whole rows of W
ONE_TILE = 16  # rows of x; up to so many this kernel was always the faster one on an H200


def tiling(rows: int, inner: int, size: int, multiprocessors: int) -> Tiling:
    """The best tiling for x [rows, inner] and W [size, inner], measured on an H200. With more tiles than
    multiprocessors, two programs share one."""
    padded = max(16, triton.next_power_of_2(rows))
    tiles = triton.cdiv(size, BLOCK_N)
    columns = 128 if padded == 64 or tiles > multiprocessors else 256
    room = SHARED_BYTES // 2 if tiles > multiprocessors else SHARED_BYTES
    stages = min(MAX_STAGES, room // (2 * columns * (BLOCK_N + padded)))
    parts = splits(tiles, triton.cdiv(inner, columns), multiprocessors)
    return Tiling(padded, BLOCK_N, columns, parts, 4, stages)


class SkinnyLinear:
    """A linear product for 1 to 64 rows. Its calls must be in one stream."""

    def __init__(self, weight: Tensor, bias: Tensor | None, multiprocessors: int) -> None:
        """weight [out, in] float16 or bfloat16, bias [out]. Neither is copied."""
        self._weight, self._bias, self._multiprocessors = weight, bias, multiprocessors
        tiles = triton.cdiv(len(weight), BLOCK_N)
        self._is_small = 2 * tiles * MAX_SPLITS <= multiprocessors and weight.shape[1] <= WEIGHTS
        self._finished = counters(tiles, weight.device)

    @staticmethod
    def suits(weight: Tensor) -> bool:
        """Whether the kernel supports this weight and device. Hopper's copy engine needs rows of a multiple
        of 16 bytes."""
        return (
            from_hopper_on(weight.device)
            and weight.dtype in (torch.float16, torch.bfloat16)
            and weight.is_contiguous()
            and weight.shape[1] % 8 == 0
        )

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in], contiguous, 1 to 64 rows. Returns [rows, out]."""
        assert x.is_contiguous(), "the kernel assumes dense rows"
        (rows, inner), size = x.shape, len(self._weight)
        if self._is_small and rows <= FEW_ROWS:
            return _whole_rows(x, self._weight, self._bias)
        shape = tiling(rows, inner, size, self._multiprocessors)
        return multiply(x, self._weight, self._bias, x.dtype, shape, self._finished.tensor)


class FewRowsLinear:
    """A linear product for 1 to 64 rows, by `SkinnyLinear` or by cuBLAS: what is faster on this device."""

    def __init__(self, weight: Tensor, bias: Tensor | None, multiprocessors: int) -> None:
        """As `SkinnyLinear`."""
        self._weight, self._bias = weight, bias
        self._skinny = SkinnyLinear(weight, bias, multiprocessors)
        self._name = f"{weight.dtype} {len(weight)} x {weight.shape[1]}"

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in], contiguous, 1 to 64 rows. Returns [rows, out]."""
        if len(x) <= ONE_TILE:
            return self._skinny(x)
        return fastest(self._name, x, len(x), {"skinny": self._skinny, "cublas": self._by_cublas})

    def _by_cublas(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


def _whole_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    (rows, inner), size = x.shape, len(weight)
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    columns = triton.next_power_of_2(inner)
    block_n = WEIGHTS // columns
    blocks = {"ROWS": rows, "BLOCK_N": block_n, "COLUMNS": columns}
    grid = (triton.cdiv(size, block_n),)
    _multiply[grid](x, weight, bias, out, size, inner, **blocks, num_warps=4, **launch_options())
    return out


@triton.jit
def _multiply(
    x, weight, bias, out, size, inner, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr
):
    next_may_begin()
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, COLUMNS)
    is_row, is_column, of_bias = n < size, k < inner, 0.0
    at = weight + n[:, None] * inner + k[None, :]
    w = tl.load(at, mask=is_row[:, None] & is_column[None, :], other=0.0).to(tl.float32)
    if bias is not None:
        of_bias = tl.load(bias + n, mask=is_row, other=0.0).to(tl.float32)
    inputs_ready()
    for row in tl.static_range(ROWS):
        of_x = tl.load(x + row * inner + k, mask=is_column, other=0.0).to(tl.float32)
        y = tl.sum(w * of_x[None, :], axis=1) + of_bias
        tl.store(out + row * size + n, y.to(out.dtype.element_ty), mask=is_row)
