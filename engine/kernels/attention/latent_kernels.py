"""Latent attention (`latent`) in Triton.

*Absorbed.* `_attend_absorbed` has a program for each piece of a context and each block of query heads. It
reads a tile of the cache once: the tile is the keys, and its latents are the values. Numbers in FP8 are
multiplied by their scales first. Positions and dimensions are the large sides of the products, as in
`decode`, which also cuts the contexts of decodes and combines the pieces. A short chunk of a prompt is
absorbed, too: each of its queries is a row with a context of its own.

*Expanded.* The keys and values of all positions of some chunks go to scratch memory. It always has
`SCRATCH_BYTES` (`latent_tiling`), so the rehearsal of the largest steps counts it. A chunk with more
positions than it holds is computed for a few heads at a time. If it does not hold one head, the chunk is
absorbed, `MOST_ABSORBED` queries at a time.

*Exact* (`--batch-invariant`): all chunks are absorbed, so one kernel attends for decodes and prompts. A piece
is a segment (`online_softmax`). So the pieces of a query, and the order in which they are put together,
depend on its position alone. Products of heads have tiles of EXACT_TILE rows, however many rows there are.

*Sparse*: in a model with an index, rows that may see more positions than a query chooses are absorbed. Their
tables have the slots of the chosen positions (`index_kernels`), so the same kernel attends to these.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from baton.engine.kernels.attention import index_kernels, latent_wgmma
from baton.engine.kernels.attention.latent import LatentHeads, LatentNorm
from baton.engine.kernels.attention.latent_tiling import Absorbed, ExpandedChunks, LatentTiling
from baton.engine.kernels.attention.online_softmax import LOG2_E, weigh
from baton.engine.kernels.attention.paged import KV, IndexQueries, parts
from baton.engine.kernels.attention.pieces import COMBINED, combine
from baton.engine.kernels.attention.prefill import prefill_attention
from baton.engine.kernels.fp8 import scale_of
from baton.engine.kernels.launch import inputs_ready, launch_options, next_may_begin

WARPS = 4
SPARSE_WARPS = 8  # where each position has a slot of its own: with fewer, registers spill
STAGES = 2
MAX_SKINNY_ROWS = 64  # tokens whose heads `_multiply` multiplies; cuBLAS is faster for more
WEIGHTS = 16384  # of a program of `_multiply`
GATHERED = 1 << 15  # positions: so many latents are copied out of the cache at a time
EXACT_TILE = 16  # rows of `_multiply` in the exact mode


def choose_positions(queries: IndexQueries, keys: KV, tiling: LatentTiling) -> None:
    for part in tiling:
        if isinstance(part, Absorbed) and part.choice is not None:
            of_rows = IndexQueries(queries.values[part.rows], queries.weights[part.rows])
            index_kernels.choose(of_rows, keys, part.choice)


def latent_attention(
    q: Tensor, kv: KV, tiling: LatentTiling, heads: LatentHeads, out: Tensor | None = None
) -> Tensor:
    out = q.new_empty(len(q), *heads.values.shape[:2]) if out is None else out
    for part in tiling:
        if isinstance(part, Absorbed):
            _absorbed(q[part.rows], kv, part, heads, out[part.rows])
        else:
            _expanded(q[part.rows], kv, part, heads, out[part.rows])
    return out


def _absorbed(q: Tensor, kv: KV, part: Absorbed, heads: LatentHeads, out: Tensor) -> None:
    cached, scales = parts(kv)
    _, _, block_size, cut, head_dim = cached.shape
    (rows, num_heads, made_of), rank, size = q.shape, heads.values.shape[2], cut * head_dim
    count = len(part.pieces.work)
    queries, latents = q.new_empty(rows, num_heads, size), q.new_empty(rows, num_heads, rank)
    _multiply_heads(q, heads.keys[:, :made_of], queries, exact=part.exact)
    partial = torch.empty((count, num_heads, rank), dtype=torch.float32, device=q.device)
    lse = torch.empty((count, num_heads), dtype=torch.float32, device=q.device)
    cached = cached.view(-1, size)
    grid, form = (triton.cdiv(num_heads, part.form.rows), count), part.form
    row_stride = part.tables.stride(0) if part.tables.dim() == 2 else 0
    work, scale = (part.tables, part.pieces.work, part.pieces.first), heads.scale * LOG2_E.value
    arguments = (*work, partial, lse, latents, scale, row_stride)
    shape = {"HEADS": num_heads, "ROWS": form.rows, "BLOCK_N": form.block_n}
    shape["ENTRY"] = block_size if part.choice is None else 1
    if form.wgmma:
        latent_wgmma.attend(grid, queries, cached, *arguments, **shape)
    else:
        _attend_absorbed[grid](
            queries,
            cached,
            *(TensorDescriptor.from_tensor(cached, [form.block_n, n]) for n in (rank, size - rank)),
            scales,
            *arguments,
            **shape,
            BLOCK_SIZE=block_size,
            RANK=rank,
            ROPE=size - rank,
            HEAD_DIM=head_dim,
            num_warps=WARPS if part.choice is None else SPARSE_WARPS,
            num_stages=STAGES,
            **launch_options(),
        )
    at_once = COMBINED  # in the exact mode the order of the sums is always the same
    if not part.exact:  # all pieces of a row, if each row has equally many
        at_once = min(COMBINED, triton.next_power_of_2(triton.cdiv(count, max(1, rows))))
    combine(partial, lse, part.pieces, latents, early=True, at_once=at_once)
    _multiply_heads(latents, heads.values.mT, out, exact=part.exact)


def _expanded(q: Tensor, kv: KV, part: ExpandedChunks, heads: LatentHeads, out: Tensor) -> None:
    padding, at_once = heads.keys.shape[1] - q.shape[2], part.scratch.keys.shape[3]
    for first in range(0, q.shape[1], at_once):
        some = slice(first, first + at_once)
        for begin in range(0, len(part.slots), GATHERED):
            cached = _at(kv, part.slots[begin : begin + GATHERED], q.dtype)
            for weights, made in zip(heads[:2], part.scratch, strict=True):
                out_rows = made.flatten(0, 2).flatten(1)[begin : begin + len(cached)]
                torch.mm(cached[:, : weights.shape[2]], weights[some].flatten(0, 1).T, out=out_rows)
        queries = F.pad(q[:, some], (0, padding)) if padding else q[:, some]
        prefill_attention(
            queries, part.scratch, part.tables, part.tiles, out[:, some], None, None, heads.scale
        )


def _at(kv: KV, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """The latents in these slots: [slots, size] of a plain dtype."""
    values, scales = parts(kv)
    cached = values.flatten(0, 2).flatten(1)
    if scales is None:
        return cached.index_select(0, slots)
    rows, block_size = cached.view(torch.uint8).index_select(0, slots).view(cached.dtype), values.shape[2]
    of_heads = scales[0].transpose(1, 2)[slots // block_size, slots % block_size]
    numbers = rows.float().unflatten(1, (of_heads.shape[1], -1)) * of_heads[:, :, None]
    return numbers.flatten(1).to(dtype)


@triton.jit(do_not_specialize=["table_stride"])
def _attend_absorbed(
    q,
    cache,
    latent_tiles,
    shared_tiles,
    scales,
    block_tables,
    work,
    first,
    partial,
    lse,
    out,
    scale,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    ENTRY: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """ENTRY: positions that an entry of a table stands for."""
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
    last, offsets = begin, tl.arange(0, BLOCK_N)
    if ENTRY % BLOCK_N == 0 and q.dtype.element_ty != tl.float32:
        last += (stop - begin) // BLOCK_N * BLOCK_N
        for start in tl.range(begin, last, BLOCK_N):
            slot = tl.load(table + start // ENTRY) * ENTRY + start % ENTRY
            latent, shared = latent_tiles.load([slot, 0]), shared_tiles.load([slot, RANK])
            if scales is not None:
                of_heads = scales + _places(slot.to(tl.int64) + offsets, BLOCK_SIZE, SIZE // HEAD_DIM)
                latent = _scaled(latent, of_heads, 0, None, BLOCK_SIZE, HEAD_DIM, q.dtype.element_ty)
                shared = _scaled(shared, of_heads, RANK, None, BLOCK_SIZE, HEAD_DIM, q.dtype.element_ty)
            m, total, acc = _attend_tile(q_latent, q_shared, latent, shared, None, m, total, acc, scale)
    for start in tl.range(last, stop, BLOCK_N):
        inside = start + offsets < stop
        if ENTRY % BLOCK_N == 0:
            slots = tl.load(table + start // ENTRY).to(tl.int64) * ENTRY
            slots += start % ENTRY + offsets
        else:
            positions = start + offsets
            block = tl.load(table + positions // ENTRY, mask=inside, other=0).to(tl.int64)
            slots = block * ENTRY + positions % ENTRY
        keys = cache + slots[:, None] * SIZE
        latent = tl.load(keys + dims, mask=inside[:, None], other=0.0)
        shared = tl.load(keys + of_shared, mask=inside[:, None], other=0.0)
        if scales is not None:
            of_heads = scales + _places(slots, BLOCK_SIZE, SIZE // HEAD_DIM)
            latent = _scaled(latent, of_heads, 0, inside, BLOCK_SIZE, HEAD_DIM, q.dtype.element_ty)
            shared = _scaled(shared, of_heads, RANK, inside, BLOCK_SIZE, HEAD_DIM, q.dtype.element_ty)
        m, total, acc = _attend_tile(q_latent, q_shared, latent, shared, inside, m, total, acc, scale)
    result = tl.trans(acc) / tl.where(total == 0.0, 1.0, total)[:, None]  # 0: the piece of a padding request
    if tl.load(first + row + 1) - tl.load(first + row) == 1:
        to = out + (row * HEADS + heads)[:, None] * RANK + dims
        tl.store(to, result.to(out.dtype.element_ty), mask=used)
    else:
        at = piece.to(tl.int64) * HEADS + heads
        tl.store(partial + at[:, None] * RANK + dims, result, mask=used)
        tl.store(lse + at, m + tl.log2(total), mask=heads < HEADS)


@triton.jit
def _places(slots, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr):
    """The place of the first head's scale in `Fp8KV.scales`. Heads are BLOCK_SIZE apart."""
    return slots // BLOCK_SIZE * (HEADS * BLOCK_SIZE) + slots % BLOCK_SIZE


@triton.jit
def _scaled(
    x,
    scales,
    FIRST: tl.constexpr,
    inside,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    dtype: tl.constexpr,
):
    """x [positions, dims from FIRST on] in FP8, times the scales of their heads, as `dtype`. scales: pointers
    to those of the first head."""
    HEADS: tl.constexpr = x.shape[1] // HEAD_DIM
    heads = FIRST // HEAD_DIM + tl.arange(0, HEADS)
    at = scales[:, None] + heads[None, :] * BLOCK_SIZE
    of_heads = tl.load(at) if inside is None else tl.load(at, mask=inside[:, None], other=0.0)
    numbers = tl.reshape(x.to(tl.float32), (x.shape[0], HEADS, HEAD_DIM)) * of_heads[:, :, None]
    return tl.reshape(numbers, x.shape).to(dtype)


@triton.jit
def _attend_tile(q_latent, q_shared, latent, shared, inside, m, total, acc, scale):
    """Adds a tile of positions, which are all seen or those `inside`. Returns the new m, total and acc."""
    scores = tl.dot(latent, q_latent, input_precision="tf32x3")
    scores = tl.dot(shared, q_shared, scores, input_precision="tf32x3") * scale
    if inside is not None:
        scores = tl.where(inside[:, None], scores, float("-inf"))
    new_m = tl.maximum(m, tl.max(scores, axis=0))
    weights, total, shrink = weigh(scores, new_m, m, total, None, 0)
    acc *= shrink
    acc = tl.dot(tl.trans(latent), weights.to(latent.dtype), acc, input_precision="tf32x3")
    return new_m, total, acc


def _multiply_heads(x: Tensor, weights: Tensor, out: Tensor, *, exact: bool) -> None:
    """Writes x [tokens, heads, k] times weights [heads, k, n] to out [tokens, heads, n], which is dense."""
    tokens, num_heads, size = x.shape
    if tokens > MAX_SKINNY_ROWS and not exact:
        torch.bmm(x.transpose(0, 1), weights, out=out.transpose(0, 1))
        return
    assert x.stride(2) == 1, "the kernel assumes dense heads"
    columns, inner = weights.shape[2], triton.next_power_of_2(size)
    block_n = max(16, WEIGHTS // inner)
    rows = EXACT_TILE if exact else max(16, triton.next_power_of_2(tokens))
    _multiply[(triton.cdiv(columns, block_n), num_heads, triton.cdiv(tokens, rows))](
        x,
        weights,
        out,
        tokens,
        x.stride(0),
        x.stride(1),
        *weights.stride(),
        columns,
        HEADS=num_heads,
        SIZE=size,
        INNER=inner,
        ROWS=rows,
        BLOCK_N=block_n,
        num_warps=4,
        **launch_options(),
    )


@triton.jit(do_not_specialize=["tokens"])
def _multiply(
    x,
    weights,
    out,
    tokens,
    x_row,
    x_head,
    of_head,
    of_inner,
    of_column,
    columns,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    head, column = tl.program_id(1), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner, row = tl.arange(0, INNER), tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    weights += head.to(tl.int64) * of_head + inner[:, None] * of_inner + column[None, :] * of_column
    inside = (column < columns)[None, :]
    weight = tl.load(weights, mask=(inner < SIZE)[:, None] & inside, other=0.0)
    inputs_ready()  # loading the weights overlaps with the kernel before
    real = (row < tokens)[:, None]
    of_x = x + row[:, None].to(tl.int64) * x_row + head * x_head + inner[None, :]
    inputs = tl.load(of_x, mask=real & (inner < SIZE)[None, :], other=0.0)
    result = tl.dot(inputs, weight, input_precision="tf32x3")
    to = out + (row[:, None].to(tl.int64) * HEADS + head) * columns + column[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=real & inside)


def write_latent(
    q: Tensor, latent: Tensor, shared: Tensor, norm: LatentNorm, rotary: Tensor, kv: KV, slots: Tensor
) -> None:
    tokens, heads, size = q.shape
    cached, scales = parts(kv)
    assert q.stride()[1:] == (size, 1), "the kernel assumes dense heads"
    _write[(tokens,)](
        q,
        latent,
        shared,
        norm.weight,
        norm.eps,
        rotary,
        cached,
        scales,
        slots,
        q.stride(0),
        latent.stride(0),
        shared.stride(0),
        HEADS=heads,
        SIZE=size,
        RANK=latent.shape[1],
        ROPE=shared.shape[1],
        ROWS=triton.next_power_of_2(heads),
        BLOCK_SIZE=cached.shape[2],
        HEAD_DIM=cached.shape[4],
        num_warps=4,
        **launch_options(),
    )


@triton.jit
def _write(
    q,
    latent,
    shared,
    norm,
    eps,
    rotary,
    cache,
    scales,
    slots,
    q_stride,
    latent_stride,
    shared_stride,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    next_may_begin()
    of_latent = tl.arange(0, RANK)
    norm_weights = tl.load(norm + of_latent).to(tl.float32)
    token = tl.program_id(0).to(tl.int64)
    dims, pairs = tl.arange(0, ROPE), tl.arange(0, ROPE // 2)
    # The table's rows are cos θ twice, then −sin θ and sin θ.
    angles = rotary + token * (2 * ROPE) + pairs
    cos, sin = tl.load(angles), tl.load(angles + ROPE + ROPE // 2)
    slot = tl.load(slots + token)
    inputs_ready()
    heads = tl.arange(0, ROWS)[:, None]
    at = q + token * q_stride + heads * SIZE + SIZE - ROPE + dims[None, :]
    tl.store(at, _rotated(tl.load(at, mask=heads < HEADS, other=0.0), cos, sin), mask=heads < HEADS)
    if slot >= 0:
        to = cache + slot * (RANK + ROPE)
        x = tl.load(latent + token * latent_stride + of_latent).to(tl.float32)
        x *= tl.rsqrt(tl.sum(x * x, axis=0) / RANK + eps) * norm_weights
        x = x.to(latent.dtype.element_ty)
        key = _rotated(tl.load(shared + token * shared_stride + dims)[None, :], cos, sin)
        if scales is not None:
            of_heads = scales + _places(slot, BLOCK_SIZE, (RANK + ROPE) // HEAD_DIM)
            x = _quantized(x, of_heads, 0, cache, BLOCK_SIZE, HEAD_DIM)
            key = _quantized(key, of_heads, RANK, cache, BLOCK_SIZE, HEAD_DIM)
        tl.store(to + of_latent, x)
        tl.store(to + RANK + dims[None, :], key)


@triton.jit
def _quantized(x, scales, FIRST: tl.constexpr, cache, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """The numbers of a token from FIRST on, in FP8. Stores the scales of their heads, as in `_scaled`."""
    HEADS: tl.constexpr = x.numel // HEAD_DIM
    heads = tl.reshape(x.to(tl.float32), (HEADS, HEAD_DIM))
    scale = scale_of(tl.max(tl.abs(heads), axis=1))
    tl.store(scales + (FIRST // HEAD_DIM + tl.arange(0, HEADS)) * BLOCK_SIZE, scale)
    return tl.reshape(heads / scale[:, None], x.shape).to(cache.dtype.element_ty)


@triton.jit
def _rotated(x, cos, sin):
    """Rotates pairs of neighbours, in float32."""
    pairs = tl.reshape(x.to(tl.float32), (x.shape[0], x.shape[1] // 2, 2))
    even, odd = tl.split(pairs)
    turned = tl.interleave(even * cos - odd * sin, odd * cos + even * sin)
    return turned.to(x.dtype)
