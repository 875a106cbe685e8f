"""The gated delta rule and KDA for chunks of prompts. `gated_delta` defines them.

In a chunk, the values w that are written solve a triangular system. Its matrix I + A depends neither on v nor
on the state. So the inverse T of all chunks and heads is computed at once (`_solve`), as in DeltaNet's UT
transform (Yang 2024) with the gates of Gated DeltaNet. Then a program takes some dims of a head through the
chunks of a request, with the state in registers (`_scan`). With S the state before a chunk, it computes:

    w = T β (v − exp(s) S k)
    y = exp(s) S q + P w,  P_ij = exp(s_i − s_j) q_i · k_j for j ≤ i
    S = exp(s_last) S + Σ_j exp(s_last − s_j) w_j ⊗ k_j

β is part of T there, and the norms of k and q are parts of the factors of their rows.

In KDA each dimension of a key decays by itself, so the factors exp(s) are in the keys and queries that
`_scan` reads: `_solve` writes them. Its products within a chunk are

    Σ_c k_ic k_jc exp(s_ic − s_jc)

with exponents of at most 0. For i and j in different blocks of 16 tokens they are a product of matrices: with
r the s before the block of i, exp(s_i − r) and exp(r − s_j) are at most 1. Within a block they are summed one
by one, as in FLA's kernels (Yang & Zhang 2024).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.launch import inputs_ready, launch_options
from baton.engine.kernels.state.gated_delta import EPS, KimiDelta
from baton.engine.kernels.state.mamba2 import HeadStates, Rates
from baton.engine.kernels.state.ssd import LARGEST_FEW, LEAST, copy_after, prompt_of, shape_of, state_at
from baton.engine.kernels.state.state_update import time_step
from baton.engine.kernels.state.tiling import TritonStateTiling

SOLVE_WARPS = 4
DIMS, WARPS = 32, 4
FEW, MANY = 3, 2
"""Stages of the pipeline. If there are few programs, each has a multiprocessor to itself."""
BLOCK = tl.constexpr(16)
"""Rows of the system that are solved one after another."""
FACTORS = 4
"""Factors of each row and head: those of S k, of S q, of w ⊗ k, and of the state before the chunk."""
PART = tl.constexpr(32)
"""Dimensions of keys that are summed at once."""


def scan(
    rows: Tensor, rates: Rates, layer: HeadStates, state: Tensor, tiling: TritonStateTiling, y: Tensor
) -> None:
    """rows [rows, channels] after the convolution, y [rows, heads · head_dim]: dense rows at any stride. The
    tiling has chunks."""
    assert tiling.scans is not None, "the tiling has chunks"
    _, heads, head_dim, size = state.shape
    tokens = tiling.tokens
    count = len(rows)
    dt, share = rates
    dims = max(LEAST, min(DIMS, triton.next_power_of_2(head_dim)))
    systems = torch.empty(2, count, heads, tokens, dtype=rows.dtype, device=rows.device)  # T and P
    factors = torch.empty(FACTORS, heads, count, device=rows.device)
    shape = shape_of(layer, state, tokens)
    decayed = last = None
    if isinstance(layer, KimiDelta):
        # Keys and queries with their factors: those of S k, of S q, and of w ⊗ k.
        decayed = torch.empty(3, count, heads, size, dtype=rows.dtype, device=rows.device)
        # Each chunk has a number, `chunk_number`.
        last = torch.empty(count // tokens + len(tiling.slots) + 1, heads, size, device=rows.device)
    _solve[(len(tiling.scans), heads)](
        rows,
        dt,
        share,
        layer.dt_bias,
        layer.a,
        tiling.scans,
        systems,
        factors,
        decayed,
        last,
        rows.stride(0),
        dt.stride(0),
        share.stride(0),
        count,
        size**-0.5,
        EPS,
        **shape,
        num_warps=SOLVE_WARPS,
        **launch_options(),
    )
    # The first chunks of all prompts come first in `scans`.
    parts = triton.cdiv(head_dim, dims)
    fits = size <= LARGEST_FEW and rows.dtype is not torch.float32
    few = fits and parts * heads * tiling.prompts <= tiling.multiprocessors
    _scan[(tiling.prompts, heads, parts)](
        rows,
        state,
        tiling.slots,
        tiling.scans,
        tiling.copies,
        systems,
        factors,
        decayed,
        last,
        y,
        rows.stride(0),
        y.stride(0),
        count,
        DIMS=dims,
        **shape,
        num_warps=WARPS,
        num_stages=FEW if few else MANY,
        **launch_options(),
    )


@triton.jit(do_not_specialize=["count"])
def _solve(
    rows,
    dt,
    share,
    dt_bias,
    a,
    scans,
    systems,
    factors,
    decayed,  # None: a head decays as a whole
    last,
    row_stride,
    dt_stride,
    share_stride,
    count,
    scale,
    eps,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    inputs_ready()
    chunk, head = scans + tl.program_id(0) * 6, tl.program_id(1)
    tokens = tl.load(chunk + 2)
    if tokens == 0:
        return
    token = tl.arange(0, TOKENS)
    used = token < tokens
    row = tl.load(chunk + 1).to(tl.int64) + token
    if decayed is None:
        columns = tl.arange(0, COLUMNS)
        in_state = used[:, None] & (columns < SIZE)[None, :]
        of_row = rows + row[:, None] * row_stride
        of_group = of_row + (HEADS * HEAD_DIM + head // GROUP * SIZE + columns)[None, :]
        k = tl.load(of_group, mask=in_state, other=0.0)
        q = tl.load(of_group + HEADS // GROUP * SIZE, mask=in_state, other=0.0)
        k_scale = tl.rsqrt(tl.sum(k.to(tl.float32) * k.to(tl.float32), axis=1) + eps)
        q_scale = tl.rsqrt(tl.sum(q.to(tl.float32) * q.to(tl.float32), axis=1) + eps) * scale
        steps = tl.load(dt + row * dt_stride + head, mask=used, other=0.0).to(tl.float32)
        decay = tl.where(
            used, time_step(steps + tl.load(dt_bias + head), 0.0, float("inf")) * tl.load(a + head), 0.0
        )
        beta = _beta(share + row * share_stride + head, used)
        total, chunk_total = tl.cumsum(decay, 0), tl.sum(decay, 0)
        seen = token[:, None] >= token[None, :]
        decays = tl.exp(tl.where(seen, total[:, None] - total[None, :], float("-inf"))) * k_scale[None, :]
        answers = tl.dot(q, tl.trans(k), input_precision="tf32x3") * decays * q_scale[:, None]
        system = tl.dot(k, tl.trans(k), input_precision="tf32x3") * decays * (k_scale * beta)[:, None]
    else:
        tl.static_assert(GROUP == 1, "each head has a key of its own")
        kk, qk, k_squares, q_squares = _of_keys(
            rows, dt, dt_bias, a, decayed, last, row_stride, dt_stride, count, chunk, row, head, used,
            HEADS, HEAD_DIM, SIZE, COLUMNS,
        )  # fmt: skip
        k_scale, q_scale = tl.rsqrt(k_squares + eps), tl.rsqrt(q_squares + eps) * scale
        beta = _beta(share + row * share_stride + head, used)
        answers = qk * q_scale[:, None] * k_scale[None, :]
        system = kk * (k_scale * beta)[:, None] * k_scale[None, :]
    PRECISION: tl.constexpr = "tf32x3" if rows.dtype.element_ty == tl.float32 else "tf32"
    inverse = _inverse(tl.where(token[:, None] > token[None, :], system, 0.0), PRECISION) * beta[None, :]

    to = systems + (row[:, None] * HEADS + head) * TOKENS + token[None, :]
    tl.store(to, inverse.to(systems.dtype.element_ty), mask=used[:, None])
    to += count.to(tl.int64) * HEADS * TOKENS
    tl.store(to, answers.to(systems.dtype.element_ty), mask=used[:, None])
    factor, to = HEADS * count.to(tl.int64), factors + head * count.to(tl.int64) + row
    if decayed is None:
        grown = tl.exp(total)  # pyrefly: ignore[unbound-name]  (the branch above has set it)
        tl.store(to, grown * k_scale, mask=used)
        tl.store(to + factor, grown * q_scale, mask=used)
        tl.store(to + 2 * factor, tl.exp(chunk_total - total) * k_scale, mask=used)  # pyrefly: ignore[unbound-name]
        tl.store(to + 3 * factor, tl.exp(chunk_total), mask=used)
    else:
        tl.store(to, k_scale, mask=used)
        tl.store(to + factor, q_scale, mask=used)
        tl.store(to + 2 * factor, k_scale, mask=used)


@triton.jit
def _beta(of_rows, used):
    """sigmoid(β) of the rows of a head; 0 behind them."""
    beta = tl.load(of_rows, mask=used, other=0.0).to(tl.float32)
    return tl.where(used, tl.sigmoid(beta), 0.0)


@triton.jit
def _of_keys(
    rows, dt, dt_bias, a, decayed, last, row_stride, dt_stride, count, chunk, row, head, used,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Writes the keys and queries of a chunk with their factors. Returns what `_products` adds up, and the
    squares of keys and queries."""
    DTYPE: tl.constexpr = rows.dtype.element_ty
    TOKENS: tl.constexpr = used.shape[0]
    WIDTH: tl.constexpr = PART if COLUMNS > PART else COLUMNS
    number = chunk_number(tl.load(chunk + 1), tl.load(chunk), TOKENS)
    rate = tl.load(a + head)
    k_squares, q_squares = tl.zeros([TOKENS], tl.float32), tl.zeros([TOKENS], tl.float32)
    kk, qk = tl.zeros([TOKENS, TOKENS], tl.float32), tl.zeros([TOKENS, TOKENS], tl.float32)
    for start in range(0, COLUMNS, WIDTH):
        columns = start + tl.arange(0, WIDTH)
        inside = used[:, None] & (columns < SIZE)[None, :]
        of_head = rows + row[:, None] * row_stride + (HEADS * HEAD_DIM + head * SIZE + columns)[None, :]
        k = tl.load(of_head, mask=inside, other=0.0).to(tl.float32)
        q = tl.load(of_head + HEADS * SIZE, mask=inside, other=0.0).to(tl.float32)
        of_key = head * SIZE + columns
        of_step = dt + row[:, None] * dt_stride + of_key[None, :]
        steps = tl.load(of_step, mask=inside, other=0.0).to(tl.float32)
        steps += tl.load(dt_bias + of_key, mask=columns < SIZE, other=0.0)[None, :]
        decay = tl.where(inside, time_step(steps, 0.0, float("inf")) * rate, 0.0)
        total, chunk_total = tl.cumsum(decay, 0), tl.sum(decay, 0)
        k_squares += tl.sum(k * k, axis=1)
        q_squares += tl.sum(q * q, axis=1)

        to = decayed + (row[:, None] * HEADS + head) * SIZE + columns[None, :]
        of_all = count.to(tl.int64) * HEADS * SIZE
        grown = tl.exp(total)
        tl.store(to, (k * grown).to(DTYPE), mask=inside)
        tl.store(to + of_all, (q * grown).to(DTYPE), mask=inside)
        tl.store(to + 2 * of_all, (k * tl.exp(chunk_total[None, :] - total)).to(DTYPE), mask=inside)
        of_chunk = last + (number * HEADS + head) * SIZE + columns
        tl.store(of_chunk, tl.exp(chunk_total), mask=columns < SIZE)

        kk, qk = _products(k, q, total, kk, qk, DTYPE)
    return kk, qk, k_squares, q_squares


@triton.jit
def _products(k, q, total, kk, qk, DTYPE: tl.constexpr):
    """Adds Σ_c k_ic k_jc exp(s_ic − s_jc) to kk for j ≤ i, and that with q_i to qk. k, q and the s of `total`
    are [TOKENS, …]."""
    TOKENS: tl.constexpr = k.shape[0]
    BLOCKS: tl.constexpr = TOKENS // BLOCK
    token, i = tl.arange(0, TOKENS), tl.arange(0, BLOCK)
    # Of tokens in different blocks.
    for block in tl.static_range(1, BLOCKS):
        before, in_block = (token < block * BLOCK)[:, None], (token // BLOCK == block)[:, None]
        reference = tl.sum(tl.where(token[:, None] == block * BLOCK - 1, total, 0.0), axis=0)[None, :]
        keys = tl.trans((k * tl.exp(tl.where(before, reference - total, float("-inf")))).to(DTYPE))
        grown = tl.exp(tl.where(in_block, total - reference, float("-inf")))
        kk = tl.dot((k * grown).to(DTYPE), keys, kk, input_precision="tf32x3")
        qk = tl.dot((q * grown).to(DTYPE), keys, qk, input_precision="tf32x3")
    # Of tokens in the same block.
    blocks_k = tl.reshape(k, [BLOCKS, BLOCK, k.shape[1]])
    blocks_q = tl.reshape(q, [BLOCKS, BLOCK, k.shape[1]])
    blocks_total = tl.reshape(total, [BLOCKS, BLOCK, k.shape[1]])
    for j in range(BLOCK):
        at = (i == j)[None, :, None]
        key = tl.sum(tl.where(at, blocks_k, 0.0), axis=1)[:, None, :]
        key_total = tl.sum(tl.where(at, blocks_total, 0.0), axis=1)[:, None, :]
        exponent = tl.where((i >= j)[None, :, None], blocks_total - key_total, float("-inf"))
        key *= tl.exp(exponent)
        column = (token[:, None] // BLOCK * BLOCK + j) == token[None, :]
        kk += tl.where(column, tl.reshape(tl.sum(blocks_k * key, axis=2), [TOKENS])[:, None], 0.0)
        qk += tl.where(column, tl.reshape(tl.sum(blocks_q * key, axis=2), [TOKENS])[:, None], 0.0)
    return kk, qk


@triton.jit
def chunk_number(row, request, TOKENS: tl.constexpr):
    """A number of its own for the chunk that begins with this row: the chunks of a request are TOKENS rows
    apart, and those of later requests have later rows."""
    return row // TOKENS + request


@triton.jit
def _inverse(lower, PRECISION: tl.constexpr):
    """(I + below)⁻¹, for a matrix below the diagonal: first of the blocks on the diagonal, row by row. They
    are the inverse D without the other blocks L. As (D L)⁴ is 0, four blocks a side need few products."""
    TOKENS: tl.constexpr = lower.shape[0]
    BLOCKS: tl.constexpr = TOKENS // BLOCK
    tl.static_assert(BLOCKS <= 4)
    block, i, token = tl.arange(0, BLOCKS), tl.arange(0, BLOCK), tl.arange(0, TOKENS)
    on_diagonal = block[:, None, None, None] == block[None, None, :, None]
    parts = tl.reshape(lower, [BLOCKS, BLOCK, BLOCKS, BLOCK])
    parts = tl.sum(tl.where(on_diagonal, parts, 0.0), axis=2)  # [BLOCKS, BLOCK, BLOCK]
    solved = tl.where(i[None, :, None] == i[None, None, :], 1.0, 0.0) + tl.zeros_like(parts)
    for row in range(1, BLOCK):
        at = (i == row)[None, :, None]
        factors = tl.sum(tl.where(at, parts, 0.0), axis=1)
        solved -= tl.where(at, tl.sum(factors[:, :, None] * solved, axis=1)[:, None, :], 0.0)
    solved = tl.where(on_diagonal, solved[:, :, None, :], 0.0)
    diagonal = tl.reshape(solved, [TOKENS, TOKENS])
    off_diagonal = tl.where((token // BLOCK)[:, None] > (token // BLOCK)[None, :], lower, 0.0)
    step = tl.dot(diagonal, off_diagonal, input_precision=PRECISION)
    inverse = diagonal - tl.dot(step, diagonal, input_precision=PRECISION)
    if BLOCKS > 2:
        twice = tl.dot(step, step, input_precision=PRECISION)
        inverse += tl.dot(twice, inverse, input_precision=PRECISION)
    return inverse


@triton.jit
def _three(first, distance, inside):
    """A tile at `first`, and two more at this distance each."""
    one = tl.load(first, mask=inside, other=0.0)
    two = tl.load(first + distance, mask=inside, other=0.0)
    return one, two, tl.load(first + 2 * distance, mask=inside, other=0.0)


@triton.jit(do_not_specialize=["count"])
def _scan(
    rows,
    state,
    slots,
    scans,
    copies,
    systems,
    factors,
    decayed,  # None: a head decays as a whole
    last,
    y,
    row_stride,
    y_stride,
    count,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    inputs_ready()
    request, first, tokens, has_state = prompt_of(scans, tl.program_id(0))
    if tokens == 0:
        return
    head = tl.program_id(1)
    token, columns = tl.arange(0, TOKENS), tl.arange(0, COLUMNS)
    dims = tl.program_id(2) * DIMS + tl.arange(0, DIMS)
    in_head, in_state = (dims < HEAD_DIM)[None, :], columns < SIZE
    inside = in_state[:, None] & in_head
    slot = tl.load(slots + request).to(tl.int64)
    kept = state_at(state, slot, head, dims, columns, HEADS, HEAD_DIM, SIZE)
    now = tl.load(kept, mask=inside & has_state, other=0.0).to(tl.float32)
    factor = HEADS * count.to(tl.int64)
    # Loaded a chunk ahead, since each chunk would wait for it.
    next_slot = -1 if copies is None else copy_after(copies, first, 0, tokens, TOKENS)
    for start in range(0, tokens, TOKENS):
        row, used = first + start + token, start + token < tokens
        channels = rows + row[:, None] * row_stride
        v = tl.load(channels + (head * HEAD_DIM + dims)[None, :], mask=used[:, None] & in_head, other=0.0)
        in_rows = used[:, None] & in_state[None, :]
        if decayed is None:
            of_group = channels + (HEADS * HEAD_DIM + head // GROUP * SIZE + columns)[None, :]
            k = tl.load(of_group, mask=in_rows, other=0.0)
            q = tl.load(of_group + HEADS // GROUP * SIZE, mask=in_rows, other=0.0)
            written_k = k
        else:
            of_head = decayed + (row[:, None] * HEADS + head) * SIZE + columns[None, :]
            k, q, written_k = _three(of_head, factor * SIZE, in_rows)
        of_system = systems + (row[:, None] * HEADS + head) * TOKENS + token[None, :]
        inverse = tl.load(of_system, mask=used[:, None], other=0.0)
        answers = tl.load(of_system + factor * TOKENS, mask=used[:, None], other=0.0)
        of_row = factors + head * count.to(tl.int64) + row
        of_k, of_q, of_written = _three(of_row, factor, used)
        if decayed is None:
            of_state = tl.load(factors + 3 * factor + head * count.to(tl.int64) + first + start)
        else:
            of_chunk = last + (chunk_number(first + start, request, TOKENS) * HEADS + head) * SIZE + columns
            of_state = tl.load(of_chunk, mask=in_state, other=0.0)[:, None]

        before = now.to(k.dtype)
        new = v.to(tl.float32) - tl.dot(k, before, input_precision="tf32x3") * of_k[:, None]
        written = tl.dot(inverse, new.to(k.dtype), input_precision="tf32x3")
        out = tl.dot(q, before, input_precision="tf32x3") * of_q[:, None]
        out = tl.dot(answers, written.to(k.dtype), out, input_precision="tf32x3")
        to = y + row[:, None] * y_stride + (head * HEAD_DIM + dims)[None, :]
        tl.store(to, out.to(y.dtype.element_ty), mask=used[:, None] & in_head)
        moved = (written * of_written[:, None]).to(k.dtype)
        now = tl.dot(tl.trans(written_k), moved, now * of_state, input_precision="tf32x3")
        if copies is not None:
            to_slot, next_slot = next_slot, copy_after(copies, first, start + TOKENS, tokens, TOKENS)
            if to_slot >= 0:
                copy = state_at(state, to_slot, head, dims, columns, HEADS, HEAD_DIM, SIZE)
                tl.store(copy, now, mask=inside)
    tl.store(kept, now, mask=inside)
