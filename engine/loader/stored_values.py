"""Quantized matrices that are dequantized at load, for the model's dtype: of bitsandbytes and torchao.

bitsandbytes NF4, FP4   weight [out · in / 2, 1]: two codes in a byte, the first one in its upper half;
                        weight.quant_map [16], weight.absmax of each block of a flat weight. `absmax`
                        may itself be codes of weight.nested_quant_map, with weight.nested_absmax.
bitsandbytes INT8       weight [out, in] int8, SCB [out]: 127 times the scales
torchao                 weight_qdata and weight_scale [out, groups], and perhaps weight_zero_point
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baton.engine.kernels import FourBits, Fp8Experts, LinearMethod
from baton.engine.layers.linear import PlainLinear
from baton.engine.layers.ranks import Shard
from baton.engine.layers.weights import PlainFormat, Stack, Weights
from baton.engine.loader.by_module import ByModule, by_module, require

ReadValues = Callable[[Weights, str, Shard, Shard], Tensor]
"""Reads rows × columns of a projection, as float32."""

FLOATS = torch.float32, torch.float16, torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class StoredValues(PlainFormat):
    marker: str
    """Suffix of a tensor that each quantized matrix has."""
    read: ReadValues

    def reads(self, weights: Weights, name: str) -> bool:
        return weights.has(f"{name}.{self.marker}")

    def values(self, weights: Weights, name: str, rows: Shard, columns: Shard) -> Tensor:
        return self.read(weights, name, rows, columns)

    def dense(self, weights: Weights, stack: Stack) -> Tensor:
        parts = zip(stack.names, stack.rows, strict=True)
        return torch.cat([self.read(weights, name, rows, stack.columns) for name, rows in parts]).to(
            weights.dtype
        )

    def linear(self, weights: Weights, stack: Stack) -> LinearMethod:
        return PlainLinear(self.dense(weights, stack), weights.bias(stack), exact=weights.kernels.exact)

    def experts(self, weights: Weights, experts: Sequence[Stack]) -> Tensor | Fp8Experts | FourBits:
        held = [self.dense(weights, stack) for stack in experts]
        return torch.stack([values for values in held if len(values)])


def bitsandbytes(settings: Mapping[str, Any], source: str, device: torch.device) -> ByModule:
    if settings.get("load_in_8bit") or settings.get("_load_in_8bit"):
        name, marker, read = "bitsandbytes int8, dequantized at load", "SCB", _bnb_int8
    else:
        require(settings, source, load_in_4bit=(True,), bnb_4bit_quant_type=("nf4", "fp4", None))
        name, marker, read = "bitsandbytes 4 bits, dequantized at load", "weight.absmax", _bnb_4bits
    made = StoredValues(name=name, identity=name, marker=marker, read=read)
    return by_module([made], lambda _: made, source)


def _bnb_int8(weights: Weights, name: str, rows: Shard, columns: Shard) -> Tensor:
    if weights.has(f"{name}.weight_format"):
        order = weights.stored(f"{name}.weight_format", None, torch.uint8, torch.int8)
        if not order.is_meta and order.item() != 0:
            raise ValueError(
                f"{weights.source}: {name}.weight_format is not that of rows, which is supported"
            )
    values = weights.stored(f"{name}.weight", (rows, columns), torch.int8).float()
    return values * weights.stored(f"{name}.SCB", (rows,), torch.float32)[:, None] / 127


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
