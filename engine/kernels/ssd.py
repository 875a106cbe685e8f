"""The scan of Mamba-2 over the chunks of prompts in one kernel. `mamba2` defines it.

A program computes one chunk of one head. It takes all five steps of the chain of kernels in `mamba_ssm` (Dao
& Gu 2024): the sums of Δ A, the chunk's own state, the state after the chunk, C Bᵀ, and y. Only the state
passes from chunk to chunk. A program waits until the one before it has written the state to the slot of the
request. This is the idea of PyTorch's fused kernel (*Accelerating Mamba2 with Kernel Fusion*, 2026).

Programs take their chunks in order: an atomic counter on the device gives each a ticket. So all programs of
earlier chunks run already when a program begins to wait, in any order in which the GPU starts them. Between
the wait and the signal of a program is one multiplication of the state. The rest overlaps with other chunks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import overlap
from engine.kernels.mamba2 import Mamba2
from engine.kernels.overlap import inputs_ready
from engine.kernels.state_update import time_step

TOKENS, WARPS = 64, 4
TOKENS_FLOAT32 = 32  # larger chunks do not fit into registers
LEAST = 16  # of a dimension of a product in Triton


def chunk_tokens(dtype: torch.dtype) -> int:
    """Tokens of a chunk."""
    return TOKENS_FLOAT32 if dtype is torch.float32 else TOKENS


def progress_of(requests: int, heads: int, device: torch.device) -> Tensor:
    """Counters for `scan`: a ticket, and the finished chunks of each request and head. All are 0 between two
    calls, which may be for different layers."""
    return torch.zeros(1 + requests * heads, dtype=torch.int32, device=device)


def scan(
    rows: Tensor,
    dt: Tensor,
    layer: Mamba2,
    state: Tensor,
    slots: Tensor,
    scans: Tensor,
    progress: Tensor,
    y: Tensor,
) -> None:
    """rows [rows, channels] after the convolution, dt [rows, heads], y [rows, heads · head_dim]: dense
    rows at any stride. scans from `scan_work` with `chunk_tokens`."""
    _, heads, head_dim, size = state.shape
    _scan[(len(scans) * heads,)](
        rows,
        dt,
        layer.dt_bias,
        layer.a,
        layer.d,
        state,
        slots,
        scans,
        progress,
        y,
        rows.stride(0),
        dt.stride(0),
        y.stride(0),
        *layer.dt_limits,
        HEADS=heads,
        GROUP=heads // layer.groups,
        HEAD_DIM=head_dim,
        SIZE=size,
        DIMS=max(LEAST, triton.next_power_of_2(head_dim)),
        COLUMNS=max(LEAST, triton.next_power_of_2(size)),
        TOKENS=chunk_tokens(rows.dtype),
        num_warps=WARPS,
        **overlap.options(),
    )


@triton.jit
def _scan(
    rows,
    dt,
    dt_bias,
    a,
    d,
    state,
    slots,
    scans,
    progress,
    y,
    row_stride,
    dt_stride,
    y_stride,
    dt_min,
    dt_max,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    inputs_ready(OVERLAP)
    ticket = tl.atomic_add(progress, 1)
    if ticket == tl.num_programs(0) - 1:
        tl.store(progress, 0)
    head = ticket % HEADS
    chunk = scans + ticket // HEADS * 6
    tokens = tl.load(chunk + 2)
    if tokens == 0:
        return
    request = tl.load(chunk)
    row = tl.load(chunk + 1).to(tl.int64)
    number = tl.load(chunk + 3)
    is_last = tl.load(chunk + 4) == tokens
    has_state = tl.load(chunk + 5) > 0  # at its first position a request has none

    token, dims, columns = tl.arange(0, TOKENS), tl.arange(0, DIMS), tl.arange(0, COLUMNS)
    used = token < tokens
    of_head = used[:, None] & (dims < HEAD_DIM)[None, :]
    in_state = used[:, None] & (columns < SIZE)[None, :]
    inside = (dims < HEAD_DIM)[:, None] & (columns < SIZE)[None, :]
    step = tl.load(dt + (row + token) * dt_stride + head, mask=used, other=0.0).to(tl.float32)
    step = tl.where(used, time_step(step + tl.load(dt_bias + head), dt_min, dt_max), 0.0)
    decay = step * tl.load(a + head)
    total = tl.cumsum(decay, 0)
    whole = tl.sum(decay, 0)

    channels = rows + (row + token)[:, None] * row_stride
    x = tl.load(channels + (head * HEAD_DIM + dims)[None, :], mask=of_head, other=0.0)
    of_group = channels + (HEADS * HEAD_DIM + head // GROUP * SIZE + columns)[None, :]
    b = tl.load(of_group, mask=in_state, other=0.0)
    moved = (x.to(tl.float32) * (tl.exp(whole - total) * step)[:, None]).to(x.dtype)
    own = tl.dot(tl.trans(moved), b, input_precision="tf32x3")  # [DIMS, COLUMNS]

    slot = tl.load(slots + request).to(tl.int64)
    kept = state + ((slot * HEADS + head) * HEAD_DIM + dims)[:, None] * SIZE + columns[None, :]
    finished = progress + 1 + request * HEADS + head
    while tl.atomic_add(finished, 0, sem="acquire") < number:
        pass
    tl.debug_barrier()  # one thread has seen the count before all of them read
    before = tl.load(kept, mask=inside & has_state, other=0.0, cache_modifier=".cg")
    tl.store(kept, before * tl.exp(whole) + own, mask=inside)
    tl.debug_barrier()  # all threads have written before the chunk counts as finished
    tl.atomic_xchg(finished, tl.where(is_last, 0, number + 1), sem="release")

    c = tl.load(of_group + HEADS // GROUP * SIZE, mask=in_state, other=0.0)
    out = tl.dot(c, tl.trans(before.to(c.dtype)), input_precision="tf32x3") * tl.exp(total)[:, None]
    scores = tl.dot(c, tl.trans(b), input_precision="tf32x3")
    seen = token[:, None] >= token[None, :]
    between = tl.exp(tl.where(seen, total[:, None] - total[None, :], float("-inf")))
    out += tl.dot((scores * between * step[None, :]).to(x.dtype), x, input_precision="tf32x3")
    out += x.to(tl.float32) * tl.load(d + head)
    to = y + (row + token)[:, None] * y_stride + (head * HEAD_DIM + dims)[None, :]
    tl.store(to, out.to(y.dtype.element_ty), mask=of_head)
