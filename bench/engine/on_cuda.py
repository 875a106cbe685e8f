"""The 8B Llama shape in bfloat16 with random weights on a GPU, without a prefix cache.

The goal of a row is its *must*. A second row compares it with the floor of the same run. A decode row is the
time from step to step with about 1,064 tokens of context. A prefill row is the time from arrival to the last
first token. A throughput row has a queue of requests with 2,000 tokens in and 150 out.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import baton.bench.contract as contract
from baton.bench.contract import Report, Row
from baton.bench.engine.drive import decode_step_seconds, drain, greedy, median_ms, prefill_seconds, prompt
from baton.bench.engine.floor import Floor, Shape
from baton.bench.shapes import DENSE, SHAPES, write_shape
from baton.engine import Engine, EngineConfig, build_engine

CONTEXT = 1064
DECODE_MUST_MS = {1: 4.5, 8: 4.8, 32: 5.8, 64: 6.9, 128: 9.8, 256: 16.8}  # by batch
PREFILL_MUST_MS = {(1, 2000): 49.8, (1, 8000): 212.0, (4, 2000): 194.0, (16, 2000): 752.0}
PROMPT, OUTPUT = 2000, 150  # tokens of a request in the throughput rows
THROUGHPUT_MUST = {(32, 512): 2000.0, (128, 8192): 2500.0}
"""Output tokens/s by (running requests, --max-num-batched-tokens). The budget is the best of 512, 1024, 2048,
8192 and 16384. A step with a prompt reads the weights for the decodes, too: with few decodes, many such steps
are best."""
PENALISED = {"repetition_penalty": 1.05}  # the default of some models
HBM_BYTES_PER_S = 4.8e12
GEMM_FLOPS = 790e12


def measure(args: argparse.Namespace, report: Report) -> None:
    floor = Floor(dense_shape())
    decode_floor = {batch: floor.decode_ms(batch, CONTEXT) for batch in DECODE_MUST_MS}
    prefill_floor = {work: floor.prefill_ms(*work) for work in PREFILL_MUST_MS}
    throughput_floor = {work: _throughput_floor(floor, *work) for work in THROUGHPUT_MUST}
    del floor
    gc.collect()
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as directory:
        engine = dummy_engine(DENSE, Path(directory), 256, 16384)  # a prefill is one chunk if it fits
        _prefills(engine, report, prefill_floor, rounds=3 if args.short else 9)
        _decodes(engine, report, decode_floor, steps=32 if args.short else 128)
        for (running, chunk), must in THROUGHPUT_MUST.items():
            del engine
            gc.collect()
            torch.cuda.empty_cache()
            engine = dummy_engine(DENSE, Path(directory), running, chunk)
            rate = _throughput(engine, requests=running * (2 if args.short else 6))
            name, most = f"engine.throughput.b{running}", throughput_floor[running, chunk]
            report.add(Row(name, rate, "tokens/s", goal=must, better="higher"))
            report.add(
                Row(f"{name}.floor", most, "tokens/s", ratio=rate / most, ratio_to="cuBLAS floor, same run")
            )


def dummy_engine(
    model: str,
    directory: Path,
    running: int,
    chunk: int,
    *,
    quantization: str = "auto",
    kv_cache_dtype: str = "auto",
    max_model_len: int = 16384,
    prefix_caching: bool = False,
) -> Engine:
    """An engine with random weights in the shape `model` and no limit on the chunks of prompts."""
    return build_engine(
        EngineConfig(
            str(write_shape(model, directory)),
            dtype="bfloat16",
            device="cuda",
            load_format="dummy",
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            max_model_len=max_model_len,
            enable_prefix_caching=prefix_caching,
            max_num_seqs=running,
            max_num_batched_tokens=chunk,
            ttit_target=60.0,  # no limit on the chunks of prompts beside decodes
        )
    )


def _prefills(engine: Any, report: Report, floors: dict[tuple[int, int], float], rounds: int) -> None:
    flops_per_token = 2 * dense_shape().layer_parameters
    for (sequences, tokens), must in PREFILL_MUST_MS.items():
        batches = [
            [prompt(tokens, 100 * r + n + tokens) for n in range(sequences)] for r in range(rounds + 1)
        ]
        prefill_seconds(engine, batches[0])
        times = [prefill_seconds(engine, batch) for batch in batches[1:]]
        name, took = f"engine.prefill.{sequences}x{tokens}", median_ms(times)
        report.add(
            Row(name, took, "ms", p99=max(times) * 1e3, goal=must, better="lower", spread=_spread(times))
        )
        floor = floors[sequences, tokens]
        report.add(Row(f"{name}.floor", floor, "ms", ratio=took / floor, ratio_to="cuBLAS floor, same run"))
        rate = flops_per_token * sequences * tokens / (took / 1e3)
        report.add(Row(f"{name}.gemm_flops", rate / 1e12, "TFLOP/s", ratio=rate / GEMM_FLOPS, ratio_to="790"))


def _decodes(engine: Any, report: Report, floors: dict[int, float], steps: int) -> None:
    shape = dense_shape()
    for batch, must in DECODE_MUST_MS.items():
        times = decode_step_seconds(engine, batch, CONTEXT, steps)
        name, took = f"engine.decode.b{batch}", median_ms(times)
        p99 = contract.percentile(times, 0.99) * 1e3
        report.add(Row(name, took, "ms", p99=p99, goal=must, better="lower"))
        report.add(
            Row(
                f"{name}.floor", floors[batch], "ms",
                ratio=took / floors[batch], ratio_to="cuBLAS floor, same run",
            )
        )  # fmt: skip
        moved = 2 * shape.gemm_parameters + batch * shape.kv_bytes(CONTEXT)
        rate = moved / (took / 1e3)
        report.add(
            Row(f"{name}.bytes", rate / 1e9, "GB/s", ratio=rate / HBM_BYTES_PER_S, ratio_to="4.8 TB/s")
        )
        if batch == 64:
            times = decode_step_seconds(engine, batch, CONTEXT, steps, **PENALISED)
            p99, penalised = contract.percentile(times, 0.99) * 1e3, median_ms(times)
            report.add(
                Row(f"{name}.penalised", penalised, "ms", p99=p99, ratio=penalised / took, ratio_to="without")
            )


def _throughput(engine: Engine, requests: int) -> float:
    """Output tokens per second, from the arrival of the requests to the last token."""
    for number in range(requests):
        engine.add(greedy(prompt(PROMPT, 7_000_000 + number), OUTPUT))
    began = time.perf_counter()
    return drain(engine) / (time.perf_counter() - began)


def _throughput_floor(floor: Floor, running: int, budget: int) -> float:
    """Output tokens per second of an engine with steps as fast as the floor.

    Its queue always has a prompt. Some steps have as many prompt tokens as fit (whole prompts, if one fits),
    the others have none.
    """
    room = budget - running
    chunk = room // PROMPT * PROMPT or room
    context = PROMPT + OUTPUT // 2
    mixed, steps = PROMPT / chunk, OUTPUT / running  # of each request
    assert mixed <= steps, "no step is left without prompts"
    seconds = mixed * floor.mixed_ms(running, context, PROMPT, chunk) / 1e3
    seconds += (steps - mixed) * floor.decode_ms(running, context) / 1e3
    return OUTPUT / seconds


def dense_shape(*, fp8_kv: bool = False) -> Shape:
    c = SHAPES[DENSE]
    heads = c["num_attention_heads"]
    head_dim = c["hidden_size"] // heads
    return Shape(
        layers=c["num_hidden_layers"], hidden=c["hidden_size"], heads=heads,
        kv_heads=c["num_key_value_heads"], head_dim=head_dim,
        feed_forward=c["intermediate_size"], vocab=c["vocab_size"],
        kv_bytes_per_vector=head_dim + 4 if fp8_kv else 2 * head_dim,
    )  # fmt: skip


def _spread(seconds: list[float]) -> float:
    return (max(seconds) - min(seconds)) * 1e3
