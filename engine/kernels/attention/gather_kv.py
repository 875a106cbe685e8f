"""Writes blocks of an FP8 cache as a plain cache: value · scale, rounded to the model's dtype.

Attention over FP8 converts a tile of keys and values for each tile of queries. For long chunks it is faster
to convert each block once, for each layer, into memory that the next layer uses again.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels import Fp8KV
from baton.engine.kernels.upload import upload

MOST_POSITIONS = 32768
"""Most positions of all chunks of a step. The scratch memory always has room for so many, so the rehearsal of
the largest steps counts it. For 8 heads of 128 dimensions it is 128 MiB."""
LEAST_TOKENS = 128
"""Least tokens of a chunk, on average. With fewer, converting tiles is faster (measured on an H200)."""
ROWS = 64  # positions of a program


class Gathered(NamedTuple):
    """Which blocks the chunks of a step need."""

    blocks: Tensor  # [blocks] int32: places in the cache
    tables: Tensor  # [requests, blocks] int32: as the block tables of the step, with indices into `blocks`


def tile_gather(
    prefills: Sequence[tuple[int, int]], num_decodes: int, block_tables: Tensor, block_size: int
) -> Gathered | None:
    """The blocks of the chunks (start, stop), the requests from `num_decodes` on. None: too many, or the
    chunks are short."""
    counts = [-(-stop // block_size) for _, stop in prefills]
    tokens = sum(stop - start for start, stop in prefills)
    if sum(counts) * block_size > MOST_POSITIONS or tokens < LEAST_TOKENS * len(prefills):
        return None
    tables = np.zeros((num_decodes + len(prefills), max(counts)), dtype=np.int32)
    first = 0
    for table, count in zip(tables[num_decodes:], counts, strict=True):
        table[:count] = np.arange(first, first + count)
        first += count
    blocks = [table[:count] for table, count in zip(block_tables[num_decodes:], counts, strict=True)]
    return Gathered(torch.cat(blocks), *upload([tables], block_tables.device))


def gather(kv: Fp8KV, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """A plain cache that begins with these blocks; its other blocks are undefined."""
    _, num_blocks, block_size, kv_heads, head_dim = kv.values.shape
    room = MOST_POSITIONS // block_size
    out = torch.empty(2, room, block_size, kv_heads, head_dim, dtype=dtype, device=blocks.device)
    _gather[(len(blocks), triton.cdiv(block_size, ROWS), 2 * kv_heads)](
        *kv,
        blocks,
        out,
        num_blocks,
        room,
        BLOCK_SIZE=block_size,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        ROWS=ROWS,
    )
    return out


@triton.jit
def _gather(
    values,
    scales,
    blocks,
    out,
    num_blocks,
    room,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    to = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(2) % KV_HEADS
    is_value = (tl.program_id(2) // KV_HEADS).to(tl.int64)
    block = tl.load(blocks + to) + is_value * num_blocks
    inside = row < BLOCK_SIZE
    scale = tl.load(scales + (block * KV_HEADS + head) * BLOCK_SIZE + row, mask=inside, other=0.0)
    in_block = (row[:, None] * KV_HEADS + head) * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    SIZE: tl.constexpr = BLOCK_SIZE * KV_HEADS * HEAD_DIM
    x = tl.load(values + block * SIZE + in_block, mask=inside[:, None], other=0.0).to(tl.float32)
    y = (x * scale[:, None]).to(out.dtype.element_ty)
    tl.store(out + (is_value * room + to) * SIZE + in_block, y, mask=inside[:, None])
