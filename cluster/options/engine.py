"""Which model a worker computes, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from cluster.options.declare import between, opt


@dataclass(frozen=True)
class ModelOptions:
    """Which model. Router and workers must be given the same."""

    panel: ClassVar[str] = "Model"
    model: Annotated[
        str | None,
        opt(
            "A Hugging Face directory, a GGUF file, or a name on the Hugging Face hub.",
            "PATH_OR_HUB_ID",
            shown="the embedded SmolLM2-135M-Instruct",
        ),
    ] = None
    revision: Annotated[str | None, opt("Branch, tag or commit of a model on the hub.", "NAME")] = None
    served_model_name: Annotated[
        str | None, opt("The model's name for clients and metrics.", "NAME", shown="as in --model")
    ] = None


@dataclass(frozen=True)
class RouterModelOptions(ModelOptions):
    """Whose tokenizer a router uses. It refuses workers with another one."""

    model: Annotated[
        str | None,
        opt("As for the workers. Only the tokenizer is read.", "PATH_OR_HUB_ID", shown="that of the workers"),
    ] = None
    revision: Annotated[
        str | None, opt("Branch, tag or commit of a model on the hub.", "NAME", shown="that of the workers")
    ] = None
    served_model_name: Annotated[
        str | None, opt("The model's name for clients and metrics.", "NAME", shown="as in --model")
    ] = None


@dataclass(frozen=True)
class EngineOptions:
    """How a worker computes."""

    panel: ClassVar[str] = "Engine"
    device: Annotated[
        str | None, opt("cpu, cuda or cuda:N.", "DEVICE", shown="cuda where there is a GPU, else cpu")
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        opt("Of weights, activations and KV: auto (the model's own), float32, bfloat16 or float16.", "TYPE"),
    ] = "auto"
    load_format: Annotated[
        Literal["auto", "dummy"], opt("auto, or dummy: random weights, to measure with.", "FORMAT")
    ] = "auto"  # fmt: skip
    tensor_parallel_size: Annotated[int, opt("GPUs that one worker spans.", "N", check=between(1, 1))] = 1
    max_model_len: Annotated[
        int | None,
        opt("Longest prompt + output.", "TOKENS", shown="the model's context", check=between(1)),
    ] = None
    max_num_seqs: Annotated[int, opt("Requests in one batch.", "N", check=between(1))] = 64
    max_num_batched_tokens: Annotated[
        int, opt("Tokens in one step; longer prompts are computed in chunks.", "TOKENS", check=between(1))
    ] = 2048
    enable_prefix_caching: Annotated[
        bool | None,
        opt("Keep the KV of common prompt prefixes.", shown="on for prefill workers, off for decode workers"),
    ] = None
    block_size: Annotated[
        int | None,
        opt("Tokens in one KV block.", "TOKENS", shown="128 on GPUs, 16 on CPUs", check=between(1)),
    ] = None
    num_blocks: Annotated[
        int | None,
        opt("KV blocks in the pool.", "N", shown="what fits the memory", check=between(2)),
    ] = None
    gpu_memory_utilization: Annotated[
        float,
        opt(
            "Share of its GPU's memory that one worker takes, KV included.", "SHARE", check=between(0.05, 1.0)
        ),
    ] = 0.9
    seed: Annotated[int, opt("Seed of dummy weights.", "N")] = 0
    num_threads: Annotated[
        int | None,
        opt("CPU threads of one engine.", "N", shown="the cores, shared by the workers", check=between(1)),
    ] = None


TtitTarget = Annotated[
    float | None,
    opt(
        "Time between tokens: a decode step with some of a prompt stays within it, and decode grows for it.",
        "MS",
        shown="1.5 times a step without a prompt, and 100 to grow",
        check=between(0.1),
    ),
]


@dataclass(frozen=True)
class PaceOptions:
    panel: ClassVar[str] = "Engine"
    ttit_target: TtitTarget = None
