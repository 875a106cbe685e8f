"""Products on a CPU with few numbers of rows, and those with the same bits for any number."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

EXACT_ROWS = 16
"""Rows of a block. oneDNN chooses the order of sums by the number of rows: a single one has another kernel.
For 16 it takes hardly longer than for one."""


def in_blocks(multiply: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`multiply` for x [rows, in], EXACT_ROWS rows at a time. Zeros pad the last block."""
    blocks = F.pad(x, (0, 0, 0, -len(x) % EXACT_ROWS)).split(EXACT_ROWS)
    return torch.cat([multiply(block) for block in blocks])[: len(x)]


def in_sizes(multiply: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`multiply` for x [rows, in], with zeros below it up to `size_for`.

    oneDNN compiles code for each number of rows. It takes 0.6 MiB for each matrix, of which the half stays
    however small its cache is."""
    size = size_for(len(x))
    return multiply(x) if size == len(x) else multiply(F.pad(x, (0, 0, 0, size - len(x))))[: len(x)]


def size_for(rows: int) -> int:
    """Rounds up to one of eight numbers between two powers of two."""
    step = 1 << max(0, (rows - 1).bit_length() - 4)
    return -(-rows // step) * step
