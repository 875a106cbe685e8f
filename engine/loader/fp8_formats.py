"""Which `Fp8Format` a `quantization_config` means."""

from collections.abc import Mapping
from typing import Any

import torch

from baton.engine.kernels import FP8_GROUP, from_hopper_on
from baton.engine.layers.fp8_linear import (
    Fp8Format,
    Reader,
    block_reader,
    fp8_rows,
    quantize_on_load,
    row_reader,
)


def fp8_on_load(device: torch.device) -> Fp8Format:
    return _format("fp8 by row, quantized on load", quantize_on_load, device)


def fp8_output(device: torch.device) -> Fp8Format:
    """For the output projection of a plain checkpoint, where the other matrices have another format."""
    return _format("fp8 by row", fp8_rows, device)


def fp8(settings: Mapping[str, Any], source: str, device: torch.device) -> Fp8Format:
    """`quant_method` fp8: scales of blocks (DeepSeek-V3, Qwen3-FP8), or of tensors or rows."""
    blocks = settings.get("weight_block_size")
    if settings.get("fmt", "e4m3") != "e4m3":
        raise ValueError(f"{source}: quantization_config: fmt {settings['fmt']!r} is not supported (e4m3 is)")
    return _stored(None if blocks is None else "weight_scale_inv", blocks, source, device)


def compressed_float(kept: Mapping[str, Any], source: str, device: torch.device) -> Fp8Format:
    """`format` float-quantized of compressed-tensors. `kept`: how a group keeps weights."""
    if (kept.get("num_bits"), kept.get("type"), kept.get("symmetric", True)) != (8, "float", True):
        raise ValueError(f"{source}: quantization_config: weights {kept} are not supported (FP8 is)")
    strategy = kept.get("strategy")
    if strategy not in ("tensor", "channel", "block"):
        raise ValueError(
            f"{source}: quantization_config: strategy {strategy!r} is not supported "
            "(tensor, channel and block are)"
        )
    if strategy != "block":
        return _stored(None, None, source, device)
    return _stored("weight_scale", kept.get("block_structure"), source, device)


def fp8_rows_as(values: str, scales: str, device: torch.device) -> Fp8Format:
    """Stored by row or tensor under these names."""
    return _format("fp8 by row or tensor", row_reader(values, scales), device, scales)


def _stored(block_scales: str | None, block: Any, source: str, device: torch.device) -> Fp8Format:
    if block_scales is None:
        return fp8_rows_as("weight", "weight_scale", device)
    if block != [FP8_GROUP, FP8_GROUP]:
        raise ValueError(
            f"{source}: quantization_config: blocks of {block} are not supported ([{FP8_GROUP}, {FP8_GROUP}] "
            "are)"
        )
    return _format("fp8 in blocks of 128 × 128", block_reader(block_scales), device, block_scales)


def _format(stored: str, read: Reader, device: torch.device, scales: str | None = None) -> Fp8Format:
    native = from_hopper_on(device)
    name = stored if native else f"{stored}, dequantized at load on this device"
    return Fp8Format(name=name, read=read, quantizes_activations=native, scales=scales)
