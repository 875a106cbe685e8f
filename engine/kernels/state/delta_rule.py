"""The step of the gated delta rule for requests that decode. `gated_delta` defines it.

A program computes some rows of the state of a head: a row needs no other row. The state is read and written
once, so decodes take the time of this. Programs run in the order that `state_update` has measured.
"""

import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels import launch
from baton.engine.kernels.launch import inputs_ready
from baton.engine.kernels.state.gated_delta import EPS, GatedDelta
from baton.engine.kernels.state.state_update import time_step

ROWS, WARPS = 16, 2


def delta_rule(
    rows: Tensor,
    beside: Tensor,
    layer: GatedDelta,
    state: Tensor,
    slots: Tensor,
    contexts: Tensor,
    y: Tensor,
) -> None:
    """rows [requests, channels] after the convolution, beside [requests, 2 · heads], y [requests, heads ·
    head_dim]: dense rows at any stride. A request with context 0 is padding."""
    _, heads, head_dim, size = state.shape
    _delta_rule[(triton.cdiv(head_dim, ROWS), heads, len(contexts))](
        rows,
        beside,
        layer.dt_bias,
        layer.a,
        state,
        slots,
        contexts,
        y,
        rows.stride(0),
        beside.stride(0),
        y.stride(0),
        size**-0.5,
        EPS,
        HEADS=heads,
        GROUP=heads // layer.groups,
        HEAD_DIM=head_dim,
        SIZE=size,
        ROWS=ROWS,
        COLUMNS=triton.next_power_of_2(size),
        num_warps=WARPS,
        **launch.options(),
    )


@triton.jit
def _delta_rule(
    rows,
    beside,
    dt_bias,
    a,
    state,
    slots,
    contexts,
    y,
    row_stride,
    beside_stride,
    y_stride,
    scale,
    eps,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    inputs_ready(OVERLAP)
    part, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    context = tl.load(contexts + row)
    if context == 0:
        return
    dims, columns = part * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    in_head, in_state = dims < HEAD_DIM, columns < SIZE
    inside = in_head[:, None] & in_state[None, :]
    slot = tl.load(slots + row).to(tl.int64)
    kept = state + ((slot * HEADS + head) * HEAD_DIM + dims)[:, None] * SIZE + columns[None, :]
    # At its first position a request has no state.
    now = tl.load(kept, mask=inside & (context > 1), other=0.0)
    channels = rows + row * row_stride
    v = tl.load(channels + head * HEAD_DIM + dims, mask=in_head, other=0.0).to(tl.float32)
    of_group = channels + HEADS * HEAD_DIM + head // GROUP * SIZE + columns
    k = tl.load(of_group, mask=in_state, other=0.0).to(tl.float32)
    q = tl.load(of_group + HEADS // GROUP * SIZE, mask=in_state, other=0.0).to(tl.float32)
    k *= tl.rsqrt(tl.sum(k * k, axis=0) + eps)
    q *= tl.rsqrt(tl.sum(q * q, axis=0) + eps) * scale
    of_head = beside + row * beside_stride + head
    step = time_step(tl.load(of_head).to(tl.float32) + tl.load(dt_bias + head), 0.0, float("inf"))
    share = tl.sigmoid(tl.load(of_head + HEADS).to(tl.float32))
    now *= tl.exp(step * tl.load(a + head))
    written = (v - tl.sum(now * k[None, :], axis=1)) * share
    now += written[:, None] * k[None, :]
    out = tl.sum(now * q[None, :], axis=1).to(y.dtype.element_ty)
    tl.store(y + row * y_stride + head * HEAD_DIM + dims, out, mask=in_head)
    tl.store(kept, now, mask=inside)
