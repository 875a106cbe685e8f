"""`grouped_linear` of many pairs for Hopper's tensor cores, in Gluon.

*Warp specialization*, as in `prefill_wgmma`: one group of warps gathers rows of x and lets the copy engine
load rows of W. The other two multiply half of a tile's pairs each.
*Persistent*: a program computes one tile after the other. So the first loads of a tile overlap with the end
of the tile before. Its tiles come in order, so it goes from expert to expert and counts their tiles.
"""

from typing import Any

import torch
import triton
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

from baton.engine.kernels.launch import multiprocessors, on_hopper
from baton.engine.kernels.moe.shuffle import Shuffled
from baton.engine.kernels.warp_groups import barrier, barriers

BLOCK_M = gl.constexpr(128)  # pairs of a tile
ROWS = 256  # of W, of a tile: half of them of gate and half of up, if gated
BYTES_K = 128  # of a row of x and W at a time
GROUP = gl.constexpr(8)  # tiles that share rows of W
STAGES = gl.constexpr(4)
REGISTERS = 216, 72  # of a thread that multiplies, and of one that loads
ARRIVALS = gl.constexpr(1 + 128)  # at a barrier of loads: the copy engine's, and one of each thread


def suits(dtype: torch.dtype, inner: int) -> bool:
    """Whether the kernel supports rows of so many numbers on this device."""
    return dtype.itemsize <= 2 and inner % 16 == 0 and on_hopper()


def multiply(
    x: Tensor,
    x_scales: Tensor | None,
    weight: Tensor,
    weight_scales: Tensor | None,
    shuffled: Shuffled,
    out: Tensor,
    *,
    gated: bool,
) -> None:
    """As `grouped_linear`, into out [pairs, columns]. Scales are of rows."""
    (tokens, chosen), (experts, _, inner) = shuffled.weights.shape, weight.shape
    block_n, block_k = ROWS // 2 if gated else ROWS, BYTES_K // x.itemsize
    swizzled = gl.NVMMASharedLayout(128, 8 * x.itemsize, rank=2)
    tiles: Any = TensorDescriptor.from_tensor(weight.view(-1, inner), [block_n, block_k], swizzled)
    _multiply[(multiprocessors(x.device),)](
        x,
        x_scales,
        tiles,
        weight_scales,
        shuffled.counts,
        shuffled.pairs,
        out,
        tokens,
        experts,
        out.shape[1],
        inner,
        CHOSEN=chosen,
        GATHER=len(x) == tokens,
        GATED=gated,
        FULL_BLOCKS=inner % block_k == 0,
        EXPERTS=max(128, triton.next_power_of_2(experts)),
        REGISTERS=REGISTERS,
        num_warps=4,
    )


@gluon.jit
def _tile_of(index, total, columns):
    """The tile of pairs, and that of columns."""
    before = index // (GROUP * columns) * GROUP
    width = gl.minimum(GROUP, total - before)
    index -= before * columns
    return before + index % width, index // width


@gluon.jit
def _expert_of(tile, expert, before, counts):
    """The expert of a tile, and the number of tiles of those before it. Begins with the expert of another
    tile."""
    is_later = tile >= before
    expert, before = gl.where(is_later, expert, 0), gl.where(is_later, before, 0)
    pairs = gl.load(counts + expert)
    while before + gl.cdiv(pairs, BLOCK_M) <= tile:
        before += gl.cdiv(pairs, BLOCK_M)
        expert += 1
        pairs = gl.load(counts + expert)
    return expert, before, pairs


@gluon.jit
def _produce(
    work, x, tiles, ring, inner, CHOSEN: gl.constexpr, GATHER: gl.constexpr, GATED: gl.constexpr,
    FULL_BLOCKS: gl.constexpr,
):  # fmt: skip
    total, column_tiles, counts, pairs, tokens, columns = work
    of_x, of_w, of_up, loaded, free = ring
    BLOCK_K: gl.constexpr = of_x.shape[2]
    BLOCK_N: gl.constexpr = of_w.shape[1]
    VECTOR: gl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth  # 16 bytes
    ROW: gl.constexpr = gl.BlockedLayout([1, VECTOR], [4, 8], [4, 1], [1, 0])
    k = gl.arange(0, BLOCK_K, gl.SliceLayout(0, ROW))[None, :]
    count, expert, before = total * 0, total * 0, total * 0
    for index in range(gl.program_id(0), total * column_tiles, gl.num_programs(0)):
        tile, column = _tile_of(index, total, column_tiles)
        expert, before, expert_pairs = _expert_of(tile, expert, before, counts)
        place = (tile - before) * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, ROW))
        pair = gl.load(pairs + expert.to(gl.int64) * tokens + place, mask=place < expert_pairs, other=0)
        row = pair // CHOSEN if GATHER else pair
        at = x + row.to(gl.int64)[:, None] * inner + k
        real = (place < expert_pairs)[:, None]
        first = (expert * columns * 2 if GATED else expert * columns) + column * BLOCK_N
        for start in range(0, inner, BLOCK_K):
            stage = count % STAGES
            mbarrier.wait(free.index(stage), count // STAGES & 1 ^ 1)
            done = loaded.index(stage)
            mbarrier.expect(done, tiles.block_type.nbytes * 2 if GATED else tiles.block_type.nbytes)
            tma.async_copy_global_to_shared(tiles, [first, start], done, of_w.index(stage))
            if GATED:
                tma.async_copy_global_to_shared(tiles, [first + columns, start], done, of_up.index(stage))
            mask = real if FULL_BLOCKS else real & (k < inner - start)
            async_copy.async_copy_global_to_shared(of_x.index(stage), at + start, mask=mask)
            async_copy.mbarrier_arrive(done, increment_count=False)
            count += 1


@gluon.jit
def _skip(count, inner, ring):
    of_x, _, _, loaded, free = ring
    BLOCK_K: gl.constexpr = of_x.shape[2]
    for _ in range(0, inner, BLOCK_K):
        mbarrier.wait(loaded.index(count % STAGES), count // STAGES & 1)
        barrier()  # no warp may be a round behind
        mbarrier.arrive(free.index(count % STAGES))
        count += 1
    return count


@gluon.jit
def _products(half: gl.constexpr, count, inner, ring, LAYOUT: gl.constexpr, GATED: gl.constexpr):
    """Those of half of the pairs. Returns those of gate and of up, if gated, and the steps until now."""
    of_x, of_w, of_up, loaded, free = ring
    ROWS: gl.constexpr = of_x.shape[1] // 2
    BLOCK_N: gl.constexpr = of_w.shape[1]
    BLOCK_K: gl.constexpr = of_x.shape[2]
    IN_FLIGHT: gl.constexpr = 2 if GATED else 1
    acc = gl.zeros([ROWS, BLOCK_N], gl.float32, LAYOUT)
    acc_up = acc
    for start in range(0, inner, BLOCK_K):
        stage = count % STAGES
        mbarrier.wait(loaded.index(stage), count // STAGES & 1)
        fence_async_shared()
        x_half = of_x.index(stage).slice(half * ROWS, ROWS, dim=0)
        acc = warpgroup_mma(x_half, of_w.index(stage).permute((1, 0)), acc, is_async=True)
        if GATED:
            acc_up = warpgroup_mma(x_half, of_up.index(stage).permute((1, 0)), acc_up, is_async=True)
        acc, acc_up = warpgroup_mma_wait(IN_FLIGHT, deps=(acc, acc_up))
        if start > 0:
            barrier()  # all warps of the group have read the stage before
            mbarrier.arrive(free.index((count - 1) % STAGES))
        count += 1
    acc, acc_up = warpgroup_mma_wait(0, deps=(acc, acc_up))
    barrier()
    mbarrier.arrive(free.index((count - 1) % STAGES))
    return acc, acc_up, count


@gluon.jit
def _consume(
    half: gl.constexpr, work, out, x_scales, weight_scales, ring, inner, CHOSEN: gl.constexpr,
    GATHER: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    total, column_tiles, counts, pairs, tokens, columns = work
    BLOCK_N: gl.constexpr = ring[1].shape[1]
    ROWS: gl.constexpr = BLOCK_M // 2
    K: gl.constexpr = 256 // ring[0].dtype.primitive_bitwidth  # of an instruction
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, K])
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_N, BLOCK_N // 8], [4, 1], [1, 0])
    count, expert, before = total * 0, total * 0, total * 0
    for index in range(gl.program_id(0), total * column_tiles, gl.num_programs(0)):
        tile, column = _tile_of(index, total, column_tiles)
        expert, before, expert_pairs = _expert_of(tile, expert, before, counts)
        pairs_of, first = pairs + expert.to(gl.int64) * tokens, (tile - before) * BLOCK_M + half * ROWS
        if first >= expert_pairs:
            count = _skip(count, inner, ring)
        else:
            acc, acc_up, count = _products(half, count, inner, ring, ACC, GATED)
            if x_scales is not None:
                place = first + gl.arange(0, ROWS, gl.SliceLayout(1, ACC))
                pair = gl.load(pairs_of + place, mask=place < expert_pairs, other=0)
                at = column * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, ACC))
                of_x = gl.load(
                    x_scales + (pair // CHOSEN if GATHER else pair), mask=place < expert_pairs, other=0.0
                )
                of_w = gl.load(weight_scales + expert * columns + at, mask=at < columns, other=0.0)
                acc *= of_x[:, None] * of_w[None, :]
            if GATED:
                acc = acc * (1 / (1 + gl.exp(-acc))) * acc_up
            y = gl.convert_layout(acc.to(out.dtype.element_ty), STORED)
            place = first + gl.arange(0, ROWS, gl.SliceLayout(1, STORED))
            pair = gl.load(pairs_of + place, mask=place < expert_pairs, other=0).to(gl.int64)
            at = column * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, STORED))
            to = out + pair[:, None] * columns + at[None, :]
            gl.store(to, y, mask=(place < expert_pairs)[:, None] & (at < columns)[None, :])


@gluon.jit(do_not_specialize=["tokens"])
def _multiply(
    x,
    x_scales,
    tiles,
    weight_scales,
    counts,
    pairs,
    out,
    tokens,
    experts,
    columns,
    inner,
    CHOSEN: gl.constexpr,
    GATHER: gl.constexpr,
    GATED: gl.constexpr,
    FULL_BLOCKS: gl.constexpr,
    EXPERTS: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    dtype: gl.constexpr = x.dtype.element_ty
    BLOCK_N: gl.constexpr = tiles.block_shape[0]
    BLOCK_K: gl.constexpr = tiles.block_shape[1]
    index = gl.arange(0, EXPERTS, gl.BlockedLayout([1], [32], [4], [0]))
    of_experts = gl.load(counts + index, mask=index < experts, other=0)
    total = gl.sum((of_experts + BLOCK_M - 1) // BLOCK_M, 0)
    shared: gl.constexpr = gl.NVMMASharedLayout(128, dtype.primitive_bitwidth, rank=2)
    of_x = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], shared)
    of_w = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_K], shared)
    of_up = of_w
    if GATED:
        of_up = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_K], shared)
    work = total, gl.cdiv(columns, BLOCK_N), counts, pairs, tokens, columns
    ring = of_x, of_w, of_up, barriers(STAGES, ARRIVALS), barriers(STAGES, 2)
    gl.warp_specialize(
        [
            (_consume, (0, work, out, x_scales, weight_scales, ring, inner, CHOSEN, GATHER, GATED)),
            (_consume, (1, work, out, x_scales, weight_scales, ring, inner, CHOSEN, GATHER, GATED)),
            (_produce, (work, x, tiles, ring, inner, CHOSEN, GATHER, GATED, FULL_BLOCKS)),
        ],
        [4, 4],
        REGISTERS,
    )
