"""y = x Wᵀ + b with W in 4 bits (`FourBits`).

    up to 2 rows    `int4_gemv` multiplies integers, and then the sums of groups by their scales.
    few rows        The kernel below writes W into registers, in x's dtype. Tensor cores multiply it.
    more rows       x and W become FP8, with a scale for each row: W in registers, as before.
    many rows       W becomes FP8 in memory, and cuBLAS multiplies.

The first rounds no weight, the second rounds once to x's dtype. Scales and zeros are in x's dtype. Products
in FP8 take half the time, which pays for the conversion: in x's dtype, more rows took longer than with a W
that is not packed. Rounding W to FP8 adds little to what INT4 has lost. Measurements choose between the last
two and among tilings (`fastest`). These multiply the same numbers. cuBLAS needs a multiple of ALIGNED rows
of W. Other matrices are written to memory in x's dtype, for more than few rows.

A program handles a tile of y, and one of SPLITS parts of the columns (`split_k`).

*Exact* (`--batch-invariant`): the kernel for few rows, with one part, multiplies up to MAX_EXACT_ROWS rows.
For more rows, W is written to memory in x's dtype, and `exact_linear` multiplies it. Both round W in the same
way, and add its columns in their order.
"""

from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from baton.engine.kernels import FourBits, Kernels, LinearMethod, Quantized
from baton.engine.kernels.exact_linear import exact_linear
from baton.engine.kernels.fastest import fastest
from baton.engine.kernels.fp8 import outer_scales, quantize
from baton.engine.kernels.launch import inputs_ready, launch_options
from baton.engine.kernels.quantized import int4_gemv
from baton.engine.kernels.quantized.four_bits import of_planes, outside_loop, tiles, two_planes, values
from baton.engine.kernels.split_k import MAX_SPLITS, Tiling, add_partials, counters, partials_of, store_tile

MAX_FEW_ROWS = 32
MAX_EXACT_ROWS = 128
"""An estimate: from here on, each tile of 32 rows reads and converts W once more than writing it does."""
MAX_MEASURED_ROWS = 1024
ALIGNED = 16
MAX_STAGES = 6
MULTIPROCESSOR_BYTES, PROGRAM_BYTES = 228 << 10, 1200
"""Shared memory of a multiprocessor, and what a program takes of it beside its tiles."""
MAX_BLOCK_M = 128
FORMS = {"narrow": 64, "wide": 128}
"""Tilings in FP8: the rows of W of a program. Two share a multiprocessor: while one waits, the other one uses
the tensor cores."""


def tiling(
    rows: int, weight: FourBits, multiprocessors: int, form: str | None = None, *, exact: bool = False
) -> Tiling:
    """The tiling for x of these rows. `form`: in FP8. `exact`: the columns are one part."""
    rows = max(16, triton.next_power_of_2(rows))  # as `fastest` counts them
    if form is None:
        narrow = triton.cdiv(rows, MAX_FEW_ROWS) * triton.cdiv(weight.size, 64) <= 2 * multiprocessors
        most, block_n, each = MAX_FEW_ROWS, 64 if narrow else 128, 3 if narrow else 2
    else:
        most, block_n, each = MAX_BLOCK_M, FORMS[form], 2
    block_m = min(rows, most)
    tiles = rows // block_m * triton.cdiv(weight.size, block_n)
    most_splits = min(each * multiprocessors // tiles, weight.words.shape[1] // weight.block, MAX_SPLITS)
    most_splits = 1 if exact else max(1, most_splits)
    splits = 1 << most_splits.bit_length() - 1  # few numbers of splits are few kernels to compile
    sharing = min(each, triton.cdiv(tiles * splits, multiprocessors))
    # Bytes of a stage. Of W there is one less.
    scales = max(1, 4 * weight.block // weight.group) * (1 if weight.zeros is None else 2)
    of_x, of_w = (8 if form is None else 4) * block_m * weight.block, 2 * block_n * (weight.block + scales)
    stages = (MULTIPROCESSOR_BYTES // sharing - PROGRAM_BYTES + of_w) // (of_x + of_w)
    warps = 8 if block_m * block_n > 1 << 13 else 4
    return Tiling(block_m, block_n, weight.block, splits, warps, max(2, min(MAX_STAGES, stages)))


class Int4Linear(LinearMethod):
    """A linear product with weights in 4 bits. Its calls must be in one stream."""

    def __init__(
        self, weight: FourBits, bias: Tensor | None, multiprocessors: int, *, exact: bool = False
    ) -> None:
        """bias [out]. `exact`: a row of a result has the same bits whatever the other rows."""
        self.weight, self._bias, self._multiprocessors, self._exact = weight, bias, multiprocessors, exact
        self._gemv_rows = 0 if exact or weight.floats else int4_gemv.MAX_ROWS
        self._few_rows = MAX_EXACT_ROWS if exact else MAX_FEW_ROWS
        self._row_scales = None if exact or weight.size % ALIGNED else weight.row_scales()
        tiles = MAX_MEASURED_ROWS // MAX_BLOCK_M * triton.cdiv(weight.size, 64)
        self._finished = counters(tiles, weight.words.device)
        self._name = f"int4 {weight.size} x {weight.inner} in groups of {weight.group}"

    def quantizes(self, rows: int) -> bool | None:
        return None if rows <= MAX_FEW_ROWS or self._row_scales is None else False

    def __call__(self, x: Tensor | Quantized) -> Tensor:
        """x [rows, in], contiguous. Returns [rows, out]."""
        if isinstance(x, Tensor):
            if len(x) <= self._gemv_rows:
                return int4_gemv.gemv(x, self.weight, self._bias, gated=False)
            if len(x) <= self._few_rows:
                return self.triton(x)
            if self._row_scales is None:
                return self._by_values(x)
            x = quantize(x, grouped=False)
        if len(x.values) > MAX_MEASURED_ROWS:
            return self.cublas(x)
        kernels = {form: partial(self.triton, form=form) for form in FORMS} | {"cublas": self.cublas}
        return fastest(self._name, x, len(x.values), kernels)

    def silu_mul(self, x: Tensor | Quantized, kernels: Kernels) -> Tensor:
        if isinstance(x, Tensor) and len(x) <= self._gemv_rows:
            return int4_gemv.gemv(x, self.weight, self._bias, gated=True)
        return super().silu_mul(x, kernels)

    def _by_values(self, x: Tensor) -> Tensor:
        weight = values(self.weight)
        if self._exact:
            counts = self._finished.tensor
            return exact_linear(x, weight, self._bias, x.dtype, self._multiprocessors, counts)
        return F.linear(x, weight, self._bias)

    def cublas(self, x: Quantized) -> Tensor:
        """The product by cuBLAS, of all values of W in FP8. It gives bfloat16 only."""
        scales = self._row_scales
        assert scales is not None, "other matrices are not multiplied in FP8"
        weight = values(self.weight, scales).T
        y = torch._scaled_mm(
            x.values, weight, x.scales, scales, out_dtype=torch.bfloat16, use_fast_accum=True
        ).to(self.weight.scales.dtype)
        return y if self._bias is None else y.add_(self._bias)

    def triton(self, x: Tensor | Quantized, form: str | None = None) -> Tensor:
        """The product by the kernel alone. `form`: in FP8."""
        x, of_x, of_w = (x, None, None) if isinstance(x, Tensor) else (*x, self._row_scales)
        assert x.is_contiguous(), "the kernel assumes dense rows"
        rows, weight = len(x), self.weight
        shape = tiling(rows, weight, self._multiprocessors, form, exact=self._exact)
        row_tiles, columns = triton.cdiv(rows, shape.block_m), triton.cdiv(weight.size, shape.block_n)
        out = torch.empty(rows, weight.size, dtype=weight.scales.dtype, device=x.device)
        _int4_linear[(row_tiles, columns, shape.splits)](
            TensorDescriptor.from_tensor(x, [shape.block_m, 2 * shape.block_k]),
            *tiles(weight, shape.block_n, shape.block_k),
            of_x,
            of_w,
            self._bias,
            partials_of(out, shape.splits, row_tiles * columns, shape.block_n, shape.block_m),
            self._finished.tensor,
            out,
            rows,
            weight.size,
            weight.words.shape[1] // shape.block_k,
            GROUP=weight.group,
            FLOATS=weight.floats,
            SPLITS=shape.splits,
            **shape.options(),
            **launch_options(),
        )
        return out


@triton.jit(do_not_specialize=["rows", "steps"])
def _int4_linear(
    x_tiles,
    word_tiles,
    scale_tiles,
    zero_tiles,
    x_scales,
    row_scales,
    bias,
    partials,
    finished,
    out,
    rows,
    size,
    steps,
    GROUP: tl.constexpr,
    FLOATS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """BLOCK_K: words of a block. x_scales [rows] and row_scales [size]: x and W are multiplied in FP8."""
    inputs_ready()
    # Programs of the same rows of W are neighbours, so that W is read once.
    first_m, first_n, split = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N, tl.program_id(2)
    n, m = first_n + tl.arange(0, BLOCK_N), first_m + tl.arange(0, BLOCK_M)
    of_rows = None
    if row_scales is not None:
        of_rows = tl.load(row_scales + n, mask=n < size, other=1.0)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in tl.range(split * steps // SPLITS, (split + 1) * steps // SPLITS):
        column = 4 * BLOCK_K * step
        words = word_tiles.load([first_n, BLOCK_K * step])  # past the end: zeros
        scales = of_planes(scale_tiles, column // GROUP, first_n, of_rows, GROUP, BLOCK_N, BLOCK_K)
        zeros = of_planes(zero_tiles, column // GROUP, first_n, of_rows, GROUP, BLOCK_N, BLOCK_K)
        x0 = x_tiles.load([first_m, column])
        x1 = x_tiles.load([first_m, column + 2 * BLOCK_K])
        acc = tl.dot(two_planes(words, scales, zeros, 0, FLOATS, x0.dtype), tl.trans(x0), acc)
        acc = tl.dot(two_planes(words, scales, zeros, 2, FLOATS, x1.dtype), tl.trans(x1), acc)
        acc = outside_loop(acc)
    is_last = True
    if SPLITS > 1:
        tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        acc, is_last = add_partials(
            acc, partials, finished, tile, tl.num_programs(0) * tl.num_programs(1), split, SPLITS
        )
    if is_last:
        if row_scales is not None:
            acc *= outer_scales(tl.load(x_scales + m, mask=m < rows, other=0.0), of_rows, True, False)
        store_tile(acc, bias, out, first_m, first_n, rows, size, True)
