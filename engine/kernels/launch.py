"""How kernels are launched: each starts while the kernel before it ends (programmatic dependent launch, from
Hopper on).

Between two small kernels the GPU idles for a microsecond: the last programs of one kernel finish, then the
next is launched and reads its arguments. A kernel launched with `launch_options` may begin earlier: when all
programs of the kernel before it have called `inputs_ready` or ended. The code before its own `inputs_ready`
then overlaps with that kernel. Only after this call may it write, or read what that kernel writes.

Most kernels let the next one begin once their own inputs are ready. When that one begins, all kernels of its
stream but the one before it are over: it may read their results. Where some short kernels follow each other,
they let the next one begin at once (`next_may_begin`). So several of them load weights, and wait, at a time.
The kernel after one of these reads nothing of its own layer before its inputs are ready. Products with more
weights lose by it: in the 8B shape, steps took 1 to 2 % longer (measured on an H200).

A kernel launched without the option, such as torch's or cuBLAS', waits for all kernels before it, as always.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

INTERPRETED_MULTIPROCESSORS = 4
"""Assumed when Triton's interpreter runs the kernels, in tests."""

COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)
"""False: the interpreter runs the kernels. It has no PTX."""


@triton.jit
def inputs_ready():
    """Waits for the inputs, then lets the next kernel begin. Every program calls it."""
    if COMPILED and cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def next_may_begin():
    """Lets the next kernel begin at once, when all programs have called this, before `inputs_ready`."""
    if COMPILED and cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def finishes_last(counts, place, programs):
    """Counts this program at a place of `counts`. Returns whether it is the last of so many `programs`. Then
    it sees what all of them have stored, and must set the count to 0."""
    tl.debug_barrier()  # all threads have stored before the program counts as finished
    return tl.atomic_add(counts + place, 1, sem="acq_rel") == programs - 1


def on_hopper() -> bool:
    """Whether kernels are compiled for a GPU with products of warp groups. Later ones have others."""
    return COMPILED.value and cuda_capability_geq(9, 0) and not cuda_capability_geq(10, 0)


@functools.cache
def launch_options() -> dict[str, Any]:
    """Options of a launch on this device, of a kernel that calls `inputs_ready`."""
    return {"launch_pdl": COMPILED.value and cuda_capability_geq(9, 0)}


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many programs run at once, if each has a multiprocessor to itself."""
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
