"""A mixture of experts in bfloat16 with random weights on a GPU: the shape of Qwen3-30B-A3B.

Rows are those of `on_cuda`, with two bounds: the goal of a row is its *must*, and `.goal` is the time to aim
at. A decode step is bound by the bytes that it reads, so `.floor` is their time at the bandwidth of the
datasheet. Only experts that have tokens are read; `.experts` is their number, per layer and step, counted
while the requests decode.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

import bench.contract as contract
from bench.contract import Report, Row
from bench.engine.bounded import add_bounded
from bench.engine.drive import decode_step_seconds, drain, fill, median_ms, prefill_seconds, prompt
from bench.engine.on_cuda import CONTEXT, GEMM_FLOPS, HBM_BYTES_PER_S, dummy_engine
from bench.shapes import MOE
from engine import Engine

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
COUNTED = 32
"""Decode steps that `.experts` is the mean of."""


def measure(args: argparse.Namespace, report: Report) -> None:
    with tempfile.TemporaryDirectory() as directory:
        engine = dummy_engine(MOE, Path(directory), 256, 16384)  # a prefill is one chunk if it fits
        for (sequences, tokens), bounds in PREFILL_MS.items():
            _prefill(engine, report, sequences, tokens, bounds, rounds=3 if args.short else 9)
        for batch, bounds in DECODE_MS.items():
            _decode(engine, report, batch, bounds, steps=32 if args.short else 128)


def _prefill(
    engine: Any, report: Report, sequences: int, tokens: int, bounds: tuple[float, float], rounds: int
) -> None:
    times = [
        prefill_seconds(engine, [prompt(tokens, 100 * r + n + tokens) for n in range(sequences)])
        for r in range(rounds + 1)
    ][1:]
    name, took = f"engine.moe.prefill.{sequences}x{tokens}", median_ms(times)
    add_bounded(report, name, took, max(times) * 1e3, bounds)
    config = engine.model_config
    active = config.parameters_read(1) - 2 * config.vocab_size * config.hidden_size
    rate = 2 * active * sequences * tokens / (took / 1e3)
    report.add(Row(f"{name}.gemm_flops", rate / 1e12, "TFLOP/s", ratio=rate / GEMM_FLOPS, ratio_to="790"))


def _decode(engine: Any, report: Report, batch: int, bounds: tuple[float, float], steps: int) -> None:
    times = decode_step_seconds(engine, batch, CONTEXT, steps)
    name, took = f"engine.moe.decode.b{batch}", median_ms(times)
    add_bounded(report, name, took, contract.percentile(times, 0.99) * 1e3, bounds)
    read = experts_read(engine, batch, CONTEXT)
    report.add(Row(f"{name}.experts", read, "per layer and step"))
    moved = bytes_read(engine, batch, CONTEXT, read)
    floor, rate = moved / HBM_BYTES_PER_S * 1e3, moved / (took / 1e3)
    report.add(Row(f"{name}.floor", floor, "ms", ratio=took / floor, ratio_to="4.8 TB/s"))
    report.add(Row(f"{name}.bytes", rate / 1e9, "GB/s", ratio=rate / HBM_BYTES_PER_S, ratio_to="4.8 TB/s"))


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


def bytes_read(engine: Engine, batch: int, context: int, experts_read: float) -> float:
    """Bytes of weights and KV that a decode step reads, if it reads so many experts in each layer."""
    config = engine.model_config
    experts = config.experts
    assert experts is not None
    one = 3 * config.hidden_size * experts.intermediate_size * len(experts.layers)
    dense = config.num_parameters - experts.num_experts * one - config.vocab_size * config.hidden_size
    kv = sum(cache.bytes_per_token for cache in engine.cache_spec)
    return torch.bfloat16.itemsize * (dense + experts_read * one) + batch * context * kv
