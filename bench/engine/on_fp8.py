"""The 8B Llama shape with FP8 weights on a GPU: random weights, quantized on load.

Rows are those of `on_cuda`, with two bounds: the goal of a row is its *must*, and `.goal` is the time to aim
at. The floor is that of cuBLAS with FP8 products.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from pathlib import Path

import torch

import bench.contract as contract
from bench.contract import Report, Row
from bench.engine.bounded import add_bounded
from bench.engine.drive import decode_step_seconds, median_ms, prefill_seconds, prompt
from bench.engine.floor import Fp8Floor
from bench.engine.on_cuda import CONTEXT, HBM_BYTES_PER_S, dense_shape, dummy_engine
from bench.shapes import DENSE

DECODE_MS = {1: (3.2, 2.6), 8: (3.5, 2.9), 32: (4.6, 3.9), 64: (5.6, 5.0), 128: (8.4, 7.7), 256: (14.8, 13.5)}
"""Must and goal by batch."""
PREFILL_MS = {(1, 2000): (30.5, 28.0), (1, 8000): (138.0, 130.0), (4, 2000): (122.0, 112.0)}


def measure(args: argparse.Namespace, report: Report) -> None:
    shape = dense_shape()
    floor = Fp8Floor(shape)
    decode_floor = {batch: floor.decode_ms(batch, CONTEXT) for batch in DECODE_MS}
    prefill_floor = {work: floor.prefill_ms(*work) for work in PREFILL_MS}
    del floor
    gc.collect()
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as directory:
        engine = dummy_engine(DENSE, Path(directory), 256, 16384, quantization="fp8")
        for (sequences, tokens), bounds in PREFILL_MS.items():
            times = [
                prefill_seconds(engine, [prompt(tokens, 100 * r + n + tokens) for n in range(sequences)])
                for r in range(4 if args.short else 10)
            ][1:]
            name, took = f"engine.fp8.prefill.{sequences}x{tokens}", median_ms(times)
            add_bounded(report, name, took, max(times) * 1e3, bounds)
            _add_floor(report, name, took, prefill_floor[sequences, tokens])
        for batch, bounds in DECODE_MS.items():
            times = decode_step_seconds(engine, batch, CONTEXT, 32 if args.short else 128)
            name, took = f"engine.fp8.decode.b{batch}", median_ms(times)
            add_bounded(report, name, took, contract.percentile(times, 0.99) * 1e3, bounds)
            _add_floor(report, name, took, decode_floor[batch])
            head = 2 * shape.hidden * shape.vocab
            rate = (shape.layer_parameters + head + batch * shape.kv_bytes(CONTEXT)) / (took / 1e3)
            report.add(
                Row(f"{name}.bytes", rate / 1e9, "GB/s", ratio=rate / HBM_BYTES_PER_S, ratio_to="4.8 TB/s")
            )


def _add_floor(report: Report, name: str, took: float, floor: float) -> None:
    report.add(Row(f"{name}.floor", floor, "ms", ratio=took / floor, ratio_to="cuBLAS FP8 floor, same run"))
