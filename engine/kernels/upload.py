"""Moves arrays of the host to the device."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes. Triton compiles a kernel anew for pointers that are aligned differently."""


def aligned(size: int) -> int:
    """`size` rounded up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """One tensor on the device for each array. On a GPU this only queues the copy; torch keeps the pinned
    memory until the copy is over."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
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
