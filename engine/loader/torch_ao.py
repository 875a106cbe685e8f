"""`quant_method` torchao: what version 2 of its configurations writes in safetensors.

integers    _weight_qdata [out, in] int8, _weight_scale [out, groups], and perhaps _weight_zero_point as int8
INT4        _weight_qdata [out, in / 2]: two signed integers in a byte, the first one in its lower half;
            _weight_scale and _weight_zero_point [groups, out], which are added as they are
FP8         _weight_qdata [out, in], _weight_scale of rows or of the tensor
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from baton.engine.layers.ranks import Shard
from baton.engine.layers.weights import Groups, PlainFormat, Weights
from baton.engine.loader import fp8_formats
from baton.engine.loader.by_module import ByModule, by_module, require
from baton.engine.loader.int_formats import SCALES, SIZES, bytes_of, nibbles, size_of, stored_groups

STORED = CODES, SCALE, ZERO = "_weight_qdata", "_weight_scale", "_weight_zero_point"
BYTES = "Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "IntxWeightOnlyConfig"
INT4 = "Int4WeightOnlyConfig"
FP8 = "Float8WeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig"


def torchao(settings: Mapping[str, Any], source: str, device: torch.device) -> ByModule:
    kinds = settings.get("quant_type")
    kind = kinds.get("default") if isinstance(kinds, Mapping) and len(kinds) == 1 else None
    data = kind.get("_data") if isinstance(kind, Mapping) else None
    if kind is None or not isinstance(data, Mapping):
        raise ValueError(
            f"{source}: quantization_config: quant_type {kinds!r} is not supported (one default is); "
            "serve the model with --engine vllm"
        )
    require(kind, source, _type=(*BYTES, INT4, *FP8), _version=(2,))
    made = _format(kind["_type"], data, source, device)
    return by_module([made], lambda _: made, source)


def _format(kind: str, data: Mapping[str, Any], source: str, device: torch.device) -> PlainFormat:
    if kind in FP8:
        return fp8_formats.fp8_rows_as(CODES, SCALE, device)
    size = size_of(_value(data, "group_size") or _value(data.get("granularity"), "group_size") or -1, source)
    if kind == INT4:
        require(data, source, int4_packing_format=({"_type": "Int4PackingFormat", "_data": "PLAIN"}, None))
        require({"group_size": size}, source, group_size=SIZES)
        return stored_groups("torchao", 4, size, CODES, partial(_nibbles, size or 0), device)
    packing = _value(data.get("intx_packing_format"), "_data") or data.get("intx_packing_format")
    require({"intx_packing_format": packing}, source, intx_packing_format=("UNPACKED_TO_INT8", None))
    return stored_groups("torchao", 8, size, CODES, partial(bytes_of, size, STORED), device)


def _value(settings: Any, key: str) -> Any:
    """Of a setting, or of the object that it is."""
    if not isinstance(settings, Mapping):
        return None
    return settings.get(key, _value(settings.get("_data"), key))


def _nibbles(size: int, weights: Weights, name: str, rows: Shard, columns: Shard) -> Groups:
    pairs = weights.stored(f"{name}.{CODES}", (rows, columns.in_groups(2)), torch.int8, torch.uint8)
    codes = nibbles(pairs.view(torch.uint8)) ^ 8  # signed to above 0
    parts = columns.in_groups(size), rows
    scales, zeros = (weights.stored(f"{name}.{each}", parts, *SCALES).float().T for each in (SCALE, ZERO))
    return Groups(codes, scales.contiguous(), zeros.contiguous(), 4)
