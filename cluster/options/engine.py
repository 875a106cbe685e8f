"""Options of the model and the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import typer

from baton.cluster.options.declare import between, check_size, directory, opt


def _given_once(context: typer.Context, value: str | None) -> str | None:
    sources = [context.get_parameter_source(name) for name in ("model", "model_argument")]
    if all(source is not None and source.name == "COMMANDLINE" for source in sources):
        raise typer.BadParameter("the model is given as an argument and as --model; leave one out")
    return value


ServedModelName = Annotated[
    list[str],
    opt(
        "The model's name for clients; repeat it for more names. Responses and metrics have the first one.",
        "NAME",
        shown="as in --model",
    ),
]


@dataclass(frozen=True)
class ModelOptions:
    """Which model to serve. Router and workers must have the same model."""

    panel: ClassVar[str] = "Model"
    model: Annotated[
        str | None,
        opt(
            "A Hugging Face directory, a GGUF file, or a name on the Hugging Face hub.",
            "PATH_OR_HUB_ID",
            shown="the embedded SmolLM2-135M-Instruct",
            check=_given_once,
        ),
    ] = None
    revision: Annotated[str | None, opt("Branch, tag or commit of a model on the hub.", "NAME")] = None
    served_model_name: ServedModelName = field(default_factory=list)
    tokenizer: Annotated[
        str | None,
        opt(
            "The tokenizer, if it is not that of --model: a directory, a GGUF file, or a name on the hub.",
            "PATH_OR_HUB_ID",
            shown="as in --model",
        ),
    ] = None
    download_dir: Annotated[
        Path | None, directory("Keep models of the hub here.", shown="HF_HUB_CACHE, or the hub's default")
    ] = None


@dataclass(frozen=True)
class RouterModelOptions(ModelOptions):
    """Which model's tokenizer a router uses. It refuses workers with another tokenizer."""

    model: Annotated[
        str | None,
        opt(
            "The workers' model. The router reads only its tokenizer.",
            "PATH_OR_HUB_ID",
            shown="the workers' --model",
        ),
    ] = None
    revision: Annotated[
        str | None,
        opt("Branch, tag or commit of a model on the hub.", "NAME", shown="the workers' --revision"),
    ] = None
    served_model_name: ServedModelName = field(default_factory=list)


@dataclass(frozen=True)
class ServedModel:
    """The model as an argument of `baton serve`."""

    model_argument: Annotated[
        str | None,
        typer.Argument(
            help="The same as --model.", metavar="MODEL", show_default=False, callback=_given_once
        ),
    ] = None


KVCacheDtype = Annotated[
    Literal["auto", "fp8"],
    opt("Type of the KV cache: auto (as --dtype), or fp8, which takes about half the bytes."),
]


Optimize = Literal["latency", "balanced", "throughput"]


@dataclass(frozen=True)
class EngineOptions:
    """How a worker computes."""

    panel: ClassVar[str] = "Engine"
    device: Annotated[
        str | None, opt("cpu, cuda or cuda:N.", "DEVICE", shown="cuda if there is a GPU, else cpu")
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        opt("Type of weights and activations; auto is the model's."),
    ] = "auto"
    kv_cache_dtype: KVCacheDtype = "auto"
    load_format: Annotated[
        Literal["auto", "dummy"], opt("dummy: random weights, for benchmarks.")
    ] = "auto"  # fmt: skip
    quantization: Annotated[
        Literal["auto", "fp8", "int4", "none", "gguf"],
        opt(
            "Format of the matrices: auto (the checkpoint's own), fp8 or int4 (quantized on load); for GGUF "
            "files also none and gguf."
        ),
    ] = "auto"
    tensor_parallel_size: Annotated[int, opt("GPUs of one worker.", "N", check=between(1))] = 1
    enable_expert_parallel: Annotated[
        bool, opt("Of a mixture of experts, each GPU holds whole experts, not a part of every expert.")
    ] = False
    optimize: Annotated[
        Optimize,
        opt(
            "latency (shorter gaps between tokens), balanced, or throughput (more tokens per second). It "
            "sets the defaults of --ttit-target and --max-num-seqs."
        ),
    ] = "balanced"
    max_model_len: Annotated[
        int | None,
        opt("Most tokens of prompt and output.", "TOKENS", shown="the model's context", check=between(1)),
    ] = None
    max_num_seqs: Annotated[
        int | None,
        opt(
            "Requests in one batch.",
            "N",
            shown="256 on a GPU with 70 GiB or more, else 64; with --optimize latency half of it, with "
            "throughput 512 on a GPU with 128 GiB or more",
            check=between(1),
        ),
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        opt(
            "Tokens in one step; longer prompts are computed in chunks.",
            "TOKENS",
            shown="8192 on a GPU with 70 GiB or more, else 2048",
            check=between(1),
        ),
    ] = None
    enable_prefix_caching: Annotated[
        bool | None,
        opt("Keep the KV of prompts and answers, for later prompts with the same beginning.", shown="on"),
    ] = None
    host_cache_size: Annotated[
        str,
        opt(
            "Memory of the host, such as 8GiB, for cached KV that leaves the memory of the GPUs. 0: none.",
            "SIZE",
            check=check_size,
        ),
    ] = "0"
    disk_cache_size: Annotated[
        str,
        opt(
            "The same on a local disk: bytes of each worker's file in --disk-cache-dir. 0: none.",
            "SIZE",
            check=check_size,
        ),
    ] = "0"
    disk_cache_dir: Annotated[
        Path | None,
        directory("A directory on a local disk, for --disk-cache-size. The file in it has no name."),
    ] = None
    block_size: Annotated[
        int | None,
        opt(
            "Tokens in one KV block: a divisor or a multiple of 64.",
            "TOKENS",
            shown="128 on GPUs, 16 on CPUs",
            check=between(1),
        ),
    ] = None
    num_blocks: Annotated[
        int | None,
        opt(
            "KV blocks in the pool.",
            "N",
            shown="as many as fit in memory",
            check=between(2),
            also="--num-gpu-blocks-override",
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float,
        opt("Share of GPU memory for one worker, including KV.", "SHARE", check=between(0.05, 1.0)),
    ] = 0.9
    seed: Annotated[int, opt("Seed of dummy weights.", "N")] = 0
    num_threads: Annotated[
        int | None,
        opt("CPU threads of one engine.", "N", shown="an equal share of the CPUs", check=between(1)),
    ] = None


TtitTarget = Annotated[
    float | None,
    opt(
        "Target time between tokens. It limits prompt tokens in a decode step, and the decode pool grows to "
        "meet it.",
        "MS",
        shown="3.5 times the fastest step without a prompt, with --optimize latency 1.5, with throughput 6; "
        "100 to grow the pool",
        check=between(0.1),
    ),
]


@dataclass(frozen=True)
class PaceOptions:
    panel: ClassVar[str] = "Engine"
    ttit_target: TtitTarget = None
