"""The scan of Mamba-2 as a chain of five kernels, which `engine.kernels.state.ssd` is compared with.

The steps are those of `mamba_ssm` (Dao & Gu 2024). Each writes its result to memory for the next one:

    cumsum ─▶ Δ and s of each chunk ─▶ state ─▶ what a chunk adds to the state ─▶ passing ─▶ the state before
    each chunk ─▶ product ─▶ C Bᵀ of each chunk and group ─▶ output ─▶ y
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.state.mamba2 import Mamba2
from baton.engine.kernels.state.state_update import time_step

WARPS = 8


def scan(
    rows: Tensor,
    dt: Tensor,
    layer: Mamba2,
    state: Tensor,
    slots: Tensor,
    scans: Tensor,
    y: Tensor,
    tokens: int,
) -> None:
    """As `engine.kernels.state.ssd.scan`, with chunks of so many `tokens`."""
    _, heads, head_dim, size = state.shape
    chunks, groups, device = len(scans), layer.groups, rows.device
    steps = torch.empty(2, chunks, heads, tokens, device=device)  # Δ and s
    own = torch.empty(chunks, heads, head_dim, size, device=device)
    products = torch.empty(chunks, groups, tokens, tokens, dtype=rows.dtype, device=device)
    shape = {"HEADS": heads, "HEAD_DIM": head_dim, "SIZE": size, "TOKENS": tokens}
    of_group = {**shape, "GROUP": heads // groups, "num_warps": WARPS}
    _cumsum[(chunks, heads)](
        dt, layer.dt_bias, layer.a, scans, steps, dt.stride(0), *layer.dt_limits, HEADS=heads, TOKENS=tokens
    )
    _state[(chunks, heads)](rows, scans, steps, own, rows.stride(0), **of_group)
    _pass[(heads, triton.cdiv(head_dim * size, 256), chunks)](
        scans, slots, steps, own, state, chunks, **shape, BLOCK=256
    )
    _product[(chunks, groups)](rows, scans, products, rows.stride(0), **of_group)
    _output[(chunks, heads)](
        rows, scans, steps, own, products, layer.d, y, rows.stride(0), y.stride(0), **of_group
    )


@triton.jit
def _cumsum(
    dt, dt_bias, a, scans, steps, dt_stride, dt_min, dt_max, HEADS: tl.constexpr, TOKENS: tl.constexpr
):
    chunk, head = tl.program_id(0), tl.program_id(1)
    row, tokens = tl.load(scans + chunk * 6 + 1).to(tl.int64), tl.load(scans + chunk * 6 + 2)
    token = tl.arange(0, TOKENS)
    used = token < tokens
    step = tl.load(dt + (row + token) * dt_stride + head, mask=used, other=0.0).to(tl.float32)
    step = tl.where(used, time_step(step + tl.load(dt_bias + head), dt_min, dt_max), 0.0)
    to = steps + (chunk * HEADS + head) * TOKENS + token
    tl.store(to, step)
    tl.store(to + tl.num_programs(0) * HEADS * TOKENS, tl.cumsum(step * tl.load(a + head), 0))


@triton.jit
def _state(
    rows,
    scans,
    steps,
    own,
    row_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
):
    chunk, head = tl.program_id(0), tl.program_id(1)
    row, tokens = tl.load(scans + chunk * 6 + 1).to(tl.int64), tl.load(scans + chunk * 6 + 2)
    token, dims, columns = tl.arange(0, TOKENS), tl.arange(0, HEAD_DIM), tl.arange(0, SIZE)
    used = (token < tokens)[:, None]
    of_head = steps + (chunk * HEADS + head) * TOKENS
    sums = of_head + tl.num_programs(0) * HEADS * TOKENS
    weight = tl.load(of_head + token) * tl.exp(tl.load(sums + TOKENS - 1) - tl.load(sums + token))
    channels = rows + (row + token)[:, None] * row_stride
    x = tl.load(channels + (head * HEAD_DIM + dims)[None, :], mask=used, other=0.0)
    b = tl.load(channels + (HEADS * HEAD_DIM + head // GROUP * SIZE + columns)[None, :], mask=used, other=0.0)
    moved = (x.to(tl.float32) * weight[:, None]).to(x.dtype)
    to = own + ((chunk * HEADS + head) * HEAD_DIM + dims)[:, None] * SIZE + columns[None, :]
    tl.store(to, tl.dot(tl.trans(moved), b, input_precision="tf32x3"))


@triton.jit
def _pass(
    scans,
    slots,
    steps,
    own,
    state,
    chunks,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Replaces what each chunk adds by the state before it. The program of a request's first chunk does this
    for all its chunks."""
    head, first = tl.program_id(0), tl.program_id(2)
    if tl.load(scans + first * 6 + 3) > 0:
        return
    request = tl.load(scans + first * 6)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < HEAD_DIM * SIZE
    slot = tl.load(slots + request).to(tl.int64)
    kept = state + (slot * HEADS + head) * HEAD_DIM * SIZE + at
    before = tl.load(kept, mask=inside & (tl.load(scans + first * 6 + 5) > 0), other=0.0)
    for chunk in range(first, chunks):
        if tl.load(scans + chunk * 6) == request:
            to = own + (chunk * HEADS + head) * HEAD_DIM * SIZE + at
            added = tl.load(to, mask=inside, other=0.0)
            tl.store(to, before, mask=inside)
            whole = tl.load(steps + ((chunks + chunk) * HEADS + head) * TOKENS + TOKENS - 1)
            before = before * tl.exp(whole) + added
    tl.store(kept, before, mask=inside)


@triton.jit
def _product(
    rows,
    scans,
    products,
    row_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
):
    chunk, group = tl.program_id(0), tl.program_id(1)
    row, tokens = tl.load(scans + chunk * 6 + 1).to(tl.int64), tl.load(scans + chunk * 6 + 2)
    token, columns = tl.arange(0, TOKENS), tl.arange(0, SIZE)
    used = (token < tokens)[:, None]
    at = rows + (row + token)[:, None] * row_stride + (HEADS * HEAD_DIM + group * SIZE + columns)[None, :]
    b = tl.load(at, mask=used, other=0.0)
    c = tl.load(at + HEADS // GROUP * SIZE, mask=used, other=0.0)
    to = products + ((chunk * tl.num_programs(1) + group) * TOKENS + token)[:, None] * TOKENS + token[None, :]
    tl.store(to, tl.dot(c, tl.trans(b), input_precision="tf32x3").to(products.dtype.element_ty))


@triton.jit
def _output(
    rows,
    scans,
    steps,
    before,
    products,
    d,
    y,
    row_stride,
    y_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
):
    chunk, head = tl.program_id(0), tl.program_id(1)
    row, tokens = tl.load(scans + chunk * 6 + 1).to(tl.int64), tl.load(scans + chunk * 6 + 2)
    token, dims, columns = tl.arange(0, TOKENS), tl.arange(0, HEAD_DIM), tl.arange(0, SIZE)
    used = (token < tokens)[:, None]
    of_head = steps + (chunk * HEADS + head) * TOKENS + token
    step = tl.load(of_head)
    total = tl.load(of_head + tl.num_programs(0) * HEADS * TOKENS)
    channels = rows + (row + token)[:, None] * row_stride
    c_at = HEADS * HEAD_DIM + (HEADS // GROUP + head // GROUP) * SIZE + columns
    c = tl.load(channels + c_at[None, :], mask=used, other=0.0)
    state = tl.load(before + ((chunk * HEADS + head) * HEAD_DIM + dims)[:, None] * SIZE + columns[None, :])
    out = tl.dot(c, tl.trans(state.to(c.dtype)), input_precision="tf32x3") * tl.exp(total)[:, None]
    of_group = (chunk * (HEADS // GROUP) + head // GROUP) * TOKENS
    scores = tl.load(products + (of_group + token)[:, None] * TOKENS + token[None, :]).to(tl.float32)
    seen = token[:, None] >= token[None, :]
    between = tl.exp(tl.where(seen, total[:, None] - total[None, :], float("-inf")))
    x = tl.load(channels + (head * HEAD_DIM + dims)[None, :], mask=used, other=0.0)
    out += tl.dot((scores * between * step[None, :]).to(x.dtype), x, input_precision="tf32x3")
    out += x.to(tl.float32) * tl.load(d + head)
    to = y + (row + token)[:, None] * y_stride + (head * HEAD_DIM + dims)[None, :]
    tl.store(to, out.to(y.dtype.element_ty), mask=used)
