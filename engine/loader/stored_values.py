"""Matrices of bitsandbytes, and others that are dequantized at load for the model's dtype.

bitsandbytes NF4, FP4   weight [out · in / 2, 1]: two codes in a byte, the first one in its upper half;
                        weight.quant_map [16], weight.absmax of each block of a flat weight. `absmax`
                        may itself be codes of weight.nested_quant_map, with weight.nested_absmax.
bitsandbytes INT8       weight [out, in] int8, SCB [out]: 127 times the scales
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baton.engine.layers.ranks import Shard
from baton.engine.layers.weights import Groups, PlainFormat, Weights
from baton.engine.loader.by_module import ByModule, Dequantized, by_module, require
from baton.engine.loader.int_formats import stored_groups

ReadValues = Callable[[Weights, str, Shard, Shard], Tensor]
"""Reads rows × columns of a projection, as float32."""


@dataclass(frozen=True, kw_only=True)
class StoredValues(Dequantized):
    marker: str
    """Suffix of a tensor that each quantized matrix has."""
    read: ReadValues

    def reads(self, weights: Weights, name: str) -> bool:
        return weights.has(f"{name}.{self.marker}")

    def values(self, weights: Weights, name: str, rows: Shard, columns: Shard) -> Tensor:
        return self.read(weights, name, rows, columns)


def bitsandbytes(settings: Mapping[str, Any], source: str, device: torch.device) -> ByModule:
    if settings.get("load_in_8bit") or settings.get("_load_in_8bit"):
        made: PlainFormat = stored_groups("bitsandbytes", 8, None, "SCB", _bnb_int8, device)
    else:
        require(settings, source, load_in_4bit=(True,), bnb_4bit_quant_type=("nf4", "fp4", None))
        name = "bitsandbytes 4 bits, dequantized at load"
        made = StoredValues(name=name, identity=name, marker="weight.absmax", read=_bnb_4bits)
    return by_module([made], lambda _: made, source)


def _bnb_int8(weights: Weights, name: str, rows: Shard, columns: Shard) -> Groups:
    if weights.has(f"{name}.weight_format"):
        order = weights.stored(f"{name}.weight_format", None, torch.uint8, torch.int8)
        if not order.is_meta and order.item() != 0:
            raise ValueError(
                f"{weights.source}: {name}.weight_format is not that of rows, which is supported"
            )
    codes = weights.stored(f"{name}.weight", (rows, columns), torch.int8).view(torch.uint8) ^ 128
    scales = weights.stored(f"{name}.SCB", (rows,), torch.float32)[:, None] / 127
    return Groups(codes, scales, torch.zeros_like(scales), 8)


def _bnb_4bits(weights: Weights, name: str, rows: Shard, columns: Shard) -> Tensor:
    """The whole matrix is read, since a block may have columns of several rows."""
    weight, whole = f"{name}.weight", rows.size * columns.size

    def stored(suffix: str, *dtypes: torch.dtype) -> Tensor:
        return weights.stored(f"{weight}.{suffix}", None, *dtypes).flatten()

    kinds = [kind for kind in ("nf4", "fp4") if weights.has(f"{weight}.quant_state.bitsandbytes__{kind}")]
    if not kinds:
        raise ValueError(f"{weights.source}: {weight}.quant_state.bitsandbytes__nf4 is missing")
    state = stored(f"quant_state.bitsandbytes__{kinds[0]}", torch.uint8)
    table, absmax = stored("quant_map", torch.float32), stored("absmax", torch.uint8, torch.float32)
    nested = None
    if weights.has(f"{weight}.nested_absmax"):
        nested = stored("nested_quant_map", torch.float32), stored("nested_absmax", torch.float32)
    packed = weights.stored(weight, None, torch.uint8).flatten()
    if packed.is_meta:
        return torch.empty((rows.length, columns.length), device=packed.device)
    try:
        settings = json.loads(bytes(state.cpu().tolist()))
        shape, block = list(settings["shape"]), int(settings["blocksize"])
        if nested is not None:
            steps, offset = int(settings["nested_blocksize"]), float(settings["nested_offset"])
            blocks = torch.arange(len(absmax), device=absmax.device) // steps
            absmax = nested[0][absmax.int()] * nested[1][blocks] + offset
        codes = torch.stack((packed >> 4, packed & 15), dim=1).flatten()
        if shape != [rows.size, columns.size] or len(codes) != whole + whole % 2:
            raise ValueError(f"a shape of {shape}")
        scales = absmax[torch.arange(whole, device=codes.device) // block]
        values = (table[codes[:whole].int()] * scales).view(shape)
    except (ValueError, KeyError, TypeError, IndexError, RuntimeError) as error:
        raise ValueError(f"{weights.source}: {weight} does not fit its settings: {error}") from error
    return values[rows.indices, columns.indices]
