"""Attention to `Expanded` keys and values for Hopper's tensor cores, in Gluon.

The products of a tile run while the softmax of another one is computed (FlashAttention-3, Shah 2024):

    scores of tile i + 1 │ sums += weights of tile i · values of tile i
                         │ softmax of tile i + 1
                         │                       scores of tile i + 2 │ sums += …

Triton's own pipeline begins a softmax only when no product runs. For heads of 128 dims in a paged cache it is
faster nevertheless (`prefill`): here, lookups of blocks would delay the loads.
"""

from typing import Any

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

from baton.engine.kernels.attention.latent_wgmma import ROW, _barrier
from baton.engine.kernels.attention.online_softmax import Expanded
from baton.engine.kernels.attention.tiles import TILE_FIELDS
from baton.engine.kernels.launch import on_hopper

HEAD_DIM = 256  # of queries and keys, padded
BLOCK_M, BLOCK_N = 128, 64  # queries and keys of a tile
WIDTH = 64  # dims of a row of shared memory
KEY_TILES, VALUE_TILES = gl.constexpr(2), gl.constexpr(3)  # in shared memory
FIELDS = gl.constexpr(TILE_FIELDS)


def suits(q: Tensor, kv: Expanded) -> bool:
    """Whether the kernel supports these types and sizes on this device."""
    sizes = q.shape[2] == HEAD_DIM and kv.values.shape[4] in (128, 256)
    return sizes and q.dtype.itemsize == 2 and on_hopper()


def attend(q: Tensor, kv: Expanded, block_tables: Tensor, work: Tensor, out: Tensor, scale: float) -> None:
    """As `prefill_attention`, for tiles of `BLOCK_M` queries. The blocks of a request follow each other.
    `scale`: times log₂ e."""
    _, _, block_size, heads, head_dim = kv.keys.shape
    swizzled = gl.NVMMASharedLayout(128, 16, rank=2)
    tiles: list[Any] = [
        TensorDescriptor.from_tensor(x.view(-1, heads * x.shape[4]), [BLOCK_N, x.shape[4]], swizzled)
        for x in kv
    ]
    _attend[(len(work), heads)](
        q,
        *tiles,
        block_tables,
        work,
        out,
        scale,
        q.stride(0),
        out.stride(0),
        block_tables.stride(0),
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        VALUE_DIM=kv.values.shape[4],
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        WIDTH=WIDTH,
        num_warps=8,
    )


@gluon.jit
def _barriers(COUNT: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=1)
    return made


@gluon.jit
def _load(tile, count, tiles, base, head, buffers, loaded):
    """Begins to load a tile of the request, if there are so many. `base`: the row of its first key."""
    wanted, stage = tile < count, tile % buffers.shape[0]
    barrier, at = loaded.index(stage), [base + tile * buffers.shape[1], head * buffers.shape[2]]
    mbarrier.expect(barrier, tiles.block_type.nbytes, wanted)
    tma.async_copy_global_to_shared(tiles, at, barrier, buffers.index(stage), wanted)


@gluon.jit
def _load_queries(q, tokens, queries, q_stride, WIDTH: gl.constexpr):
    row = gl.arange(0, queries.shape[0], gl.SliceLayout(1, ROW))[:, None]
    q += row * q_stride + gl.arange(0, WIDTH, gl.SliceLayout(0, ROW))[None, :]
    for i in gl.static_range(queries.shape[1] // WIDTH):
        queries.slice(i * WIDTH, WIDTH, dim=1).store(gl.load(q + i * WIDTH, mask=row < tokens, other=0.0))
    fence_async_shared()


@gluon.jit
def _scores(queries, tile, keys, loaded, zeros):
    """Begins to multiply the queries with a tile of keys."""
    stage = tile % keys.shape[0]
    mbarrier.wait(loaded.index(stage), tile // keys.shape[0] & 1)
    return warpgroup_mma(queries, keys.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _sums(weights, tile, values, loaded, acc):
    """Begins to add a tile of values with these weights."""
    stage = tile % values.shape[0]
    mbarrier.wait(loaded.index(stage), tile // values.shape[0] & 1)
    return warpgroup_mma(weights, values.index(stage), acc, is_async=True)


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
def _step(tile, weights, query, m, total, acc, scale, shared, sources):
    """Adds a tile of values with these weights, and computes the weights of the next tile meanwhile."""
    queries, keys, keys_loaded, values, values_loaded, zeros = shared
    key_tiles, value_tiles, base, head, count = sources
    following = _scores(queries, tile + 1, keys, keys_loaded, zeros)
    acc = _sums(weights, tile, values, values_loaded, acc)
    scores = warpgroup_mma_wait(1, deps=(following,))
    m, total, new_weights, shrink = _softmax(scores, tile + 1, query, m, total, scale)
    new_weights = gl.convert_layout(new_weights.to(weights.dtype), weights.type.layout)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    acc *= gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
    _barrier()  # all warps have read both tiles
    _load(tile + 1 + keys.shape[0], count, key_tiles, base, head, keys, keys_loaded)
    _load(tile + values.shape[0], count, value_tiles, base, head, values, values_loaded)
    return new_weights, m, total, acc


@gluon.jit(do_not_specialize=["table_stride"])
def _attend(
    q,
    key_tiles,
    value_tiles,
    block_tables,
    work,
    out,
    scale,
    q_stride,
    out_stride,
    table_stride,
    BLOCK_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    VALUE_DIM: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    WIDTH: gl.constexpr,
):
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, VALUE_DIM, 16])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    dtype: gl.constexpr = q.dtype.element_ty
    work += gl.program_id(0) * FIELDS
    head = gl.program_id(1)
    request, row = gl.load(work).to(gl.int64), gl.load(work + 1).to(gl.int64)
    tokens, first = gl.load(work + 2), gl.load(work + 3)
    if tokens == 0:
        return
    count = gl.cdiv(first + tokens, BLOCK_N)
    base = gl.load(block_tables + request * table_stride) * BLOCK_SIZE
    keys = gl.allocate_shared_memory(dtype, [KEY_TILES, BLOCK_N, HEAD_DIM], SHARED)
    values = gl.allocate_shared_memory(dtype, [VALUE_TILES, BLOCK_N, VALUE_DIM], SHARED)
    keys_loaded, values_loaded = _barriers(KEY_TILES), _barriers(VALUE_TILES)
    for i in gl.static_range(KEY_TILES):
        _load(i, count, key_tiles, base, head, keys, keys_loaded)
    for i in gl.static_range(VALUE_TILES):
        _load(i, count, value_tiles, base, head, values, values_loaded)
    queries = gl.allocate_shared_memory(dtype, [BLOCK_M, HEAD_DIM], SHARED)
    _load_queries(q + row * q_stride + head * HEAD_DIM, tokens, queries, q_stride, WIDTH)
    _barrier()

    m = gl.full([BLOCK_M], -1e30, gl.float32, gl.SliceLayout(1, SCORES))  # −∞ would give NaN
    total = gl.zeros([BLOCK_M], gl.float32, gl.SliceLayout(1, SCORES))
    acc = gl.zeros([BLOCK_M, VALUE_DIM], gl.float32, SUMS)
    zeros = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, SCORES)
    query = first + gl.arange(0, BLOCK_M, gl.SliceLayout(1, SCORES))
    scores = warpgroup_mma_wait(0, deps=(_scores(queries, 0, keys, keys_loaded, zeros),))
    m, total, weights, _ = _softmax(scores, 0, query, m, total, scale)
    weights = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, SUMS, 2))
    _barrier()  # all warps have read the tile of keys
    _load(KEY_TILES, count, key_tiles, base, head, keys, keys_loaded)
    whole = gl.minimum((first + 1) // BLOCK_N, count)  # tiles that all queries see
    shared = queries, keys, keys_loaded, values, values_loaded, zeros
    sources = key_tiles, value_tiles, base, head, count
    for i in range(whole - 1):
        weights, m, total, acc = _step(i, weights, None, m, total, acc, scale, shared, sources)
    for i in range(gl.maximum(whole - 1, 0), count - 1):
        weights, m, total, acc = _step(i, weights, query, m, total, acc, scale, shared, sources)
    acc = warpgroup_mma_wait(0, deps=(_sums(weights, count - 1, values, values_loaded, acc),))
    acc /= gl.convert_layout(total, gl.SliceLayout(1, SUMS))[:, None]
    token = gl.arange(0, BLOCK_M, gl.SliceLayout(1, SUMS))
    dims = gl.arange(0, VALUE_DIM, gl.SliceLayout(0, SUMS))
    to = out + (row + token)[:, None] * out_stride + (head * VALUE_DIM + dims)[None, :]
    gl.store(to, acc.to(dtype), mask=(token < tokens)[:, None])
