"""A slice as it is in an arena slot and on the wire, and its conversion to another dtype: for `HostPool`.

In FP8 a head of a position stands for values · scale. To FP8: scale = largest |x| of the head / 448, and
values = x / scale, rounded to the nearest FP8 number. A NaN or infinite number gives NaN in its own head
only.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from baton.kv_transfer.layout import FP8, ITEM_BYTES, KVLayout, Slice

LARGEST = 448.0  # the largest FP8 number
LEAST = 2.0**-100  # counts as the largest value of a head of zeros, so that its scale is not 0


class Dense(NamedTuple):
    """A slice in a slot."""

    values: np.ndarray  # [2, tokens, heads, bytes of a head]
    scales: np.ndarray | None  # [2, tokens, heads] float32

    @classmethod
    def of(cls, slot: memoryview, piece: Slice, layout: KVLayout) -> Dense:
        heads = 2, piece.token_count, piece.head_count
        shape = (*heads, layout.head_dim * ITEM_BYTES[layout.dtype])
        size = math.prod(shape)
        values = np.frombuffer(slot, np.uint8, size).reshape(shape)
        if layout.dtype != FP8:
            return cls(values, None)
        return cls(values, np.frombuffer(slot, np.float32, math.prod(heads), size).reshape(heads))

    def converted(self, dtype: str, to: str) -> Dense:
        """In new memory, from one dtype to the other."""
        exact = torch.from_numpy(self.values).view(getattr(torch, dtype)).to(torch.float32, copy=True)
        if self.scales is not None:
            exact *= torch.from_numpy(self.scales)[..., None]
        scales = None
        if to == FP8:
            scales = exact.abs().amax(dim=-1).clamp_min(LEAST) / LARGEST
            exact /= scales[..., None]
        values = exact.to(getattr(torch, to)).view(torch.uint8).numpy()
        return Dense(values, None if scales is None else scales.numpy())
