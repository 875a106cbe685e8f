"""y = x Wᵀ + b with x and W in FP8: y[m, n] = b[n] + Σ x[m, k] W[n, k], times the scales of x and W.

With one scale for each row of x and of W, the scales apply to the sum. Few rows of x take the kernel below,
as in decode steps, and many rows take cuBLAS. In between, the faster one computes. For more than MAX_FEW_ROWS
the kernel has a tiling for products whose tiles all run at once: tiles of 64 rows of W then occupy nearly all
multiprocessors.

With a scale for each group of 128 columns, the product of each group is multiplied, in float32. cuBLAS can do
so, too, if W has a scale for each block of 128 × 128 and the device is one of Hopper's: cuBLAS knows this
format from CUDA 12.9 on. All multiply the same FP8 numbers, so the number of rows changes only the order of
the sum.
"""

from functools import cache

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from baton.engine.kernels import FP8, FP8_GROUP, Quantized
from baton.engine.kernels.exact_linear import exact_linear
from baton.engine.kernels.fastest import fastest
from baton.engine.kernels.split_k import SHARED_BYTES, Tiling, counters, multiply, splits

MAX_FEW_ROWS = 128
MAX_MEASURED_ROWS = 512
"""Up to so many rows of x, measurements choose between the kernel and cuBLAS (`fastest`)."""
BLOCK_N = 64
WIDE, NARROW = 512, 256
"""Columns at a time: where a program has a multiprocessor for itself, and where two share one."""
MAX_STAGES = 8
MAX_FEW_ROWS_BY_BLOCK = 32
ALIGNED = 4
"""What cuBLAS needs of the number of groups of columns, and of the rows of x if these have groups."""

AT_ONCE = Tiling(128, BLOCK_N, FP8_GROUP, 1, 4, 6)
"""For more than MAX_FEW_ROWS rows of x, with a scale for each row."""
MANY = Tiling(64, 128, FP8_GROUP, 1, 4, 3)
"""For more than MAX_FEW_ROWS rows of x, with a scale for each group of columns."""


def tiling(rows: int, inner: int, size: int, multiprocessors: int, *, grouped: bool) -> Tiling:
    """The tiling for x [rows, inner] and W [size, inner]."""
    if rows > MAX_FEW_ROWS:
        return MANY if grouped else AT_ONCE
    padded = max(16, triton.next_power_of_2(rows))
    tiles = triton.cdiv(size, BLOCK_N)
    shared = tiles > multiprocessors  # by two programs
    columns = FP8_GROUP if grouped else NARROW if shared or padded >= 64 else WIDE
    room = SHARED_BYTES // 2 if shared else SHARED_BYTES
    stages = min(MAX_STAGES, room // (columns * (BLOCK_N + padded)))
    # With the most rows, multiplying takes longer than reading W. Then more programs are worth their parts.
    spread = tiles if padded < MAX_FEW_ROWS else triton.cdiv(tiles, 2)
    parts = splits(spread, triton.cdiv(inner, columns), multiprocessors)
    return Tiling(padded, BLOCK_N, columns, parts, 4, stages)


def runs_at_once(rows: int, size: int, multiprocessors: int) -> bool:
    """Whether the tiles of AT_ONCE occupy most of the multiprocessors, and each has one at most."""
    tiles = triton.cdiv(rows, AT_ONCE.block_m) * triton.cdiv(size, AT_ONCE.block_n)
    return multiprocessors // 2 < tiles <= multiprocessors


@cache
def knows_blocks(device: torch.device) -> bool:
    """Whether cuBLAS multiplies with scales of blocks of 128 × 128 on this device."""
    version = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    return version >= (12, 9) and torch.cuda.get_device_capability(device)[0] == 9


class Fp8Linear:
    """A linear product with FP8 weights. Its calls must be in one stream."""

    def __init__(
        self,
        weight: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        multiprocessors: int,
        *,
        exact: bool = False,
    ) -> None:
        """weight [out, in] FP8, scales [groups, out or out / FP8_GROUP] float32, bias [out]: not copied.
        dtype: of y. `exact`: as in `exact_linear`. A sum over groups of columns always is."""
        assert weight.shape[1] % 16 == 0, "the copy engine needs rows of a multiple of 16 bytes"
        self._weight, self._scales, self._bias, self._dtype = weight, scales, bias, dtype
        self._grouped, self._by_block = len(scales) > 1, scales.shape[1] < len(weight)
        self._for_cublas = scales
        if self._by_block:
            self._for_cublas = scales.T.contiguous().T
        self._multiprocessors, self._exact = multiprocessors, exact
        scales_of = "blocks" if self._by_block else "groups" if self._grouped else "rows"
        self._name = f"fp8 {len(weight)} x {weight.shape[1]}, scales of {scales_of}"
        self._finished = counters(triton.cdiv(len(weight), BLOCK_N), weight.device)

    def __call__(self, x: Quantized) -> Tensor:
        """x [rows, in]. Returns [rows, out]."""
        rows, (size, inner) = len(x.values), self._weight.shape
        if self._exact:
            return self.triton(x)
        if self._grouped:
            fits = self._by_block and inner % (ALIGNED * FP8_GROUP) == 0 and knows_blocks(self._weight.device)
            by_cublas = rows > MAX_FEW_ROWS_BY_BLOCK
        else:
            fits, by_cublas = (
                True,
                rows > MAX_FEW_ROWS and not runs_at_once(rows, size, self._multiprocessors),
            )
        if not fits:
            return self.triton(x)
        if rows > MAX_MEASURED_ROWS:
            return self.cublas(x)
        kinds = ("cublas", "triton") if by_cublas else ("triton", "cublas")
        return fastest(self._name, x, rows, {kind: getattr(self, kind) for kind in kinds})

    def cublas(self, x: Quantized) -> Tensor:
        """The product by cuBLAS, with scales of rows or of blocks."""
        rows = len(x.values)
        weight, scales, dtype = self._weight.T, self._for_cublas, self._dtype
        if not self._grouped:
            return torch._scaled_mm(
                x.values, weight, x.scales, scales, self._bias, out_dtype=dtype, use_fast_accum=True
            )
        values = F.pad(x.values.view(torch.uint8), (0, 0, 0, -rows % ALIGNED)).view(FP8)
        of_x = x.scales.new_zeros(len(scales), len(values))
        of_x[:, :rows] = x.scales.T
        y = torch._scaled_mm(values, weight, of_x.T, scales, out_dtype=dtype)[:rows]
        return y if self._bias is None else y.add_(self._bias)  # cuBLAS adds no bias to such a product

    def triton(self, x: Quantized) -> Tensor:
        """The product by the kernel alone."""
        (rows, inner), size = x.values.shape, len(self._weight)
        scales = x.scales, self._scales
        if self._exact and not self._grouped:
            weight, bias, dtype, counts = self._weight, self._bias, self._dtype, self._finished.tensor
            return exact_linear(x.values, weight, bias, dtype, self._multiprocessors, counts, scales)
        shape = tiling(rows, inner, size, self._multiprocessors, grouped=self._grouped)
        shape = shape._replace(splits=1) if self._exact else shape
        return multiply(x.values, self._weight, self._bias, self._dtype, shape, self._finished.tensor, scales)
