"""How kernels are launched: each starts while the kernel before it ends (programmatic dependent launch, from
Hopper on).

Between two small kernels the GPU idles for a microsecond: the last programs of one kernel finish, then the
next is launched and reads its arguments. A kernel launched with `**options()` may begin earlier: when all
programs of the kernel before it have called `inputs_ready` or ended. The code before its own `inputs_ready`
then overlaps with that kernel. Only after this call may it write, or read results of kernels of this step.

Each kernel lets the next one begin only after its own inputs are ready. So at most two kernels run at once.
When a kernel begins, all kernels of its stream but the one before it are over. A kernel launched without the
option, such as torch's or cuBLAS', waits for all kernels before it, as always.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime import JITFunction

INTERPRETED_MULTIPROCESSORS = 4
"""Assumed when Triton's interpreter runs the kernels, in tests."""


@triton.jit
def inputs_ready(OVERLAP: tl.constexpr):
    """Waits for the inputs, then lets the next kernel begin. The first call of every program."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@functools.cache
def options() -> dict[str, Any]:
    """Arguments of a launch on this device: OVERLAP for the kernel, and Triton's option for the launch."""
    overlap = (
        isinstance(inputs_ready, JITFunction) and triton.runtime.driver.active.get_current_target().arch >= 90
    )
    return {"OVERLAP": overlap, "launch_pdl": overlap}


def multiprocessors(device: torch.device) -> int:
    """How many programs run at once, if each has a multiprocessor to itself."""
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
