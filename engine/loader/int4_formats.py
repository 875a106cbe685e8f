"""INT4 weights of Hugging Face checkpoints: what `quantization_config` means, and where the groups are.

All keep integers of 4 bits in words of 32 bits, the first one in the lowest bits, unless told otherwise:

    gptq                 qweight [in / 8, out], qzeros [groups, out / 8] less 1, scales [groups, out]
    awq                  qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out]; the eight
                         integers of a word are in the order AWQ_ORDER
    compressed-tensors   weight_packed [out, in / 8], weight_scale [out, groups], and if asymmetric
                         weight_zero_point [out / 8, groups]
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from baton.engine.layers.grouped_linear import GroupsFormat, bytes_per_parameter
from baton.engine.layers.ranks import Shard, unsharded
from baton.engine.layers.weights import Groups, Stack, Weights, stacked

WORD = 8
"""Integers in a word."""

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Output i of a word is at this place in it."""

SCALES = (torch.float16, torch.bfloat16, torch.float32)

Reader = Callable[[Weights, str, Shard, Shard], Groups]
"""Reads rows × columns of a projection; the columns are whole groups."""


@dataclass(frozen=True, kw_only=True)
class Int4Format(GroupsFormat):
    size: int
    """Columns of a group."""
    marker: str
    """Suffix of a tensor that each quantized matrix has; matrices without it are plain."""
    read: Reader
    extra_biases = True  # of AutoGPTQ

    def bytes_per_parameter(self, dtype: torch.dtype, *, output: bool = False) -> float:
        return dtype.itemsize if output else bytes_per_parameter(4, self.size, dtype, self.device)

    def read_groups(self, weights: Weights, stack: Stack) -> Groups | None:
        names, rows, columns, _ = stack
        quantized = [name for name in names if weights.has(f"{name}.{self.marker}")]
        if not quantized:
            return None
        if len(quantized) < len(names):
            raise ValueError(f"{weights.source}: of {', '.join(names)} only some are quantized")
        columns.check_groups(self.size, f"{names[0]} in {weights.source}")
        parts = [self.read(weights, name, part, columns) for name, part in zip(names, rows, strict=True)]
        groups = stacked(parts)
        if groups is None:
            raise ValueError(
                f"{weights.source}: {', '.join(names)} have the same input, but g_idx gives their columns "
                "different orders, which is not supported"
            )
        return groups


def gptq(settings: Mapping[str, Any], source: str, device: torch.device) -> Int4Format:
    _require(settings, source, bits=(4,))
    version = settings.get("checkpoint_format", "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise ValueError(f"{source}: quantization_config: checkpoint_format {version!r} is not supported")
    size = _size(settings.get("group_size"), source)
    less = 1 if version == "gptq" else 0
    return _format(version, size, "qweight", partial(_gptq, size, less), device)


def awq(settings: Mapping[str, Any], source: str, device: torch.device) -> Int4Format:
    _require(settings, source, bits=(4,), version=("gemm", "GEMM", None))
    size = _size(settings.get("group_size", settings.get("q_group_size")), source)
    return _format("awq", size, "qweight", partial(_awq, size), device)


def compressed_int(settings: Mapping[str, Any], source: str, device: torch.device) -> Int4Format:
    """`quant_method` compressed-tensors, `format` pack-quantized."""
    groups = settings["config_groups"].values()
    weights_of_groups = [group["weights"] for group in groups]
    sizes = {_size(weights.get("group_size"), source) for weights in weights_of_groups}
    for group, weights in zip(groups, weights_of_groups, strict=True):
        if group.get("input_activations"):
            raise ValueError(f"{source}: quantization_config: quantized activations are not supported")
        _require(
            weights, source, num_bits=(4,), type=("int",), strategy=("group",),
            actorder=(None, False, "static", "weight"),
        )  # fmt: skip
    if len(sizes) != 1:
        raise ValueError(
            f"{source}: quantization_config: one size of groups is supported, not {sorted(sizes)}"
        )
    (size,) = sizes
    return _format("compressed-tensors", size, "weight_packed", partial(_compressed, size), device)


def _format(stored: str, size: int, marker: str, read: Reader, device: torch.device) -> Int4Format:
    name = f"{stored} int4 in groups of {size}"
    return Int4Format(name=name, identity=name, size=size, marker=marker, read=read, device=device)


def _require(settings: Mapping[str, Any], source: str, **allowed: tuple[Any, ...]) -> None:
    for key, values in allowed.items():
        if settings.get(key) not in values:
            raise ValueError(
                f"{source}: quantization_config: {key} {settings.get(key)!r} is not supported "
                f"({', '.join(str(value) for value in values if value is not None)} is)"
            )


def _size(size: Any, source: str) -> int:
    if type(size) is not int or size not in (32, 64, 128):
        raise ValueError(
            f"{source}: quantization_config: groups of {size!r} are not supported (32, 64, 128 are)"
        )
    return size


def _gptq(size: int, less: int, weights: Weights, name: str, rows: Shard, columns: Shard) -> Groups:
    words = weights.stored(f"{name}.qweight", (columns.in_groups(WORD), rows), torch.int32)
    codes, order = _unpacked(words.T.contiguous()), None
    if weights.has(f"{name}.g_idx"):
        index = weights.stored(f"{name}.g_idx", (columns,), torch.int32)
        ordered = torch.arange(columns.start, columns.stop, dtype=torch.int32, device=index.device) // size
        if not index.is_meta and not index.equal(ordered):  # `desc_act`
            order = index.argsort(stable=True)
            if not index[order].equal(ordered):
                raise ValueError(
                    f"{weights.source}: {name}.g_idx: --tensor-parallel-size cuts groups, or a group has not "
                    f"{size} columns"
                )
            codes = codes[:, order]
    scales = weights.stored(f"{name}.scales", (columns.in_groups(size), rows), *SCALES).float()
    packed = weights.stored(f"{name}.qzeros", (columns.in_groups(size), rows.in_groups(WORD)), torch.int32)
    zeros = _within(_unpacked(packed), rows).float() + less
    return _around(codes, scales.T, zeros.T)._replace(order=order)


def _awq(size: int, weights: Weights, name: str, rows: Shard, columns: Shard) -> Groups:
    def unpacked(suffix: str, first: Shard) -> Tensor:
        words = weights.stored(f"{name}.{suffix}", (first, rows.in_groups(WORD)), torch.int32)
        ordered = _unpacked(words).unflatten(1, (-1, WORD))[:, :, list(AWQ_ORDER)]
        return _within(ordered.flatten(1), rows).T

    codes = unpacked("qweight", columns).contiguous()
    zeros = unpacked("qzeros", columns.in_groups(size)).float()
    scales = weights.stored(f"{name}.scales", (columns.in_groups(size), rows), *SCALES).float()
    return _around(codes, scales.T, zeros)


def _compressed(size: int, weights: Weights, name: str, rows: Shard, columns: Shard) -> Groups:
    codes = _unpacked(weights.stored(f"{name}.weight_packed", (rows, columns.in_groups(WORD)), torch.int32))
    scales = weights.stored(f"{name}.weight_scale", (rows, columns.in_groups(size)), *SCALES).float()
    shape = weights.stored(f"{name}.weight_shape", (unsharded(2),), torch.int64, torch.int32)
    if not shape.is_meta and shape.tolist() != [rows.size, columns.size]:
        raise ValueError(
            f"{weights.source}: {name}.weight_shape is {shape.tolist()}, not {[rows.size, columns.size]}"
        )
    if not weights.has(f"{name}.weight_zero_point"):
        return Groups(codes, scales, torch.zeros_like(scales), 4)
    parts = (rows.in_groups(WORD), columns.in_groups(size))
    packed = weights.stored(f"{name}.weight_zero_point", parts, torch.int32)
    zeros = _within(_unpacked(packed.T.contiguous()), rows).float()
    return _around(codes, scales, zeros.T)


def _around(codes: Tensor, scales: Tensor, zeros: Tensor) -> Groups:
    """(code − zero) · scale"""
    return Groups(codes, scales.contiguous(), ((8 - zeros) * scales).contiguous(), 4)


def _unpacked(words: Tensor) -> Tensor:
    """[rows, words] int32 → [rows, 8 · words] uint8."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return (words[:, :, None] >> shifts).bitwise_and_(15).to(torch.uint8).flatten(1)


def _within(unpacked: Tensor, part: Shard) -> Tensor:
    """The columns of this part, from those of its words."""
    first = part.start % WORD
    return unpacked[:, first : first + part.length]
