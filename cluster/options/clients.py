"""What talks to a cluster, or looks at it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import typer

from cluster.options.declare import NO_ARGV, OLD_FILE, PORT, between, opt


@dataclass(frozen=True)
class EndpointOptions:
    """A client's view: which cluster to talk to."""

    panel: ClassVar[str] = "Endpoint"
    url: Annotated[str, opt("Base URL of a router.")] = "http://127.0.0.1:8000"
    api_key: Annotated[list[str], opt(f"Key for it. {NO_ARGV}", "KEY")] = field(default_factory=list)


@dataclass(frozen=True)
class StatusOptions:
    json: Annotated[bool, opt("Print what the router reports as JSON.")] = False


@dataclass(frozen=True)
class TopOptions:
    interval: Annotated[float, opt("Between two looks.", "S", check=between(0.1, 3600))] = 2.0
    once: Annotated[bool, opt("Print one frame, of two looks, and end.")] = False


@dataclass(frozen=True)
class SizingOptions:
    """What `baton plan` is to plan for."""

    panel: ClassVar[str] = "Load"
    rate: Annotated[float, opt("Requests per second.", "R", check=between(0.001, 1e5))] = 10.0
    input: Annotated[int, opt("Prompt tokens of a request.", "TOKENS", check=between(1, 1 << 20))] = 2000
    output: Annotated[int, opt("Tokens of an answer.", "TOKENS", check=between(1, 1 << 20))] = 150
    slo: Annotated[str, opt("Kept by 99 % of first tokens and gaps, in ms.", "TTFT_AND_TTIT")] = (
        "ttft=1000,ttit=50"
    )
    model: Annotated[str, opt("llama-3.1-8b, a Hugging Face directory, or a name on the hub.", "MODEL")] = (
        "llama-3.1-8b"
    )
    gpu: Annotated[Literal["h200"], opt("One that was measured.", "GPU")] = "h200"
    measured: Annotated[
        Path | None, opt("Speeds from `python -m bench.engine --json FILE` instead.", shown="no", **OLD_FILE)
    ] = None
    gpu_memory: Annotated[float | None, opt("Of that GPU.", "GIB", shown="as --gpu", check=between(1))] = None
    gpu_memory_utilization: Annotated[
        float, opt("Share of it for weights and KV.", "SHARE", check=between(0.05, 1.0))
    ] = 0.9
    max_num_seqs: Annotated[int, opt("Requests in one batch.", "N", check=between(1))] = 256


@dataclass(frozen=True)
class DoctorOptions:
    """What `baton doctor` looks at: this machine, unless told otherwise."""

    panel: ClassVar[str] = "Checks"
    cluster: Annotated[bool, opt("Look at a running cluster, through its router at --url.")] = False
    admin_url: Annotated[
        str | None, opt("Its admin port, where it has one; see --admin-port.", "URL", shown="as --url")
    ] = None
    listen: Annotated[
        int | None, opt("Measure the network: wait here for one --peer.", "PORT", shown="no", **PORT)
    ] = None
    peer: Annotated[
        str | None, opt("Measure it from here, to a node that does.", "HOST:PORT", shown="no")
    ] = None
    host: Annotated[str, opt("Address of --listen and --check-port.", "ADDRESS")] = "127.0.0.1"
    check_port: Annotated[list[int], opt("A port that a role is to have; repeat it.", "PORT")] = field(
        default_factory=list
    )
    kv_lanes: Annotated[int, opt("TCP connections at once.", "N", check=between(1, 64))] = 4
    model: Annotated[str | None, opt("Model that is to be served.", "MODEL", shown="the embedded one")] = None
    cluster_secret_file: Annotated[
        Path | None, opt("Secret of the cluster.", shown="BATON_CLUSTER_SECRET", **OLD_FILE)
    ] = None


@dataclass(frozen=True)
class ChatOptions:
    panel: ClassVar[str] = "Chat"
    message: Annotated[
        str | None, typer.Argument(help="One question; without it, a chat.", show_default=False)
    ] = None
    system: Annotated[str | None, opt("System message.", "TEXT")] = None
    chat_model: Annotated[str | None, opt("Model to ask.", "NAME", shown="the first one served")] = None
    max_tokens: Annotated[int | None, opt("Longest answer.", "N", check=between(1))] = None
    temperature: Annotated[
        float | None, opt("0 always takes the likeliest token.", "T", check=between(0))
    ] = None
