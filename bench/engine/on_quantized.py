"""The 8B Llama shape with quantized weights or KV on a GPU: random weights, quantized on load.

`fp8_kv` in names of rows says that KV is in FP8. Rows are those of `on_cuda`, with two bounds where there are
any: the goal of a row is its *must*, and `.goal` is the time to aim at. The floor is that of cuBLAS, with FP8
products for FP8 weights, else in bfloat16.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

import baton.bench.contract as contract
from baton.bench.contract import Report, Row
from baton.bench.engine.bounded import add_bounded
from baton.bench.engine.drive import decode_step_seconds, median_ms, prefill_seconds, prompt
from baton.bench.engine.floor import Floor, Fp8Floor
from baton.bench.engine.on_cuda import CONTEXT, HBM_BYTES_PER_S, dense_shape, dummy_engine
from baton.bench.shapes import DENSE

Bounds = tuple[float, float] | None
"""Must and goal, in ms."""


@dataclass(frozen=True)
class Format:
    decode: dict[int, Bounds]  # by batch
    prefill: dict[tuple[int, int], Bounds]  # by sequences, tokens of each
    floor: type[Floor]
    floor_is: str
    bytes: float  # of a parameter of a layer
    output_bytes: float = 2  # of a parameter of the output projection


GROUP = 128
"""Columns of a group of INT4 weights."""

FORMATS = {
    "fp8": Format(
        {1: (3.2, 2.6), 8: (3.5, 2.9), 32: (4.6, 3.9), 64: (5.6, 5.0), 128: (8.4, 7.7), 256: (14.8, 13.5)},
        {(1, 2000): (30.5, 28.0), (1, 8000): (138.0, 130.0), (4, 2000): (122.0, 112.0)},
        Fp8Floor,
        "cuBLAS FP8 floor, same run",
        1,
    ),
    "fp8_kv": Format(
        dict.fromkeys((1, 8, 32, 64, 128, 256)),
        dict.fromkeys([(1, 2000), (1, 8000), (4, 2000)]),
        Floor,
        "cuBLAS bfloat16 floor, same run",
        2,
    ),
    "fp8_fp8_kv": Format(
        {**dict.fromkeys((1, 8, 32, 64, 128)), 256: (10.5, 9.0)},
        dict.fromkeys([(1, 2000), (1, 8000), (4, 2000)]),
        Fp8Floor,
        "cuBLAS FP8 floor, same run",
        1,
    ),
    "int4": Format(
        {1: (2.2, 1.7)} | dict.fromkeys((8, 32, 64, 128, 256)),
        dict.fromkeys([(1, 2000), (1, 8000), (4, 2000)]),
        Floor,
        "cuBLAS bfloat16 floor, same run",
        1 / 2 + 2 / GROUP,
        1,
    ),
}


def measure(args: argparse.Namespace, report: Report) -> None:
    fp8_kv = args.kv_cache_dtype == "fp8"
    kind = "_".join(filter(None, (args.quantization, "fp8_kv" if fp8_kv else None)))
    chosen, shape = FORMATS[kind], dense_shape(fp8_kv=fp8_kv)
    floor = chosen.floor(shape)
    decode_floor = {batch: floor.decode_ms(batch, CONTEXT) for batch in chosen.decode}
    prefill_floor = {work: floor.prefill_ms(*work) for work in chosen.prefill}
    del floor
    gc.collect()
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as directory:
        engine = dummy_engine(
            DENSE, Path(directory), 256, 16384, quantization=args.quantization or "auto",
            kv_cache_dtype=args.kv_cache_dtype or "auto",
        )  # fmt: skip
        for (sequences, tokens), bounds in chosen.prefill.items():
            times = [
                prefill_seconds(engine, [prompt(tokens, 100 * r + n + tokens) for n in range(sequences)])
                for r in range(4 if args.short else 10)
            ][1:]
            name, took = f"engine.{kind}.prefill.{sequences}x{tokens}", median_ms(times)
            _add(report, name, took, max(times) * 1e3, bounds)
            _add_floor(report, name, took, prefill_floor[sequences, tokens], chosen)
        for batch, bounds in chosen.decode.items():
            times = decode_step_seconds(engine, batch, CONTEXT, 32 if args.short else 128)
            name, took = f"engine.{kind}.decode.b{batch}", median_ms(times)
            _add(report, name, took, contract.percentile(times, 0.99) * 1e3, bounds)
            _add_floor(report, name, took, decode_floor[batch], chosen)
            head = chosen.output_bytes * shape.hidden * shape.vocab
            read = chosen.bytes * shape.layer_parameters + head + batch * shape.kv_bytes(CONTEXT)
            rate = read / (took / 1e3)
            report.add(
                Row(f"{name}.bytes", rate / 1e9, "GB/s", ratio=rate / HBM_BYTES_PER_S, ratio_to="4.8 TB/s")
            )


def _add(report: Report, name: str, took: float, p99: float, bounds: Bounds) -> None:
    if bounds is None:
        report.add(Row(name, took, "ms", p99=p99))
    else:
        add_bounded(report, name, took, p99, bounds)


def _add_floor(report: Report, name: str, took: float, floor: float, chosen: Format) -> None:
    report.add(Row(f"{name}.floor", floor, "ms", ratio=took / floor, ratio_to=chosen.floor_is))
