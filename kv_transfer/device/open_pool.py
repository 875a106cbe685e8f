"""Opens the KV cache of an engine for one direction, on the device where it is."""

from __future__ import annotations

import torch

from baton.kv_transfer.arena import Arena
from baton.kv_transfer.device.host_pool import HostPool, NoPool
from baton.kv_transfer.device.pool import Pool
from baton.kv_transfer.layout import FP8
from baton.kv_transfer.transport import PagedKV


def open_pool(kv: PagedKV, arena: Arena, *, exported: bool = False) -> Pool:
    """`exported`: `export`, or `open` and `pull`, will be called."""
    layout = kv.layout
    num_layers = len(layout.kv_layers)
    assert len(kv.layers) == num_layers, f"{len(kv.layers)} layers of KV, layout has {num_layers}"
    first, last = kv.heads[None]
    assert len(kv.scales) == (num_layers if layout.dtype == FP8 else 0), "FP8 has scales"
    for scales, tensor in zip(kv.scales, kv.layers, strict=False):
        shape = (2, tensor.shape[1], last - first, kv.block_size)
        assert tuple(scales.shape) == shape, f"{tuple(scales.shape)} is not {shape}"
        assert scales.is_contiguous(), "scales must be contiguous"
        assert scales.dtype is torch.float32, f"scales are {scales.dtype}"
    for tensor in kv.layers:
        shape = (2, tensor.shape[1], kv.block_size, last - first, layout.head_dim)
        assert tensor.is_contiguous(), "KV must be contiguous"
        assert tuple(tensor.shape) == shape, f"{tuple(tensor.shape)} is not {shape}"
        assert tensor.dtype == getattr(torch, layout.dtype), (
            f"KV is {tensor.dtype}, layout says {layout.dtype}"
        )
    for number, (state, layers) in enumerate(zip(layout.states, kv.states, strict=True)):
        first, last = kv.heads[number]
        assert len(layers) == len(layout.state_layers), f"{len(layers)} layers with the state {state.name}"
        for tensor in layers:
            shape = (tensor.shape[0], state.rows, last - first, state.head_dim)
            assert tensor[0, 0].is_contiguous(), "the heads of a state must be contiguous"
            assert tuple(tensor.shape) == shape, f"{tuple(tensor.shape)} is not {shape}"
            assert tensor.dtype == getattr(torch, state.dtype), f"{state.name} is {tensor.dtype}"
    match torch.device(kv.device).type:
        case "cuda":
            from baton.kv_transfer.device.cuda_pool import CudaPool

            return CudaPool(kv, arena, exported=exported)
        case "meta":
            return NoPool()
        case _:
            return HostPool(kv, arena)
