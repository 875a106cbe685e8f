"""The convolution of state layers over the last tokens of each channel. Silu follows, unless the layer is a
`ShortConvolution`. `mamba2` defines it.

One kernel is for requests that decode, the other for chunks of prompts. Both keep the last inputs of each
request in its slot. Of a prompt only the first programs do: they also read what the slot held.

The kernel for prompts is bound by instructions. So a program takes some tokens one after another, and keeps
the last inputs in registers. It loads and converts each input once, not for each token that it counts for.
"""

import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.launch import inputs_ready, launch_options
from baton.engine.kernels.state.mamba2 import StateLayer
from baton.engine.kernels.state.ssd import copy_after
from baton.engine.kernels.state.tiling import TritonStateTiling

BLOCK_DECODE = 512  # channels of a program
BLOCK_CHUNK, WARPS_CHUNK = 512, 4
STEPS = 16  # tokens of a program


def convolve_next(
    x: Tensor, layer: StateLayer, state: Tensor, tiling: TritonStateTiling, out: Tensor
) -> None:
    """x, out [requests, channels], with dense rows at any stride."""
    width, channels = layer.conv_weight.shape
    _convolve_next[(len(tiling.contexts), triton.cdiv(channels, BLOCK_DECODE))](
        x,
        layer.conv_weight,
        layer.conv_bias,
        state,
        tiling.slots,
        tiling.contexts,
        out,
        x.stride(0),
        out.stride(0),
        channels,
        WIDTH=width,
        ACTIVATED=layer.activated,
        BLOCK=BLOCK_DECODE,
        **launch_options(),
    )


def convolve(x: Tensor, layer: StateLayer, state: Tensor, tiling: TritonStateTiling, out: Tensor) -> None:
    """x, out [rows, channels], with dense rows at any stride. The tiling has chunks."""
    assert tiling.scans is not None, "the tiling has chunks"
    width, channels = layer.conv_weight.shape
    steps = min(STEPS, tiling.tokens)
    assert width <= steps + 1, "a program needs the one before it at most"
    _convolve[(triton.cdiv(channels, BLOCK_CHUNK), tiling.tokens // steps, len(tiling.scans))](
        x,
        layer.conv_weight,
        layer.conv_bias,
        state,
        tiling.slots,
        tiling.scans,
        tiling.copies,
        out,
        x.stride(0),
        out.stride(0),
        channels,
        WIDTH=width,
        STEPS=steps,
        ACTIVATED=layer.activated,
        BLOCK=BLOCK_CHUNK,
        num_warps=WARPS_CHUNK,
        **launch_options(),
    )


@triton.jit
def _convolve_next(
    x,
    weight,
    bias,
    state,
    slots,
    contexts,
    out,
    x_stride,
    out_stride,
    channels,
    WIDTH: tl.constexpr,
    ACTIVATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    inputs_ready()
    row = tl.program_id(0).to(tl.int64)
    context = tl.load(contexts + row)
    if context == 0:
        return
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < channels
    slot = tl.load(slots + row).to(tl.int64)
    kept = state + slot * (WIDTH - 1) * channels + at
    total = tl.zeros([BLOCK], tl.float32)
    if bias is not None:
        total += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    known = inside & (context > 1)
    for i in tl.static_range(WIDTH - 1):
        value = tl.load(kept + i * channels, mask=known, other=0.0)
        if i > 0:
            tl.store(kept + (i - 1) * channels, value, mask=inside)
        total += value.to(tl.float32) * tl.load(weight + i * channels + at, mask=inside, other=0.0)
    value = tl.load(x + row * x_stride + at, mask=inside, other=0.0)
    tl.store(kept + (WIDTH - 2) * channels, value, mask=inside)
    total += value.to(tl.float32) * tl.load(weight + (WIDTH - 1) * channels + at, mask=inside, other=0.0)
    y = total * tl.sigmoid(total) if ACTIVATED else total
    tl.store(out + row * out_stride + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _convolve(
    x,
    weight,
    bias,
    state,
    slots,
    scans,
    copies,
    out,
    x_stride,
    out_stride,
    channels,
    WIDTH: tl.constexpr,
    STEPS: tl.constexpr,
    ACTIVATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    inputs_ready()
    scan, first = scans + tl.program_id(2) * 6, tl.program_id(1) * STEPS
    tokens = tl.load(scan + 2)
    if tokens <= first:
        return
    slot = tl.load(slots + tl.load(scan)).to(tl.int64)
    row = tl.load(scan + 1).to(tl.int64) + first
    begins = tl.load(scan + 3) + first == 0
    has_state = tl.load(scan + 5) > 0
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < channels
    kept = state + slot * (WIDTH - 1) * channels + at
    inputs, weights = (), ()
    for i in tl.static_range(WIDTH):
        weights += (tl.load(weight + i * channels + at, mask=inside, other=0.0).to(tl.float32),)
    for i in tl.static_range(WIDTH - 1):
        of_row = x + (row + i - (WIDTH - 1)) * x_stride + at
        known = inside & (has_state | ~begins)
        value = tl.load(tl.where(begins, kept + i * channels, of_row), mask=known, other=0.0)
        inputs += (value.to(tl.float32),)
    if bias is None:
        start = tl.zeros([BLOCK], tl.float32)
    else:
        start = tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    for step in tl.static_range(STEPS):
        used = inside & (first + step < tokens)
        value = tl.load(x + (row + step) * x_stride + at, mask=used, other=0.0)
        inputs += (value.to(tl.float32),)
        total = start
        for i in tl.static_range(WIDTH):
            total += inputs[step + i] * weights[i]
        y = total / (1.0 + tl.exp(-total)) if ACTIVATED else total
        tl.store(out + (row + step) * out_stride + at, y.to(out.dtype.element_ty), mask=used)
    if copies is not None:
        to_slot = copy_after(copies, row, 0, tokens - first, STEPS)
        if to_slot >= 0:
            for i in tl.static_range(WIDTH - 1):
                copy = state + (to_slot * (WIDTH - 1) + i) * channels + at
                tl.store(copy, inputs[STEPS + i].to(state.dtype.element_ty), mask=inside)
    if begins:
        tl.debug_barrier()  # all threads have read the slot before one of them writes it
        last = tl.load(scan + 4) - (WIDTH - 1)
        for i in tl.static_range(WIDTH - 1):
            index = last + i
            kept_before = inside & has_state & (index < 0)
            last_of_slot = tl.load(kept + (index + WIDTH - 1) * channels, mask=kept_before, other=0.0)
            of_rows = tl.load(x + (row + index) * x_stride + at, mask=inside & (index >= 0), other=0.0)
            tl.store(kept + i * channels, tl.where(index < 0, last_of_slot, of_rows), mask=inside)
