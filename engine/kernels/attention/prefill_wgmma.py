"""`prefill_attention` for Hopper's tensor cores, in Gluon: a paged cache, or `Expanded` keys and values.

*Warp specialization* (FlashAttention-3, Shah 2024): a program has three groups of four warps. One looks up
blocks and lets the copy engine load tiles of keys and values. The other two have half of the queries each,
and wait for nothing but these tiles. So the softmax of one group runs beside the products of the other.

Within a group, the products of a tile run while the softmax of the next tile is computed:

    scores of tile i + 1 │ sums += weights of tile i · values of tile i
                         │ softmax of tile i + 1
                         │                       scores of tile i + 2 │ sums += …

Programs of some heads begin together (a *section*), the longest first. The keys and values of so many heads
fit into half of the L2 cache. With more heads, each program would read its keys from memory. With fewer, too
few programs are left for the last wave.

A program has the keys [begin, end) of a tile (`tile_work`), and counts positions from `begin` on.
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from baton.engine.kernels.attention.online_softmax import Expanded
from baton.engine.kernels.attention.tiles import TILE_FIELDS
from baton.engine.kernels.launch import on_hopper
from baton.engine.kernels.warp_groups import barrier, barriers, clear

BLOCK_M = 128  # rows: (token, head of the group) pairs
HEAD_DIMS = {128: 128, 256: 64}  # of keys; and keys of a tile
LEAST_PART = 16  # positions: parts of a tile begin at whole rows of the swizzle, which are 8
STAGES = gl.constexpr(2)  # tiles of keys, and of values, in shared memory
WIDTH = gl.constexpr(64)  # dims of a row of shared memory
REGISTERS = 240, 24  # of a thread that multiplies, and of one that loads
FIELDS = gl.constexpr(TILE_FIELDS)
ROW = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # of [rows, WIDTH]


def suits(dtype: torch.dtype, head_dim: int, block_size: int) -> bool:
    """Whether the kernel supports queries and blocks of this kind on this device."""
    has_form = dtype.itemsize == 2 and head_dim in HEAD_DIMS
    return has_form and part_of_tile(head_dim, block_size) >= LEAST_PART and on_hopper()


def part_of_tile(head_dim: int, block_size: int) -> int:
    """The positions that one copy loads: the most that lie in one block, wherever a tile begins."""
    return math.gcd(HEAD_DIMS[head_dim], block_size)


def attend(
    q: Tensor,
    kv: Tensor | Expanded,
    block_tables: Tensor,
    work: Tensor,
    out: Tensor,
    partial: Tensor,
    lse: Tensor,
    scale: float,
) -> None:
    """As `prefill_attention`, for tiles of `BLOCK_M` rows. partial and lse: as `combine_tiles` reads them.
    `scale`: times log₂ e."""
    keys, values = (x.squeeze(0) for x in kv) if isinstance(kv, Expanded) else kv
    _, block_size, kv_heads, head_dim = keys.shape
    value_dim, block_n = values.shape[3], HEAD_DIMS[head_dim]
    swizzled, part = gl.NVMMASharedLayout(128, 16, rank=2), part_of_tile(head_dim, block_size)
    tiles: list[Any] = [
        TensorDescriptor.from_tensor(x.view(-1, kv_heads * x.shape[3]), [part, x.shape[3]], swizzled)
        for x in (keys, values)
    ]
    _attend[(kv_heads * len(work),)](
        q,
        *tiles,
        block_tables,
        work,
        out,
        partial,
        lse,
        scale,
        q.stride(0),
        out.stride(0),
        block_tables.stride(0),
        len(work),
        _l2_bytes(q.device) // (2 * (head_dim + value_dim) * q.itemsize),
        KV_HEADS=kv_heads,
        GROUP=q.shape[1] // kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        BLOCK_M=BLOCK_M,
        BLOCK_N=block_n,
        FINITE=isinstance(kv, Expanded),
        REGISTERS=REGISTERS,
        num_warps=4,
    )


@functools.cache
def _l2_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0


@gluon.jit
def _section(positions, most_positions, KV_HEADS: gl.constexpr):
    """Heads of a section: all sections have as many. `positions`: of all contexts."""
    most = most_positions // gl.maximum(positions, 1)
    heads = 1
    for n in gl.static_range(2, KV_HEADS + 1):
        if KV_HEADS % n == 0:
            heads = gl.where(n <= most, n, heads)
    return heads


@gluon.jit
def _ring(dtype: gl.constexpr, ROWS: gl.constexpr, DIM: gl.constexpr):
    """Places for tiles in shared memory; barriers for those that are loaded; and for those that both groups
    have read."""
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    return (
        gl.allocate_shared_memory(dtype, [STAGES, ROWS, DIM], shared),
        barriers(STAGES, 1),
        barriers(STAGES, 2),
    )


@gluon.jit
def _load(tile, ring, tiles, table, begin, end, head, BLOCK_SIZE: gl.constexpr):
    """Loads a tile once its place is free. A tile may be in several blocks, but each part is in one."""
    buffers, loaded, free = ring
    BLOCK_N: gl.constexpr = buffers.shape[1]
    ROWS: gl.constexpr = tiles.block_shape[0]
    stage = tile % STAGES
    mbarrier.wait(free.index(stage), tile // STAGES & 1 ^ 1)
    barrier()  # no warp may be a round behind
    mbarrier.expect(loaded.index(stage), tiles.block_type.nbytes * (BLOCK_N // ROWS))
    for part in gl.static_range(BLOCK_N // ROWS):
        position = begin + tile * BLOCK_N + part * ROWS
        block = gl.load(table + position // BLOCK_SIZE, mask=position < end, other=0)
        at = [block * BLOCK_SIZE + position % BLOCK_SIZE, head * tiles.block_shape[1]]
        to = buffers.index(stage).slice(part * ROWS, ROWS, dim=0)
        tma.async_copy_global_to_shared(tiles, at, loaded.index(stage), to)


@gluon.jit
def _produce(count, begin, end, key_tiles, value_tiles, table, head, keys, values, BLOCK_SIZE: gl.constexpr):
    for i in range(count):
        _load(i, keys, key_tiles, table, begin, end, head, BLOCK_SIZE)
        _load(i, values, value_tiles, table, begin, end, head, BLOCK_SIZE)


@gluon.jit
def _scores(queries, tile, ring, zeros):
    """Begins to multiply the queries with a tile of keys."""
    buffers, loaded, _ = ring
    mbarrier.wait(loaded.index(tile % STAGES), tile // STAGES & 1)
    keys = buffers.index(tile % STAGES).permute((1, 0))
    return warpgroup_mma(queries, keys, zeros, use_acc=False, is_async=True)


@gluon.jit
def _sums(weights, tile, ring, acc):
    """Begins to add a tile of values with these weights."""
    buffers, loaded, _ = ring
    mbarrier.wait(loaded.index(tile % STAGES), tile // STAGES & 1)
    return warpgroup_mma(weights, buffers.index(tile % STAGES), acc, is_async=True)


@gluon.jit
def _has_read(tile, ring):
    barrier()  # all warps of the group
    mbarrier.arrive(ring[2].index(tile % STAGES))


@gluon.jit
def _softmax(scores, tile, query, m, total, scale):
    """`query`: positions of the rows, which see no later keys. None: they see all of the tile."""
    if query is not None:
        columns: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
        key = tile * scores.shape[1] + gl.arange(0, scores.shape[1], columns)
        scores = gl.where(key[None, :] <= query[:, None], scores, float("-inf"))
    new_m = gl.maximum(m, gl.max(scores, 1) * scale)
    weights, shrink = gl.exp2(scores * scale - new_m[:, None]), gl.exp2(m - new_m)
    return new_m, total * shrink + gl.sum(weights, 1), weights, shrink


@gluon.jit
def _step(tile, weights, query, m, total, acc, scale, queries, keys, values, zeros):
    """Adds a tile of values with these weights, and computes the weights of the next tile meanwhile."""
    following = _scores(queries, tile + 1, keys, zeros)
    acc = _sums(weights, tile, values, acc)
    scores = warpgroup_mma_wait(1, deps=(following,))
    _has_read(tile + 1, keys)
    m, total, new_weights, shrink = _softmax(scores, tile + 1, query, m, total, scale)
    new_weights = gl.convert_layout(new_weights.to(weights.dtype), weights.type.layout)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    _has_read(tile, values)
    acc *= gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
    return new_weights, m, total, acc


@gluon.jit
def _load_queries(q, tokens, half, queries, q_stride, GROUP: gl.constexpr):
    row = half * queries.shape[0] + gl.arange(0, queries.shape[0], gl.SliceLayout(1, ROW))[:, None]
    dims: gl.constexpr = queries.shape[1]
    q += row // GROUP * q_stride + row % GROUP * dims + gl.arange(0, WIDTH, gl.SliceLayout(0, ROW))[None, :]
    for i in gl.static_range(dims // WIDTH):
        part = gl.load(q + i * WIDTH, mask=row // GROUP < tokens, other=0.0)
        queries.slice(i * WIDTH, WIDTH, dim=1).store(part)
    fence_async_shared()
    barrier()


@gluon.jit
def _clear_from(end, tile, ring):
    """Clears the last tile of values from this position on. Both groups of warps write the same."""
    buffers, loaded, _ = ring
    BLOCK_N: gl.constexpr = buffers.shape[1]
    if end % BLOCK_N != 0:
        mbarrier.wait(loaded.index(tile % STAGES), tile // STAGES & 1)
        clear(buffers.index(tile % STAGES), end % BLOCK_N, ROW, WIDTH)
        barrier()


@gluon.jit
def _consume(half: gl.constexpr, count, rows, GROUP: gl.constexpr, FINITE: gl.constexpr):
    """Attends with half of the rows of the tile."""
    q, results, queries, keys, values, tokens, first, end, scale, q_stride = rows
    dtype: gl.constexpr = q.dtype.element_ty
    ROWS: gl.constexpr = queries.shape[1]
    BLOCK_N: gl.constexpr = keys[0].shape[1]
    VALUE_DIM: gl.constexpr = values[0].shape[2]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, VALUE_DIM, 16])
    queries = queries.index(half)
    _load_queries(q, tokens, half, queries, q_stride, GROUP)
    m = gl.full([ROWS], -1e30, gl.float32, gl.SliceLayout(1, SCORES))  # −∞ would give NaN
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
    acc = gl.zeros([ROWS, VALUE_DIM], gl.float32, SUMS)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    query = first + (half * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))) // GROUP
    scores = warpgroup_mma_wait(0, deps=(_scores(queries, 0, keys, zeros),))
    _has_read(0, keys)
    m, total, weights, _ = _softmax(scores, 0, query, m, total, scale)
    weights = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, SUMS, 2))
    unmasked = gl.minimum((first + half * ROWS // GROUP + 1) // BLOCK_N, count)  # tiles that all rows see
    for i in range(unmasked - 1):
        weights, m, total, acc = _step(i, weights, None, m, total, acc, scale, queries, keys, values, zeros)
    for i in range(gl.maximum(unmasked - 1, 0), count - 1):
        weights, m, total, acc = _step(i, weights, query, m, total, acc, scale, queries, keys, values, zeros)
    if not FINITE:
        _clear_from(end, count - 1, values)
    acc = warpgroup_mma_wait(0, deps=(_sums(weights, count - 1, values, acc),))
    acc /= gl.convert_layout(total, gl.SliceLayout(1, SUMS))[:, None]
    _store(acc, m + gl.log2(total), half, tokens, results, GROUP)


@gluon.jit
def _store(acc, own_lse, half: gl.constexpr, tokens, results, GROUP: gl.constexpr):
    """Stores half of the rows of a tile, or of a piece of it."""
    out, partial, lse, pieces, out_stride, partial_stride, lse_stride = results
    rows: gl.constexpr = acc.shape[0]
    dim: gl.constexpr = acc.shape[1]
    row = half * rows + gl.arange(0, rows, gl.SliceLayout(1, acc.type.layout))[:, None]
    dims = gl.arange(0, dim, gl.SliceLayout(0, acc.type.layout))[None, :]
    used = row // GROUP < tokens
    if pieces == 1:
        to = out + row // GROUP * out_stride + row % GROUP * dim
        gl.store(to + dims, acc.to(out.dtype.element_ty), mask=used)
    else:
        to_sums = partial + row // GROUP * partial_stride + row % GROUP * dim
        gl.store(to_sums + dims, acc, mask=used)
        of_lse = half * rows + gl.arange(0, rows, own_lse.type.layout)
        to_lse = lse + of_lse // GROUP * lse_stride + of_lse % GROUP
        gl.store(to_lse, own_lse, mask=of_lse // GROUP < tokens)


@gluon.jit(do_not_specialize=["table_stride", "num_tiles"])
def _attend(
    q,
    key_tiles,
    value_tiles,
    block_tables,
    work,
    out,
    partial,
    lse,
    scale,
    q_stride,
    out_stride,
    table_stride,
    num_tiles,
    most_positions,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    VALUE_DIM: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    FINITE: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """FINITE: no slot past a context holds NaN."""
    dtype: gl.constexpr = q.dtype.element_ty
    index = gl.program_id(0)
    section = _section(gl.load(work + 9), most_positions, KV_HEADS)
    head = index // (section * num_tiles) * section + index % section
    work += index % (section * num_tiles) // section * FIELDS
    request, row = gl.load(work).to(gl.int64), gl.load(work + 1).to(gl.int64)
    tokens, first = gl.load(work + 2), gl.load(work + 3)
    if tokens == 0:
        return
    begin, end = gl.load(work + 4), gl.load(work + 5)
    place, pieces = gl.load(work + 6).to(gl.int64), gl.load(work + 7)
    count = gl.cdiv(end - begin, BLOCK_N)
    keys, values = _ring(dtype, BLOCK_N, HEAD_DIM), _ring(dtype, BLOCK_N, VALUE_DIM)
    halves: gl.constexpr = [2, BLOCK_M // 2, HEAD_DIM]
    queries = gl.allocate_shared_memory(dtype, halves, gl.NVMMASharedLayout(128, 16, rank=2))
    q += row * q_stride + head * GROUP * HEAD_DIM
    out += row * out_stride + head * GROUP * VALUE_DIM
    HEADS: gl.constexpr = KV_HEADS * GROUP
    of_piece = place * (BLOCK_M // GROUP) * HEADS + head * GROUP
    partial += of_piece * VALUE_DIM
    results = out, partial, lse + of_piece, pieces, out_stride, HEADS * VALUE_DIM, HEADS
    table = block_tables + request * table_stride
    rows = q, results, queries, keys, values, tokens, first - begin, end - begin, scale, q_stride
    gl.warp_specialize(
        [
            (_consume, (0, count, rows, GROUP, FINITE)),
            (_consume, (1, count, rows, GROUP, FINITE)),
            (_produce, (count, begin, end, key_tiles, value_tiles, table, head, keys, values, BLOCK_SIZE)),
        ],
        [4, 4],
        REGISTERS,
    )
