"""New weights in pieces, since steps compute meanwhile.

The driver makes other threads wait while it pins memory, or copies from memory that is not pinned. A launch
of a step may come then, so it waits for one piece at most. What rounds weights needs several times their
memory in float32, so it takes pieces, too.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

PINNED_PER_S = 1.7e9
"""Bytes of new memory. Steps waited 0.6 s for a tensor of 1.05 GB on an H200 (docs/lab/tables.md)."""
LONGEST_WAIT = 0.005
"""Seconds that a step waits for a piece: about as long as a short step takes."""
PIECE = 1 << int(math.log2(PINNED_PER_S * LONGEST_WAIT))
"""Bytes, at most: 8 MiB. Torch rounds pinned memory up to a power of two, and keeps what is freed for the
next one of that size. So it is the same for all changes."""


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of tensors of one shape, all cut alike. Of the first one, each has at most PIECE bytes, and lies
    in one part of memory if the whole does."""
    first = tensors[0]
    if first.nbytes <= PIECE:
        yield tensors
        return
    dim = max((i for i, size in enumerate(first.shape) if size > 1), key=first.stride)
    for halves in zip(*(tensor.chunk(2, dim) for tensor in tensors), strict=True):
        yield from pieces(*halves)


def rows_in_pieces(x: Tensor) -> Sequence[Tensor]:
    """Views of whole rows, in order. Each has PIECE bytes at most, or is one row."""
    return x.split(max(1, PIECE // max(1, math.prod(x.shape[1:]) * x.itemsize)))


def copy_values(to: Tensor, values: Tensor) -> None:
    """Copies values of any dtype and place to a tensor of their shape, in the order of the current stream.
    Values on the host go through two pieces of pinned memory. They may change when this returns."""
    assert to.shape == values.shape
    if not to.is_cuda or values.is_cuda:
        to.copy_(values)
        return
    stream = torch.cuda.current_stream(to.device)
    for part, some in pieces(to, values):
        pinned = torch.empty(some.shape, dtype=to.dtype, pin_memory=True).copy_(some)
        stream.synchronize()  # the piece before this one is free again
        part.copy_(pinned, non_blocking=True)
