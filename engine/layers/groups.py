"""Matrices of 4 or 8 bits, in groups of columns that share a scale.

GPTQ, AWQ, compressed-tensors and GGUF store such matrices in different layouts; here all are `Groups`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Groups(NamedTuple):
    """A matrix [rows, columns] of (code − middle) · scale + zero, where middle is 8 or 128."""

    codes: Tensor  # [rows, columns] uint8: unsigned integers of `bits` bits
    scales: Tensor  # [rows, groups] float32
    zeros: Tensor  # [rows, groups] float32
    bits: int

    @property
    def size(self) -> int:
        """Columns of a group."""
        return self.codes.shape[1] // self.scales.shape[1]

    def on(self, device: torch.device) -> "Groups":
        return Groups(self.codes.to(device), self.scales.to(device), self.zeros.to(device), self.bits)

    def values(self) -> Tensor:
        """[rows, columns] float32."""
        codes = self.codes.float().sub_(1 << (self.bits - 1)).unflatten(1, (-1, self.size))
        return codes.mul_(self.scales[:, :, None]).add_(self.zeros[:, :, None]).flatten(1)


def stacked(parts: Sequence[Groups]) -> Groups | None:
    """The rows of all parts. None: their groups differ."""
    if len({(part.size, part.bits) for part in parts}) > 1:
        return None
    codes, scales, zeros, bits = zip(*parts, strict=True)
    return Groups(torch.cat(codes), torch.cat(scales), torch.cat(zeros), bits[0])
