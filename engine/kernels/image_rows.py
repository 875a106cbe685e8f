"""Rows of a step that are part of an image. A program for each row of the step, which ends at once if the row
is text: so graphs have room for images and cost text no time.

`index` [rows] int32 names for each row the image row that it is, −1 for text.
"""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # columns of a program


def place_images(rows: Tensor, index: Tensor, features: Tensor, part: int, *, added: bool = False) -> None:
    """As `Kernels.place_images`."""
    assert rows.is_contiguous(), "the kernel assumes dense rows"
    assert features.is_contiguous(), "the kernel assumes dense rows"
    size = rows.shape[1]
    _place_images[(len(rows), triton.cdiv(size, BLOCK))](
        rows, index, features, features.shape[1] * size, part * size, size, ADDED=added, BLOCK=BLOCK
    )


def turn_images(rotary: Tensor, index: Tensor, positions: Tensor, table: Tensor, axes: Tensor) -> None:
    """As `Kernels.turn_images`."""
    assert rotary.is_contiguous(), "the kernel assumes dense rows"
    size = rotary.shape[-1]
    _turn_images[(len(rotary),)](
        rotary, index, positions, table, axes, size, BLOCK=triton.next_power_of_2(size), num_warps=1
    )


@triton.jit(do_not_specialize=["offset"])
def _place_images(rows, index, features, stride, offset, size, ADDED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.load(index + row).to(tl.int64)
    if at < 0:
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    to = rows + row * size + columns
    values = tl.load(features + at * stride + offset + columns, mask=inside, other=0.0)
    if ADDED:
        values = values.to(tl.float32) + tl.load(to, mask=inside, other=0.0).to(tl.float32)
    tl.store(to, values.to(rows.dtype.element_ty), mask=inside)


@triton.jit
def _turn_images(rotary, index, positions, table, axes, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.load(index + row).to(tl.int64)
    if at < 0:
        return
    dims = tl.arange(0, BLOCK)
    inside = dims < size
    position = tl.load(positions + at * 3 + tl.load(axes + dims, mask=inside, other=0), mask=inside, other=0)
    for half in tl.static_range(2):
        values = tl.load(table + (position * 2 + half) * size + dims, mask=inside, other=0.0)
        tl.store(rotary + (row * 2 + half) * size + dims, values, mask=inside)
