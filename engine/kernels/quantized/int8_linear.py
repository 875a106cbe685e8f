"""y = x Wᵀ + b with W in integers of 8 bits, in groups of columns or by row.

    w = (code − 128) · scale + zero, in float32, rounded once to x's dtype

    few rows     The kernel below writes W into registers. Tensor cores multiply it.
    many rows    W is written to memory, and cuBLAS multiplies it.

Both multiply the same numbers: those of W dequantized at load. Activations stay as they are. In between,
measurements choose (`fastest`).
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from baton.engine.kernels import LinearMethod
from baton.engine.kernels.fastest import fastest
from baton.engine.kernels.launch import inputs_ready, launch_options
from baton.engine.kernels.split_k import (
    SHARED_BYTES,
    Tiling,
    add_partials,
    counters,
    partials_of,
    splits,
    store_tile,
)

BLOCK_N = 64
COLUMNS = 128
"""The most columns at a time. Groups have a multiple of them, or a power of two."""
MAX_BLOCK_M = 64
MAX_FEW_ROWS, MAX_MEASURED_ROWS = 16, 256
MAX_STAGES = 8
ALIGNED = 16
"""The copy engine needs rows of a multiple of so many bytes."""


def tiling(rows: int, inner: int, size: int, columns: int, multiprocessors: int) -> Tiling:
    """For x [rows, inner] and W [size, inner], `columns` at a time. As `skinny_linear`, whose W has two bytes
    where this one has one."""
    block_m = min(MAX_BLOCK_M, max(16, triton.next_power_of_2(rows)))
    tiles = triton.cdiv(size, BLOCK_N) * triton.cdiv(rows, block_m)
    room = SHARED_BYTES // 2 if tiles > multiprocessors else SHARED_BYTES
    stages = min(MAX_STAGES, room // (columns * (BLOCK_N + 2 * block_m)))
    parts = splits(tiles, triton.cdiv(inner, columns), multiprocessors) if rows <= block_m else 1
    return Tiling(block_m, BLOCK_N, columns, parts, 4, stages)


class Int8Linear(LinearMethod):
    """A linear product with weights in 8 bits. Its calls must be in one stream."""

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        multiprocessors: int,
    ) -> None:
        """codes [out, in] uint8; scales and zeros [out, groups] float32; bias [out]. dtype: of x."""
        assert codes.shape[1] % ALIGNED == 0, "the copy engine needs rows of a multiple of 16 bytes"
        self._codes = (codes ^ 128).view(torch.int8)
        self._scales = scales.T.contiguous()
        self._zeros = zeros.T.contiguous() if zeros.any() else None
        self._bias, self._dtype, self._multiprocessors = bias, dtype, multiprocessors
        groups = scales.shape[1]
        self._group = None if groups == 1 else codes.shape[1] // groups
        self._columns = min(self._group or COLUMNS, COLUMNS)
        self._finished = counters(triton.cdiv(len(codes), BLOCK_N), codes.device)
        self._name = f"int8 {len(codes)} x {codes.shape[1]} in groups of {self._group}"

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in], contiguous. Returns [rows, out]."""
        if len(x) <= MAX_FEW_ROWS:
            return self.triton(x)
        if len(x) > MAX_MEASURED_ROWS:
            return self.cublas(x)
        return fastest(self._name, x, len(x), {"triton": self.triton, "cublas": self.cublas})

    def cublas(self, x: Tensor) -> Tensor:
        """The product by cuBLAS, of all values of W."""
        return F.linear(x, self.values(), self._bias)

    def values(self) -> Tensor:
        """[out, in] in x's dtype."""
        out = torch.empty(self._codes.shape, dtype=self._dtype, device=self._codes.device)
        size, inner = out.shape
        _values[(triton.cdiv(size, BLOCK_N), triton.cdiv(inner, self._columns))](
            self._codes,
            self._scales,
            self._zeros,
            out,
            size,
            inner,
            GROUP=self._group,
            BLOCK_N=BLOCK_N,
            BLOCK_K=self._columns,
        )
        return out

    def triton(self, x: Tensor) -> Tensor:
        """The product by the kernel alone."""
        assert x.is_contiguous(), "the kernel assumes dense rows"
        (rows, inner), size = x.shape, len(self._codes)
        shape = tiling(rows, inner, size, self._columns, self._multiprocessors)
        row_tiles, tiles = triton.cdiv(rows, shape.block_m), triton.cdiv(size, BLOCK_N)
        out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
        _int8_linear[(row_tiles, tiles, shape.splits)](
            TensorDescriptor.from_tensor(x, [shape.block_m, shape.block_k]),
            TensorDescriptor.from_tensor(self._codes, [shape.block_n, shape.block_k]),
            self._scales,
            self._zeros,
            self._bias,
            partials_of(out, shape.splits, tiles, shape.block_n, shape.block_m),
            self._finished.tensor,
            out,
            rows,
            size,
            triton.cdiv(inner, shape.block_k),
            GROUP=self._group,
            SPLITS=shape.splits,
            **shape.options(),
            **launch_options(),
        )
        return out


@triton.jit
def _of_columns(codes, scales, zeros, column, n, size, GROUP: tl.constexpr, DTYPE: tl.constexpr):
    """The values of codes [n, k] of columns from `column` on, which are in one group."""
    at = n if GROUP is None else column // GROUP * size + n
    w = codes.to(tl.float32) * tl.load(scales + at, mask=n < size, other=0.0)[:, None]
    if zeros is not None:
        w += tl.load(zeros + at, mask=n < size, other=0.0)[:, None]
    return w.to(DTYPE)


@triton.jit
def _values(
    codes, scales, zeros, out, size, inner, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    column = tl.program_id(1) * BLOCK_K
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), column + tl.arange(0, BLOCK_K)
    at = n[:, None].to(tl.int64) * inner + k[None, :]
    used = (n < size)[:, None] & (k < inner)[None, :]
    read = tl.load(codes + at, mask=used, other=0)
    w = _of_columns(read, scales, zeros, column, n, size, GROUP, out.dtype.element_ty)
    tl.store(out + at, w, mask=used)


@triton.jit(do_not_specialize=["rows"])
def _int8_linear(
    x_tiles,
    code_tiles,
    scales,
    zeros,
    bias,
    partials,
    finished,
    out,
    rows,
    size,
    steps,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
):
    inputs_ready()
    # Programs of the same rows of W are neighbours, so that W is read once.
    first_m, tile, split = tl.program_id(0) * BLOCK_M, tl.program_id(1), tl.program_id(2)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in tl.range(split * steps // SPLITS, (split + 1) * steps // SPLITS):
        column = step * BLOCK_K
        codes = code_tiles.load([tile * BLOCK_N, column])  # past the end: zeros, as those of x
        x = x_tiles.load([first_m, column])
        w = _of_columns(codes, scales, zeros, column, n, size, GROUP, x.dtype)
        acc = tl.dot(w, tl.trans(x), acc)
    is_last = True
    if SPLITS > 1:
        acc, is_last = add_partials(acc, partials, finished, tile, tl.num_programs(1), split, SPLITS)
    if is_last:
        store_tile(acc, bias, out, first_m, tile * BLOCK_N, rows, size, True)
