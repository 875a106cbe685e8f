"""Prints the answer: a table, and for each pool a line with the reason for its size."""

import shlex
from dataclasses import replace

import torch
from rich.console import Console

from baton.cluster.options.clients import DEFAULT_SLO, SizingOptions
from baton.cluster.options.parameters import size_in_bytes, to_argv
from baton.cluster.tools.sizing.answer import (
    Answer,
    Pools,
    Targets,
    answer,
    parse_slo,
    positions_of,
    predicted,
)
from baton.cluster.tools.sizing.images import choose, encoding, images_of, with_images
from baton.cluster.tools.sizing.speeds import H200, Speeds, as_kept, measured, opened
from baton.cluster.tools.tables import console, table
from baton.engine.api.config import EngineConfig
from baton.engine.kernels import FP8
from baton.engine.loader import planned_format
from baton.engine.loader.families import cache_spec
from baton.engine.loader.hybrid_config import chosen_dtype
from baton.engine.models import cache_bytes_per_token


def run(sizing: SizingOptions) -> int:
    if (sizing.prefill is None) is not (sizing.decode is None):
        raise ValueError("--prefill and --decode: give both, or none")
    targets = parse_slo(sizing.slo or DEFAULT_SLO)
    gpu = H200 if sizing.measured is None else measured(H200, sizing.measured)
    if sizing.gpu_memory is not None:
        gpu = replace(gpu, memory=size_in_bytes(sizing.gpu_memory))
    checkpoint = opened(sizing.model)
    model = checkpoint.config
    model = replace(model, state=chosen_dtype(model.state, sizing.state_dtype, sizing.model))
    if model.state is not None and not gpu.planned:
        raise ValueError(
            f"{model.architecture} has state layers, whose speeds are not those of other models; measure it "
            "with python -m baton.bench.engine --model-shape SHAPE --json FILE in a clone of Baton, and give "
            "--measured FILE"
        )
    weight_format = planned_format(EngineConfig(sizing.model), checkpoint, torch.device("cuda"))
    sizes = sizing.prefill_tensor_parallel_size, sizing.decode_tensor_parallel_size
    kv_dtype = FP8 if sizing.kv_cache_dtype == "fp8" else torch.bfloat16
    for pool, ranks in zip(("prefill", "decode"), sizes, strict=True):
        if ranks not in model.group_sizes:
            possible = ", ".join(map(str, model.group_sizes))
            raise ValueError(
                f"--{pool}-tensor-parallel-size {ranks}: the heads of the model do not divide so; choose one "
                f"of {possible}"
            )
    of_prefill, of_decode = (
        as_kept(gpu, model, weight_format, torch.bfloat16, ranks, kv_dtype, positions_of(sizing),
                sizing.gpu_memory_utilization, model.max_model_len)
        for ranks in sizes
    )  # fmt: skip
    images = images_of(sizing, model, Speeds(gpu, model, weight_format.matrix_bytes(model, torch.bfloat16)))
    load, chosen = with_images(sizing, images), None
    with Console(stderr=True).status("Simulating clusters. Hundreds of requests at a time take minutes."):
        if load.prefill is not None and load.decode is not None:
            speeds = of_prefill, of_decode
            if images is not None:
                speeds = encoding(of_prefill, load, images), encoding(of_decode, load, images)
            sized = predicted(*speeds, load, Pools(load.prefill, load.decode))
        elif images is not None:
            chosen = choose(of_prefill, of_decode, load, targets, images)
            sized = chosen.answer
        else:
            sized = answer(of_prefill, of_decode, load, targets)
    show(sized, sizes, gpu.source)
    if sizing.link_gbps is not None and (second := sized.served.second_token) is not None:
        times = f"first to second token p50 {second.p50 * 1e3:.1f}, p99 {second.p99 * 1e3:.1f} ms"
        print(f"Links of {sizing.link_gbps:g} Gbit/s: {sized.served.handed_over:.0%} handed over, {times}")
    if images is not None:
        how = "measured" if images.measured else "estimated from its size"
        seconds = f"{1e3 * images.seconds:.1f} ms of an encoder ({how})"
        print(f"An image of {sizing.image_size}: {images.tokens:,} tokens, {seconds}")
    if chosen is not None:
        print(f"Encoders: {chosen.why}")
    per_token = cache_bytes_per_token(cache_spec(model, torch.bfloat16, kv_dtype))
    print(f"KV: {str(kv_dtype).removeprefix('torch.')}, {per_token:,} bytes a token")
    encoders = 0 if chosen is None else chosen.encoders
    print(f"To serve it: {serve_line(sizing, sized.pools, targets if sized.why else None, encoders)}")
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


def serve_line(sizing: SizingOptions, pools: Pools, targets: Targets | None, encoders: int) -> str:
    """The command that starts these pools. Options that it would have by default are left out."""
    words = ["baton", "serve", HUB_NAMES.get(sizing.model, sizing.model)]
    # A cluster has a worker of each kind, and answers of one token need no decode worker.
    words += ["--prefill", str(pools.prefill), "--decode", str(max(1, pools.decode))]
    words += ["--encode", str(encoders)] if encoders else []
    if targets is not None:
        words += ["--ttft-target", f"{targets.ttft * 1e3:g}", "--itl-target", f"{targets.itl * 1e3:g}"]
    shared = (
        "prefill_tensor_parallel_size", "decode_tensor_parallel_size", "kv_cache_dtype", "state_dtype",
        "max_num_seqs", "gpu_memory_utilization",
    )  # fmt: skip
    return shlex.join(words + to_argv(SizingOptions(**{name: getattr(sizing, name) for name in shared})))


def show(sized: Answer, sizes: tuple[int, int], source: str) -> None:
    """`sizes`: GPUs of a prefill worker and of a decode worker."""
    columns = ("", "workers", "GPUs", "p50", "p99", "busy", "batch", "KV in use")
    served, pools = sized.served, sized.pools
    prefill = (
        "prefill (TTFT)", pools.prefill, pools.prefill * sizes[0],
        *(f"{t * 1e3:.0f} ms" for t in (served.ttft.p50, served.ttft.p99)), f"{served.busy[0]:.0%}", "", "",
    )  # fmt: skip
    decode = (
        "decode (ITL)", pools.decode, pools.decode * sizes[1],
        *(f"{t * 1e3:.1f} ms" for t in (served.gap.p50, served.gap.p99)), f"{served.busy[1]:.0%}",
        f"≤ {served.most}", f"≤ {sized.kv_bytes / 1e9:.1f} of {sized.kv_room / 1e9:.1f} GB",
    )  # fmt: skip
    rows = [dict(zip(columns, map(str, cells), strict=True)) for cells in (prefill, decode)]
    terminal = console()
    terminal.print(table(rows, columns, texts=("",)))
    p50, p90 = (1e3 * seconds for seconds in served.latency)
    print(f"{served.tokens_per_s:,.0f} output tokens/s, latency ÷ tokens p50 {p50:.1f}, p90 {p90:.1f} ms")
    if served.first is not None and served.later is not None:
        turns = {"first": served.first, "later": served.later}
        turns_text = (f"{name} turns {1e3 * t.p50:.0f}, {1e3 * t.p99:.0f} ms" for name, t in turns.items())
        print(f"TTFT p50, p99: {'; '.join(turns_text)}")
    if sized.overloaded:
        terminal.print(
            f"Too much for these pools: the load keeps {sized.busy:.2f} workers busy, and queues grow "
            "as long as it lasts"
        )
    for pool, why in zip(("prefill", "decode"), sized.why, strict=False):
        terminal.print(f"{pool}: {why}")
    terminal.print(f"Simulated, from: {source}", style="dim", soft_wrap=True)
