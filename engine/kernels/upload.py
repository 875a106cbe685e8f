"""Moves arrays of the host to the device."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from baton.engine.step import Pieces

LARGE = 1 << 20
"""Bytes of an array that is copied from where it is, if that is pinned memory: the host copies some 10 GB/s,
and an H200 reads pinned memory at 50."""
ALIGNMENT = 16
"""Bytes. Triton compiles a kernel anew for pointers that are aligned differently."""


def aligned(size: int) -> int:
    """`size` rounded up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def upload(arrays: Sequence[np.ndarray | Pieces], device: torch.device) -> list[Tensor]:
    """One tensor on the device for each array. On a GPU this only queues the copy; torch keeps the pinned
    memory until the copy is over. A large array that lies in pinned memory must stay until then."""
    if device.type == "cpu":
        return [torch.from_numpy(np.asarray(array)) for array in arrays]
    moved: dict[int, Tensor] = {}
    packed: dict[int, np.ndarray] = {}
    for i, array in enumerate(arrays):
        pieces = array.pieces if isinstance(array, Pieces) else [array]
        if sum(piece.nbytes for piece in pieces) >= LARGE and all(map(_is_pinned, pieces)):
            moved[i] = _copied(pieces, device)
        else:
            packed[i] = np.asarray(array)
    moved |= zip(packed, _packed(list(packed.values()), device), strict=True)
    return [moved[i] for i in range(len(arrays))]


def _is_pinned(array: np.ndarray) -> bool:
    return torch.from_numpy(array).is_pinned()


def _copied(pieces: Sequence[np.ndarray], device: torch.device) -> Tensor:
    """Each from where it is."""
    sources = list(map(torch.from_numpy, pieces))
    target = torch.empty((sum(map(len, pieces)), *pieces[0].shape[1:]), dtype=sources[0].dtype, device=device)
    for part, source in zip(target.split([len(piece) for piece in pieces]), sources, strict=True):
        part.copy_(source, non_blocking=True)
    return target


def _packed(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """In one copy."""
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
