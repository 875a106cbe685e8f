"""Matrix products with FP8 weights (e4m3), from quantized checkpoints or quantized on load.

The numbers of a checkpoint stay as they are. Its scales may be one for each tensor, for each row (*channel*),
or for each block of 128 × 128. Here a scale belongs to a row of W, and to all columns or a group of 128:
[groups, out] float32. So projections of one input can be stacked, and ranks can cut W at any row. Where the
blocks of the result are whole, the kernels get one scale for each block, which is faster.

    GPUs from Hopper on    W8A8: activations are quantized, too, with the same groups. Norm and activation
                           function quantize their result, other inputs are quantized alone.
    other devices          the weights times their scales, in the model's dtype, once, at load
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.kernels import FP8, FP8_GROUP, FourBits, Fp8Experts, LinearMethod, Quantized
from baton.engine.kernels.quantized.reference import quantize, spread
from baton.engine.layers.linear import PlainLinear
from baton.engine.layers.pieces import rows_in_pieces
from baton.engine.layers.ranks import Shard, unsharded
from baton.engine.layers.weights import OUTPUT, PlainFormat, Stack, Weights

ALIGNED = 16
"""Both dimensions of W must be multiples of this."""

SCALES = torch.float32, torch.bfloat16, torch.float16

KEPT_PLAIN = ("gate", "router", "kv_b_proj")
"""Quantizing on load leaves these in the model's dtype: products that matter most for their size, and what
`dense` reads."""


class Scaled(NamedTuple):
    """Rows of W."""

    values: Tensor  # [rows, columns] FP8
    scales: Tensor  # [groups, rows] float32: one group, or one for each FP8_GROUP columns


Reader = Callable[[Weights, str, Shard, Shard], Scaled | None]
"""Reads rows × columns of a projection. None: it is not quantized."""


class Fp8Linear(LinearMethod):
    """A product of quantized activations with FP8 weights."""

    def __init__(self, weight: Scaled, bias: Tensor | None, weights: Weights) -> None:
        self._grouped = len(weight.scales) > 1
        self._kernels = weights.kernels
        self._product = weights.kernels.fp8_linear(*weight, bias, weights.dtype)

    def quantizes(self, rows: int) -> bool:
        return self._grouped

    def __call__(self, x: Tensor | Quantized) -> Tensor:
        if isinstance(x, Tensor):
            x = self._kernels.quantize(x, grouped=self._grouped)
        return self._product(x)


@dataclass(frozen=True, kw_only=True)
class Fp8Format(PlainFormat):
    read: Reader
    quantizes_activations: bool
    identity: str = "fp8"
    scales: str | None = None
    """What the scales of a matrix are called in the checkpoint. None: it has none."""

    def alike(self, weights: Weights, names: Sequence[str]) -> bool:
        return self.scales is None or len({weights.has(f"{name}.{self.scales}") for name in names}) == 1

    def reads(self, weights: Weights, name: str) -> bool:
        return self.scales is None or weights.has(f"{name}.{self.scales}")

    def values(self, weights: Weights, name: str, rows: Shard, columns: Shard) -> Tensor:
        weight = self.read(weights, name, rows, columns)
        return super().values(weights, name, rows, columns) if weight is None else exact(weight)

    def bytes_per_parameter(
        self, dtype: torch.dtype, *, output: bool = False, experts: bool = False
    ) -> float:
        return 1 + 4 / FP8_GROUP if self.quantizes_activations and not output else dtype.itemsize

    def linear(self, weights: Weights, stack: Stack) -> LinearMethod:
        weight = self._stacked(weights, stack)
        if weight is None:
            return super().linear(weights, stack)
        added = weights.bias(stack)
        if not self.quantizes_activations:
            return PlainLinear(exact(weight).to(weights.dtype), added, exact=weights.kernels.exact)
        return Fp8Linear(weight._replace(scales=by_block(weight.scales)), added, weights)

    def experts(self, weights: Weights, experts: Sequence[Stack]) -> Tensor | Fp8Experts | FourBits:
        read = [self._stacked(weights, stack) for stack in experts]
        held = [weight for weight in read if weight and len(weight.values)]
        if not held:
            return super().experts(weights, experts)
        if not self.quantizes_activations:
            return torch.stack([exact(weight).to(weights.dtype) for weight in held])
        values = torch.stack([weight.values.view(torch.uint8) for weight in held]).view(FP8)
        return Fp8Experts(values, by_block(torch.stack([weight.scales for weight in held])))

    def dense(self, weights: Weights, stack: Stack) -> Tensor:
        weight = self._stacked(weights, stack)
        return super().dense(weights, stack) if weight is None else exact(weight).to(weights.dtype)

    def _stacked(self, weights: Weights, stack: Stack) -> Scaled | None:
        """The rows of all projections. None: they are not quantized."""
        names, rows, columns, _ = stack
        read = [self.read(weights, name, part, columns) for name, part in zip(names, rows, strict=True)]
        parts = [part for part in read if part is not None]
        if not parts:
            return None
        if len(parts) < len(names):
            raise ValueError(f"{weights.source}: of {', '.join(names)} only some are in FP8")
        if self.quantizes_activations:
            self._check(weights, names[0], sum(part.length for part in rows), columns.length)
        values = torch.cat([part.values.view(torch.uint8) for part in parts]).view(FP8)
        return Scaled(values, torch.cat([part.scales for part in parts], dim=1).contiguous())

    @staticmethod
    def _check(weights: Weights, name: str, *shape: int) -> None:
        """Raises `ValueError` if no kernel multiplies a weight of this shape."""
        if weights.device.type == "cuda" and weights.dtype is not torch.bfloat16:
            raise ValueError(f"{weights.source}: products in FP8 give bfloat16 only; use --dtype bfloat16")
        if any(size % ALIGNED for size in shape):
            raise ValueError(
                f"{weights.source}: {name} is {list(shape)} on this rank, products in FP8 need multiples of "
                f"{ALIGNED}; change --tensor-parallel-size"
            )


def exact(weight: Scaled) -> Tensor:
    """values · scales [rows, columns] float32."""
    return spread(weight.values, weight.scales.T)


def by_block(scales: Tensor) -> Tensor:
    """[…, groups, out] with groups of columns → […, groups, out / FP8_GROUP], if the rows of each block have
    the same scales. Other scales stay as they are, and so do declared ones, which have no values."""
    groups, out = scales.shape[-2:]
    if groups == 1 or out % FP8_GROUP or scales.is_meta:
        return scales
    blocks = scales[..., ::FP8_GROUP].contiguous()
    return blocks if torch.equal(blocks.repeat_interleave(FP8_GROUP, dim=-1), scales) else scales


def row_reader(values: str, scales: str) -> Reader:
    """From a checkpoint with scales under this name: one for the tensor, or [out] or [out, 1] for its rows.

    A static `input_scale` is not used: the scale of each row of activations is at least as exact."""

    def read(weights: Weights, name: str, rows: Shard, columns: Shard) -> Scaled | None:
        if not weights.has(f"{name}.{scales}"):
            return None
        if weights.has(f"{name}.input_scale"):
            weights.stored(f"{name}.input_scale", None, *SCALES)
        codes = weights.stored(f"{name}.{values}", (rows, columns), FP8)
        shape = weights.shape(f"{name}.{scales}") or ()
        by_row = shape in ((rows.size,), (rows.size, 1))
        parts = (rows, unsharded(1))[: len(shape)] if by_row else None
        found = weights.stored(f"{name}.{scales}", parts, *SCALES)
        if not by_row and found.numel() != 1:
            raise ValueError(
                f"{weights.source}: {name}.{scales} is {list(found.shape)}; "
                f"one value, [{rows.size}] or [{rows.size}, 1] are supported"
            )
        return Scaled(codes, found.float().view(1, -1).expand(1, rows.length))

    return read


def block_reader(suffix: str) -> Reader:
    """From a checkpoint with a scale for each block of 128 × 128, `suffix`: [out / 128, in / 128], rounded
    up; or [out, in / 128], where the checkpoint has the rows in another order."""

    def read(weights: Weights, name: str, rows: Shard, columns: Shard) -> Scaled | None:
        if not weights.has(f"{name}.{suffix}"):
            return None
        if columns.start % FP8_GROUP:
            raise ValueError(
                f"{weights.source}: --tensor-parallel-size cuts the blocks of {name}, which have scales: "
                f"a rank's columns begin at {columns.start}, no multiple of {FP8_GROUP}"
            )
        values = weights.stored(f"{name}.weight", (rows, columns), FP8)
        by_row = rows.size > 1 and (weights.shape(f"{name}.{suffix}") or ())[:1] == (rows.size,)
        blocks = rows if by_row else rows.in_groups(FP8_GROUP), columns.in_groups(FP8_GROUP)
        scales = weights.stored(f"{name}.{suffix}", blocks, *SCALES)
        if by_row:
            return Scaled(values, scales.float().T)
        first = rows.start % FP8_GROUP
        of_rows = scales.float().T.repeat_interleave(FP8_GROUP, dim=1)
        return Scaled(values, of_rows[:, first : first + rows.length])

    return read


def quantize_on_load(weights: Weights, name: str, rows: Shard, columns: Shard) -> Scaled | None:
    """From a plain checkpoint. The output projection and KEPT_PLAIN stay plain."""
    kept = name.rpartition(".")[2] in (OUTPUT, *KEPT_PLAIN)
    return None if kept else fp8_rows(weights, name, rows, columns)


def fp8_rows(weights: Weights, name: str, rows: Shard, columns: Shard) -> Scaled:
    """A plain matrix in FP8. The scale of a row is that of the whole row, also if a rank has a part."""
    plain = weights.stack([f"{name}.weight"], [(rows, unsharded(columns.size))], scratch=True)
    parts = [quantize(rows, grouped=False) for rows in rows_in_pieces(plain)]
    values = torch.cat([part.values.view(torch.uint8) for part in parts]).view(FP8)
    return Scaled(values[:, columns.indices], torch.cat([part.scales for part in parts]).T)
