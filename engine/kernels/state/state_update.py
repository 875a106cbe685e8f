"""The step of Mamba-2 and of the gated delta rule for requests that decode. `mamba2` and `gated_delta` define
them.

A program takes some dims of a head of a request: a row of the state needs no other row. It reads and writes
the state once, in float32, and so takes the time of this. Programs that run at the same time have neighboring
parts of one request's state. So it takes 7 % less time than with the same head of many requests (measured on
an H200).
"""

import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.launch import inputs_ready, launch_options
from baton.engine.kernels.state.gated_delta import EPS
from baton.engine.kernels.state.mamba2 import Mamba2, StateLayer
from baton.engine.kernels.state.plan import TritonStatePlan

DIMS, WARPS = 32, 4
DELTA_DIMS, DELTA_WARPS = 16, 2


def update(
    rows: Tensor, beside: Tensor, layer: StateLayer, state: Tensor, plan: TritonStatePlan, y: Tensor
) -> None:
    """rows [requests, channels] after the convolution, beside [requests, heads or 2 · heads], y [requests,
    heads · head_dim]: dense rows at any stride."""
    _, heads, head_dim, size = state.shape
    if isinstance(layer, Mamba2):
        d, limits, factors = layer.d, layer.dt_limits, (None, None)
        dims, warps = min(DIMS, triton.next_power_of_2(head_dim)), WARPS
    else:
        d, limits, factors = None, (None, None), (size**-0.5, EPS)
        dims, warps = DELTA_DIMS, DELTA_WARPS
    _update[(triton.cdiv(head_dim, dims), heads, len(plan.contexts))](
        rows,
        beside,
        layer.dt_bias,
        layer.a,
        d,
        state,
        plan.slots,
        plan.contexts,
        y,
        rows.stride(0),
        beside.stride(0),
        y.stride(0),
        *limits,
        *factors,
        HEADS=heads,
        GROUP=heads // layer.groups,
        HEAD_DIM=head_dim,
        SIZE=size,
        DIMS=dims,
        COLUMNS=triton.next_power_of_2(size),
        num_warps=warps,
        **launch_options(),
    )


@triton.jit
def _update(
    rows,
    beside,
    dt_bias,
    a,
    d,  # None: the gated delta rule
    state,
    slots,
    contexts,
    y,
    row_stride,
    beside_stride,
    y_stride,
    dt_min,
    dt_max,
    scale,
    eps,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    inputs_ready()
    part, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    context = tl.load(contexts + row)
    if context == 0:
        return
    dims, columns = part * DIMS + tl.arange(0, DIMS), tl.arange(0, COLUMNS)
    in_head, in_state = dims < HEAD_DIM, columns < SIZE
    inside = in_head[:, None] & in_state[None, :]
    slot = tl.load(slots + row).to(tl.int64)
    kept = state + ((slot * HEADS + head) * HEAD_DIM + dims)[:, None] * SIZE + columns[None, :]
    # At its first position a request has no state.
    now = tl.load(kept, mask=inside & (context > 1), other=0.0)
    channels = rows + row * row_stride
    x = tl.load(channels + head * HEAD_DIM + dims, mask=in_head, other=0.0).to(tl.float32)
    of_group = channels + HEADS * HEAD_DIM + head // GROUP * SIZE + columns
    b = tl.load(of_group, mask=in_state, other=0.0).to(tl.float32)
    c = tl.load(of_group + HEADS // GROUP * SIZE, mask=in_state, other=0.0).to(tl.float32)
    if d is None:
        b *= tl.rsqrt(tl.sum(b * b, axis=0) + eps)
        c *= tl.rsqrt(tl.sum(c * c, axis=0) + eps) * scale
        of_head = beside + row * beside_stride + head
        step = time_step(tl.load(of_head).to(tl.float32) + tl.load(dt_bias + head), 0.0, float("inf"))
        share = tl.sigmoid(tl.load(of_head + HEADS).to(tl.float32))
        now *= tl.exp(step * tl.load(a + head))
        written = (x - tl.sum(now * b[None, :], axis=1)) * share
        now += written[:, None] * b[None, :]
        out = tl.sum(now * c[None, :], axis=1).to(y.dtype.element_ty)
        tl.store(y + row * y_stride + head * HEAD_DIM + dims, out, mask=in_head)
        tl.store(kept, now, mask=inside)
    else:
        dt = tl.load(beside + row * beside_stride + head).to(tl.float32) + tl.load(dt_bias + head)
        step = time_step(dt, dt_min, dt_max)
        now = now * tl.exp(step * tl.load(a + head)) + (x * step)[:, None] * b[None, :]
        tl.store(kept, now, mask=inside)
        out = tl.sum(now * c[None, :], axis=1) + x * tl.load(d + head)
        tl.store(y + row * y_stride + head * HEAD_DIM + dims, out.to(y.dtype.element_ty), mask=in_head)


@triton.jit
def time_step(x, least, most):
    """softplus(x) within limits."""
    z = tl.exp(-tl.abs(x))
    u = 1.0 + z
    # log(1 + z), also exact where z is so small that 1 + z is 1 or rounds z.
    log1p = tl.where(u == 1.0, z, tl.log(u) * (z / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.minimum(tl.maximum(tl.maximum(x, 0.0) + log1p, least), most)
