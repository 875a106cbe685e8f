"""One slice between a paged pool and dense memory, as Triton kernels: what `CudaPool` launches.

    gather    dense[h, t, :] = pool[h, rows[t], heads, :]
    scatter   pool[h, rows[t], heads, :] = dense[h, t, :]        h = 0 (keys), 1 (values)

The heads of a slice are neighbours, so each row is one run of bytes, moved as 32-bit words whatever the
dtype: read once, written once, and no value is ever looked at. In torch: `index_select`, `index_copy_`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

WORDS = 4096  # of one program: 16 KiB, 32 words a thread
WARPS = 4


def gather(pool: Tensor, rows: Tensor, head_start: int, dense: Tensor) -> None:
    """pool [2, all rows, all heads, head_dim] → dense [2, tokens, heads, head_dim], contiguous both; the
    heads from head_start on; rows [tokens] int64."""
    _launch(pool, rows, head_start, dense, into_pool=False)


def scatter(dense: Tensor, pool: Tensor, rows: Tensor, head_start: int) -> None:
    """The reverse. No row may be named twice."""
    _launch(pool, rows, head_start, dense, into_pool=True)


def _launch(pool: Tensor, rows: Tensor, head_start: int, dense: Tensor, *, into_pool: bool) -> None:
    tokens, heads, head_dim = dense.shape[1:]
    assert pool.is_contiguous(), "rows are runs of bytes"
    assert dense.is_contiguous(), "rows are runs of bytes"
    assert head_dim * dense.itemsize % 4 == 0, "moved as 32-bit words"
    assert rows.shape == (tokens,), f"{tokens} tokens, rows for {tuple(rows.shape)}"
    head_words = head_dim * dense.itemsize // 4
    columns = triton.next_power_of_2(heads * head_words)
    per_program = max(1, WORDS // columns)
    _copy[(triton.cdiv(tokens, per_program), 2)](
        pool.view(torch.int32),
        rows,
        dense.view(torch.int32),
        tokens,
        heads * head_words,
        head_start * head_words,
        pool.shape[2] * head_words,
        pool.stride(0) // head_dim * head_words,
        TOKENS=per_program,
        COLUMNS=columns,
        INTO_POOL=into_pool,
        num_warps=WARPS,
    )


# One compiled kernel for slices of any length, from wherever in a table.
@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["rows"])
def _copy(
    pool,
    rows,
    dense,
    tokens,
    width,  # words of a row of dense
    first,  # word in a row of the pool
    pool_width,
    pool_half,  # words of the pool's keys
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTO_POOL: tl.constexpr,
):
    half = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, COLUMNS)
    inside = (token < tokens)[:, None] & (column < width)[None, :]
    row = tl.load(rows + token, mask=token < tokens, other=0)
    paged = pool + half * pool_half + row[:, None] * pool_width + first + column[None, :]
    packed = dense + half * tokens * width + token.to(tl.int64)[:, None] * width + column[None, :]
    if INTO_POOL:
        tl.store(paged, tl.load(packed, mask=inside), mask=inside)
    else:
        tl.store(packed, tl.load(paged, mask=inside), mask=inside)
