"""One kernel begins while the one before it ends (programmatic dependent launch, from Hopper on).

Between two small kernels the GPU does nothing for a microsecond: the last programs of one finish, then the
next is launched, and looks up what it is to do. Launched with `**options(...)`, a kernel may begin as soon as
all programs of the one before it have called `inputs_ready`, or ended; what it does before its own
`inputs_ready` overlaps. Only from there on may it read what kernels of this step wrote, or write anything.

Each kernel says that the next may begin only after its own inputs are ready. So there are never more than two
under way, and whatever began has all kernels but the last one before it behind it. A kernel launched without
the option, torch's or cuBLAS', waits for all before it, as always.
"""

import functools
from typing import Any

import triton
import triton.language as tl
from triton.runtime import JITFunction


@triton.jit
def inputs_ready(OVERLAP: tl.constexpr):
    """First in every program that `options` is for."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@functools.cache
def options() -> dict[str, Any]:
    """Of a launch on this device: the kernel's OVERLAP, and the launch's own."""
    overlap = (
        isinstance(inputs_ready, JITFunction) and triton.runtime.driver.active.get_current_target().arch >= 90
    )
    return {"OVERLAP": overlap, "launch_pdl": overlap}
