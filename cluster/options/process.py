"""One process of a role: where it listens, whom it knows, what it writes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from cluster.options.declare import PORT, between, directory, opt


@dataclass(frozen=True)
class WorkerOptions:
    """Where one worker listens. Port 0 lets the system choose; the log says what it chose."""

    panel: ClassVar[str] = "Network"
    host: Annotated[str, opt("Address at which routers reach it.", "ADDRESS")] = "127.0.0.1"
    port: Annotated[int, opt("gRPC, for routers.", "PORT", **PORT)] = 0
    kv_host: Annotated[
        str | None,
        opt("Address or interface on the network that carries KV.", "ADDRESS", shown="as --host"),
    ] = None
    kv_port: Annotated[int, opt("KV lanes; only prefill workers listen.", "PORT", **PORT)] = 0
    metrics_port: Annotated[int, opt("Prometheus metrics.", "PORT", **PORT)] = 0


@dataclass(frozen=True)
class MembershipOptions:
    """How a router finds workers."""

    panel: ClassVar[str] = "Workers"
    worker: Annotated[list[str], opt("gRPC address of a worker of either role; repeat it.", "HOST:PORT")] = (
        field(default_factory=list)
    )
    workers_file: Annotated[
        Path | None, opt("File with one such address a line; watched for changes.", dir_okay=False)
    ] = None
    kubernetes_service: Annotated[
        list[str],
        opt("Service whose ready endpoints are workers, in this pod's own namespace; repeat it.", "NAME"),
    ] = field(default_factory=list)
    cluster_file: Annotated[
        Path | None, opt("What a supervisor knows of all roles (JSON), for /status.", dir_okay=False)
    ] = None


@dataclass(frozen=True)
class RoleOptions:
    """What sets one process of a role apart from its siblings, and ties it to whoever started it."""

    panel: ClassVar[str] = "Process"
    index: Annotated[int, opt("Its number in its role, for people.", "N", check=between(0))] = 0
    title: Annotated[
        str,
        opt("What the titles of its processes begin with: `baton serve` adds its port.", "TEXT", hidden=True),
    ] = "baton"
    ready_fd: Annotated[
        int | None,
        opt(
            "Report progress as JSON lines here, and end with whoever started this process.",
            "FD",
            check=between(3),
        ),
    ] = None


@dataclass(frozen=True)
class RouterProcessOptions:
    """For the supervisor of several router processes, which starts them with these."""

    process_number: Annotated[int | None, opt("Its number.", "N", hidden=True)] = None
    control_fd: Annotated[int | None, opt("Its end of a socket pair.", "FD", hidden=True)] = None


@dataclass(frozen=True)
class RunDirOptions:
    panel: ClassVar[str] = "Files"
    run_dir: Annotated[
        Path | None, directory("Sockets and the like go into a new directory in here.", shown="$TMPDIR")
    ] = None


@dataclass(frozen=True)
class TraceOptions:
    panel: ClassVar[str] = "Files"
    trace_dir: Annotated[Path | None, directory("Write Chrome traces of KV transfers here.")] = None


@dataclass(frozen=True)
class LogOptions:
    panel: ClassVar[str] = "Files"
    log_dir: Annotated[
        Path | None, directory("Keep logs here.", shown="the run directory, which goes with the cluster")
    ] = None


@dataclass(frozen=True)
class ObserveOptions:
    """How it can be watched. OTEL_EXPORTER_OTLP_ENDPOINT counts where the flag is not given."""

    panel: ClassVar[str] = "Logs and traces"
    log_format: Annotated[Literal["text", "json"], opt("One line a record, for people or for machines.")] = (
        "text"
    )
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        opt("Least level that is logged; debug follows each request from process to process.")
    ] = "info"  # fmt: skip
    otlp_endpoint: Annotated[
        str | None,
        opt(
            "Send OpenTelemetry traces to this OTLP/gRPC receiver.",
            "URL",
            shown="OTEL_EXPORTER_OTLP_ENDPOINT, or none",
        ),
    ] = None

    @property
    def endpoint(self) -> str | None:
        return self.otlp_endpoint or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or None
