"""Options of the commands that use or inspect a cluster."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import typer

from baton.cluster.options.engine import kv_cache_dtype, state_dtype
from baton.cluster.options.parameters import (
    NO_ARGV,
    OLD_FILE,
    advanced,
    argument,
    between,
    check_size,
    directory,
    opt,
    size_in_bytes,
)


@dataclass(frozen=True)
class EndpointOptions:
    panel: ClassVar[str] = "Endpoint"
    url: str = opt("http://127.0.0.1:8000", "Base URL of a router.")
    api_key: list[str] = opt([], f"API key. {NO_ARGV}", "KEY")


@dataclass(frozen=True)
class DoctorEndpointOptions(EndpointOptions):
    """A cluster for `baton doctor`. Without a URL it checks this machine."""

    url: str = opt("", "Check the cluster behind this router.", shown="none: check this machine")


@dataclass(frozen=True)
class LocalOptions:
    """Where a cluster of this machine tells its secret to commands of the same user."""

    panel: ClassVar[str] = "Endpoint"
    run_dir: Path | None = directory(
        "That of a `baton serve` on this machine.", shown="$TMPDIR", advanced=True
    )


@dataclass(frozen=True)
class JsonOptions:
    json: bool = opt(False, "Print the result as JSON.")


@dataclass(frozen=True)
class StatusOptions:
    worker: list[str] = opt([], "Ask this worker, without a router; repeat it.", "HOST:PORT")


@dataclass(frozen=True)
class FlipOptions:
    worker: str = argument("Name from `baton status` (prefill-0), or HOST:PORT.")
    pool: Literal["prefill", "decode"] = argument("Its new pool.")
    force: bool = opt(False, "Move it even if it is the last worker of its pool.")


@dataclass(frozen=True)
class RestartOptions:
    worker: str | None = argument(
        "With --engine: this worker alone. Name from `baton status` (decode-0), or HOST:PORT.", default=None
    )
    engines: bool = opt(
        False,
        "Restart only engine processes: workers, ports and KV stay. For workers with --replace-engine.",
        also="--engine",
    )


@dataclass(frozen=True)
class WeightsOptions:
    path: str = argument("Checkpoint with the new weights, at the same place on the hosts of all workers.")
    max_unavailable: int | None = opt(
        None,
        "Change so many workers at a time, while the others serve. Without it all change at once.",
        "N",
        check=between(1, 10_000),
    )


@dataclass(frozen=True)
class TopOptions:
    interval: float = advanced(2.0, "Time between two samples.", "S", check=between(0.1, 3600))


@dataclass(frozen=True)
class RunBatchOptions:
    panel: ClassVar[str] = "Batch"
    input_file: Path | None = opt(
        None, "Requests, in OpenAI's batch form.", "FILE", shown="must be given", also="-i", **OLD_FILE
    )
    output_file: Path | None = opt(
        None, "Responses, one line each.", "FILE", shown="must be given", also="-o", dir_okay=False
    )
    concurrency: int = opt(32, "Requests at a time.", "N", check=between(1, 10_000))


def _check_memory(value: str | None) -> str | None:
    if value is not None and size_in_bytes(check_size(value)) < 1 << 30:
        raise typer.BadParameter(f"{value} is less than 1GiB; give a size such as 80GiB")
    return value


DEFAULT_SLO = "ttft=1000,itl=50"
"""Of `baton plan`."""


@dataclass(frozen=True)
class SizingOptions:
    """The load and the hardware for `baton plan`."""

    panel: ClassVar[str] = "Load"
    rate: float = opt(10.0, "Requests per second.", "R", check=between(0.001, 1e5))
    input_len: int = opt(2000, "Prompt tokens of a request.", "TOKENS", check=between(1, 1 << 20))
    output_len: int = opt(150, "Tokens of an answer.", "TOKENS", check=between(1, 1 << 20))
    images: int = advanced(
        0, "Images of a request, whose tokens come to those of --input-len.", "N", check=between(0, 256)
    )
    image_size: str = advanced("1920x1080", "Pixels of an image.", "WxH")
    agents: int | None = opt(
        None,
        "Agents at a time, as of `baton bench agents`, in place of --rate, --input-len and --output-len.",
        "N",
        check=between(1, 4096),
    )
    slo: str | None = opt(
        None,
        "Targets for the 99th percentile, in ms. The cluster is told of them.",
        "TTFT_AND_ITL",
        shown=f"{DEFAULT_SLO}; with --prefill those of `baton serve`",
    )
    prefill: int | None = opt(
        None, "Predict what so many prefill workers do, with --decode.", "N", check=between(1, 1024)
    )
    decode: int | None = opt(
        None, "Predict what so many decode workers do, with --prefill.", "N", check=between(1, 1024)
    )
    model: str = opt(
        "llama-3.1-8b",
        "llama-3.1-8b, qwen3-30b-a3b, glm-4.7-flash, deepseek-v3, llama-4-scout, llama-4-maverick, "
        "gpt-oss-20b, gpt-oss-120b, a Hugging Face directory, or a name on the hub.",
        "MODEL",
    )
    prefill_tensor_parallel_size: int = opt(1, "GPUs of one prefill worker.", "N", check=between(1))
    decode_tensor_parallel_size: int = opt(1, "GPUs of one decode worker.", "N", check=between(1))
    kv_cache_dtype: Literal["auto", "fp8"] = kv_cache_dtype()
    state_dtype: Literal["auto", "float32", "bfloat16", "float16"] = state_dtype()
    link_gbps: float | None = advanced(
        None,
        "What the link of each worker carries to others, and from them, in Gbit/s.",
        "GBPS",
        shown="more than it needs",
        check=between(0.001, 1e5),
    )
    measured: Path | None = opt(
        None,
        "Use the speeds in this file, from `python -m baton.bench.engine --json FILE` in a clone of Baton.",
        shown="those of an H200",
        **OLD_FILE,
    )
    gpu_memory: str | None = opt(None, "Memory of the GPU.", "SIZE", shown="139GiB", check=_check_memory)
    gpu_memory_utilization: float = opt(
        0.9, "Share of GPU memory for weights and KV.", "SHARE", check=between(0.05, 1.0)
    )
    max_num_seqs: int = opt(256, "Requests in one batch.", "N", check=between(1))


@dataclass(frozen=True)
class DoctorOptions:
    """What `baton doctor` checks."""

    panel: ClassVar[str] = "Checks"
    admin_url: str | None = advanced(
        None, "URL of the router's --admin-port, if it has one.", "URL", shown="as --url"
    )
    model: str | None = opt(None, "Check this model's files.", "MODEL", shown="the embedded model")
    tensor_parallel_size: int = opt(
        1, "Check that the model allows workers of N GPUs.", "N", check=between(1)
    )
    cluster_secret_file: Path | None = opt(
        None, "Secret of the cluster.", shown="BATON_CLUSTER_SECRET", **OLD_FILE
    )


@dataclass(frozen=True)
class ChatOptions:
    panel: ClassVar[str] = "Chat"
    message: str | None = argument("One question. Without it a chat starts.", default=None)
    system: str | None = advanced(None, "System message.", "TEXT")
    model: str | None = opt(None, "Model to ask.", "NAME", shown="the first one served")
    max_tokens: int | None = advanced(
        None, "Most tokens of an answer.", "N", shown="2048, or the model's context", check=between(1)
    )
    temperature: float | None = opt(None, "Sampling temperature; 0 is greedy.", "T", check=between(0))
