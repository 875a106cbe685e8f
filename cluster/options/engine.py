"""Options of the model and the engine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import typer

from baton.cluster.options.parameters import advanced, argument, between, check_size, directory, opt


def _given_once(context: typer.Context, value: str | None) -> str | None:
    sources = [context.get_parameter_source(name) for name in ("model", "model_argument")]
    if all(source is not None and source.name == "COMMANDLINE" for source in sources):
        raise typer.BadParameter("the model is given as an argument and as --model; leave one out")
    return value


AUTO = "auto"


def check_host_cache(value: str) -> str:
    return value if value == AUTO else check_size(value)


@dataclass(frozen=True)
class ModelOptions:
    """Which model to serve. A router refuses workers with another tokenizer."""

    panel: ClassVar[str] = "Model"
    model: str | None = opt(
        None,
        "A Hugging Face directory, a GGUF file, or a name on the Hugging Face hub. A router reads only its "
        "tokenizer.",
        "PATH_OR_HUB_ID",
        shown="the embedded SmolLM2-135M-Instruct; of a router its workers' model",
        check=_given_once,
    )
    revision: str | None = opt(
        None, "Branch, tag or commit of a model on the hub.", "NAME", shown="none; of a router its workers'"
    )
    served_model_name: list[str] = opt(
        [],
        "The model's name for clients; repeat it for more names. Responses and metrics have the first one.",
        "NAME",
        shown="as in --model",
    )
    tokenizer: str | None = opt(
        None,
        "The tokenizer, if it is not that of --model: a directory, a GGUF file, or a name on the hub.",
        "PATH_OR_HUB_ID",
        shown="as in --model",
    )
    language_model_only: bool = opt(
        False, "Take no images: workers load no encoder. All workers and routers need it."
    )


@dataclass(frozen=True)
class ServedModel:
    """The model as an argument of `baton serve`."""

    model_argument: str | None = argument("The same as --model.", "MODEL", check=_given_once, default=None)


def kv_cache_dtype() -> Any:
    text = "Type of the KV cache: auto (as --dtype), or fp8, which takes about half the bytes."
    return opt("auto", text)


def state_dtype() -> Any:
    text = (
        "Type of the states of Mamba-2 and linear attention: auto (what the checkpoint says, else float32). "
        "bfloat16 takes about half the bytes."
    )
    return advanced("auto", text)


Optimize = Literal["latency", "balanced", "throughput"]


def _check_speculative(value: str | None) -> str | None:
    from baton.engine import SpeculativeConfig

    try:
        if value is not None:
            SpeculativeConfig.of(value)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return value


@dataclass(frozen=True)
class EngineOptions:
    panel: ClassVar[str] = "Engine"
    engine: Literal["baton", "vllm"] = opt(
        "baton", "baton: Baton's own engine. vllm: vLLM, which must be installed beside Baton."
    )
    vllm_args: str = opt("", "With --engine vllm: more options of `vllm serve`, as one text.", "ARGS")
    vllm_untested: bool = advanced(False, "Try a version of vLLM that Baton is not tested with.")
    device: str | None = opt(None, "cpu, cuda or cuda:N.", "DEVICE", shown="cuda if there is a GPU, else cpu")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = opt(
        "auto", "Type of weights and activations; auto is the model's."
    )
    kv_cache_dtype: Literal["auto", "fp8"] = kv_cache_dtype()
    state_dtype: Literal["auto", "float32", "bfloat16", "float16"] = state_dtype()
    load_format: Literal["auto", "dummy"] = opt("auto", "dummy: random weights, for benchmarks.")
    model_impl: Literal["auto", "baton", "transformers"] = advanced(
        "auto",
        "What computes the model: a class of Baton, or the modules of transformers with Baton's attention; "
        "auto takes these only where Baton has no class.",
    )
    skip_model_check: bool = advanced(
        False,
        "Serve modules of transformers without the check that they compute the same with Baton's attention.",
    )
    quantization: Literal["auto", "fp8", "int4", "none", "gguf"] = opt(
        "auto",
        "Format of the matrices: auto (the checkpoint's own), fp8 or int4 (quantized on load); for GGUF "
        "files also none and gguf.",
    )
    tensor_parallel_size: int = opt(1, "GPUs of one worker.", "N", check=between(1))
    data_parallel_size: int = opt(
        1,
        "With --engine vllm, for a mixture of experts: workers in one group. They share the experts out, and "
        "each has its own requests and KV.",
        "N",
        check=between(1, 64),
    )
    enable_expert_parallel: bool = opt(
        False, "Of a mixture of experts, each GPU holds whole experts, not a part of every expert."
    )
    lora_modules: list[str] = opt(
        [],
        "With --engine vllm: an adapter (LoRA), in a directory as PEFT writes it, which requests name as a "
        "model; repeat it for more.",
        "NAME=PATH",
    )
    max_loras: int | None = advanced(
        None,
        "Most adapters in one step, and on the device; also for those that are loaded later.",
        "N",
        shown="1, or as many as --lora-modules",
        check=between(1),
    )
    max_cpu_loras: int | None = advanced(
        None,
        "Most adapters that are loaded. Those that are not on the device are in the memory of the host.",
        "N",
        shown="--advanced.max-loras, or as many as --lora-modules if they are more",
        check=between(1),
    )
    max_lora_rank: int | None = advanced(
        None, "Largest rank of an adapter.", "N", shown="vLLM's default, 16", check=between(1)
    )
    encoder_pool: bool = advanced(
        False,
        "Images are encoded by encoders (`baton encode`), and this worker fetches their embeddings. Without, "
        "each worker encodes the images of its prompts.",
    )
    batch_invariant: bool = opt(
        False,
        "A request gets the same bits whatever shares its batch, however its prompt is cut, and after a "
        "recovery, also in bfloat16 and FP8.",
    )
    optimize: Optimize = opt(
        "balanced",
        "latency (shorter gaps between tokens), balanced, or throughput (more tokens per second). It "
        "sets the defaults of --itl-target and --max-num-seqs.",
    )
    itl_target: float | None = opt(
        None,
        "Target time between tokens. It limits prompt tokens in a decode step, but gives way "
        "where decodes alone take most of it and prompts are late. The decode pool grows to meet it.",
        "MS",
        shown="3.5 times the fastest step without a prompt, with --optimize latency 1.75, with throughput 6; "
        "100 to grow the pool",
        check=between(0.1),
    )
    speculative_config: str | None = opt(
        None,
        'Draft tokens, as a JSON object: {"method": "ngram", "num_speculative_tokens": 3, '
        '"prompt_lookup_max": 4, "prompt_lookup_min": 2}, {"method": "mtp"}, or {"method": "eagle3", '
        '"model": "HEAD"}.',
        "JSON",
        check=_check_speculative,
    )
    max_model_len: int | None = opt(
        None, "Most tokens of prompt and output.", "TOKENS", shown="the model's context", check=between(1)
    )
    max_num_seqs: int | None = opt(
        None,
        "Requests in one batch.",
        "N",
        shown="256 on a GPU with 70 GiB or more, else 64; with --optimize latency half of it, with "
        "throughput 512 on a GPU with 128 GiB or more",
        check=between(1),
    )
    max_num_batched_tokens: int | None = opt(
        None,
        "Tokens in one step; longer prompts are computed in chunks.",
        "TOKENS",
        shown="8192 on a GPU with 70 GiB or more, else 2048",
        check=between(1),
    )
    enable_prefix_caching: bool | None = opt(
        None, "Keep the KV of prompts and answers, for later prompts with the same beginning.", shown="on"
    )
    host_cache_size: str = opt(
        AUTO,
        "Memory of the host, such as 8GiB, for cached KV that leaves the memory of a worker's GPUs. It is "
        "pinned when it is needed. 0: none.",
        "SIZE",
        shown="on GPUs an equal part of a quarter of the memory that the host has left; on CPUs 0",
        check=check_host_cache,
    )
    disk_cache_size: str = opt(
        "0",
        "The same on a local disk: bytes of each worker's file in --disk-cache-dir. 0: none.",
        "SIZE",
        check=check_size,
    )
    disk_cache_dir: Path | None = directory(
        "A directory on a local disk, for --disk-cache-size. The file in it has no name."
    )
    elastic_memory: bool | None = advanced(
        None,
        "Move memory between KV and states, or KV and layers with windows, while a worker runs.",
        shown="on; off with --replace-engine",
    )
    enable_memory_saver: bool = opt(
        False,
        "Let a trainer take the memory of KV and weights for a while (POST /release_memory_occupation).",
    )
    replace_engine: bool = opt(
        False,
        "Replace an engine process that ends: requests go on with its published KV.",
    )
    no_standby: bool = advanced(
        False,
        "With --replace-engine: start the next engine process only when it is needed. Until then it takes no "
        "memory.",
    )
    block_size: int | None = advanced(
        None,
        "Tokens in one KV block: a divisor or a multiple of 64.",
        "TOKENS",
        shown="128 on GPUs, 16 on CPUs",
        check=between(1),
    )
    num_blocks: int | None = advanced(
        None,
        "KV blocks in the pool.",
        "N",
        shown="as many as fit in memory",
        check=between(2),
        also="--num-gpu-blocks-override",
    )
    gpu_memory_utilization: float = opt(
        0.9, "Share of GPU memory for one worker, including KV.", "SHARE", check=between(0.05, 1.0)
    )
    seed: int = advanced(0, "Seed of dummy weights.", "N")
    num_threads: int | None = advanced(
        None, "CPU threads of one engine.", "N", shown="an equal share of the CPUs", check=between(1)
    )
