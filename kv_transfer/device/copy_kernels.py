"""Slices between a paged pool and dense memory, any number in one launch, as Triton kernels: for `CudaPool`.

    gather    dense[h, t, heads, :] = pool[h, block, offset, heads, :] of position start + t
    scatter   pool[h, block, offset, heads, :] = dense[h, t, heads, :]        h: a row, such as keys or values
    convert   both, if `dense` is in a narrower dtype than the pool: as in `host_pool`

A *pool* is a tensor of one array of a cache in one layer, as `pool.planes` shows it. Its strides are
constants of the kernels, so a cache may have any order of dimensions, if a head of a position is a run of
bytes.

What differs between the slices of a batch is in a table on the device, a line for each: addresses of the
layer's pool, of the request's block table and of the dense memory. All is moved as 32-bit words whatever the
dtype: read once, written once, and no value is ever looked at. In torch: `index_select`, `index_copy_`.

The checksum of a slice is the sum of its 32-bit words, each mixed with its place in the slice. For one place
the mix is a bijection, so one wrong word is always found. The kernel that moves a slice sums it, too.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kv_names.cache_kinds import CacheArray
from baton.kv_transfer.device.pool import LARGEST_FP8, LEAST_OF_HEAD, Window

WORDS = 4096  # of one program: 16 KiB, 32 words a thread
WARPS = 4
PROGRAMS = 132
"""That write into the pool at the same time: one for each multiprocessor of an H200. So many keep a link to
another GPU busy. More read no faster, but hold the multiprocessors: a decode step took four times as long."""
FIELDS = 11  # of a line: see `Pages.line`
SUM_FIELDS = 3
_compiled: dict[tuple[torch.device, tuple[int, ...]], Any] = {}
"""Kernels of `_copy`. To look one up, Triton takes longer than to launch it."""
CONVERTED_FIELDS = 10
CONVERTED_HEADS = 32  # of one program
CONVERTED_DIMS = 128  # of a piece of a state
LARGEST, LEAST = tl.constexpr(LARGEST_FP8), tl.constexpr(LEAST_OF_HEAD)
SHIFT = tl.constexpr(2.0**120)
LEAST_NORMAL = tl.constexpr(2.0**-6)  # of FP8
ROUNDER = tl.constexpr(2.0**14)
"""Neighbours of this number in float32 differ by the least number above 0 of FP8."""


@dataclass(frozen=True, slots=True)
class Pages:
    """Shape and strides of a pool, in 32-bit words."""

    rows: int
    block_size: int
    """Positions of a block."""
    pieces: int
    """Into how many neighbours the kernel cuts a large head, since a program moves whole ones. Each is a
    position of its own. 1, unless positions have one head."""
    words: int
    """Of a piece."""
    row: int
    """Stride, as are the next three."""
    block: int
    position: int
    head: int

    @classmethod
    def of(cls, pool: Tensor) -> "Pages":
        """`pool` as in `pool.planes`."""
        rows, _, block_size, heads, _ = pool.shape
        sizes = [stride * pool.itemsize for stride in (*pool.stride()[:4], pool.shape[4])]
        assert pool.stride(4) == 1, "a head is a run of bytes"
        assert all(size % 4 == 0 for size in sizes), "moved as 32-bit words"
        row, block, position, head, words = (size // 4 for size in sizes)
        if block_size == 1:
            position = words  # nor has a single position
        pieces = 1
        while heads == 1 and words > WORDS and words % 2 == 0:
            words, pieces = words // 2, 2 * pieces
        if heads == 1:
            head = words  # it has no neighbour
        assert pieces == 1 or position == pieces * words, "positions are neighbours"
        return cls(rows, block_size * pieces, pieces, words, row, block, position // pieces, head)

    def line(
        self, pool: int, blocks: int, dense: int, part: Window, checksum: int, first_word: int = 0
    ) -> list[int]:
        """A line of the table, for the part of a slice that a rank holds.

        Addresses of the pool, of int64 [blocks of the request] and of the dense slice: all of them live until
        the launch is over. `checksum`: the address of an int64 that the sum is added to; `first_word`: the
        place of `dense` in the slice."""
        words, pieces = self.words, self.pieces
        skipped = (part.dense_start * pieces * part.dense_heads + part.dense_head) * words
        return [
            pool, blocks, dense + 4 * skipped, part.start * pieces, part.count * pieces,
            part.first_head * words, part.heads * words, part.dense_heads * words, checksum,
            first_word + skipped, part.dense_positions * pieces,
        ]  # fmt: skip


def launch(table: Tensor, pages: Pages, most: tuple[int, int], *, into_pool: bool) -> None:
    """Move every line of `table` [lines, FIELDS] int64, on the device, and add up its checksum. `most`:
    positions and heads of any line. Scatter: no position may be named twice in a batch."""
    most_positions, most_heads = most
    columns = _power_of_2(most_heads * pages.words)
    per_program = max(1, WORDS // columns)
    tiles = _cdiv(most_positions * pages.pieces, per_program)
    items = pages.rows * tiles * len(table)
    grid = (min(PROGRAMS, items) if into_pool else items, 1, 1)
    # In the order of the kernel's parameters: a compiled kernel takes them as they stand.
    fixed = (
        pages.row, pages.rows, FIELDS, pages.block_size, pages.block, pages.position, pages.head, pages.words,
        per_program, columns, into_pool,
    )  # fmt: skip
    compiled = _compiled.get((table.device, fixed))
    if compiled is not None:
        compiled[grid](table, items, tiles, *fixed)
        return
    compiled = _copy[grid](table, items, tiles, *fixed, num_warps=WARPS)
    if compiled is not None:  # not interpreted
        _compiled[table.device, fixed] = compiled


def launch_sums(table: Tensor, most_words: int) -> None:
    """Adds up checksums only, for each line of `table` [lines, SUM_FIELDS] int64: (address of the slice, its
    32-bit words, address of the checksum). `most_words`: of any line."""
    _sum[(_cdiv(most_words, WORDS), len(table))](table, LINE=SUM_FIELDS, COLUMNS=WORDS, num_warps=WARPS)


def line_to_convert(pool: int, blocks: int, dense: int, part: Window) -> list[int]:
    """As `Pages.line`, for `launch_converting`."""
    return [
        pool, blocks, dense, part.start, part.count, part.first_head, part.heads,
        part.dense_start * part.dense_heads + part.dense_head, part.dense_heads, part.dense_positions,
    ]  # fmt: skip


def pieces_to_convert(array: CacheArray) -> int:
    """Into how many neighbours a head is cut: a program converts all of one. A state of a head is large, and
    has no scale. It is a position of its own, and so is each piece."""
    pieces, dims = 1, array.head_dim
    while not array.per_token and dims > CONVERTED_DIMS and dims % 2 == 0:
        pieces, dims = 2 * pieces, dims // 2
    return pieces


def launch_converting(
    table: Tensor, pool: Tensor, dtype: torch.dtype, most: int, pieces: int = 1, *, into_pool: bool
) -> None:
    """Moves every line of `table` [lines, CONVERTED_FIELDS] from or to dense memory of `dtype`. `pool`: of
    any of the layers, as they are alike. `most`: heads of all positions, of any line. `pieces`: as
    `pieces_to_convert`; lines count them."""
    if pieces > 1:
        pool = pool.squeeze(3).unflatten(3, (pieces, -1)).flatten(2, 3).unsqueeze(3)
    row, *strides, _ = pool.stride()
    _convert[(_cdiv(most, CONVERTED_HEADS), pool.shape[0], len(table))](
        table,
        row,
        LINE=CONVERTED_FIELDS,
        POOL=_ELEMENTS[pool.dtype],
        DENSE=_ELEMENTS[dtype],
        INTO_POOL=into_pool,
        BLOCK=pool.shape[2],
        STRIDES=tuple(strides),
        HEAD_DIM=pool.shape[4],
        DIMS=_power_of_2(pool.shape[4]),
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
    pool_half,  # words from the pool's keys to its values: it depends on the number of blocks
    HALVES: tl.constexpr,
    LINE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    POSITION_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    HEAD_WORDS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTO_POOL: tl.constexpr,
):
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        half = (item // tiles % HALVES).to(tl.int64)
        entry = table + item // (HALVES * tiles) * LINE
        pool = tl.load(entry).to(tl.pointer_type(tl.int32))
        blocks = tl.load(entry + 1).to(tl.pointer_type(tl.int64))
        dense = tl.load(entry + 2).to(tl.pointer_type(tl.int32))
        start = tl.load(entry + 3)
        tokens = tl.load(entry + 4)
        first = tl.load(entry + 5)  # word of a position, as if its heads were neighbours
        width = tl.load(entry + 6)  # words to move of each position
        dense_width = tl.load(entry + 7)  # words of a position of dense
        dense_tokens = tl.load(entry + 10)  # positions of dense, of each half
        token = item % tiles * TOKENS + tl.arange(0, TOKENS)
        column = tl.arange(0, COLUMNS)
        inside = (token < tokens)[:, None] & (column < width)[None, :]
        position = start + token
        block = tl.load(blocks + position // BLOCK, mask=token < tokens, other=0)
        row = block * BLOCK_STRIDE + position % BLOCK * POSITION_STRIDE
        paged = pool + half * pool_half + row[:, None]
        if HEAD_STRIDE == HEAD_WORDS:
            paged += first + column[None, :]
        else:
            word = first + column
            paged += (word // HEAD_WORDS * HEAD_STRIDE + word % HEAD_WORDS)[None, :]
        place = (half * dense_tokens + token.to(tl.int64)[:, None]) * dense_width + column[None, :]
        if INTO_POOL:
            words = tl.load(dense + place, mask=inside, other=0)
            tl.store(paged, words, mask=inside)
        else:
            words = tl.load(paged, mask=inside, other=0)
            tl.store(dense + place, words, mask=inside)
        checksum = tl.load(entry + 8).to(tl.pointer_type(tl.int64))
        tl.atomic_add(checksum, _mixed(words, tl.load(entry + 9) + place, inside))


@triton.jit
def _convert(
    table,
    pool_half,  # elements from the pool's keys to its values
    LINE: tl.constexpr,
    POOL: tl.constexpr,
    DENSE: tl.constexpr,
    INTO_POOL: tl.constexpr,
    BLOCK: tl.constexpr,
    STRIDES: tl.constexpr,  # of blocks, positions and heads
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    HEADS: tl.constexpr,
):
    half = tl.program_id(1).to(tl.int64)
    entry = table + tl.program_id(2) * LINE
    pool = tl.load(entry).to(tl.pointer_type(POOL))
    blocks = tl.load(entry + 1).to(tl.pointer_type(tl.int64))
    address = tl.load(entry + 2)
    start = tl.load(entry + 3)
    tokens = tl.load(entry + 4)
    heads = tl.load(entry + 6)
    dense_heads = tl.load(entry + 8)
    dense_tokens = tl.load(entry + 9)
    number = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    token = number // heads
    head = number - token * heads
    inside = token < tokens
    dense_head = (half * dense_tokens + token) * dense_heads + tl.load(entry + 7) + head
    dims = tl.arange(0, DIMS)[None, :]
    values = inside[:, None]
    if DIMS != HEAD_DIM:
        values &= dims < HEAD_DIM
    at = dense_head[:, None] * HEAD_DIM + dims
    scales = address + tl.num_programs(1) * dense_tokens * dense_heads * HEAD_DIM
    scales = scales.to(tl.pointer_type(tl.float32)) + dense_head
    position = start + token
    block = tl.load(blocks + position // BLOCK, mask=inside, other=0)
    row = block * STRIDES[0] + position % BLOCK * STRIDES[1] + (tl.load(entry + 5) + head) * STRIDES[2]
    paged = pool + half * pool_half + row[:, None] + dims
    if INTO_POOL:
        if tl.float8e4nv == DENSE:
            x = _decoded(tl.load(address.to(tl.pointer_type(tl.uint8)) + at, mask=values, other=0))
            x *= tl.load(scales, mask=inside)[:, None]
        else:
            x = tl.load(address.to(tl.pointer_type(DENSE)) + at, mask=values, other=0).to(tl.float32)
        tl.store(paged, x.to(POOL), mask=values)
    else:
        x = tl.load(paged, mask=values, other=0).to(tl.float32)
        if tl.float8e4nv == DENSE:
            # Rounded to nearest, as on a CPU: `/` is not.
            scale = tl.div_rn(tl.maximum(tl.max(tl.abs(x), axis=1), LEAST), LARGEST)
            tl.store(scales, scale, mask=inside)
            x = tl.div_rn(x, scale[:, None])
            tl.store(address.to(tl.pointer_type(tl.uint8)) + at, _encoded(x), mask=values)
        else:
            tl.store(address.to(tl.pointer_type(DENSE)) + at, x.to(DENSE), mask=values)


@triton.jit
def _decoded(bits):
    """FP8 numbers (e4m3, uint8) as float32, also on GPUs that have no FP8. Exponent and mantissa keep their
    order of bits. The exponent of float32 has another bias, so the number is 2¹²⁰ times too small."""
    bits = bits.to(tl.int32)
    magnitude = ((bits & 0x7F) << 20).to(tl.float32, bitcast=True) * SHIFT
    magnitude = tl.where((bits & 0x7F) == 0x7F, float("nan"), magnitude)
    return tl.where(bits >= 0x80, -magnitude, magnitude)


@triton.jit
def _encoded(x):
    """The nearest FP8 numbers (e4m3, uint8) of float32 up to 464, the even one of two; else NaN. Also on GPUs
    that have no FP8."""
    magnitude = tl.abs(x)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    small = (magnitude + ROUNDER).to(tl.int32, bitcast=True) & 0xF
    rounded = tl.where(magnitude < LEAST_NORMAL, small, tl.minimum(normal, 0x7F))
    rounded = tl.where(x == x, rounded, 0x7F)
    return (rounded | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)
