"""Prints the answer: a table, and for each pool a line with the reason for its size."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table

from baton.cluster.options.clients import SizingOptions
from baton.cluster.tools.sizing.answer import Answer, PlannedLoad, answer
from baton.cluster.tools.sizing.speeds import GPUS, Speeds, measured, shape
from baton.engine.api.config import EngineConfig
from baton.engine.kernels import FP8
from baton.engine.loader import choose_format
from baton.engine.models import cache_bytes_per_token, cache_spec


def run(sizing: SizingOptions) -> int:
    ttft, ttit = parse_slo(sizing.slo)
    gpu = GPUS[sizing.gpu]
    if sizing.measured is not None:
        gpu = measured(gpu, sizing.measured)
    if sizing.gpu_memory is not None:
        gpu = replace(gpu, memory=int(sizing.gpu_memory * (1 << 30)))
    load = PlannedLoad(
        sizing.rate,
        sizing.input,
        sizing.output,
        ttft,
        ttit,
        sizing.max_num_seqs,
        sizing.gpu_memory_utilization,
    )
    model = shape(sizing.model)
    if model.state is not None:
        raise ValueError(f"{model.architecture} has state layers, for which no speeds were measured")
    weight_format = choose_format(EngineConfig(sizing.model), model, torch.device("cuda"))
    element = weight_format.bytes_per_parameter(torch.bfloat16)
    sizes = sizing.prefill_tensor_parallel_size, sizing.decode_tensor_parallel_size
    kv_dtype = FP8 if sizing.kv_cache_dtype == "fp8" else torch.bfloat16
    of_prefill, of_decode = (Speeds(gpu, model, element, ranks, kv_dtype) for ranks in sizes)
    show(answer(of_prefill, of_decode, load), sizes, gpu.source)
    per_token = cache_bytes_per_token(cache_spec(model, torch.bfloat16, kv_dtype))
    print(f"KV: {str(kv_dtype).removeprefix('torch.')}, {per_token:,} bytes a token")
    return 0


def parse_slo(text: str) -> tuple[float, float]:
    """Parses `ttft=500,ttit=20`, in ms. Returns seconds. Raises ValueError with the flag."""
    try:
        found = {
            name.strip(): float(value) / 1e3 for name, value in (word.split("=") for word in text.split(","))
        }
    except ValueError:
        found = {}
    if set(found) != {"ttft", "ttit"} or not all(value > 0 for value in found.values()):
        raise ValueError(f"--slo {text}: give both targets in milliseconds, as ttft=1000,ttit=50")
    return found["ttft"], found["ttit"]


def show(found: Answer, sizes: tuple[int, int], source: str) -> None:
    """`sizes`: GPUs of a prefill worker and of a decode worker."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    columns = ("", "workers", "GPUs", "p50", "p99", "busy", "batch", "KV in use")
    table = Table(*columns, header_style="bold", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    workers = [str(found.prefill), str(found.prefill * sizes[0])]
    times = [f"{t * 1e3:.0f} ms" for t in (found.ttft.p50, found.ttft.p99)]
    table.add_row("prefill (TTFT)", *workers, *times, f"{found.prefill_busy:.0%}", "", "")
    workers = [str(found.decode), str(found.decode * sizes[1])]
    times = [f"{t * 1e3:.1f} ms" for t in (found.ttit.p50, found.ttit.p99)]
    kv = f"≤ {found.kv_bytes / 1e9:.1f} of {found.kv_room / 1e9:.1f} GB"
    table.add_row("decode (TTIT)", *workers, *times, f"{found.decode_busy:.0%}", f"≤ {found.batch}", kv)
    console.print(table)
    console.print(f"prefill: {found.why[0]}\ndecode: {found.why[1]}")
    console.print(f"Simulated, without prefix caches, from: {source}", style="dim", soft_wrap=True)
