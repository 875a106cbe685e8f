"""y = x Wᵀ + b for few rows of x, as in decode steps. The time goes into reading W [out, in] once.

    y[m, n] = b[n] + Σ x[m, k] W[n, k]

Compared with cuBLAS, the products of a layer take 3 % less time up to 64 rows, and 6 % less with launches
that overlap (`overlap`). Both read W at over 4 TB/s and lose some 4 µs around it (docs/lab/engine.md).
"""

import torch
import triton
from torch import Tensor

from baton.engine.kernels import from_hopper_on
from baton.engine.kernels.split_k import SHARED_BYTES, Tiling, counters, multiply, splits

BLOCK_N = 64
MAX_STAGES = 8


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
        self._finished = counters(triton.cdiv(len(weight), BLOCK_N), weight.device)

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
        shape = tiling(rows, inner, size, self._multiprocessors)
        return multiply(x, self._weight, self._bias, x.dtype, shape, self._finished)
