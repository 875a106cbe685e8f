"""The scan of Mamba-2 over the chunks of prompts. `mamba2` defines it.

`_prepare` computes for all chunks at once what does not depend on the state: Δ and its sums, and C Bᵀ of each
group. All heads of a group share C Bᵀ. Then a program takes some dims of a head through the chunks of
a request, with the state in registers (`_scan`). So a state is read and written once. The chain of kernels in
`mamba_ssm` (Dao & Gu 2024) and PyTorch's fused kernel (*Accelerating Mamba2 with Kernel Fusion*, 2026)
compute chunks in parallel, and pass states through memory. But the heads of one request fill a GPU already.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.launch import inputs_ready, launch_options
from baton.engine.kernels.state.mamba2 import HeadStates, Mamba2
from baton.engine.kernels.state.state_update import time_step
from baton.engine.kernels.state.tiling import TritonStateTiling

DIMS = 64  # of a program
DIMS_FLOAT32 = 32  # more do not fit into registers and shared memory
PREPARED_HEADS, PREPARE_WARPS = 16, 4
FEW, MANY = (8, 3), (4, 2)
"""Warps and stages. With few programs, one has a multiprocessor for itself; else two share one."""
LARGEST_FEW = 128  # columns of a state: more do not fit into shared memory with so many stages
LEAST = 16  # of a dimension of a product in Triton


def shape_of(layer: HeadStates, state: Tensor, tokens: int) -> dict[str, int]:
    """What the kernels of a scan know of the state when they are compiled. `tokens`: of a chunk."""
    _, heads, head_dim, size = state.shape
    return {
        "HEADS": heads,
        "GROUP": heads // layer.groups,
        "HEAD_DIM": head_dim,
        "SIZE": size,
        "COLUMNS": max(LEAST, triton.next_power_of_2(size)),
        "TOKENS": tokens,
    }


def scan(
    rows: Tensor, dt: Tensor, layer: Mamba2, state: Tensor, tiling: TritonStateTiling, y: Tensor
) -> None:
    """rows [rows, channels] after the convolution, dt [rows, heads], y [rows, heads · head_dim]: dense
    rows at any stride. The tiling has chunks."""
    assert tiling.scans is not None, "the tiling has chunks"
    _, heads, head_dim, size = state.shape
    count, tokens = len(rows), tiling.tokens
    steps = torch.empty(2, heads, count, device=rows.device)  # Δ, and the sums s of a chunk
    products = torch.empty(count, layer.groups, tokens, dtype=rows.dtype, device=rows.device)
    shape = shape_of(layer, state, tokens)
    _prepare[(len(tiling.scans), layer.groups + triton.cdiv(heads, PREPARED_HEADS))](
        rows,
        dt,
        layer.dt_bias,
        layer.a,
        tiling.scans,
        steps,
        products,
        rows.stride(0),
        dt.stride(0),
        count,
        *layer.dt_limits,
        BLOCK=PREPARED_HEADS,
        **shape,
        num_warps=PREPARE_WARPS,
        **launch_options(),
    )
    exact = rows.dtype is torch.float32
    dims = max(LEAST, min(DIMS_FLOAT32 if exact else DIMS, triton.next_power_of_2(head_dim)))
    parts = triton.cdiv(head_dim, dims)
    few = parts * heads * tiling.prompts <= tiling.multiprocessors and size <= LARGEST_FEW
    warps, stages = FEW if few else MANY
    # The first chunks of all prompts come first in `scans`.
    _scan[(parts, heads, tiling.prompts)](
        rows,
        layer.d,
        state,
        tiling.slots,
        tiling.scans,
        tiling.copies,
        steps,
        products,
        y,
        rows.stride(0),
        y.stride(0),
        count,
        DIMS=dims,
        **shape,
        num_warps=warps,
        num_stages=2 if exact else stages,  # shared memory
        **launch_options(),
    )


@triton.jit(do_not_specialize=["count"])
def _prepare(
    rows,
    dt,
    dt_bias,
    a,
    scans,
    steps,
    products,
    row_stride,
    dt_stride,
    count,
    dt_min,
    dt_max,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The first programs of a chunk are for groups, the others for BLOCK heads each."""
    inputs_ready()
    chunk, part = scans + tl.program_id(0) * 6, tl.program_id(1)
    tokens = tl.load(chunk + 2)
    if tokens == 0:
        return
    GROUPS: tl.constexpr = HEADS // GROUP
    token = tl.arange(0, TOKENS)
    used = (token < tokens)[:, None]
    row = (tl.load(chunk + 1).to(tl.int64) + token)[:, None]
    if part < GROUPS:
        columns = tl.arange(0, COLUMNS)[None, :]
        of_group = rows + row * row_stride + HEADS * HEAD_DIM + part * SIZE + columns
        in_state = used & (columns < SIZE)
        b = tl.load(of_group, mask=in_state, other=0.0)
        c = tl.load(of_group + GROUPS * SIZE, mask=in_state, other=0.0)
        product = tl.dot(c, tl.trans(b), input_precision="tf32x3").to(products.dtype.element_ty)
        tl.store(products + (row * GROUPS + part) * TOKENS + token[None, :], product, mask=used)
    else:
        head = (part - GROUPS) * BLOCK + tl.arange(0, BLOCK)
        inside = used & (head < HEADS)[None, :]
        bias = tl.load(dt_bias + head, mask=head < HEADS, other=0.0)[None, :]
        slope = tl.load(a + head, mask=head < HEADS, other=0.0)[None, :]
        step = tl.load(dt + row * dt_stride + head[None, :], mask=inside, other=0.0).to(tl.float32)
        step = tl.where(used, time_step(step + bias, dt_min, dt_max), 0.0)
        to = steps + head[None, :] * count.to(tl.int64) + row
        tl.store(to, step, mask=inside)
        tl.store(to + HEADS * count.to(tl.int64), tl.cumsum(step * slope, 0), mask=inside)


@triton.jit
def prompt_of(scans, number):
    """The request of chunk `number` of `scans`, its first row and its tokens, and whether it has a state.

    The first chunk of a request stands for all of them: the others have 0 tokens here."""
    chunk = scans + number * 6
    tokens = tl.where(tl.load(chunk + 3) == 0, tl.load(chunk + 4), 0)
    return tl.load(chunk), tl.load(chunk + 1).to(tl.int64), tokens, tl.load(chunk + 5) > 0


@triton.jit
def state_at(
    state, slot, head, dims, columns, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, SIZE: tl.constexpr
):
    """Where `slot` has the state of a head: [columns, dims]."""
    return state + ((slot * HEADS + head) * HEAD_DIM + dims)[None, :] * SIZE + columns[:, None]


@triton.jit
def copy_after(copies, row, start, tokens, COUNT: tl.constexpr):
    """The slot that gets a copy of the state after COUNT tokens from `start` on, of a prompt with so many
    `tokens` from `row` on. −1: none."""
    last = start + COUNT - 1
    return tl.load(copies + row + last, mask=last < tokens, other=0).to(tl.int64) - 1


@triton.jit(do_not_specialize=["count"])
def _scan(
    rows,
    d,
    state,
    slots,
    scans,
    copies,
    steps,
    products,
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
    request, first, tokens, has_state = prompt_of(scans, tl.program_id(2))
    if tokens == 0:
        return
    part, head = tl.program_id(0), tl.program_id(1)
    token, columns = tl.arange(0, TOKENS), tl.arange(0, COLUMNS)
    dims = part * DIMS + tl.arange(0, DIMS)
    in_head, in_state = (dims < HEAD_DIM)[None, :], columns < SIZE
    inside = in_state[:, None] & in_head
    slot = tl.load(slots + request).to(tl.int64)
    kept = state_at(state, slot, head, dims, columns, HEADS, HEAD_DIM, SIZE)
    # At its first position a request has no state.
    now = tl.load(kept, mask=inside & has_state, other=0.0).to(tl.float32)  # [COLUMNS, DIMS]
    skip = tl.load(d + head)
    seen = token[:, None] >= token[None, :]
    sums = HEADS * count.to(tl.int64)
    of_steps = steps + head * count.to(tl.int64) + first
    next_step = tl.load(of_steps + token, mask=token < tokens, other=0.0)
    next_total = tl.load(of_steps + sums + token, mask=token < tokens, other=0.0)
    next_chunk_total = tl.load(of_steps + sums + tl.minimum(tokens, TOKENS) - 1)
    # Loaded a chunk ahead, since each chunk would wait for it.
    next_slot = -1 if copies is None else copy_after(copies, first, 0, tokens, TOKENS)
    for start in range(0, tokens, TOKENS):
        row, used = first + start + token, (start + token < tokens)[:, None]
        channels = rows + row[:, None] * row_stride
        x = tl.load(channels + (head * HEAD_DIM + dims)[None, :], mask=used & in_head, other=0.0)
        of_group = channels + (HEADS * HEAD_DIM + head // GROUP * SIZE + columns)[None, :]
        b = tl.load(of_group, mask=used & in_state[None, :], other=0.0)
        c = tl.load(of_group + HEADS // GROUP * SIZE, mask=used & in_state[None, :], other=0.0)
        product = (row[:, None] * (HEADS // GROUP) + head // GROUP) * TOKENS + token[None, :]
        scores = tl.load(products + product, mask=used, other=0.0).to(tl.float32)
        step, total, chunk_total = next_step, next_total, next_chunk_total
        later = start + TOKENS + token  # of the next chunk, which are loaded ahead
        next_step = tl.load(of_steps + later, mask=later < tokens, other=0.0)
        next_total = tl.load(of_steps + sums + later, mask=later < tokens, other=0.0)
        next_chunk_total = tl.load(of_steps + sums + tl.minimum(tokens, start + 2 * TOKENS) - 1)

        out = tl.dot(c, now.to(c.dtype), input_precision="tf32x3") * tl.exp(total)[:, None]
        decays = tl.exp(tl.where(seen, total[:, None] - total[None, :], float("-inf")))
        weights = (scores * decays * step[None, :]).to(x.dtype)
        out = tl.dot(weights, x, out, input_precision="tf32x3") + x.to(tl.float32) * skip
        to = y + row[:, None] * y_stride + (head * HEAD_DIM + dims)[None, :]
        tl.store(to, out.to(y.dtype.element_ty), mask=used & in_head)
        moved = (x.to(tl.float32) * (tl.exp(chunk_total - total) * step)[:, None]).to(x.dtype)
        now = tl.dot(tl.trans(b), moved, now * tl.exp(chunk_total), input_precision="tf32x3")
        if copies is not None:
            to_slot, next_slot = next_slot, copy_after(copies, first, start + TOKENS, tokens, TOKENS)
            if to_slot >= 0:
                copy = state_at(state, to_slot, head, dims, columns, HEADS, HEAD_DIM, SIZE)
                tl.store(copy, now, mask=inside)
    tl.store(kept, now, mask=inside)
