"""Products on a CPU with the same bits for any number of rows."""

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
