"""FP8 in plain torch: it defines the results of products of quantized activations, and runs on a CPU."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_GROUP = 128
"""Columns of activations, and rows and columns of weights, that share a scale where scales have groups."""


class Quantized(NamedTuple):
    """Activations in FP8: they stand for values times scales."""

    values: Tensor  # [rows, size] FP8
    scales: Tensor  # [rows, 1] float32, or grouped: [rows, size / FP8_GROUP rounded up]


class Fp8Experts(NamedTuple):
    """The weights of several experts in FP8: they stand for values times scales."""

    values: Tensor  # [experts, out, in] FP8
    scales: Tensor  # [experts, groups, out or out / FP8_GROUP] float32: as in `Kernels.fp8_linear`

    @property
    def grouped(self) -> bool:
        return self.scales.shape[1] > 1

    def exact(self) -> Tensor:
        """[experts, out, in] float32."""
        return torch.stack([spread(values, scales.T) for values, scales in zip(*self, strict=True)])


def quantize(x: Tensor, *, grouped: bool) -> Quantized:
    """x [rows, size] in FP8. The largest value of a row, or group, becomes the largest FP8 number."""
    size = x.shape[1]
    width = FP8_GROUP if grouped else size
    groups = F.pad(x.float(), (0, -size % width)).unflatten(1, (-1, width))
    # A row of zeros has no scale of 0.
    scales = groups.abs().amax(dim=2).clamp_min(2.0**-100) / torch.finfo(FP8).max
    return Quantized((groups / scales[:, :, None]).flatten(1)[:, :size].to(FP8), scales)


def rounded(x: Tensor, *, grouped: bool) -> Tensor:
    """x as its numbers in FP8 stand for it, in float32."""
    return spread(*quantize(x, grouped=grouped))


def fp8_linear(
    weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Callable[[Quantized], Tensor]:
    """The product x Wᵀ + b for x [rows, in] quantized, W [out, in] FP8 and b [out]. Returns [rows, out] of
    `dtype`. scales [groups, out] float32: those of W, each for a row of W and a group of its columns. Or
    [groups, out / FP8_GROUP]: each for a block. x has as many groups. All calls are in one stream."""
    exact = spread(weight, scales.T)
    added = None if bias is None else bias.float()
    return lambda x: F.linear(spread(*x), exact, added).to(dtype)


def spread(values: Tensor, scales: Tensor) -> Tensor:
    """values [rows, size] times scales [rows or rows / FP8_GROUP, groups], in float32."""
    width = values.shape[1] if scales.shape[1] == 1 else FP8_GROUP
    scales = scales.repeat_interleave(len(values) // len(scales), dim=0)
    return values.float() * scales.repeat_interleave(width, dim=1)[:, : values.shape[1]]
