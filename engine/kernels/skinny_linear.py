"""y = x Wᵀ + b for few rows of x, as in decode steps. The time goes into reading W [out, in] once.

    y[m, n] = b[n] + Σ x[m, k] W[n, k]

The rows of W are the large side of the tensor core product (yᵀ = W xᵀ), so few rows of x waste little of it.
A program handles BLOCK_N rows of W, and one of SPLITS parts of their columns. So enough programs read at
once. Each loads several tiles ahead. `split_k` adds up the parts.

Compared with cuBLAS, the products of a layer take 3 % less time up to 64 rows, and 6 % less with launches
that overlap (`overlap`). Both read W at over 4 TB/s and lose some 4 µs around it (docs/lab/engine.md).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from baton.engine.kernels import from_hopper_on
from baton.engine.kernels.launch import inputs_ready, launch_options
from baton.engine.kernels.split_k import (
    SHARED_BYTES,
    Tiling,
    add_parts,
    counters,
    parts_of,
    splits,
    store_transposed,
)

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
        tiles = len(self._finished)
        out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
        parts = parts_of(out, shape.splits, tiles, BLOCK_N, shape.block_m)
        _skinny_linear[(tiles, shape.splits)](
            TensorDescriptor.from_tensor(x, [shape.block_m, shape.block_k]),
            TensorDescriptor.from_tensor(self._weight, [BLOCK_N, shape.block_k]),
            self._bias,
            parts,
            self._finished,
            out,
            rows,
            size,
            inner,
            **shape.options(),
            **launch_options(),
        )
        return out


@triton.jit(do_not_specialize=["rows"])
def _skinny_linear(
    x_tiles,
    weight_tiles,
    bias,
    parts,
    finished,
    out,
    rows,
    size,
    inner,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
):
    inputs_ready()
    tile, split = tl.program_id(0), tl.program_id(1)
    steps = tl.cdiv(inner, BLOCK_K)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in tl.range(split * steps // SPLITS, (split + 1) * steps // SPLITS):
        w = weight_tiles.load([tile * BLOCK_N, step * BLOCK_K])  # past the end: zeros
        x = x_tiles.load([0, step * BLOCK_K])
        acc = tl.dot(w, tl.trans(x), acc)
    is_last = True
    if SPLITS > 1:
        acc, is_last = add_parts(acc, parts, finished, tile, tl.num_programs(0), split, SPLITS)
    if is_last:
        store_transposed(acc, bias, out, 0, tile * BLOCK_N, rows, size)
