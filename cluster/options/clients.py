"""Options of the commands that use or inspect a cluster."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import typer

from baton.cluster.options.declare import NO_ARGV, OLD_FILE, PORT, between, opt
from baton.cluster.options.engine import KVCacheDtype


@dataclass(frozen=True)
class EndpointOptions:
    """Which router to send requests to."""

    panel: ClassVar[str] = "Endpoint"
    url: Annotated[str, opt("Base URL of a router.")] = "http://127.0.0.1:8000"
    api_key: Annotated[list[str], opt(f"API key. {NO_ARGV}", "KEY")] = field(default_factory=list)


@dataclass(frozen=True)
class StatusOptions:
    json: Annotated[bool, opt("Print the result as JSON.")] = False


@dataclass(frozen=True)
class FlipOptions:
    """Which worker to move, and to which pool."""

    worker: Annotated[
        str,
        typer.Argument(help="Name from `baton status` (prefill-0), or HOST:PORT.", show_default=False),
    ]
    pool: Annotated[Literal["prefill", "decode"], typer.Argument(help="Its new pool.", show_default=False)]
    force: Annotated[bool, opt("Move it even if it is the last worker of its pool.")] = False


@dataclass(frozen=True)
class TopOptions:
    interval: Annotated[float, opt("Time between two samples.", "S", check=between(0.1, 3600))] = 2.0
    once: Annotated[bool, opt("Take two samples, print one frame, and end.")] = False


@dataclass(frozen=True)
class SizingOptions:
    """The load and the hardware for `baton plan`."""

    panel: ClassVar[str] = "Load"
    rate: Annotated[float, opt("Requests per second.", "R", check=between(0.001, 1e5))] = 10.0
    input: Annotated[int, opt("Prompt tokens of a request.", "TOKENS", check=between(1, 1 << 20))] = 2000
    output: Annotated[int, opt("Tokens of an answer.", "TOKENS", check=between(1, 1 << 20))] = 150
    slo: Annotated[str, opt("Targets for the 99th percentile, in ms.", "TTFT_AND_TTIT")] = "ttft=1000,ttit=50"
    model: Annotated[
        str,
        opt(
            "llama-3.1-8b, qwen3-30b-a3b, llama-4-scout, llama-4-maverick, gpt-oss-20b, gpt-oss-120b, a "
            "Hugging Face directory, or a name on the hub.",
            "MODEL",
        ),
    ] = "llama-3.1-8b"
    prefill_tensor_parallel_size: Annotated[
        int, opt("GPUs of one prefill worker.", "N", check=between(1))
    ] = 1
    decode_tensor_parallel_size: Annotated[int, opt("GPUs of one decode worker.", "N", check=between(1))] = 1
    kv_cache_dtype: KVCacheDtype = "auto"
    gpu: Annotated[Literal["h200"], opt("GPU whose measured speeds are used.")] = "h200"
    measured: Annotated[
        Path | None,
        opt(
            "Use the speeds in this file, from `python -m baton.bench.engine --json FILE`.",
            shown="no",
            **OLD_FILE,
        ),
    ] = None
    gpu_memory: Annotated[
        float | None, opt("Memory of the GPU.", "GIB", shown="as --gpu", check=between(1))
    ] = None
    gpu_memory_utilization: Annotated[
        float, opt("Share of GPU memory for weights and KV.", "SHARE", check=between(0.05, 1.0))
    ] = 0.9
    max_num_seqs: Annotated[int, opt("Requests in one batch.", "N", check=between(1))] = 256


@dataclass(frozen=True)
class DoctorOptions:
    """What `baton doctor` checks; by default this machine."""

    panel: ClassVar[str] = "Checks"
    cluster: Annotated[bool, opt("Check a running cluster through its router at --url.")] = False
    admin_url: Annotated[
        str | None, opt("URL of the router's --admin-port, if it has one.", "URL", shown="as --url")
    ] = None
    listen: Annotated[
        int | None, opt("Measure the network: wait for a node with --peer.", "PORT", shown="no", **PORT)
    ] = None
    peer: Annotated[
        str | None, opt("Measure the network to a node with --listen.", "HOST:PORT", shown="no")
    ] = None
    host: Annotated[str, opt("Address of --listen and --check-port.", "ADDRESS")] = "127.0.0.1"
    check_port: Annotated[list[int], opt("Check that this port is free; repeat it.", "PORT")] = field(
        default_factory=list
    )
    kv_lanes: Annotated[int, opt("TCP connections to measure with.", "N", check=between(1, 64))] = 4
    model: Annotated[str | None, opt("Check this model's files.", "MODEL", shown="the embedded model")] = None
    tensor_parallel_size: Annotated[
        int, opt("Check that the model and this machine allow workers of N GPUs.", "N", check=between(1))
    ] = 1
    cluster_secret_file: Annotated[
        Path | None, opt("Secret of the cluster.", shown="BATON_CLUSTER_SECRET", **OLD_FILE)
    ] = None


@dataclass(frozen=True)
class ChatOptions:
    panel: ClassVar[str] = "Chat"
    message: Annotated[
        str | None, typer.Argument(help="One question. Without it a chat starts.", show_default=False)
    ] = None
    system: Annotated[str | None, opt("System message.", "TEXT")] = None
    model: Annotated[str | None, opt("Model to ask.", "NAME", shown="the first one served")] = None
    max_tokens: Annotated[
        int | None,
        opt("Most tokens of an answer.", "N", shown="2048, or the model's context", check=between(1)),
    ] = None
    temperature: Annotated[float | None, opt("Sampling temperature; 0 is greedy.", "T", check=between(0))] = (
        None
    )
