"""The index of sparse attention (`index`) in Triton.

*Scores.* `_score` has a program for each piece of a context, as decode attention has. It reads a tile of keys
once, for up to QUERIES queries of a request. Positions are the large side of the product. The scores of all
rows go to memory: [rows, positions].

*Choice.* `_select` has a program for a row, or for each piece of BLOCK positions if there are more than
LARGEST. The chosen of all pieces then have a second choice among them. A program finds the least score that
is chosen bit by bit: up to 32 times it counts the scores from a candidate on, until they are as many as are
chosen. With equal scores the first positions are chosen. It writes what it chose in the order of
positions: a table whose entries are single slots, with which attention then reads the cache.
"""

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.attention.index import NORM_EPS, Index
from baton.engine.kernels.attention.paged import KV, IndexQueries, parts
from baton.engine.kernels.fp8 import scale_of
from baton.engine.kernels.launch import inputs_ready, launch_options
from baton.engine.kernels.upload import upload

BLOCK_N = 128  # positions of a tile; pieces are cut at multiples of it
QUERIES = 8  # of a prompt that share the keys that a program reads
SCORE_WARPS, SCORE_STAGES = 4, 2  # of `_score`
WAVES = 4  # programs of a prompt for each that runs at once
LARGEST = 32768  # scores of a program of `_select`
MOVED = 2048  # of these at a time, when it writes what it chose
SCORES_BYTES = 1 << 26  # of the rows of a prompt at a time: so few that the rehearsal need not count them


class Choice(NamedTuple):
    """What some rows choose from, and what they chose. All layers of a step share it."""

    contexts: Tensor  # [rows] int32: positions that each row sees
    tables: Tensor  # [rows, blocks] int32, or [blocks] of all rows
    work: Tensor  # [pieces, 3] int32: the first row, first position, last position + 1; row −1: no work
    queries: int  # rows of a piece
    longest: int
    """Positions of a table. The grids and the kernels follow from it, not from the contexts of a step: graphs
    replay decodes, and a prompt compiles nothing."""
    slots: Tensor  # [rows, most] int32: those of the chosen positions, in their order


def choice_of_chunk(
    start: int, stop: int, table: Tensor, longest: int, most: int, programs: int, *, exact: bool
) -> Choice:
    """Of queries at positions [start, stop). `longest`: positions of the table. `programs`: how many run at
    once."""
    contexts, queries = np.arange(start + 1, stop + 1, dtype=np.int32), 1 if exact else QUERIES
    rows = np.arange(0, stop - start, queries, dtype=np.int32)
    ends = contexts[np.minimum(rows + queries, len(contexts)) - 1]
    tiles = -(-ends // BLOCK_N)
    length = max(1, int(tiles.sum()) // (WAVES * programs)) * BLOCK_N
    counts = -(-ends // length)
    of_row = np.repeat(np.arange(len(rows)), counts)
    first = np.concatenate(([0], counts.cumsum()[:-1]))
    begins = ((np.arange(len(of_row)) - first[of_row]) * length).astype(np.int32)
    work = np.stack((rows[of_row], begins, np.minimum(begins + length, ends[of_row])), axis=1)
    on_device = upload([contexts, work.astype(np.int32)], table.device)
    slots = table.new_empty(len(contexts), most)
    return Choice(on_device[0], table, on_device[1], queries, longest, slots)


def columns_of(stop: int, longest: int) -> int:
    """The positions that rows choose from which see at most `stop` of the `longest` of a table. There are two
    sizes, so that a prompt compiles nothing: those of one choice, and all."""
    return min(longest, LARGEST) if stop <= LARGEST else longest


def rows_at_once(stop: int, longest: int, most: int) -> int:
    """Rows of a chunk up to `stop`: as many as the memory of scores has room for, and at most `most`."""
    return max(QUERIES, min(most, SCORES_BYTES // (4 * columns_of(stop, longest))))


def choose(queries: IndexQueries, keys: KV, choice: Choice) -> None:
    """Writes `choice.slots`. The queries are those of its rows."""
    cached, scales = parts(keys)
    _, _, block_size, _, head_dim = cached.shape
    rows, heads = queries.weights.shape
    most, columns = choice.slots.shape[1], triton.cdiv(choice.longest, BLOCK_N) * BLOCK_N
    scores = torch.empty((rows, columns), dtype=torch.float32, device=cached.device)
    row_stride = choice.tables.stride(0) if choice.tables.dim() == 2 else 0
    _score[(len(choice.work),)](
        queries.values,
        queries.weights,
        cached,
        scales,
        choice.tables,
        choice.contexts,
        choice.work,
        scores,
        rows,
        row_stride,
        columns,
        QUERIES=choice.queries,
        BLOCK_SIZE=block_size,
        HEADS=heads,
        ROWS=max(16, triton.next_power_of_2(heads)),
        HEAD_DIM=head_dim,
        BLOCK_N=BLOCK_N,
        num_warps=SCORE_WARPS,
        num_stages=SCORE_STAGES,
        **launch_options(),
    )
    first, positions, pieces = triton.next_power_of_2(columns), None, 1
    if first > LARGEST:
        first = LARGEST // 2
        while triton.cdiv(choice.longest, first) * most > LARGEST:
            first *= 2
        pieces = triton.cdiv(choice.longest, first)
        best = scores.new_empty(rows, pieces * most)
        positions = torch.empty(best.shape, dtype=torch.int32, device=cached.device)
        _launch_select(choice, scores, None, best, positions, first, first, row_stride, block_size)
        scores = best
    block = triton.next_power_of_2(scores.shape[1])
    _launch_select(choice, scores, positions, None, choice.slots, first, block, row_stride, block_size)


def _launch_select(
    choice: Choice,
    scores: Tensor,
    positions: Tensor | None,
    best: Tensor | None,
    out: Tensor,
    first: int,
    block: int,
    row_stride: int,
    block_size: int,
) -> None:
    rows, most = choice.slots.shape
    _select[(rows, triton.cdiv(scores.shape[1], block))](
        scores,
        positions,
        choice.contexts,
        choice.tables,
        best,
        out,
        scores.stride(0),
        out.stride(0),
        row_stride,
        MOST=most,
        FIRST=first,
        BLOCK=block,
        MOVED=min(block, MOVED),
        BLOCK_SIZE=block_size,
        num_warps=min(32, max(4, block // 1024)),
        **launch_options(),
    )


@triton.jit(do_not_specialize=["rows", "table_stride", "score_stride"])
def _score(
    q,
    weights,
    keys,
    scales,
    block_tables,
    contexts,
    work,
    scores,
    rows,
    table_stride,
    score_stride,
    QUERIES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    inputs_ready()
    piece = tl.program_id(0)
    row = tl.load(work + piece * 3).to(tl.int64)
    if row < 0:
        return
    begin, stop = tl.load(work + piece * 3 + 1), tl.load(work + piece * 3 + 2)
    heads, dims, offsets = tl.arange(0, ROWS), tl.arange(0, HEAD_DIM), tl.arange(0, BLOCK_N)
    used = heads < HEADS
    table = block_tables + row * table_stride
    last = tl.minimum(row + QUERIES, rows)
    of_query, of_heads = None, None
    if QUERIES == 1:  # then there is one loop, whose keys are loaded ahead
        at = row * HEADS + heads
        of_query = tl.load(q + at[:, None] * HEAD_DIM + dims[None, :], mask=used[:, None], other=0.0)
        of_heads = tl.load(weights + at, mask=used, other=0.0)
    for start in tl.range(begin, stop, BLOCK_N):
        positions = start + offsets
        inside = positions < stop
        block = tl.load(table + positions // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        slots = block * BLOCK_SIZE + positions % BLOCK_SIZE
        key = tl.load(keys + slots[:, None] * HEAD_DIM + dims[None, :], mask=inside[:, None], other=0.0)
        of_slots = None
        if scales is not None:
            of_slots = tl.load(scales + slots, mask=inside, other=0.0)
        if QUERIES == 1:
            total = _of_query(key, of_slots, of_query, of_heads)
            tl.store(scores + row * score_stride + positions, total, mask=inside)
        else:
            for query in tl.range(row, last):
                at = query * HEADS + heads
                one = tl.load(q + at[:, None] * HEAD_DIM + dims[None, :], mask=used[:, None], other=0.0)
                total = _of_query(key, of_slots, one, tl.load(weights + at, mask=used, other=0.0))
                seen = positions < tl.load(contexts + query)
                tl.store(scores + query * score_stride + positions, total, mask=inside & seen)


@triton.jit
def _of_query(key, of_slots, query, of_heads):
    """The scores of the tile's positions."""
    products = tl.dot(key, tl.trans(query), input_precision="tf32x3")
    total = tl.sum(tl.maximum(products, 0.0) * of_heads[None, :], axis=1)
    return total if of_slots is None else total * of_slots


@triton.jit
def _ordered(scores):
    """int32 numbers in the order of the scores. NaN is as large as infinity."""
    scores = tl.where(scores != scores, float("inf"), scores) + 0.0  # −0 becomes 0
    bits = scores.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit(do_not_specialize=["in_stride", "out_stride", "table_stride"])
def _select(
    scores,
    positions,
    contexts,
    block_tables,
    best,
    out,
    in_stride,
    out_stride,
    table_stride,
    MOST: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    MOVED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Without `best` the choice is final: `out` gets slots. With it, `best` gets scores, and `out` positions.
    `positions`: those of the scores, which are what pieces of FIRST positions chose. None: all."""
    inputs_ready()
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count = tl.load(contexts + row)
    if positions is not None:
        count = count // FIRST * MOST + tl.minimum(count % FIRST, MOST)
    valid = tl.minimum(count - piece * BLOCK, BLOCK)
    if valid <= 0:
        return
    scores += row * in_stride + piece * BLOCK
    LEAST: tl.constexpr = -2147483648
    least, missing = tl.full([], LEAST, tl.int32), tl.full([], 0, tl.int32)
    if valid > MOST:
        at = tl.arange(0, BLOCK)
        ordered = _ordered(tl.load(scores + at, mask=at < valid, other=0.0))
        ordered = tl.where(at < valid, ordered, LEAST)
        bit = tl.full([], 31, tl.int32)
        while bit >= 0:
            candidate = least ^ (tl.full([], 1, tl.int32) << bit)
            enough = tl.sum((ordered >= candidate).to(tl.int32), axis=0)
            least = tl.where(enough >= MOST, candidate, least)
            bit = tl.where(enough == MOST, -1, bit - 1)
        missing = MOST - tl.sum((ordered > least).to(tl.int32), axis=0)
    table = block_tables + row * table_stride
    chosen, equals = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for start in tl.range(0, valid, MOVED):
        at = start + tl.arange(0, MOVED)
        inside = at < valid
        score = tl.load(scores + at, mask=inside, other=0.0)
        order = _ordered(score)
        equal, more = inside & (order == least), inside & (order > least)
        # One scan counts both: those that are larger in the upper half of a number, equal ones in the lower.
        both = (more.to(tl.int32) << 16) + equal.to(tl.int32)
        counts = tl.cumsum(both, axis=0)
        ranks, larger = equals + (counts & 0xFFFF), counts >> 16
        taken = more | (equal & (ranks <= missing))
        places = chosen + larger + tl.minimum(ranks, missing) - tl.minimum(equals, missing) - 1
        if positions is None:
            position = piece * BLOCK + at
        else:
            position = tl.load(positions + row * in_stride + piece * BLOCK + at, mask=inside, other=0)
        to = row * out_stride + places
        if best is None:
            block = tl.load(table + position // BLOCK_SIZE, mask=taken, other=0)
            tl.store(out + to, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=taken)
        else:
            tl.store(best + piece * MOST + to, score, mask=taken)
            tl.store(out + piece * MOST + to, position, mask=taken)
        total, before = tl.sum(both, axis=0), equals
        equals += total & 0xFFFF
        chosen += (total >> 16) + tl.minimum(equals, missing) - tl.minimum(before, missing)


def write_index(index: Index, rotary: Tensor, cache: KV, slots: Tensor) -> IndexQueries:
    q, keys, weights, layer = index
    cached, scales = parts(cache)
    tokens, heads, head_dim = q.shape
    assert q.stride()[1:] == (head_dim, 1), "the kernel assumes dense heads"
    values = torch.empty(q.shape, dtype=cached.dtype, device=q.device)
    of_heads = torch.empty((tokens, heads), dtype=torch.float32, device=q.device)
    _write[(tokens,)](
        q,
        keys,
        weights,
        layer.norm,
        layer.norm_bias,
        layer.turn,
        rotary,
        slots,
        values,
        of_heads,
        cached,
        scales,
        NORM_EPS,
        (heads * head_dim) ** -0.5,
        q.stride(0),
        keys.stride(0),
        weights.stride(0),
        HEADS=heads,
        ROWS=max(16, triton.next_power_of_2(heads)),
        HEAD_DIM=head_dim,
        ROPE=rotary.shape[2],
        INTERLEAVED=layer.interleaved,
        num_warps=4,
        **launch_options(),
    )
    return IndexQueries(values, of_heads)


@triton.jit(do_not_specialize=["q_stride", "key_stride", "weight_stride"])
def _write(
    q,
    keys,
    weights,
    norm,
    norm_bias,
    turn,
    rotary,
    slots,
    values,
    of_heads,
    cache,
    scales,
    eps,
    scale,
    q_stride,
    key_stride,
    weight_stride,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    inputs_ready()
    token = tl.program_id(0).to(tl.int64)
    dims, heads = tl.arange(0, HEAD_DIM), tl.arange(0, ROWS)
    used, rotated = heads < HEADS, dims < ROPE
    # The table's rows are cos θ twice, then −sin θ and sin θ.
    angle, sine, partner = dims, dims, tl.where(dims < ROPE // 2, dims + ROPE // 2, dims - ROPE // 2)
    if INTERLEAVED:
        angle, partner = dims // 2, dims ^ 1
        sine = angle + dims % 2 * (ROPE // 2)
    partner = tl.where(rotated, partner, dims)
    rotary += token * (2 * ROPE)
    cos = tl.load(rotary + angle, mask=rotated, other=1.0).to(tl.float32)
    sin = tl.load(rotary + ROPE + sine, mask=rotated, other=0.0).to(tl.float32)

    dtype: tl.constexpr = q.dtype.element_ty
    at = q + token * q_stride + heads[:, None] * HEAD_DIM
    x = tl.load(at + dims[None, :], mask=used[:, None], other=0.0).to(tl.float32)
    other = tl.load(at + partner[None, :], mask=used[:, None], other=0.0).to(tl.float32)
    x = (x * cos[None, :] + other * sin[None, :]).to(dtype)
    weight = tl.load(weights + token * weight_stride + heads, mask=used, other=0.0).to(tl.float32) * scale
    to = values + (token * HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
    if scales is None:
        tl.store(to, x, mask=used[:, None])
    else:
        matrix = tl.load(turn + dims[:, None] * HEAD_DIM + dims[None, :])
        turned = tl.dot(x, matrix)
        of_rows = scale_of(tl.max(tl.abs(turned), axis=1))
        tl.store(to, (turned / of_rows[:, None]).to(cache.dtype.element_ty), mask=used[:, None])
        weight *= of_rows
    tl.store(of_heads + token * HEADS + heads, weight, mask=used)

    slot = tl.load(slots + token)
    if slot >= 0:
        keys += token * key_stride
        key = tl.load(keys + dims).to(tl.float32)
        mean = tl.sum(key, axis=0) / HEAD_DIM
        factor = tl.rsqrt(tl.sum((key - mean) * (key - mean), axis=0) / HEAD_DIM + eps)
        key = (key - mean) * factor * tl.load(norm + dims) + tl.load(norm_bias + dims)
        of_pair = (tl.load(keys + partner).to(tl.float32) - mean) * factor
        of_pair = of_pair * tl.load(norm + partner) + tl.load(norm_bias + partner)
        rounded = (key * cos + of_pair * sin).to(dtype)
        if scales is not None:
            by_rows = tl.load(turn + dims[:, None] * HEAD_DIM + dims[None, :]).to(tl.float32)
            turned_key = tl.sum(rounded.to(tl.float32)[:, None] * by_rows, axis=0)
            of_key = scale_of(tl.max(tl.abs(turned_key), axis=0))
            tl.store(scales + slot, of_key)
            tl.store(cache + slot * HEAD_DIM + dims, (turned_key / of_key).to(cache.dtype.element_ty))
        else:
            tl.store(cache + slot * HEAD_DIM + dims, rounded)
