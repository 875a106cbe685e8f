"""Slices between a paged pool and dense memory, any number in one launch, as Triton kernels: for `CudaPool`.

    gather    dense[h, t, :] = pool[h, row of position start + t, heads, :]
    scatter   pool[h, row of position start + t, heads, :] = dense[h, t, :]        h = 0 (keys), 1 (values)
    convert   scatter, from another dtype than that of the pool: as in `convert`

What differs between the slices of a batch is in a table on the device, a line for each: addresses of the
layer's pool, of the request's block table and of the dense memory. The heads of a slice are neighbours, so
each row is one run of bytes, moved as 32-bit words whatever the dtype: read once, written once, and no value
is ever looked at. In torch: `index_select`, `index_copy_`. The scales of FP8 are a pool of their own, where
the positions of a head are neighbours. In dense memory the scale of a head is a row of one word.

A slice of a state is moved in the same way: dense[row, h, :] = pool[slot, row, head start + h, :]. For the
kernel its heads are positions, of a request with one block, and its rows are what keys and values are of KV.

The checksum of a slice is the sum of its 32-bit words, each mixed with its place in the slice. For one place
the mix is a bijection, so one wrong word is always found. The kernel that moves a slice can sum it, too.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kv_transfer.device import convert
from baton.kv_transfer.layout import Range, Slice

WORDS = 4096  # of one program: 16 KiB, 32 words a thread
WARPS = 4
PROGRAMS = 132
"""That write into the pool at the same time: one for each multiprocessor of an H200. So many keep a link to
another GPU busy. More read no faster, but hold the multiprocessors: a decode step took four times as long."""
FIELDS = 11  # of a line: see `line`
SUM_FIELDS = 3
_compiled: dict[tuple[torch.device, tuple[int, ...]], Any] = {}
"""Kernels of `_copy`. To look one up, Triton takes longer than to launch it."""
CONVERTED_FIELDS = 10
CONVERTED_HEADS = 32  # of one program
LARGEST, LEAST = tl.constexpr(convert.LARGEST), tl.constexpr(convert.LEAST)
SHIFT = tl.constexpr(2.0**120)


def line(
    pool: Tensor, blocks: Tensor, dense_address: int, piece: Slice, heads: Range, first_head: int,
    *, checksum: int = 0, first_word: int = 0,
) -> list[int]:  # fmt: skip
    """A line of the table: `heads` of a slice, which are all heads of the slice or a part of them.

    pool [2, blocks, block size, heads from `first_head` on, head_dim], or scales [2, blocks, heads, block
    size]; blocks [blocks of the request] int64: both must live until the launch is over, as must the dense
    [2, tokens, heads of the slice, head_dim] at that address. `checksum`: the address of an int64 that the
    sum is added to; `first_word`: the place of `dense` in the slice."""
    return line_at(
        pool.data_ptr(), head_words(pool), blocks.data_ptr(), dense_address, piece, heads, first_head,
        checksum, first_word,
    )  # fmt: skip


def line_at(
    pool: int, words: int, blocks: int, dense: int, piece: Slice, heads: Range, first_head: int,
    checksum: int, first_word: int,
) -> list[int]:  # fmt: skip
    """As `line`, with the addresses of tensors, and the words of a head. Torch takes long to tell them."""
    skipped = words * (heads[0] - piece.head_start)
    tokens = piece.token_count
    return [
        pool, blocks, dense + 4 * skipped, piece.token_start, tokens, (heads[0] - first_head) * words,
        (heads[1] - heads[0]) * words, piece.head_count * words, checksum, first_word + skipped, tokens,
    ]  # fmt: skip


def launch(
    table: Tensor, pool: Tensor, most_tokens: int, most_heads: int, *, into_pool: bool, sums: bool = False
) -> None:
    """Move every line of `table` [lines, FIELDS] int64, on the device. `pool`: any of the layers, they are
    alike. `most_tokens`, `most_heads`: of any line. Scatter: no row may be named twice in a batch.
    `sums`: add up the checksums."""
    scales = pool.dim() == 4
    block_size, all_heads = (pool.shape[3], pool.shape[2]) if scales else pool.shape[2:4]
    assert pool.is_contiguous(), "rows are runs of bytes"
    assert pool.shape[-1] * pool.itemsize % 4 == 0, "moved as 32-bit words"
    words = head_words(pool)
    _launch(
        table, 2, most_tokens, most_heads * words, all_heads * words,
        pool.stride(0) * pool.itemsize // 4, block_size, into_pool=into_pool, sums=sums, scales=scales,
    )  # fmt: skip


def state_line(
    pool: Tensor, slot: Tensor, dense_address: int, piece: Slice, heads: Range, first_head: int,
    *, checksum: int = 0,
) -> list[int]:  # fmt: skip
    """As `line`, for `launch_states`. pool [slots, rows, heads from `first_head` on, head_dim]; slot [1]
    int64, on the device; dense [rows, heads of the slice, head_dim]."""
    parts, words = _parts(pool)
    skipped = (heads[0] - piece.head_start) * parts * words
    return [
        pool.data_ptr(), slot.data_ptr(), dense_address + 4 * skipped, (heads[0] - first_head) * parts,
        (heads[1] - heads[0]) * parts, 0, words, words, checksum, skipped, piece.head_count * parts,
    ]  # fmt: skip


def launch_states(
    table: Tensor, pool: Tensor, most_heads: int, *, into_pool: bool, sums: bool = False
) -> None:
    """As `launch`, for slices of one state of any layers. `pool`: of any of the layers."""
    parts, words = _parts(pool)
    slot_words, row_words = (stride * pool.itemsize // 4 for stride in pool.stride()[:2])
    _launch(
        table, pool.shape[1], most_heads * parts, words, words, row_words, slot_words // words,
        into_pool=into_pool, sums=sums,
    )  # fmt: skip


def _launch(
    table: Tensor, halves: int, most_rows: int, most_words: int, pool_width: int, pool_half: int,
    block_size: int, *, into_pool: bool, sums: bool, scales: bool = False,
) -> None:  # fmt: skip
    """`most_rows`: of a half of any line; `most_words`: of any row. The others are those of `_copy`."""
    columns = _power_of_2(most_words)
    per_program = max(1, WORDS // columns)
    tiles = _cdiv(most_rows, per_program)
    items = halves * tiles * len(table)
    grid = (min(PROGRAMS, items) if into_pool else items, 1, 1)
    # In the order of the kernel's parameters: a compiled kernel takes them as they stand.
    fixed = (
        pool_width, pool_half, halves, FIELDS, block_size, per_program, columns, into_pool, scales, sums
    )  # fmt: skip
    compiled = _compiled.get((table.device, fixed))
    if compiled is not None:
        compiled[grid](table, items, tiles, *fixed)
        return
    compiled = _copy[grid](table, items, tiles, *fixed, num_warps=WARPS)
    if compiled is not None:  # not interpreted
        _compiled[table.device, fixed] = compiled


def _parts(pool: Tensor) -> tuple[int, int]:
    """Into how many parts the kernel cuts a head of a state, and the 32-bit words of each. A program moves
    whole parts. A slot has a whole number of them, too: this is the size of the request's one block."""
    assert pool[0, 0].is_contiguous(), "heads are runs of bytes"
    head, slot, row = (n * pool.itemsize for n in (pool.shape[3], *pool.stride()[:2]))
    assert head % 4 == slot % 4 == row % 4 == 0, "moved as 32-bit words"
    words = math.gcd(head // 4, slot // 4)
    while words > WORDS and words % 2 == 0:
        words //= 2
    return head // 4 // words, words


def launch_sums(table: Tensor, most_words: int) -> None:
    """Adds up checksums only, for each line of `table` [lines, SUM_FIELDS] int64: (address of the slice, its
    32-bit words, address of the checksum). `most_words`: of any line."""
    _sum[(_cdiv(most_words, WORDS), len(table))](table, LINE=SUM_FIELDS, COLUMNS=WORDS, num_warps=WARPS)


def line_to_convert(
    pool: Tensor,
    scales: Tensor | None,
    blocks: Tensor,
    dense_address: int,
    piece: Slice,
    heads: Range,
    first_head: int,
) -> list[int]:
    """As `line`, for `launch_converting`. `scales`: of a pool in FP8."""
    return [
        pool.data_ptr(), 0 if scales is None else scales.data_ptr(), blocks.data_ptr(), dense_address,
        piece.token_start, piece.token_count, heads[0] - first_head, heads[1] - heads[0],
        heads[0] - piece.head_start, piece.head_count,
    ]  # fmt: skip


def launch_converting(table: Tensor, pool: Tensor, dtype: torch.dtype, most: int) -> None:
    """Scatters every line of `table` [lines, CONVERTED_FIELDS] from dense memory of `dtype`. `most`: heads of
    all positions, of any line."""
    _, _, block_size, all_heads, head_dim = pool.shape
    _convert[(_cdiv(most, CONVERTED_HEADS), 2, len(table))](
        table,
        pool.stride(0),
        LINE=CONVERTED_FIELDS,
        FROM=_ELEMENTS[dtype],
        TO=_ELEMENTS[pool.dtype],
        BLOCK=block_size,
        POOL_HEADS=all_heads,
        HEAD_DIM=head_dim,
        HEADS=CONVERTED_HEADS,
        num_warps=WARPS,
    )


_ELEMENTS = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float8_e4m3fn: tl.float8e4nv,
}


def _cdiv(count: int, each: int) -> int:
    return -(-count // each)  # that of Triton takes 5 µs


def _power_of_2(least: int) -> int:
    return 1 << (least - 1).bit_length()


def head_words(pool: Tensor) -> int:
    """32-bit words of a head of one position."""
    return 1 if pool.dim() == 4 else pool.shape[4] * pool.itemsize // 4


@triton.jit
def _mixed(words, places, inside):
    """The sum of words, each mixed with its place."""
    x = words.to(tl.uint32, bitcast=True) ^ (places.to(tl.uint32) * 0x9E3779B1)
    x *= 0x85EBCA6B
    x ^= x >> 15
    x *= 0xC2B2AE35
    x ^= x >> 13
    return tl.sum(tl.where(inside, x.to(tl.int64), 0).reshape(words.numel))


@triton.jit
def _sum(table, LINE: tl.constexpr, COLUMNS: tl.constexpr):
    entry = table + tl.program_id(1) * LINE
    dense = tl.load(entry).to(tl.pointer_type(tl.int32))
    place = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = place < tl.load(entry + 1)
    checksum = tl.load(entry + 2).to(tl.pointer_type(tl.int64))
    tl.atomic_add(checksum, _mixed(tl.load(dense + place, mask=inside, other=0), place, inside))


@triton.jit(do_not_specialize=["table", "items", "tiles"])  # compiled once, for any batch
def _copy(
    table,
    items,  # tiles of all halves of all lines
    tiles,  # of a half of a line
    pool_width,  # words of a row of the pool
    pool_half,  # words of the pool's keys
    HALVES: tl.constexpr,
    LINE: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTO_POOL: tl.constexpr,
    SCALES: tl.constexpr,
    SUMS: tl.constexpr,
):
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        half = (item // tiles % HALVES).to(tl.int64)
        entry = table + item // (HALVES * tiles) * LINE
        pool = tl.load(entry).to(tl.pointer_type(tl.int32))
        blocks = tl.load(entry + 1).to(tl.pointer_type(tl.int64))
        dense = tl.load(entry + 2).to(tl.pointer_type(tl.int32))
        start = tl.load(entry + 3)
        tokens = tl.load(entry + 4)
        first = tl.load(entry + 5)  # word in a row of the pool
        width = tl.load(entry + 6)  # words to move of each row
        dense_width = tl.load(entry + 7)  # words of a row of dense
        dense_tokens = tl.load(entry + 10)  # rows of dense, of each half
        token = item % tiles * TOKENS + tl.arange(0, TOKENS)
        column = tl.arange(0, COLUMNS)
        inside = (token < tokens)[:, None] & (column < width)[None, :]
        position = start + token
        block = tl.load(blocks + position // BLOCK, mask=token < tokens, other=0)
        if SCALES:
            in_block = (first + column) * BLOCK
            paged = block[:, None] * (pool_width * BLOCK) + in_block[None, :] + (position % BLOCK)[:, None]
            paged = pool + half * pool_half + paged
        else:
            row = block * BLOCK + position % BLOCK
            paged = pool + half * pool_half + row[:, None] * pool_width + first + column[None, :]
        place = (half * dense_tokens + token.to(tl.int64)[:, None]) * dense_width + column[None, :]
        if INTO_POOL:
            words = tl.load(dense + place, mask=inside, other=0)
            tl.store(paged, words, mask=inside)
        else:
            words = tl.load(paged, mask=inside, other=0)
            tl.store(dense + place, words, mask=inside)
        if SUMS:
            checksum = tl.load(entry + 8).to(tl.pointer_type(tl.int64))
            tl.atomic_add(checksum, _mixed(words, tl.load(entry + 9) + place, inside))


@triton.jit
def _convert(
    table,
    pool_half,  # elements of the pool's keys
    LINE: tl.constexpr,
    FROM: tl.constexpr,
    TO: tl.constexpr,
    BLOCK: tl.constexpr,
    POOL_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
):
    half = tl.program_id(1).to(tl.int64)
    entry = table + tl.program_id(2) * LINE
    pool = tl.load(entry).to(tl.pointer_type(TO))
    blocks = tl.load(entry + 2).to(tl.pointer_type(tl.int64))
    address = tl.load(entry + 3)
    start = tl.load(entry + 4)
    tokens = tl.load(entry + 5)
    heads = tl.load(entry + 7)
    dense_heads = tl.load(entry + 9)
    number = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    token, head = number // heads, number % heads
    inside = token < tokens
    from_head = (half * tokens + token) * dense_heads + tl.load(entry + 8) + head
    dims = tl.arange(0, HEAD_DIM)[None, :]
    at = from_head[:, None] * HEAD_DIM + dims
    if tl.float8e4nv != FROM:
        x = tl.load(address.to(tl.pointer_type(FROM)) + at, mask=inside[:, None]).to(tl.float32)
    else:
        x = _decoded(tl.load(address.to(tl.pointer_type(tl.uint8)) + at, mask=inside[:, None], other=0))
        scales = (address + 2 * tokens * dense_heads * HEAD_DIM).to(tl.pointer_type(tl.float32))
        x *= tl.load(scales + from_head, mask=inside)[:, None]
    position = start + token
    block = tl.load(blocks + position // BLOCK, mask=inside, other=0)
    to_head = tl.load(entry + 6) + head
    if tl.float8e4nv == TO:
        # Rounded to nearest, as on a CPU: `/` is not.
        scale = tl.div_rn(tl.maximum(tl.max(tl.abs(x), axis=1), LEAST), LARGEST)
        x = tl.div_rn(x, scale[:, None])
        place = half * (pool_half // HEAD_DIM) + (block * POOL_HEADS + to_head) * BLOCK + position % BLOCK
        tl.store(tl.load(entry + 1).to(tl.pointer_type(tl.float32)) + place, scale, mask=inside)
    row = block * BLOCK + position % BLOCK
    paged = pool + half * pool_half + ((row * POOL_HEADS + to_head) * HEAD_DIM)[:, None] + dims
    tl.store(paged, x.to(TO), mask=inside[:, None])


@triton.jit
def _decoded(bits):
    """FP8 numbers (e4m3, uint8) as float32, also on GPUs that have no FP8. Exponent and mantissa keep their
    order of bits. The exponent of float32 has another bias, so the number is 2¹²⁰ times too small."""
    bits = bits.to(tl.int32)
    magnitude = ((bits & 0x7F) << 20).to(tl.float32, bitcast=True) * SHIFT
    magnitude = tl.where((bits & 0x7F) == 0x7F, float("nan"), magnitude)
    return tl.where(bits >= 0x80, -magnitude, magnitude)
