"""Checkpoints of compressed-tensors (LLM Compressor): what `quantization_config` means.

A group of settings says which modules it holds for: by name, by a regular expression, or by their class, in
this order. Each group has a format, or all have the one of the whole.

Activations are not quantized, but for FP8. Their rounding is a part of the tool's result, and not of ours.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from baton.engine.kernels import FP8
from baton.engine.layers.ranks import Shard
from baton.engine.layers.weights import Groups, PlainFormat, Weights
from baton.engine.loader import fp8_formats
from baton.engine.loader.by_module import ByModule, by_module, require
from baton.engine.loader.int_formats import (
    SCALES,
    StoredGroups,
    compiled,
    compressed_bytes,
    compressed_packed,
    nibbles,
    stored_groups,
    within,
)
from baton.engine.loader.stored_values import StoredValues

OFFLINE = ("weight_input", "weight_output")
"""Where a rotation is a part of the weights."""

E8M0 = torch.tensor([*(2.0 ** (byte - 127) for byte in range(255)), torch.nan])
"""The scales of OCP Microscaling 2023, by their byte."""


def mxfp4(kept: Mapping[str, Any], source: str, device: torch.device) -> StoredGroups:
    require(kept, source, num_bits=(4,), type=("float",), strategy=("group",), group_size=(32,))
    return stored_groups("mx", 4, 32, "weight_packed", _mxfp4, device, kind="fp")


def nvfp4(kept: Mapping[str, Any], source: str, device: torch.device) -> StoredGroups:
    require(kept, source, num_bits=(4,), type=("float",), strategy=("tensor_group",), group_size=(16,))
    return stored_groups("nv", 4, 16, "weight_packed", _nvfp4, device, kind="fp")


def modelopt(settings: Mapping[str, Any], source: str, device: torch.device) -> ByModule:
    """`quant_method` modelopt (NVIDIA Model Optimizer): FP8 by tensor, NVFP4 with names of its own, and AWQ.
    AWQ is dequantized: no packed product multiplies columns by scales."""
    require(settings, source, quant_algo=("FP8", "NVFP4", "W4A16_NVFP4", "W4A16_AWQ"))
    made: PlainFormat = fp8_formats.fp8_rows_as("weight", "weight_scale", device)
    if settings["quant_algo"] in ("NVFP4", "W4A16_NVFP4"):
        made = stored_groups("nv", 4, 16, "weight_scale_2", _modelopt_nvfp4, device, kind="fp")
    elif settings["quant_algo"] == "W4A16_AWQ":
        name = "modelopt awq, dequantized at load"
        made = StoredValues(name=name, identity=name, marker="weight_scale", read=_modelopt_awq)
    return by_module([made], lambda _: made, source)


def mxfp8(kept: Mapping[str, Any], source: str, device: torch.device) -> StoredValues:
    require(kept, source, num_bits=(8,), type=("float",), strategy=("group",), group_size=(32,))
    name = "mxfp8, dequantized at load"
    return StoredValues(name=name, identity=name, marker="weight_scale", read=_mxfp8)


def naive(kept: Mapping[str, Any], source: str, device: torch.device) -> PlainFormat:
    of_type = compressed_bytes if kept.get("type") == "int" else fp8_formats.compressed_float
    return of_type(kept, source, device)


FORMATS: dict[str, Callable[[Mapping[str, Any], str, torch.device], PlainFormat]] = {
    "float-quantized": fp8_formats.compressed_float,
    "int-quantized": compressed_bytes,
    "mxfp4-pack-quantized": mxfp4,
    "mxfp8-quantized": mxfp8,
    "naive-quantized": naive,
    "nvfp4-pack-quantized": nvfp4,
    "pack-quantized": compressed_packed,
}


MIXED = "mixed-precision"
"""Each group names its own."""


def compressed(settings: Mapping[str, Any], source: str, device: torch.device) -> ByModule:
    """`quant_method` compressed-tensors."""
    groups, whole = settings.get("config_groups"), settings.get("format")
    if not isinstance(whole, str | None) or whole not in (*FORMATS, MIXED, None):
        raise not_supported(source, whole)
    if not isinstance(groups, Mapping) or not groups or not all(map(_is_group, groups.values())):
        raise ValueError(f"{source}: quantization_config: config_groups {groups!r} are not supported")
    _check_transforms(settings.get("transform_config"), source)
    sparsity = settings.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, Mapping) and sparsity.get("format") == "dense"):
        raise ValueError(f"{source}: quantization_config: sparsity_config {sparsity!r} is not supported")
    formats: list[PlainFormat] = []
    names: dict[str, PlainFormat] = {}
    patterns: list[tuple[re.Pattern[str], PlainFormat]] = []
    of_class: PlainFormat | None = None
    for group in groups.values():
        name = group.get("format") or whole
        if not isinstance(name, str) or name not in FORMATS:
            raise not_supported(source, name)
        made = FORMATS[name](group["weights"], source, device)
        formats.append(made)
        for target in group.get("targets") or ["Linear"]:
            if target.startswith("re:"):
                patterns.append((compiled(target.removeprefix("re:"), source, "targets"), made))
            elif target == "Linear":
                of_class = made
            else:
                names[target] = made
    left_out = _ignored(settings.get("ignore") or [], source)

    def chosen(name: str) -> PlainFormat | None:
        if any(pattern.match(name) for pattern in left_out):
            return None
        if name in names:
            return names[name]
        return next((made for pattern, made in patterns if pattern.match(name)), of_class)

    return by_module(formats, chosen, source, extra_biases=True)


def _ignored(names: Any, source: str) -> list[re.Pattern[str]]:
    """The modules that are left plain."""
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        raise ValueError(f"{source}: quantization_config: ignore {names!r} is not supported")
    return [
        compiled(
            name.removeprefix("re:") if name.startswith("re:") else f"{re.escape(name)}$", source, "ignore"
        )
        for name in names
    ]


def not_supported(source: str, name: Any) -> ValueError:
    return ValueError(
        f"{source}: quantization_config: the format {name!r} of compressed-tensors is not supported "
        f"({', '.join(FORMATS)} are); export the model again, or serve it with --engine vllm"
    )


def _is_group(group: Any) -> bool:
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        return False
    targets = group.get("targets") or []
    return isinstance(targets, list) and all(isinstance(target, str) for target in targets)


def _check_transforms(transforms: Any, source: str) -> None:
    """Raises `ValueError` for rotations of activations. Those of weights are in the weights."""
    if not transforms:
        return
    groups = transforms.get("config_groups") if isinstance(transforms, Mapping) else None
    try:
        places = {use["location"] for group in dict(groups or {}).values() for use in group["apply"]}
        online = sorted(str(place) for place in places if place not in OFFLINE)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{source}: quantization_config: transform_config {transforms!r} is not supported"
        ) from error
    if online:
        raise ValueError(
            f"{source}: quantization_config: transform_config rotates activations ({', '.join(online)}), "
            "which is not supported; export the model with rotations of weights alone, or serve it with "
            "--engine vllm"
        )


def _mxfp4(weights: Weights, name: str, rows: Shard, columns: Shard) -> Groups:
    stored = weights.stored(f"{name}.weight_scale", (rows, columns.in_groups(32)), torch.uint8)
    return floats(_packed(weights, f"{name}.weight_packed", rows, columns), exponents(stored))


def _nvfp4(weights: Weights, name: str, rows: Shard, columns: Shard) -> Groups:
    packed = _packed(weights, f"{name}.weight_packed", rows, columns)
    stored = weights.stored(f"{name}.weight_scale", (rows, columns.in_groups(16)), FP8).float()
    whole = weights.stored(f"{name}.weight_global_scale", None, torch.float32)
    return floats(packed, stored / whole.view(1, 1))


def _modelopt_nvfp4(weights: Weights, name: str, rows: Shard, columns: Shard) -> Groups:
    packed = _packed(weights, f"{name}.weight", rows, columns)
    stored = weights.stored(f"{name}.weight_scale", (rows, columns.in_groups(16)), FP8).float()
    whole = weights.stored(f"{name}.weight_scale_2", None, torch.float32)
    return floats(packed, stored * whole.view(1, 1))


def _modelopt_awq(weights: Weights, name: str, rows: Shard, columns: Shard) -> Tensor:
    """A byte has the signed codes of two rows. The export says the columns of a group by its scales alone."""
    packed = weights.stored(f"{name}.weight", (rows.in_groups(2), columns), torch.uint8)
    codes = within(nibbles(packed.T), rows, 2).T
    groups = (weights.shape(f"{name}.weight_scale") or (0, 0))[-1]
    size = max(1, columns.size // max(1, groups))
    columns.check_groups(size, f"{name} in {weights.source}")
    scales = weights.stored(f"{name}.weight_scale", (rows, columns.in_groups(size)), *SCALES).float()
    values = ((codes.float() + 8) % 16 - 8) * scales.repeat_interleave(size, 1)
    if weights.has(f"{name}.pre_quant_scale"):
        values *= weights.stored(f"{name}.pre_quant_scale", (columns,), *SCALES).float()
    return values


def _packed(weights: Weights, name: str, rows: Shard, columns: Shard) -> Tensor:
    return weights.stored(name, (rows, columns.in_groups(2)), torch.uint8)


def floats(packed: Tensor, scales: Tensor) -> Groups:
    """packed [rows, columns / 2], scales [rows, groups]."""
    return Groups(nibbles(packed), scales, torch.zeros_like(scales), 4, floats=True)


def _mxfp8(weights: Weights, name: str, rows: Shard, columns: Shard) -> Tensor:
    columns.check_groups(32, f"{name} in {weights.source}")
    values = weights.stored(f"{name}.weight", (rows, columns), FP8).float()
    parts = (rows, columns.in_groups(32))
    scales = exponents(weights.stored(f"{name}.weight_scale", parts, torch.uint8))
    return (values.unflatten(1, (-1, 32)) * scales[:, :, None]).flatten(1)


def exponents(stored: Tensor) -> Tensor:
    return E8M0.to(stored.device)[stored.int()]
