"""Quantized numbers in plain torch: it defines the results of products with them, and runs on a CPU."""

from collections.abc import Callable, Sequence
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


class Both(NamedTuple):
    """Activations in two forms."""

    plain: Tensor  # [rows, size] in the model's dtype
    quantized: Quantized  # `plain` quantized


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


MAX_WORDS = 64
"""Words of a block: at most a group, so that a plane of codes has one scale. 32 take 10 % more time."""
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FLOATS = torch.tensor((*MAGNITUDES, *(-value for value in MAGNITUDES)))
"""The values of codes in MXFP4 (OCP Microscaling 2023)."""


class FourBits(NamedTuple):
    """A matrix in 4 bits, or one for each of several experts. Groups of its columns share a scale.

        integers   w = (code − 8) · scale + zero      GPTQ, AWQ, GGUF and others
        floats     w = FLOATS[code] · scale           MXFP4

    A word of 16 bits has the codes of four columns: i, i + n, i + 2 n and i + 3 n of a block of 4 n columns.
    """

    words: Tensor  # [… out, blocks · n] int16
    scales: Tensor  # [… groups, out padded] in the dtype of x
    zeros: Tensor | None  # as the scales. None: they are 0
    size: int  # out
    inner: int  # in
    group: int  # columns
    floats: bool
    block: int  # words: n

    def row_scales(self) -> Tensor:
        """[1, out] float32: for W in FP8. The largest number that a row may have becomes the largest one."""
        largest = self.scales.float().abs() * (6 if self.floats else 8)
        if self.zeros is not None:
            largest += self.zeros.float().abs()
        most = largest.amax(dim=-2, keepdim=True)[..., : self.size]
        return most.clamp_min(2.0**-100) / torch.finfo(FP8).max

    def exact(self) -> Tensor:
        """[… out, in] float32."""
        words = self.words.int().unflatten(-1, (-1, 1, self.block)) >> torch.arange(0, 16, 4)[:, None].to(
            self.words.device
        )
        codes = (words & 15).flatten(-3)[..., : self.inner]
        numbers = FLOATS.to(codes.device)[codes] if self.floats else codes.float() - 8
        scales, zeros = (
            0.0
            if each is None
            else each.float().mT[..., : self.size, :].repeat_interleave(self.group, dim=-1)
            for each in (self.scales, self.zeros)
        )
        return numbers * scales + zeros


def four_bits(
    codes: Tensor, scales: Tensor, zeros: Tensor, dtype: torch.dtype, *, floats: bool = False
) -> FourBits:
    """codes [out, in] uint8 of 0 to 15; scales and zeros [out, groups]. dtype: of x."""
    size, inner = codes.shape
    group = inner // scales.shape[1]
    words = min(group, MAX_WORDS)
    planes = F.pad(codes, (0, -inner % (4 * words))).unflatten(1, (-1, 4, words)).to(torch.int16).unbind(2)
    packed = (planes[0] | planes[1] << 4 | planes[2] << 8 | planes[3] << 12).flatten(1)
    by_group = _by_group(zeros.to(dtype)) if zeros.any() else None
    return FourBits(packed, _by_group(scales.to(dtype)), by_group, size, inner, group, floats, words)


def of_experts(experts: Sequence[FourBits]) -> FourBits:
    """The matrices of several experts, which have equal shapes."""
    words, scales, zeros = zip(*(expert[:3] for expert in experts), strict=True)
    filled = None
    if any(zero is not None for zero in zeros):
        filled = torch.stack([torch.zeros_like(scales[0]) if zero is None else zero for zero in zeros])
    return experts[0]._replace(words=torch.stack(words), scales=torch.stack(scales), zeros=filled)


def _by_group(values: Tensor) -> Tensor:
    """[out, groups] → [groups, out], in rows of a multiple of 16 bytes, as the copy engine needs them."""
    return F.pad(values.T, (0, -len(values) % 8)).clone(memory_format=torch.contiguous_format)


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
