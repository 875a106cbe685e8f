"""A mixture of experts with random weights on a GPU: the shape of Qwen3-30B-A3B, in bfloat16 or with FP8
weights.

Rows are those of `on_cuda`, with two bounds: the goal of a row is its *must*, and `.goal` is the time to aim
at. A decode step is bound by the bytes that it reads, so `.floor` is their time at the bandwidth of the
datasheet. Only experts that have tokens are read; `.experts` is their number, per layer and step, counted
while the requests decode. A profile says how long each kernel takes in a step.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import baton.bench.contract as contract
from baton.bench.contract import Report, Row
from baton.bench.engine.bounded import add_bounded
from baton.bench.engine.drive import decode_step_seconds, drain, fill, median_ms, prefill_seconds, prompt
from baton.bench.engine.on_cuda import CONTEXT, GEMM_FLOPS, HBM_BYTES_PER_S, dummy_engine
from baton.bench.engine.profile import STEPS, add_profile, profiled, profiled_decodes
from baton.bench.shapes import MOE
from baton.engine import Engine
from baton.engine.models import cache_bytes_per_token

DECODE_MS = {
    1: (4.0, 3.0),
    8: (8.9, 7.5),
    32: (15.8, 13.5),
    64: (18.0, 16.0),
    128: (20.0, 18.0),
    256: (25.0, 22.0),
}
"""Must and goal by batch."""
PREFILL_MS = {(1, 2000): (39.0, 34.0), (1, 8000): (145.0, 130.0), (4, 2000): (121.0, 108.0)}
FP8_DECODE_MS = {
    1: (4.06, 3.63),
    8: (4.52, 4.05),
    32: (5.61, 5.02),
    64: (6.60, 5.91),
    128: (9.08, 8.13),
    256: (14.0, 12.5),
}
FP8_PREFILL_MS = {(1, 2000): (40.0, 30.0), (1, 8000): (120.0, 100.0), (4, 2000): (92.0, 80.0)}
"""With FP8 weights."""
PROFILED_BATCHES, PROFILED_PROMPT = (1, 64, 256), 8000
COUNTED = 32
"""Decode steps that `.experts` is the mean of."""


def measure(args: argparse.Namespace, report: Report) -> None:
    with tempfile.TemporaryDirectory() as directory:
        fp8 = args.quantization == "fp8"
        # A prefill is one chunk if it fits.
        engine = dummy_engine(MOE, Path(directory), 256, 16384, quantization="fp8" if fp8 else "auto")
        prefix, matrix = ("engine.moe.fp8", 1) if fp8 else ("engine.moe", 2)
        for (sequences, tokens), bounds in (FP8_PREFILL_MS if fp8 else PREFILL_MS).items():
            name, rounds = f"{prefix}.prefill.{sequences}x{tokens}", 3 if args.short else 9
            _prefill(engine, report, name, sequences, tokens, bounds, rounds)
        for batch, bounds in (FP8_DECODE_MS if fp8 else DECODE_MS).items():
            name, steps = f"{prefix}.decode.b{batch}", 32 if args.short else 128
            _decode(engine, report, name, batch, bounds, steps, matrix)
        _profiles(engine, report, prefix)


def _prefill(
    engine: Any,
    report: Report,
    name: str,
    sequences: int,
    tokens: int,
    bounds: tuple[float, float],
    rounds: int,
) -> None:
    times = [
        prefill_seconds(engine, [prompt(tokens, 100 * r + n + tokens) for n in range(sequences)])
        for r in range(rounds + 1)
    ][1:]
    took = median_ms(times)
    add_bounded(report, name, took, max(times) * 1e3, bounds)
    config = engine.model_config
    active = config.parameters_read(1) - 2 * config.vocab_size * config.hidden_size
    rate = 2 * active * sequences * tokens / (took / 1e3)
    report.add(Row(f"{name}.gemm_flops", rate / 1e12, "TFLOP/s", ratio=rate / GEMM_FLOPS, ratio_to="790"))


def _decode(
    engine: Any,
    report: Report,
    name: str,
    batch: int,
    bounds: tuple[float, float],
    steps: int,
    matrix_bytes: int,
) -> None:
    times = decode_step_seconds(engine, batch, CONTEXT, steps)
    took = median_ms(times)
    add_bounded(report, name, took, contract.percentile(times, 0.99) * 1e3, bounds)
    read = experts_read(engine, batch, CONTEXT)
    report.add(Row(f"{name}.experts", read, "per layer and step"))
    moved = bytes_read(engine, batch, CONTEXT, read, matrix_bytes)
    floor, rate = moved / HBM_BYTES_PER_S * 1e3, moved / (took / 1e3)
    report.add(Row(f"{name}.floor", floor, "ms", ratio=took / floor, ratio_to="4.8 TB/s"))
    report.add(Row(f"{name}.bytes", rate / 1e9, "GB/s", ratio=rate / HBM_BYTES_PER_S, ratio_to="4.8 TB/s"))


def _profiles(engine: Any, report: Report, prefix: str) -> None:
    """Adds the time of a step, or of a prefill, by kernel."""
    for batch in PROFILED_BATCHES:
        found = profiled_decodes(engine, batch, CONTEXT)
        add_profile(report, f"{prefix}.decode.b{batch}", found, STEPS)
    warm_up, measured = ([prompt(PROFILED_PROMPT, seed)] for seed in (1, 2))
    prefill_seconds(engine, warm_up)

    def prefill() -> None:
        prefill_seconds(engine, measured)

    found = profiled(prefill)
    add_profile(report, f"{prefix}.prefill.1x{PROFILED_PROMPT}", found, 1)


def experts_read(engine: Engine, batch: int, context: int) -> float:
    """Experts with tokens, per layer and step, while `batch` requests decode."""
    load = engine._runner.model.expert_load
    fill(engine, batch, context - COUNTED // 2, 3 * COUNTED)
    for _ in range(3):  # no counted step has a prompt
        engine.step()
    before, steps = load.totals.clone(), int(load.steps)
    for _ in range(COUNTED):
        engine.step()
    _, reads = load.totals - before
    steps = int(load.steps) - steps
    drain(engine)
    return int(reads.sum()) / len(reads) / steps


def bytes_read(engine: Engine, batch: int, context: int, experts_read: float, matrix_bytes: int) -> float:
    """Bytes of weights and KV that a decode step reads, if it reads so many experts in each layer.
    `matrix_bytes` are those of one parameter, except in the output projection, which has two."""
    config = engine.model_config
    experts = config.experts
    assert experts is not None
    one = 3 * config.hidden_size * experts.intermediate_size * len(experts.layers)
    head = config.vocab_size * config.hidden_size
    matrices = config.num_parameters - experts.num_experts * one - 2 * head + experts_read * one
    kv = cache_bytes_per_token(engine.cache_spec)
    return 2 * head + matrix_bytes * matrices + batch * context * kv
