"""`--quantization int4`: rounds the matrices of a plain checkpoint to 4 bits when it is loaded.

The output projection becomes FP8, by row: rounding it to 4 bits would change more tokens. One that is tied to
the embedding stays plain, since its copy would need more memory. Checkpoints that were quantized with the
help of activations (GPTQ, AWQ) keep more quality.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.layers.fp8_linear import ALIGNED, OUTPUT, Fp8Format
from baton.engine.layers.grouped_linear import bytes_per_parameter, grouped_linear
from baton.engine.layers.linear import PlainFormat, PlainLinear
from baton.engine.layers.ranks import Part
from baton.engine.layers.weights import Groups, LinearMethod, Weights

SIZES = (128, 64, 32)
"""Columns of a group: the first of these that divides the columns of the matrix."""


@dataclass(frozen=True)
class Int4OnLoad:
    """The `WeightFormat` that rounds matrices to INT4."""

    output: Fp8Format
    device: torch.device
    identity = "int4 on load"

    @property
    def name(self) -> str:
        return f"int4 in groups of {SIZES[0]}, quantized on load; output projection {self.output.name}"

    def bytes_per_parameter(self, dtype: torch.dtype, *, output: bool = False) -> float:
        if output:
            return self.output.bytes_per_parameter(dtype)
        return bytes_per_parameter(4, SIZES[0], dtype, self.device)

    def linear(
        self, weights: Weights, names: Sequence[str], rows: Sequence[Part], columns: Part, *, bias: bool
    ) -> LinearMethod:
        aligned = not any(part.length % ALIGNED for part in (*rows, columns))
        if names == [OUTPUT] and aligned:
            return self.output.linear(weights, names, rows, columns, bias=bias)
        size = next((size for size in SIZES if columns.size % size == 0), None)
        if names == [OUTPUT] or size is None:
            return PlainFormat().linear(weights, names, rows, columns, bias=bias)
        columns.check_groups(size, f"{names[0]} in {weights.source}")
        parts = [(part, columns) for part in rows]
        weight = weights.stack([f"{name}.weight" for name in names], parts, scratch=True)
        added = weights.bias(names, rows, columns) if bias else None
        return grouped_linear(rounded(weight, size), added, weights)

    def experts(
        self, weights: Weights, names: Sequence[Sequence[str]], rows: Sequence[Part], columns: Part
    ) -> Tensor:
        raise ValueError(f"--quantization int4: {weights.source} has experts, which can be in fp8")

    def tied(self, weights: Weights, name: str, rows: Part, columns: Part, embedding: Tensor) -> LinearMethod:
        return PlainLinear(embedding)


def rounded(weight: Tensor, size: int) -> Groups:
    """The nearest `Groups` of `size` columns without zeros. The largest number of a group has code 0, so that
    a scale may be negative."""
    groups = weight.float().unflatten(1, (-1, size))
    largest = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))[:, :, 0]
    scales = largest / -8
    codes = (groups / scales[:, :, None]).nan_to_num_(0.0).add_(8).round_().clamp_(0, 15)
    return Groups(codes.to(torch.uint8).flatten(1), scales, torch.zeros_like(scales), 4)
