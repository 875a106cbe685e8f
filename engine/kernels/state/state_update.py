"""The step of Mamba-2, of the gated delta rule and of KDA for requests that decode. `mamba2` and
`gated_delta` define them.

A program takes some dims of a head of a request: a row of the state needs no other row. It reads and writes
the state once, and so takes the time of this. It computes in float32, and rounds to the dtype of the
state once. Programs that run at the same time have neighboring
parts of one request's state. So it takes 7 % less time than with the same head of many requests (measured on
an H200).

*Exact* (`--batch-invariant`): the tokens of a prompt are steps, too, one after another in the same program.
The products of a chunk would add in another order.
"""

import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.launch import inputs_ready, launch_options
from baton.engine.kernels.state.gated_delta import EPS, KimiDelta
from baton.engine.kernels.state.mamba2 import HeadStates, Mamba2, Rates
from baton.engine.kernels.state.tiling import TritonStateTiling

DIMS, WARPS = 32, 4
DELTA_DIMS, DELTA_WARPS = 16, 2


def update(
    rows: Tensor, rates: Rates, layer: HeadStates, state: Tensor, tiling: TritonStateTiling, y: Tensor
) -> None:
    """rows [requests, channels] after the convolution, y [requests, heads · head_dim]: dense rows at any
    stride. If the tiling is exact, they have a row for each token."""
    _, heads, head_dim, size = state.shape
    dt, share = (*rates, None)[:2]
    if isinstance(layer, Mamba2):
        d, limits, factors = layer.d, layer.dt_limits, (None, None)
        dims, warps = min(DIMS, triton.next_power_of_2(head_dim)), WARPS
    else:
        d, limits, factors = None, (None, None), (size**-0.5, EPS)
        dims, warps = DELTA_DIMS, DELTA_WARPS
    requests = len(tiling.contexts) + (tiling.prompts if tiling.exact else 0)
    _update[(triton.cdiv(head_dim, dims), heads, requests)](
        rows,
        dt,
        share,
        layer.dt_bias,
        layer.a,
        d,
        state,
        tiling.slots,
        tiling.contexts,
        tiling.scans if tiling.exact else None,
        tiling.copies if tiling.exact else None,
        y,
        rows.stride(0),
        dt.stride(0),
        None if share is None else share.stride(0),
        y.stride(0),
        *limits,
        *factors,
        HEADS=heads,
        GROUP=heads // layer.groups,
        HEAD_DIM=head_dim,
        SIZE=size,
        DIMS=dims,
        COLUMNS=triton.next_power_of_2(size),
        OF_KEYS=isinstance(layer, KimiDelta),
        num_warps=warps,
        # Where the compiler fuses a product and a sum may differ from one copy of the loop to another.
        enable_fp_fusion=not tiling.exact,
        **launch_options(),
    )


@triton.jit
def _update(
    rows,
    dt,
    share,  # None: Mamba-2
    dt_bias,
    a,
    d,  # None: the gated delta rule
    state,
    slots,
    contexts,
    scans,  # None: each request has one token
    copies,
    y,
    row_stride,
    dt_stride,
    share_stride,
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
    OF_KEYS: tl.constexpr,
):
    inputs_ready()
    part, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    if scans is None:
        tokens, context = 1, tl.load(contexts + row)
        if context == 0:
            return
        slot, has_state = tl.load(slots + row).to(tl.int64), context > 1
    else:
        scan = scans + row * 6
        tokens = tl.load(scan + 4)
        if (tokens == 0) | (tl.load(scan + 3) > 0):  # padding, or not the first chunk of its request
            return
        slot, has_state = tl.load(slots + tl.load(scan)).to(tl.int64), tl.load(scan + 5) > 0
        row = tl.load(scan + 1).to(tl.int64)
    dims, columns = part * DIMS + tl.arange(0, DIMS), tl.arange(0, COLUMNS)
    in_head, in_state = dims < HEAD_DIM, columns < SIZE
    inside = in_head[:, None] & in_state[None, :]
    in_slot = (head * HEAD_DIM + dims)[:, None] * SIZE + columns[None, :]
    kept = state + slot * (HEADS * HEAD_DIM * SIZE) + in_slot
    # At its first position a request has no state.
    now = tl.load(kept, mask=inside & has_state, other=0.0).to(tl.float32)
    for _ in tl.range(tokens):
        channels = rows + row * row_stride
        x = tl.load(channels + head * HEAD_DIM + dims, mask=in_head, other=0.0).to(tl.float32)
        of_group = channels + HEADS * HEAD_DIM + head // GROUP * SIZE + columns
        b = tl.load(of_group, mask=in_state, other=0.0).to(tl.float32)
        c = tl.load(of_group + HEADS // GROUP * SIZE, mask=in_state, other=0.0).to(tl.float32)
        if OF_KEYS:
            of_key = head * SIZE + columns
            steps = tl.load(dt + row * dt_stride + of_key, mask=in_state, other=0.0).to(tl.float32)
            steps += tl.load(dt_bias + of_key, mask=in_state, other=0.0)
        else:
            steps = tl.load(dt + row * dt_stride + head).to(tl.float32) + tl.load(dt_bias + head)
        if d is None:
            b *= tl.rsqrt(tl.sum(b * b, axis=0) + eps)
            c *= tl.rsqrt(tl.sum(c * c, axis=0) + eps) * scale
            decay = tl.exp(time_step(steps, 0.0, float("inf")) * tl.load(a + head))
            now *= decay[None, :] if OF_KEYS else decay
            written = x - tl.sum(now * b[None, :], axis=1)
            written *= tl.sigmoid(tl.load(share + row * share_stride + head).to(tl.float32))
            now += written[:, None] * b[None, :]
            out = tl.sum(now * c[None, :], axis=1)
        else:
            step = time_step(steps, dt_min, dt_max)
            now = now * tl.exp(step * tl.load(a + head)) + (x * step)[:, None] * b[None, :]
            out = tl.sum(now * c[None, :], axis=1) + x * tl.load(d + head)
        tl.store(y + row * y_stride + head * HEAD_DIM + dims, out.to(y.dtype.element_ty), mask=in_head)
        now = now.to(state.dtype.element_ty).to(tl.float32)  # as if each token were a step
        if copies is not None:
            to_slot = tl.load(copies + row).to(tl.int64) - 1
            copy = state + to_slot * (HEADS * HEAD_DIM * SIZE) + in_slot
            tl.store(copy, now, mask=inside & (to_slot >= 0))
        row += 1
    tl.store(kept, now, mask=inside)


@triton.jit
def time_step(x, least, most):
    """softplus(x) within limits."""
    z = tl.exp(-tl.abs(x))
    u = 1.0 + z
    # log(1 + z), also exact where z is so small that 1 + z is 1 or rounds z.
    log1p = tl.where(u == 1.0, z, tl.log(u) * (z / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.minimum(tl.maximum(tl.maximum(x, 0.0) + log1p, least), most)
