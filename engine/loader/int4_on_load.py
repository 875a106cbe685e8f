"""`--quantization int4`: rounds the matrices of a plain checkpoint to 4 bits when it is loaded.

The output projection becomes FP8, by row: rounding it to 4 bits would change more tokens. One that is tied to
the embedding stays plain, since its copy would need more memory. So do routers, which are small. Checkpoints
that were quantized with the help of activations (GPTQ, AWQ) keep more quality.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.kernels import LinearMethod
from baton.engine.layers.fp8_linear import ALIGNED, KEPT_PLAIN, Fp8Format
from baton.engine.layers.grouped_linear import GroupsFormat
from baton.engine.layers.pieces import rows_in_pieces
from baton.engine.layers.weights import OUTPUT, Groups, Stack, Weights, stacked
from baton.engine.loader.fp8_formats import fp8_output

SIZES = (128, 64, 32)
"""Columns of a group: the first of these that divides the columns of the matrix."""


@dataclass(frozen=True, kw_only=True)
class Int4OnLoad(GroupsFormat):
    """Rounds matrices to INT4."""

    output: Fp8Format
    identity: str = "int4 on load"

    def bytes_per_parameter(
        self, dtype: torch.dtype, *, output: bool = False, experts: bool = False
    ) -> float:
        if output:
            return self.output.bytes_per_parameter(dtype)
        return self.kept_bytes(4, SIZES[0], dtype, experts=experts)

    def linear(self, weights: Weights, stack: Stack) -> LinearMethod:
        aligned = not any(part.length % ALIGNED for part in (*stack.rows, stack.columns))
        method = self.output if stack.names == [OUTPUT] and aligned else super()
        return method.linear(weights, stack)

    def read_groups(self, weights: Weights, stack: Stack) -> Groups | None:
        columns = stack.columns
        size = next((size for size in SIZES if columns.size % size == 0), None)
        if size is None or stack.names[0].rpartition(".")[2] in (OUTPUT, *KEPT_PLAIN):
            return None
        columns.check_groups(size, f"{stack.names[0]} in {weights.source}")
        plain = weights.stack(*stack.weights, scratch=True)
        return stacked([rounded(rows, size) for rows in rows_in_pieces(plain)])


def int4_on_load(device: torch.device) -> Int4OnLoad:
    output = fp8_output(device)
    name = f"int4 in groups of {SIZES[0]}, quantized on load; output projection {output.name}"
    return Int4OnLoad(name=name, output=output, device=device)


def rounded(weight: Tensor, size: int) -> Groups:
    """The nearest `Groups` of `size` columns without zeros. The largest number of a group has code 0, so that
    a scale may be negative."""
    groups = weight.float().unflatten(1, (-1, size))
    largest = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))[:, :, 0]
    scales = largest / -8
    codes = (groups / scales[:, :, None]).nan_to_num_(0.0).add_(8).round_().clamp_(0, 15)
    return Groups(codes.to(torch.uint8).flatten(1), scales, torch.zeros_like(scales), 4)
