"""Adds up the parts of a product, if several programs share its inner dimension.

Each program stores its part. The program that finishes last for a tile adds up all parts. It adds them in a
fixed order, so timing never changes the sum.
"""

import torch
import triton
import triton.language as tl

INTERPRETED_MULTIPROCESSORS = 4
"""Assumed when Triton's interpreter runs the kernels, in tests."""


def multiprocessors(device: torch.device) -> int:
    """How many programs run at once, if one has a multiprocessor for itself."""
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def add_parts(acc, parts, finished, tile, tiles, split, SPLITS: tl.constexpr):
    """Returns the sum of all parts of a tile, and whether this program is the last one and has it.

    acc [n, m] float32: this program's part. parts [splits, tiles, n, m] float32: scratch memory. finished
    [tiles] int32: 0 before and after."""
    n, m = tl.arange(0, acc.shape[0]), tl.arange(0, acc.shape[1])
    part = tiles * acc.shape[0] * acc.shape[1]
    own = parts + tile * acc.shape[0] * acc.shape[1] + n[:, None] * acc.shape[1] + m[None, :]
    tl.store(own + split * part, acc)
    tl.debug_barrier()  # all threads have stored before the program counts as finished
    is_last = tl.atomic_add(finished + tile, 1, sem="acq_rel") == SPLITS - 1
    if is_last:
        tl.store(finished + tile, 0)
        acc = tl.zeros(acc.shape, tl.float32)
        for i in tl.static_range(SPLITS):
            acc += tl.load(own + i * part, cache_modifier=".cg")
    return acc, is_last
