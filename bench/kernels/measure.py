"""Times a case: a kernel against torch and the limit of the card."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from baton.bench.contract import Row, interleaved, paired_ratio
from baton.bench.kernels.cases import BYTES_PER_S, FLOPS_PER_S, Make, nbytes

BEYOND_CACHE = 256 << 20  # least bytes of all input sets of a case together
MAX_SETS = 32
LEAST_CALLS = 4  # of a graph, since its launch and the events take microseconds of their own
PAIRS = 7
WARM_SECONDS = 0.05  # a GPU that rested begins with lower clocks


@dataclass(frozen=True, slots=True)
class Limits:
    """What plain work reaches on this device."""

    bytes_per_s: float
    flops_per_s: float


Seconds = Callable[[Sequence[Callable[[], object]]], Callable[[], float]]
"""Prepares calls. Returns a function that runs all of them once and returns their seconds."""


def graph_seconds(calls: Sequence[Callable[[], object]]) -> Callable[[], float]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # it may still fill the inputs
    with torch.cuda.stream(side):  # compile, choose algorithms and allocate before the capture
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def once() -> float:
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    start = time.perf_counter()
    while time.perf_counter() - start < WARM_SECONDS:
        once()
    return once


def limits(device: torch.device, seconds: Seconds) -> Limits:
    """Measures an elementwise kernel on 1 GiB, and a product of bfloat16 matrices by cuBLAS."""
    one, other = torch.randn(2, 8192, 8192, device=device).bfloat16()
    into = torch.empty(8, 8192, 8192, dtype=torch.bfloat16, device=device)
    source = torch.randn(into.shape, device=device).bfloat16()

    def rate(work: float, call: Callable[[], object]) -> float:
        once = seconds([call])
        return work / statistics.median(once() for _ in range(PAIRS))

    return Limits(
        rate(2 * nbytes(source), lambda: torch.neg(source, out=into)), rate(2 * 8192**3, lambda: one @ other)
    )


def measure(make: Make, seconds: Seconds, plain: Limits) -> list[Row]:
    case = make()
    sets = [case, *(make() for _ in range(min(MAX_SETS, BEYOND_CACHE // max(1, case.bytes))))]
    rounds = -(-LEAST_CALLS // len(sets))
    ours, theirs = seconds([case.ours for case in sets] * rounds), None
    if all(case.torch for case in sets):
        theirs = seconds([case.torch for case in sets if case.torch] * rounds)
    times, their_times = interleaved(ours, theirs or ours, PAIRS)
    each = statistics.median(times) / (len(sets) * rounds)
    work, limit, reached, unit, scale = case.bytes, BYTES_PER_S, plain.bytes_per_s, "GB/s", 1e9
    if case.arithmetic:
        work, limit, reached, unit, scale = case.flops, FLOPS_PER_S, plain.flops_per_s, "TFLOP/s", 1e12
    row = Row(f"kernels.{case.name}", work / each / scale, unit)
    if theirs:
        ratio, spread = paired_ratio(their_times, times)
        row = replace(row, ratio=ratio, ratio_to=f"speed of {case.torch_is}", spread=spread)
    return [
        row,
        Row(f"kernels.{case.name}.time", each / case.repeats * 1e6, "µs"),
        Row(f"kernels.{case.name}.of_limit", work / each / limit, f"of {limit / scale:g} {unit}"),
        Row(f"kernels.{case.name}.of_plain", work / each / reached, f"of {reached / scale:.4g} {unit}"),
    ]
