"""Prints the answer: a table, and for each pool a line with the reason for its size."""

import shlex
from dataclasses import replace

import torch

from baton.cluster.options.clients import SizingOptions
from baton.cluster.tools.sizing.answer import Answer, Targets, answer
from baton.cluster.tools.sizing.speeds import H200, Speeds, measured, shape
from baton.cluster.tools.tables import console, table
from baton.engine.api.config import EngineConfig
from baton.engine.kernels import FP8
from baton.engine.loader import choose_format
from baton.engine.loader.families import cache_spec
from baton.engine.models import cache_bytes_per_token


def run(sizing: SizingOptions) -> int:
    targets = parse_slo(sizing.slo)
    gpu = H200 if sizing.measured is None else measured(H200, sizing.measured)
    if sizing.gpu_memory is not None:
        gpu = replace(gpu, memory=int(sizing.gpu_memory * (1 << 30)))
    model = shape(sizing.model)
    if model.state is not None:
        raise ValueError(f"{model.architecture} has state layers, for which no speeds were measured")
    weight_format = choose_format(EngineConfig(sizing.model), model, torch.device("cuda"))
    element = weight_format.bytes_per_parameter(torch.bfloat16)
    sizes = sizing.prefill_tensor_parallel_size, sizing.decode_tensor_parallel_size
    kv_dtype = FP8 if sizing.kv_cache_dtype == "fp8" else torch.bfloat16
    of_prefill, of_decode = (
        Speeds(gpu, model, element, ranks, kv_dtype, sizing.input + sizing.output / 2) for ranks in sizes
    )
    found = answer(of_prefill, of_decode, sizing, targets)
    show(found, sizes, gpu.source)
    per_token = cache_bytes_per_token(cache_spec(model, torch.bfloat16, kv_dtype))
    print(f"KV: {str(kv_dtype).removeprefix('torch.')}, {per_token:,} bytes a token")
    print(f"To serve it: {serve_line(sizing, found)}")
    return 0


HUB_NAMES = {
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "glm-4.7-flash": "zai-org/GLM-4.7-Flash",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
    "llama-4-scout": "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    "llama-4-maverick": "meta-llama/Llama-4-Maverick-17B-128E-Instruct",
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "gpt-oss-120b": "openai/gpt-oss-120b",
}
"""Of the shapes that `--model` knows by short names."""


def serve_line(sizing: SizingOptions, found: Answer) -> str:
    """The command that starts these pools. Options that it would have by default are left out."""
    words = ["baton", "serve", HUB_NAMES.get(sizing.model, sizing.model)]
    # A cluster has a worker of each kind, and answers of one token need no decode worker.
    words += ["--prefill", str(found.prefill), "--decode", str(max(1, found.decode))]
    defaults = SizingOptions()
    for name in (
        "prefill_tensor_parallel_size", "decode_tensor_parallel_size", "kv_cache_dtype", "max_num_seqs",
        "gpu_memory_utilization",
    ):  # fmt: skip
        if (value := getattr(sizing, name)) != getattr(defaults, name):
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)


def parse_slo(text: str) -> Targets:
    """Parses `ttft=500,ttit=20`, in ms. Raises ValueError with the flag."""
    try:
        found = {
            name.strip(): float(value) / 1e3 for name, value in (word.split("=") for word in text.split(","))
        }
    except ValueError:
        found = {}
    if set(found) != {"ttft", "ttit"} or not all(value > 0 for value in found.values()):
        raise ValueError(f"--slo {text}: give both targets in milliseconds, as ttft=1000,ttit=50")
    return Targets(found["ttft"], found["ttit"])


def show(found: Answer, sizes: tuple[int, int], source: str) -> None:
    """`sizes`: GPUs of a prefill worker and of a decode worker."""
    columns = ("", "workers", "GPUs", "p50", "p99", "busy", "batch", "KV in use")
    prefill = (
        "prefill (TTFT)", found.prefill, found.prefill * sizes[0],
        *(f"{t * 1e3:.0f} ms" for t in (found.ttft.p50, found.ttft.p99)), f"{found.prefill_busy:.0%}", "", "",
    )  # fmt: skip
    decode = (
        "decode (TTIT)", found.decode, found.decode * sizes[1],
        *(f"{t * 1e3:.1f} ms" for t in (found.decoded.gap.p50, found.decoded.gap.p99)),
        f"{found.decoded.busy:.0%}", f"≤ {found.decoded.most}",
        f"≤ {found.kv_bytes / 1e9:.1f} of {found.kv_room / 1e9:.1f} GB",
    )  # fmt: skip
    rows = [dict(zip(columns, map(str, cells), strict=True)) for cells in (prefill, decode)]
    out = console()
    out.print(table(rows, columns, texts=("",)))
    out.print(f"prefill: {found.why[0]}\ndecode: {found.why[1]}")
    out.print(f"Simulated, without prefix caches, from: {source}", style="dim", soft_wrap=True)
