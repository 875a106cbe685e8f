"""The gated delta rule for requests that decode and for chunks of prompts. `gated_delta` defines it.

A program computes some rows of the state of a head, token after token: a row needs no other row. The state
stays in registers. It is read and written once, so decodes take the time of this. Prompts take the time of
their tokens one after another: products of matrices over chunks would be faster.
"""

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import overlap
from engine.kernels.gated_delta import EPS, GatedDelta
from engine.kernels.overlap import inputs_ready
from engine.kernels.state_update import time_step

ROWS, WARPS = 16, 2


def delta_rule(
    rows: Tensor,
    beside: Tensor,
    layer: GatedDelta,
    state: Tensor,
    slots: Tensor,
    contexts: Tensor,
    scans: Tensor | None,
    y: Tensor,
) -> None:
    """rows [rows, channels] after the convolution, beside [rows, 2 · heads], y [rows, heads · head_dim]:
    dense rows at any stride. contexts [requests]: those of decodes. A request with context 0 is padding.
    scans from `scan_work`: the chunks of prompts. None: there are only decodes."""
    _, heads, head_dim, size = state.shape
    blocks = triton.cdiv(head_dim, ROWS)
    for work, count in ((None, len(contexts)), (scans, 0 if scans is None else len(scans))):
        if count:
            _delta_rule[(count, heads, blocks)](
                rows,
                beside,
                layer.dt_bias,
                layer.a,
                state,
                slots,
                contexts,
                work,
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
                **overlap.options(),
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
    scans,
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
    request, head = tl.program_id(0), tl.program_id(1)
    if scans is None:
        row = request.to(tl.int64)
        context = tl.load(contexts + request)
        tokens = tl.minimum(context, 1)
        has_state = context > 1  # at its first position a request has none
    else:
        chunk = scans + request * 6
        request = tl.load(chunk)
        row = tl.load(chunk + 1).to(tl.int64)
        # The first chunk of a request stands for all of them.
        tokens = tl.where(tl.load(chunk + 3) == 0, tl.load(chunk + 4), 0)
        has_state = tl.load(chunk + 5) > 0
    if tokens == 0:
        return
    dims, columns = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    in_head, in_state = dims < HEAD_DIM, columns < SIZE
    inside = in_head[:, None] & in_state[None, :]
    slot = tl.load(slots + request).to(tl.int64)
    kept = state + ((slot * HEADS + head) * HEAD_DIM + dims)[:, None] * SIZE + columns[None, :]
    now = tl.load(kept, mask=inside & has_state, other=0.0)
    bias, slope = tl.load(dt_bias + head), tl.load(a + head)
    for token in range(tokens):
        channels = rows + (row + token) * row_stride
        v = tl.load(channels + head * HEAD_DIM + dims, mask=in_head, other=0.0).to(tl.float32)
        of_group = channels + HEADS * HEAD_DIM + head // GROUP * SIZE + columns
        k = tl.load(of_group, mask=in_state, other=0.0).to(tl.float32)
        q = tl.load(of_group + HEADS // GROUP * SIZE, mask=in_state, other=0.0).to(tl.float32)
        k *= tl.rsqrt(tl.sum(k * k, axis=0) + eps)
        q *= tl.rsqrt(tl.sum(q * q, axis=0) + eps) * scale
        of_head = beside + (row + token) * beside_stride + head
        step = time_step(tl.load(of_head).to(tl.float32) + bias, 0.0, float("inf"))
        share = tl.sigmoid(tl.load(of_head + HEADS).to(tl.float32))
        now *= tl.exp(step * slope)
        written = (v - tl.sum(now * k[None, :], axis=1)) * share
        now += written[:, None] * k[None, :]
        out = tl.sum(now * q[None, :], axis=1).to(y.dtype.element_ty)
        tl.store(y + (row + token) * y_stride + head * HEAD_DIM + dims, out, mask=in_head)
    tl.store(kept, now, mask=inside)
