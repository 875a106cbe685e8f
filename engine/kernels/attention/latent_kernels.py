"""Latent attention (`latent`) in Triton.

*Absorbed.* `_attend_absorbed` has a program for each piece of a context and each block of query heads. It
reads a tile of the cache once: the tile is the keys, and its latents are the values. Keys and dimensions are
the large sides of the products, as in `decode`, which also cuts the contexts of decodes and combines the
pieces. A short chunk of a prompt is absorbed, too: each of its queries is a row with a context of its own.

*Expanded.* The keys and values of all positions of a chunk go to scratch memory, and `prefill` attends to
them. The scratch memory always has room for `MOST_EXPANDED` positions, so the rehearsal of the largest steps
counts it. Chunks with more positions are absorbed, `MOST_ABSORBED` queries at a time.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.attention.decode import BLOCK_N, PIECES_PER_SM, Pieces, combine, partition
from baton.engine.kernels.attention.latent import LatentHeads
from baton.engine.kernels.attention.online_softmax import LOG2_E, Expanded
from baton.engine.kernels.attention.paged import AttentionMetadata
from baton.engine.kernels.attention.prefill import Tiles, prefill_attention
from baton.engine.kernels.attention.tiles import shape_for, tile_work
from baton.engine.kernels.launch import inputs_ready, launch_options

# Not measured yet.
ROWS = 16  # query heads of a program
WARPS = 4
STAGES = 3
MOST_EXPANDED = 8192
MOST_ABSORBED = (
    512  # queries of a chunk at a time: their partial results are larger than those of other kernels
)
SCRATCH_BLOCK = 128  # positions; the tiles of `prefill` divide it


class Absorbed(NamedTuple):
    """Rows that read the cache as it is."""

    rows: slice
    pieces: Pieces
    tables: Tensor  # [rows, blocks], or [blocks] of all rows


class ExpandedChunk(NamedTuple):
    """A chunk whose keys and values are made of the latents."""

    rows: slice
    slots: Tensor  # [positions] int64: of all positions up to the end of the chunk
    table: Tensor  # [1, blocks] int32: of the scratch memory
    tiles: Tiles


LatentPlan = Sequence[Absorbed | ExpandedChunk]


def plan_latent(
    metadata: AttentionMetadata, num_heads: int, least_expanded: int, multiprocessors: int
) -> LatentPlan:
    decodes, device, size = metadata.num_decodes, metadata.contexts.device, metadata.block_size
    blocks_of_heads = triton.cdiv(num_heads, ROWS)
    plan: list[Absorbed | ExpandedChunk] = []
    if decodes:
        pieces = partition(metadata.contexts[:decodes], blocks_of_heads, multiprocessors)
        plan.append(Absorbed(slice(decodes), pieces, metadata.block_tables))
    row = decodes
    for request, (start, stop) in enumerate(metadata.prefills, decodes):
        table, first = metadata.block_tables[request], row - start
        row += stop - start
        if stop - start < least_expanded or stop > MOST_EXPANDED:
            programs = PIECES_PER_SM * multiprocessors // blocks_of_heads
            for begin in range(start, stop, MOST_ABSORBED):
                end = min(begin + MOST_ABSORBED, stop)
                rows = slice(first + begin, first + end)
                plan.append(Absorbed(rows, _pieces(begin, end, programs, device), table))
            continue
        at = torch.arange(stop, device=device)
        shape = shape_for([(start, stop)])
        work = tile_work([(start, stop)], 0, shape.tokens(1), 0)
        tiles = Tiles(torch.from_numpy(work).to(device, non_blocking=True), shape, None)
        scratch = torch.arange(triton.cdiv(stop, SCRATCH_BLOCK), dtype=torch.int32, device=device)
        slots = table.long()[at // size] * size + at % size
        plan.append(ExpandedChunk(slice(first + start, row), slots, scratch[None], tiles))
    return plan


def _pieces(start: int, stop: int, programs: int, device: torch.device) -> Pieces:
    """Cuts the contexts of queries at positions [start, stop) for so many programs at once."""
    contexts = np.arange(start + 1, stop + 1, dtype=np.int32)
    tiles = -(-stop * len(contexts) // (BLOCK_N * max(programs, len(contexts))))
    length = max(1, tiles) * BLOCK_N
    counts = -(-contexts // length)
    first = np.concatenate(([0], counts.cumsum())).astype(np.int32)
    rows = np.repeat(np.arange(len(contexts), dtype=np.int32), counts)
    begins = (np.arange(first[-1], dtype=np.int32) - first[rows]) * length
    work = np.stack((rows, begins, np.minimum(begins + length, contexts[rows])), axis=1)
    on_device = [torch.from_numpy(x).to(device, non_blocking=True) for x in (work, first)]
    return Pieces(on_device[0], on_device[1], on_device[0])  # no program counts the pieces that are finished


def latent_attention(q: Tensor, kv: Tensor, plan: LatentPlan, heads: LatentHeads) -> Tensor:
    found = [
        _absorbed(q[part.rows], kv, part, heads)
        if isinstance(part, Absorbed)
        else _expanded(q[part.rows], kv, part, heads)
        for part in plan
    ]
    return found[0] if len(found) == 1 else torch.cat(found)


def _absorbed(q: Tensor, kv: Tensor, part: Absorbed, heads: LatentHeads) -> Tensor:
    rank, (_, _, block_size, _, size) = heads.up.shape[2], kv.shape
    q = heads.absorb(q)
    (rows, num_heads, _), count = q.shape, len(part.pieces.work)
    latents = q.new_empty(rows, num_heads, rank)
    partial = torch.empty((count, num_heads, rank), dtype=torch.float32, device=q.device)
    lse = torch.empty((count, num_heads), dtype=torch.float32, device=q.device)
    _attend_absorbed[(triton.cdiv(num_heads, ROWS), count)](
        q,
        kv,
        part.tables,
        part.pieces.work,
        part.pieces.first,
        partial,
        lse,
        latents,
        heads.scale * LOG2_E.value,
        part.tables.stride(0) if part.tables.dim() == 2 else 0,
        BLOCK_SIZE=block_size,
        HEADS=num_heads,
        RANK=rank,
        ROPE=size - rank,
        ROWS=ROWS,
        BLOCK_N=BLOCK_N,
        num_warps=WARPS,
        num_stages=STAGES,
        **launch_options(),
    )
    combine(partial, lse, part.pieces, latents)
    return heads.values(latents)


def _expanded(q: Tensor, kv: Tensor, part: ExpandedChunk, heads: LatentHeads) -> Tensor:
    keys, values = heads.expand(kv.flatten(0, 3).index_select(0, part.slots))
    positions, num_heads, size = keys.shape
    padded = triton.next_power_of_2(size)
    scratch = Expanded(
        *(q.new_empty(1, MOST_EXPANDED // SCRATCH_BLOCK, SCRATCH_BLOCK, num_heads, n)
          for n in (padded, values.shape[2]))
    )  # fmt: skip
    scratch.keys.flatten(0, 2)[:positions].copy_(F.pad(keys, (0, padded - size)))
    scratch.values.flatten(0, 2)[:positions].copy_(values)
    out = torch.empty_like(q[..., : values.shape[2]], memory_format=torch.contiguous_format)
    q = F.pad(q, (0, padded - size))
    prefill_attention(q, scratch, part.table, part.tiles, out, None, None, heads.scale)
    return out


@triton.jit(do_not_specialize=["table_stride"])
def _attend_absorbed(
    q,
    cache,
    block_tables,
    work,
    first,
    partial,
    lse,
    out,
    scale,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    inputs_ready()
    piece = tl.program_id(1)
    row = tl.load(work + piece * 3).to(tl.int64)
    if row < 0:
        return
    begin, stop = tl.load(work + piece * 3 + 1), tl.load(work + piece * 3 + 2)
    SIZE: tl.constexpr = RANK + ROPE
    heads = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    used = (heads < HEADS)[:, None]
    dims, of_shared = tl.arange(0, RANK)[None, :], RANK + tl.arange(0, ROPE)[None, :]
    queries = q + (row * HEADS + heads)[:, None] * SIZE
    q_latent = tl.trans(tl.load(queries + dims, mask=used, other=0.0))
    q_shared = tl.trans(tl.load(queries + of_shared, mask=used, other=0.0))
    table = block_tables + row * table_stride
    m, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([RANK, ROWS], tl.float32)
    for start in tl.range(begin, stop, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        inside = positions < stop
        block = tl.load(table + positions // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        keys = cache + (block * BLOCK_SIZE + positions % BLOCK_SIZE)[:, None] * SIZE
        latent = tl.load(keys + dims, mask=inside[:, None], other=0.0)
        shared = tl.load(keys + of_shared, mask=inside[:, None], other=0.0)
        scores = tl.dot(latent, q_latent, input_precision="tf32x3")
        scores = tl.dot(shared, q_shared, scores, input_precision="tf32x3") * scale
        scores = tl.where(inside[:, None], scores, float("-inf"))
        new_m = tl.maximum(m, tl.max(scores, axis=0))
        weights, shrink = tl.exp2(scores - new_m[None, :]), tl.exp2(m - new_m)
        total = total * shrink + tl.sum(weights, axis=0)
        acc *= shrink[None, :]
        acc = tl.dot(tl.trans(latent), weights.to(latent.dtype), acc, input_precision="tf32x3")
        m = new_m
    result = tl.trans(acc) / tl.where(total == 0.0, 1.0, total)[:, None]  # 0: the piece of a padding request
    if tl.load(first + row + 1) - tl.load(first + row) == 1:
        to = out + (row * HEADS + heads)[:, None] * RANK + dims
        tl.store(to, result.to(out.dtype.element_ty), mask=used)
    else:
        at = piece.to(tl.int64) * HEADS + heads
        tl.store(partial + at[:, None] * RANK + dims, result, mask=used)
        tl.store(lse + at, m + tl.log2(total), mask=heads < HEADS)


def write_latent(
    q: Tensor, latent: Tensor, shared: Tensor, rotary: Tensor, kv: Tensor, slots: Tensor
) -> None:
    tokens, heads, size = q.shape
    assert all(x.is_contiguous() for x in (q, latent, shared)), "the kernel assumes dense rows"
    _write[(tokens,)](
        q,
        latent,
        shared,
        rotary,
        kv,
        slots,
        HEADS=heads,
        SIZE=size,
        RANK=latent.shape[1],
        ROPE=shared.shape[1],
        ROWS=triton.next_power_of_2(heads),
        num_warps=4,
        **launch_options(),
    )


@triton.jit
def _write(
    q,
    latent,
    shared,
    rotary,
    cache,
    slots,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    ROWS: tl.constexpr,
):
    inputs_ready()
    token = tl.program_id(0).to(tl.int64)
    dims, pairs = tl.arange(0, ROPE), tl.arange(0, ROPE // 2)
    # The table's rows are cos θ twice, then −sin θ and sin θ.
    angles = rotary + token * (2 * ROPE) + pairs
    cos, sin = tl.load(angles), tl.load(angles + ROPE + ROPE // 2)
    heads = tl.arange(0, ROWS)[:, None]
    at = q + token * (HEADS * SIZE) + heads * SIZE + SIZE - ROPE + dims[None, :]
    tl.store(at, _rotated(tl.load(at, mask=heads < HEADS, other=0.0), cos, sin), mask=heads < HEADS)
    slot = tl.load(slots + token)
    if slot >= 0:
        to, of_latent = cache + slot * (RANK + ROPE), tl.arange(0, RANK)
        tl.store(to + of_latent, tl.load(latent + token * RANK + of_latent))
        key = tl.load(shared + token * ROPE + dims)[None, :]
        tl.store(to + RANK + dims[None, :], _rotated(key, cos, sin))


@triton.jit
def _rotated(x, cos, sin):
    """Rotates pairs of neighbours, in float32."""
    pairs = tl.reshape(x.to(tl.float32), (x.shape[0], x.shape[1] // 2, 2))
    even, odd = tl.split(pairs)
    turned = tl.interleave(even * cos - odd * sin, odd * cos + even * sin)
    return turned.to(x.dtype)
