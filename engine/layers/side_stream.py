"""A second stream of a GPU, for work that runs beside what the current stream does.

    with beside(stream):      begins after all that is launched so far
        a = …
    b = …                     at the same time
    join(stream)              what follows may read both

A CUDA graph that captures the current stream captures both. The allocator gives the memory of `a` to later
work of the second stream only. That work begins after what the current stream launched before it, so it
overwrites nothing that is still read.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The second stream of this device, which all layers share."""
    return torch.cuda.Stream(device)


@contextmanager
def beside(stream: torch.cuda.Stream) -> Iterator[None]:
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield


def join(stream: torch.cuda.Stream) -> None:
    torch.cuda.current_stream().wait_stream(stream)
