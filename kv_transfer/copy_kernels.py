"""Slices between a paged pool and dense memory, any number in one launch, as a Triton kernel: for `CudaPool`.

    gather    dense[h, t, :] = pool[h, row of position start + t, heads, :]
    scatter   pool[h, row of position start + t, heads, :] = dense[h, t, :]        h = 0 (keys), 1 (values)

What differs between the slices of a batch is in a table on the device, a line for each: addresses of the
layer's pool, of the request's block table and of the dense memory. The heads of a slice are neighbours, so
each row is one run of bytes, moved as 32-bit words whatever the dtype: read once, written once, and no value
is ever looked at. In torch: `index_select`, `index_copy_`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kv_transfer.layout import Range, Slice

WORDS = 4096  # of one program: 16 KiB, 32 words a thread
WARPS = 4
FIELDS = 8  # of a line: see `line`


def line(
    pool: Tensor, blocks: Tensor, dense_address: int, piece: Slice, heads: Range, first_head: int
) -> list[int]:
    """A line of the table: `heads` of a slice, which are all heads of the slice or a part of them.

    pool [2, blocks, block size, heads from `first_head` on, head_dim], blocks [blocks of the request] int64:
    both must live until the launch is over, as must the dense [2, tokens, heads of the slice, head_dim] at
    that address."""
    words = pool.shape[4] * pool.itemsize // 4  # of a head
    dense = dense_address + 4 * words * (heads[0] - piece.head_start)
    return [
        pool.data_ptr(), blocks.data_ptr(), dense, piece.token_start, piece.token_count,
        (heads[0] - first_head) * words, (heads[1] - heads[0]) * words, piece.head_count * words,
    ]  # fmt: skip


def launch(table: Tensor, pool: Tensor, most_tokens: int, most_heads: int, *, into_pool: bool) -> None:
    """Move every line of `table` [lines, FIELDS] int64, on the device. `pool`: any of the layers, they are
    alike. `most_tokens`, `most_heads`: of any line. Scatter: no row may be named twice in a batch."""
    _, _, block_size, all_heads, head_dim = pool.shape
    assert pool.is_contiguous(), "rows are runs of bytes"
    assert head_dim * pool.itemsize % 4 == 0, "moved as 32-bit words"
    words = head_dim * pool.itemsize // 4
    columns = triton.next_power_of_2(most_heads * words)
    per_program = max(1, WORDS // columns)
    _copy[(triton.cdiv(most_tokens, per_program), 2, len(table))](
        table,
        all_heads * words,
        pool.stride(0) // head_dim * words,
        LINE=FIELDS,
        BLOCK=block_size,
        TOKENS=per_program,
        COLUMNS=columns,
        INTO_POOL=into_pool,
        num_warps=WARPS,
    )


@triton.jit
def _copy(
    table,
    pool_width,  # words of a row of the pool
    pool_half,  # words of the pool's keys
    LINE: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTO_POOL: tl.constexpr,
):
    half = tl.program_id(1).to(tl.int64)
    entry = table + tl.program_id(2) * LINE
    pool = tl.load(entry).to(tl.pointer_type(tl.int32))
    blocks = tl.load(entry + 1).to(tl.pointer_type(tl.int64))
    dense = tl.load(entry + 2).to(tl.pointer_type(tl.int32))
    start = tl.load(entry + 3)
    tokens = tl.load(entry + 4)
    first = tl.load(entry + 5)  # word in a row of the pool
    width = tl.load(entry + 6)  # words to move of each row
    dense_width = tl.load(entry + 7)  # words of a row of dense
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, COLUMNS)
    inside = (token < tokens)[:, None] & (column < width)[None, :]
    position = start + token
    block = tl.load(blocks + position // BLOCK, mask=token < tokens, other=0)
    row = block * BLOCK + position % BLOCK
    paged = pool + half * pool_half + row[:, None] * pool_width + first + column[None, :]
    packed = dense + (half * tokens + token.to(tl.int64)[:, None]) * dense_width + column[None, :]
    if INTO_POOL:
        tl.store(paged, tl.load(packed, mask=inside), mask=inside)
    else:
        tl.store(packed, tl.load(paged, mask=inside), mask=inside)
