"""What the products y = x Wᵀ + b of few rows share.

A program handles a tile of yᵀ = W xᵀ, and one of several parts of its inner dimension. So enough programs
read W at once. Each program stores its part. The program that finishes last for a tile adds up all
parts. It adds them in a fixed order, so timing never changes the sum.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

SHARED_BYTES = 208 << 10  # of a multiprocessor, for tiles that are loaded ahead
MAX_SPLITS = 8


class Tiling(NamedTuple):
    block_m: int  # rows of x, padded
    block_n: int  # rows of W
    block_k: int  # columns of W, at a time
    splits: int  # parts of the columns of W
    warps: int
    stages: int  # tiles loaded ahead

    def options(self) -> dict[str, Any]:
        """Of a launch."""
        blocks = {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k}
        return {**blocks, "SPLITS": self.splits, "num_warps": self.warps, "num_stages": self.stages}


def parts_of(out: Tensor, splits: int, tiles: int, block_n: int, block_m: int) -> Tensor:
    """Scratch memory for the parts. Without splits the kernel has no use for it."""
    if splits == 1:
        return out
    return torch.empty(splits, tiles, block_n, block_m, dtype=torch.float32, device=out.device)


def counters(tiles: int, device: torch.device) -> Tensor:
    """How many parts of each tile are finished: 0 between calls."""
    return torch.zeros(tiles, dtype=torch.int32, device=device)


def splits(tiles: int, steps: int, multiprocessors: int) -> int:
    """Into how many parts to cut the columns, if the result has `tiles` tiles of `steps` steps each.

    Programs on half of the multiprocessors already read memory at its full speed. Adding up more parts costs
    more than it saves (measured on an H200)."""
    return max(1, min(multiprocessors // (2 * tiles), steps, MAX_SPLITS))


@triton.jit
def add_parts(acc, parts, finished, tile, tiles, split, SPLITS: tl.constexpr):
    """Returns the sum of all parts of a tile, and whether this program is the last one and has it.

    acc [n, m] float32: this program's part. parts [splits, tiles, n, m] float32: scratch memory. finished
    [tiles] int32: 0 before and after."""
    n, m = tl.arange(0, acc.shape[0]), tl.arange(0, acc.shape[1])
    part = tiles * acc.shape[0] * acc.shape[1]
    own = parts + tile * acc.shape[0] * acc.shape[1] + n[:, None] * acc.shape[1] + m[None, :]
    tl.store(own + split * part, acc)
    tl.debug_barrier()  # all threads have stored before the program counts as finished
    is_last = tl.atomic_add(finished + tile, 1, sem="acq_rel") == SPLITS - 1
    if is_last:
        tl.store(finished + tile, 0)
        acc = tl.zeros(acc.shape, tl.float32)
        for i in tl.static_range(SPLITS):
            acc += tl.load(own + i * part, cache_modifier=".cg")
    return acc, is_last


@triton.jit
def store_transposed(acc, bias, out, first_m, first_n, rows, size):
    """Adds the bias to a tile [n, m] of yᵀ, and stores it in out [rows, size]."""
    n, m = first_n + tl.arange(0, acc.shape[0]), first_m + tl.arange(0, acc.shape[1])
    if bias is not None:
        acc += tl.load(bias + n, mask=n < size, other=0.0).to(tl.float32)[:, None]
    y = tl.trans(acc).to(out.dtype.element_ty)
    to = out + m[:, None].to(tl.int64) * size + n[None, :]
    tl.store(to, y, mask=(m < rows)[:, None] & (n < size)[None, :])
