"""The quantized blocks of GGUF files as `Groups`, and the format that serves them so.

The types are described in https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.kernels import Fp8Experts
from engine.layers.grouped_linear import bytes_per_parameter, grouped_linear, packs
from engine.layers.groups import Groups, stacked
from engine.layers.linear import PlainFormat, PlainLinear
from engine.layers.ranks import Part
from engine.layers.weights import LinearMethod, Weights

GROUP = 32
"""Columns of a group, in all these types."""


def _half(raw: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block."""
    return raw[..., at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """[…, n] → […, 2 n]: all low halves, then all high halves."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _q4_0(raw: Tensor) -> Groups:
    scales = _half(raw, 0)[..., 0]
    return Groups(_nibbles(raw[..., 2:]).flatten(1), scales, torch.zeros_like(scales), 4)


def _q4_1(raw: Tensor) -> Groups:
    scales, least = _half(raw, 0)[..., 0], _half(raw, 2)[..., 0]
    return Groups(_nibbles(raw[..., 4:]).flatten(1), scales, least + 8 * scales, 4)


def _q8_0(raw: Tensor) -> Groups:
    scales = _half(raw, 0)[..., 0]
    return Groups((raw[..., 2:] ^ 128).flatten(1), scales, torch.zeros_like(scales), 8)


def _q4_k(raw: Tensor) -> Groups:
    """Blocks of eight groups, with scales and minima of 6 bits."""
    scale, least = _half(raw, 0), _half(raw, 2)  # [rows, blocks, 1]
    first, second, third = raw[..., 4:8], raw[..., 8:12], raw[..., 12:16]
    scales = torch.cat((first & 63, (third & 15) | (first >> 6 << 4)), dim=-1).float()
    minima = torch.cat((second & 63, (third >> 4) | (second >> 6 << 4)), dim=-1).float()
    scales, minima = (scale * scales).flatten(1), (least * minima).flatten(1)
    return Groups(_nibbles(raw[..., 16:].unflatten(-1, (4, 32))).flatten(1), scales, 8 * scales - minima, 4)


UNPACK: dict[str, Callable[[Tensor], Groups]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q8_0": _q8_0,
}
"""By type: [rows, blocks, bytes of a block] uint8 → its groups."""


@dataclass(frozen=True)
class GGUFFormat:
    """The `WeightFormat` of the quantized matrices of a GGUF file. Types without groups are plain."""

    types: Sequence[str]
    device: torch.device
    identity = "gguf"

    @property
    def name(self) -> str:
        return f"gguf ({', '.join(self.types)})"

    def bytes_per_parameter(self, dtype: torch.dtype) -> float:
        packed = UNPACK.keys() & self.types
        if not packed:
            return dtype.itemsize
        bits = 8 if packed == {"Q8_0"} else 4
        return bytes_per_parameter(bits, GROUP, dtype, self.device)

    def linear(
        self, weights: Weights, names: Sequence[str], rows: Sequence[Part], columns: Part, *, bias: bool
    ) -> LinearMethod:
        groups = self._read(weights, names, rows, columns)
        if groups is None:
            return PlainFormat().linear(weights, names, rows, columns, bias=bias)
        added = weights.bias(names, rows, columns) if bias else None
        return grouped_linear(groups, added, weights, output=names == ["lm_head"])

    def experts(
        self, weights: Weights, names: Sequence[Sequence[str]], rows: Sequence[Part], columns: Part
    ) -> Tensor | Fp8Experts:
        return PlainFormat().experts(weights, names, rows, columns)

    def tied(self, weights: Weights, name: str, rows: Part, columns: Part, embedding: Tensor) -> LinearMethod:
        packed = packs(weights.dtype, weights.device)
        groups = self._read(weights, [name], [rows], columns) if packed else None
        if groups is None:
            return PlainLinear(embedding)
        return grouped_linear(groups, None, weights, output=True)

    @staticmethod
    def _read(weights: Weights, names: Sequence[str], rows: Sequence[Part], columns: Part) -> Groups | None:
        parts = [
            weights.groups(f"{name}.weight", (part, columns)) for name, part in zip(names, rows, strict=True)
        ]
        read = [part for part in parts if part is not None]
        return stacked(read) if len(read) == len(parts) else None


def gguf(settings: Mapping[str, Any], source: str, device: torch.device) -> GGUFFormat:
    return GGUFFormat(settings["types"], device)


def serves_packed(settings: Mapping[str, Any], device: torch.device) -> bool:
    """Whether a device serves this file packed by default."""
    return bool(UNPACK.keys() & settings["types"]) and packs(torch.bfloat16, device)
