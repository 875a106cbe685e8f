"""`_attend_absorbed` for Hopper's tensor cores, in Gluon, which lays out registers and shared memory by hand.

Query heads are the rows of both products (FlashMLA, DeepSeek 2025). Two warp groups divide the columns: half
of a tile's positions each in the first product, half of the latent's dimensions each in the second one. So no
product is computed twice, and 64 rows of a result with 512 columns fit into their registers. Triton gives
each warp group all columns of the first of two products, or some rows of the second one.

A table has blocks of positions, whose tiles come by TMA, or single slots of chosen positions (ENTRY 1). TMA
has no tiles of rows anywhere on Hopper, so each thread copies some columns of some slots (`cp.async`, as
FlashMLA's sparse prefill does). It reads the slots of a tile in the table one tile ahead.
"""

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from baton.engine.kernels.launch import launch_options
from baton.engine.kernels.warp_groups import barrier, barriers, clear

ROWS = 64  # query heads of a program: the rows of an instruction
BLOCK_N = 64  # positions of a tile
STAGES = gl.constexpr(2)  # tiles in shared memory
RANK, ROPE = 512, 64  # the only sizes
WARPS = 8
ROW = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0]))  # of [rows, ROPE]
SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))  # of all tiles
WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0]))  # of [rows, RANK]


def attend(grid: tuple[int, int], q: Tensor, cached: Tensor, *arguments: Any, **shape: int) -> None:
    """As `_attend_absorbed`, whose arguments follow. cached [slots, RANK + ROPE]."""
    tiles = [TensorDescriptor.from_tensor(cached, [BLOCK_N, size], SHARED.value) for size in (RANK, ROPE)]
    sizes = {"RANK": RANK, "ROPE": ROPE, "num_warps": WARPS}
    _attend[grid](q, cached, *tiles, *arguments, **shape, **sizes, **launch_options())


@gluon.jit
def _load(
    tile, begin, stop, table, latent_tiles, shared_tiles, latents, shareds, loaded, ENTRY: gl.constexpr
):
    """As `_begin`, a tile of one block."""
    start, stage = begin + tile * latents.shape[1], tile % STAGES
    inside = start < stop
    slot = gl.load(table + start // ENTRY, mask=inside, other=0) * ENTRY + start % ENTRY
    done = loaded.index(stage)
    size: gl.constexpr = latent_tiles.block_type.nbytes + shared_tiles.block_type.nbytes
    mbarrier.expect(done, size, inside)
    tma.async_copy_global_to_shared(latent_tiles, [slot, 0], done, latents.index(stage), inside)
    to = shareds.index(stage)
    tma.async_copy_global_to_shared(shared_tiles, [slot, latents.shape[2]], done, to, inside)


@gluon.jit
def _slots(tile, begin, stop, table, BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr):
    """The slots of a tile's positions. Those behind the last position of the piece have its slot: they add
    nothing, and it has no NaN."""
    position = begin + tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT))
    return gl.load(table + gl.maximum(gl.minimum(position, stop - 1), 0))


@gluon.jit
def _slots_ahead(tile, begin, stop, table, BLOCK_N: gl.constexpr, ENTRY: gl.constexpr):
    """Of a tile that `_begin` will load, in the layouts of both copies. Nothing, if TMA loads it."""
    slots = ()
    if ENTRY == 1:
        slots = (
            _slots(tile, begin, stop, table, BLOCK_N, WIDE),
            _slots(tile, begin, stop, table, BLOCK_N, ROW),
        )
    return slots


@gluon.jit
def _copy(cache, slots, to, FIRST: gl.constexpr, SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    """Begins to copy columns of the cache, from FIRST on, of rows of SIZE."""
    column = FIRST + gl.arange(0, to.shape[1], gl.SliceLayout(0, LAYOUT))[None, :]
    async_copy.async_copy_global_to_shared(to, cache + slots.to(gl.int64)[:, None] * SIZE + column)


@gluon.jit
def _begin(
    tile, begin, stop, slots, cache, latent_tiles, shared_tiles, table, latents, shareds, loaded,
    ENTRY: gl.constexpr,
):  # fmt: skip
    """Begins to load a tile of the piece, if there are so many. `slots`: from `_slots_ahead`."""
    if ENTRY == 1:
        RANK: gl.constexpr = latents.shape[2]
        SIZE: gl.constexpr = RANK + shareds.shape[2]
        if begin + tile * latents.shape[1] < stop:
            stage = tile % STAGES
            _copy(cache, slots[0], latents.index(stage), 0, SIZE, WIDE)
            _copy(cache, slots[1], shareds.index(stage), RANK, SIZE, ROW)
            async_copy.mbarrier_arrive(loaded.index(stage), increment_count=False)
    else:
        _load(tile, begin, stop, table, latent_tiles, shared_tiles, latents, shareds, loaded, ENTRY)


@gluon.jit
def _load_queries(
    q,
    dtype: gl.constexpr,
    ROWS: gl.constexpr,
    RANK: gl.constexpr,
    ROPE: gl.constexpr,
    HEADS: gl.constexpr,
):
    """q: of the first head. The heads of this program go to shared memory, in parts of the size of `ROW`.
    Returns their latents and what they share."""
    q_latent = gl.allocate_shared_memory(dtype, [ROWS, RANK], SHARED)
    q_shared = gl.allocate_shared_memory(dtype, [ROWS, ROPE], SHARED)
    head = gl.program_id(0) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, ROW))[:, None]
    q += head * (RANK + ROPE) + gl.arange(0, ROPE, gl.SliceLayout(0, ROW))[None, :]
    parts = ()
    for i in gl.static_range(RANK // ROPE + 1):  # all loads begin before the first store waits for one
        parts += (gl.load(q + i * ROPE, mask=head < HEADS, other=0.0),)
    for i in gl.static_range(RANK // ROPE):
        q_latent.slice(i * ROPE, ROPE, dim=1).store(parts[i])
    q_shared.store(parts[RANK // ROPE])
    return q_latent, q_shared


@gluon.jit
def _inputs_ready():  # that of `launch`, which Gluon cannot call
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; // $0",
        "=r", [], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _weights(scores, m, total):
    new_m = gl.maximum(m, gl.max(scores, 1))
    weights, shrink = gl.exp2(scores - new_m[:, None]), gl.exp2(m - new_m)
    return new_m, total * shrink + gl.sum(weights, 1), weights, shrink


@gluon.jit
def _store(to, x, HEADS: gl.constexpr):
    """x [heads] or [heads, dims] of this program; `to`: of the first head."""
    rows: gl.constexpr = gl.SliceLayout(1, x.type.layout) if len(x.shape) == 2 else x.type.layout
    head = gl.program_id(0) * x.shape[0] + gl.arange(0, x.shape[0], rows)
    if len(x.shape) == 2:
        dims = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
        to += head[:, None] * x.shape[1] + dims[None, :]
        gl.store(to, x.to(to.dtype.element_ty), mask=(head < HEADS)[:, None])
    else:
        gl.store(to + head, x, mask=head < HEADS)


@gluon.jit(do_not_specialize=["table_stride"])
def _attend(
    q,
    cache,
    latent_tiles,
    shared_tiles,
    block_tables,
    work,
    first,
    partial,
    lse,
    out,
    scale,
    table_stride,
    ENTRY: gl.constexpr,
    HEADS: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    RANK: gl.constexpr,
    ROPE: gl.constexpr,
):
    """ENTRY: as in `_attend_absorbed`, a multiple of BLOCK_N, or 1."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BLOCK_N // 2, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, RANK // 2, 16])
    dtype: gl.constexpr = q.dtype.element_ty
    piece = gl.program_id(1)
    row = gl.load(work + piece * 3).to(gl.int64)
    if row < 0:
        _inputs_ready()
        return
    begin, stop, pieces = (
        gl.load(work + piece * 3 + 1),
        gl.load(work + piece * 3 + 2),
        gl.load(first + row + 1) - gl.load(first + row),
    )
    table = block_tables + row * table_stride
    latents = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, RANK], SHARED)
    shareds = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, ROPE], SHARED)
    loaded = barriers(STAGES, gl.num_warps() * 32 if ENTRY == 1 else 1)
    for i in gl.static_range(STAGES):
        slots = _slots_ahead(i, begin, stop, table, BLOCK_N, ENTRY)
        _begin(
            i, begin, stop, slots, cache, latent_tiles, shared_tiles, table, latents, shareds, loaded, ENTRY
        )
    _inputs_ready()  # the cache was written by an earlier kernel than the one before this one
    q_latent, q_shared = _load_queries(q + row * (HEADS * (RANK + ROPE)), dtype, ROWS, RANK, ROPE, HEADS)
    weighted = gl.allocate_shared_memory(dtype, [ROWS, BLOCK_N], SHARED)
    fence_async_shared()

    ROW_OF: gl.constexpr = gl.SliceLayout(1, SCORES)
    m, total = gl.full([ROWS], float("-inf"), gl.float32, ROW_OF), gl.zeros([ROWS], gl.float32, ROW_OF)
    acc, zeros = gl.zeros([ROWS, RANK], gl.float32, SUMS), gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    column = gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))[None, :]
    for i in range(gl.cdiv(stop - begin, BLOCK_N)):
        start, stage = begin + i * BLOCK_N, i % STAGES
        latent, shared = latents.index(stage), shareds.index(stage)
        slots = _slots_ahead(i + STAGES, begin, stop, table, BLOCK_N, ENTRY)
        mbarrier.wait(loaded.index(stage), i // STAGES & 1)
        if ENTRY == 1:
            fence_async_shared()
        elif start + BLOCK_N > stop:
            clear(latent, stop - start, ROW, ROPE)
        scores = warpgroup_mma(q_latent, latent.permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma(q_shared, shared.permute((1, 0)), scores, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        scores = gl.where(start + column < stop, scores * scale, float("-inf"))
        m, total, weights, shrink = _weights(scores, m, total)
        weighted.store(weights.to(dtype))
        fence_async_shared()
        acc *= gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
        acc = warpgroup_mma(weighted, latent, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        barrier()  # both warp groups have read the tile
        _begin(
            i + STAGES, begin, stop, slots, cache, latent_tiles, shared_tiles, table, latents, shareds,
            loaded, ENTRY,
        )  # fmt: skip

    acc /= gl.convert_layout(gl.where(total == 0.0, 1.0, total), gl.SliceLayout(1, SUMS))[:, None]
    if pieces == 1:
        _store(out + row * (HEADS * RANK), acc, HEADS)
    else:
        at = piece.to(gl.int64) * HEADS
        _store(partial + at * RANK, acc, HEADS)
        _store(lse + at, m + gl.log2(total), HEADS)
