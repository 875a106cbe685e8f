"""Times a case, and times kernels by their constants."""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from baton.bench.contract import Row, interleaved, paired_ratio
from baton.bench.kernels.cases import BYTES_PER_S, FLOPS_PER_S, Cases, Make, nbytes

if TYPE_CHECKING:
    from baton.bench.kernels.fp8 import Fp8Cases
    from baton.bench.kernels.fp8_kv import Fp8KVCases
    from baton.bench.kernels.int4 import Int4Cases
    from baton.bench.kernels.mamba2 import Mamba2Cases  # imports kernels, as the next one
    from baton.bench.kernels.moe import MoeCases

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


def sweep(seconds: Seconds, plain: Limits, choices: Choices) -> list[Row]:
    rows = []
    for module, constants, make in choices:
        before = {name: getattr(module, name) for name in constants}
        for values in itertools.product(*constants.values()):
            chosen = dict(zip(constants, values, strict=True))
            for name, value in chosen.items():
                setattr(module, name, value)
            label = " ".join(f"{name}={value}" for name, value in chosen.items())
            try:
                time = measure(make, seconds, plain)[1]
            except Exception as error:  # noqa: BLE001 - a choice may not fit the device
                print(f"{module.__name__} {label}: {type(error).__name__}", file=sys.stderr)
            else:
                rows.append(replace(time, name=f"{time.name.removesuffix('.time')} {label}"))
        for name, value in before.items():
            setattr(module, name, value)
    return sorted(rows, key=lambda row: (row.name.split(" ")[0], row.value))


Choices = Sequence[tuple[ModuleType, dict[str, list[Any]], Make]]
"""Constants of a module, the values to try, and the case to time them by."""


def moe_choices(cases: MoeCases) -> Choices:
    from baton.engine.kernels import grouped_linear
    from baton.engine.kernels.grouped_linear import Tiling

    few = [
        Tiling(rows, *of_weight, True, None)
        for rows in (16, 32)
        for of_weight in (
            (64, 128, 4, 3), (64, 128, 4, 4), (64, 256, 4, 3), (64, 64, 4, 6), (128, 128, 4, 3),
            (128, 64, 4, 4),
        )
    ] + [Tiling(16, 64, 128, 4, 4, False, None)]  # fmt: skip
    few_gated = [
        Tiling(rows, *of_weight, True, None)
        for rows in (16, 32)
        for of_weight in ((64, 128, 4, 2), (64, 128, 4, 3), (64, 64, 4, 4), (64, 64, 4, 5), (128, 64, 4, 3))
    ] + [Tiling(16, 32, 128, 4, 4, False, None)]
    many = [
        Tiling(*tile, False, group)
        for tile in (
            (64, 128, 64, 4, 4), (64, 256, 64, 8, 3), (128, 128, 64, 8, 3), (128, 256, 64, 8, 3),
            (128, 256, 64, 8, 4),
        )
        for group in (8, 32, None)
    ]  # fmt: skip
    many_gated = [
        Tiling(*tile, False, group)
        for tile in (
            (64, 64, 64, 4, 4), (64, 128, 64, 8, 3), (128, 64, 64, 4, 4), (128, 128, 64, 8, 3),
            (128, 128, 64, 8, 4),
        )
        for group in (8, 32, None)
    ]  # fmt: skip

    def choices(tokens: int, *tilings: list[Tiling], suffix: str) -> dict[str, list[Any]]:
        """The constant that applies to so many tokens, and its choices."""
        mean = tokens * cases.shape.chosen / cases.shape.experts
        name = ("FEW", "SOME", "MANY", "MOST")[bisect_right(grouped_linear.LIMITS, mean)]
        return {name + suffix: tilings[mean >= grouped_linear.LIMITS[1]]}

    found: list[tuple[ModuleType, dict[str, list[Any]], Make]] = []
    for tokens in cases.shape.tokens:
        gated = choices(tokens, few_gated, many_gated, suffix="_GATED")
        found.append((grouped_linear, gated, partial(cases.gate_up, tokens, loop=False)))
        plain = choices(tokens, few, many, suffix="")
        found.append((grouped_linear, plain, partial(cases.down, tokens, loop=False)))
    return found


def mamba2_choices(cases: Mamba2Cases) -> Choices:
    from baton.engine.kernels import causal_conv, ssd, state_update

    batch, (requests, tokens) = cases.shape.batches[-1], cases.shape.prompts[len(cases.shape.prompts) // 2]
    return [
        *(
            (ssd, {name: [(4, 2), (8, 2), (8, 3)] for name in ("FEW", "MANY")}, partial(cases.scan, *prompt))
            for prompt in cases.shape.prompts[1:4]
        ),
        (causal_conv, {"STEPS": [8, 16, 32]}, partial(cases.prompts, requests, tokens)),
        (state_update, {"BLOCK_DIMS": [16, 32, 64], "WARPS": [2, 4]}, partial(cases.decode, batch)),
        (causal_conv, {"BLOCK_DECODE": [256, 512, 1024]}, partial(cases.decode, batch)),
    ]


def fp8_choices(cases: Fp8Cases) -> Choices:
    from baton.engine.kernels import fp8_linear, silu

    few = {"BLOCK_N": [64, 128], "WIDE": [256, 512], "NARROW": [128, 256]}
    batches, prompt = cases.shape.batches, cases.shape.prompts[0]
    return [
        *((fp8_linear, few, partial(cases.layer, rows)) for rows in (batches[0], batches[len(batches) // 2])),
        *((fp8_linear, {"MAX_FEW_ROWS": [0, 64, 128]}, partial(cases.layer, rows)) for rows in batches),
        *(
            (silu, {"MAX_WARPS": [4, 8, 16, 32]}, partial(cases.silu_mul, rows))
            for rows in (batches[0], prompt)
        ),
    ]


def int4_choices(cases: Int4Cases) -> Choices:
    from baton.engine.kernels import int4_gemv, int4_linear

    shared = [(64, 4, 2), (64, 4, 4), (128, 4, 2), (128, 8, 1)]
    return [
        *(
            (
                int4_gemv,
                {"BLOCK_N": [8, 16], "FEWER": [8, 16], "WIDE": [0, 8192, 32768]},
                partial(cases.layer, rows),
            )
            for rows in (1, 2)
        ),
        *((int4_gemv, {"MAX_ROWS": [0, 2]}, partial(cases.layer, rows)) for rows in (1, 2)),
        (int4_linear, {"FEW": shared, "MAX_WORDS": [32, 64]}, partial(cases.layer, 8)),
        (int4_linear, {"SOME": shared, "MAX_WORDS": [32, 64]}, partial(cases.layer, 64)),
        (int4_linear, {"MANY": shared, "MAX_FEW_ROWS": [0, 256]}, partial(cases.layer, 256)),
    ]


def fp8_kv_choices(cases: Fp8KVCases) -> Choices:
    from baton.engine.kernels import decode_attention, prefill_attention, tiles
    from baton.engine.kernels.tiles import Shape as Tile

    shape = cases.shape
    split = {"PIECES_PER_SM": [2, 4, 8], "BLOCK_N": [32, 64], "STAGES": [3, 5, 7, 9]}
    split |= {"BYTES_PER_WARP": [64, 128]}
    shapes = [Tile(128, 128, 8), Tile(128, 64, 8), Tile(64, 64, 4)]
    decode = [partial(cases.decode, f"b{batch}", [shape.context] * batch) for batch in shape.batches]
    return [
        *((decode_attention, split, case) for case in decode[::2]),
        (tiles, {"LONG": shapes}, partial(cases.prefill, 0, shape.prompts[-1])),
        (prefill_attention, {"STAGES": [2, 3, 4, 5]}, partial(cases.prefill, 0, shape.prompts[-1])),
    ]


def choices(cases: Cases) -> Choices:
    from baton.engine.kernels import decode_attention, prefill_attention, thresholds, tiles
    from baton.engine.kernels.tiles import Shape as Tile

    shape = cases.shape
    shapes = [Tile(128, 128, 8), Tile(128, 64, 8), Tile(64, 64, 4)]
    pieces = {"PIECES_PER_SM": [2, 4, 8], "BLOCK_N": [32, 64], "STAGES": [3, 5, 7]}
    search = {"PIVOTS": [4, 8, 16], "PROGRAMS": [256, 512, 1024]}
    long, some = shape.prompts[-1], shape.batches[len(shape.batches) // 2]
    return [
        (tiles, {"LONG": shapes}, lambda: cases.prefill(0, long)),
        (prefill_attention, {"STAGES": [3, 5]}, lambda: cases.prefill(0, long)),
        (decode_attention, pieces, lambda: cases.decode(f"b{some}", [shape.context] * some)),
        (decode_attention, pieces, lambda: cases.decode("b1", [shape.context])),
        (thresholds, search, lambda: cases.thresholds(some, "top_p", shape.vocabulary, 0.9)),
    ]
