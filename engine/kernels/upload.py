"""Moves arrays of the host to the device."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

LARGE = 1 << 20
"""Bytes of an array that is copied from where it is, if that is pinned memory: the host copies some 10 GB/s,
and an H200 reads pinned memory at 50."""
ALIGNMENT = 16
"""Bytes. Triton compiles a kernel anew for pointers that are aligned differently."""


def aligned(size: int) -> int:
    """`size` rounded up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """One tensor on the device for each array. On a GPU this only queues the copy; torch keeps the pinned
    memory until the copy is over. A large array that lies in pinned memory must stay until then."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    stay = [array.nbytes >= LARGE and torch.from_numpy(array).is_pinned() for array in arrays]
    if any(stay):
        rest = iter(upload([array for array, stays in zip(arrays, stay, strict=True) if not stays], device))
        return [
            torch.from_numpy(array).to(device, non_blocking=True) if stays else next(rest)
            for array, stays in zip(arrays, stay, strict=True)
        ]
    offsets = np.cumsum([0, *(aligned(array.nbytes) for array in arrays)]).tolist()
    packed = torch.empty(offsets[-1], dtype=torch.uint8, pin_memory=True)
    host = packed.numpy()
    for array, at in zip(arrays, offsets, strict=False):
        host[at : at + array.nbytes] = array.reshape(-1).view(np.uint8)
    moved = packed.to(device, non_blocking=True)
    return [
        moved[at : at + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for array, at in zip(arrays, offsets, strict=False)
    ]
