"""Options of one process of a role: addresses, workers, files, logs."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from baton.cluster.options.declare import PORT, between, directory, opt


@dataclass(frozen=True)
class WorkerOptions:
    """Where a worker listens. With port 0 the system chooses a port, and the log shows it."""

    panel: ClassVar[str] = "Network"
    host: Annotated[str, opt("Address at which routers reach this worker.", "ADDRESS")] = "127.0.0.1"
    port: Annotated[int, opt("Port of gRPC, for routers.", "PORT", **PORT)] = 0
    kv_host: Annotated[
        str | None,
        opt("Address or interface of the network for KV.", "ADDRESS", shown="as --host"),
    ] = None
    kv_port: Annotated[int, opt("Port of KV lanes.", "PORT", **PORT)] = 0
    metrics_port: Annotated[int, opt("Port of Prometheus metrics.", "PORT", **PORT)] = 0


@dataclass(frozen=True)
class MembershipOptions:
    """How a router finds workers."""

    panel: ClassVar[str] = "Workers"
    worker: Annotated[list[str], opt("gRPC address of a worker of either role; repeat it.", "HOST:PORT")] = (
        field(default_factory=list)
    )
    workers_file: Annotated[
        Path | None, opt("File with one worker address per line, watched for changes.", dir_okay=False)
    ] = None
    kubernetes_service: Annotated[
        list[str],
        opt("Service in this pod's namespace whose ready endpoints are workers; repeat it.", "NAME"),
    ] = field(default_factory=list)
    decode_only: Annotated[
        bool,
        opt(
            "The cluster has no prefill workers: be ready with a decode worker, which computes prompts, too."
        ),
    ] = False
    cluster_file: Annotated[
        Path | None, opt("File in which a supervisor reports all roles (JSON), for /status.", dir_okay=False)
    ] = None


@dataclass(frozen=True)
class RoleOptions:
    """The identity of a role's process, and its tie to its supervisor."""

    panel: ClassVar[str] = "Process"
    index: Annotated[int, opt("Number of this worker or router, for people.", "N", check=between(0))] = 0
    title: Annotated[
        str,
        opt("Prefix of the process titles; `baton serve` adds its port.", "TEXT", hidden=True),
    ] = "baton"
    ready_fd: Annotated[
        int | None,
        opt(
            "Report progress as JSON lines to this descriptor, and end when its reader ends.",
            "FD",
            check=between(3),
        ),
    ] = None


@dataclass(frozen=True)
class RouterProcessOptions:
    """Set by the supervisor of several router processes for each of them."""

    process_number: Annotated[int | None, opt("Number of this router process.", "N", hidden=True)] = None
    control_fd: Annotated[
        int | None, opt("This process' end of the socket pair to its supervisor.", "FD", hidden=True)
    ] = None


@dataclass(frozen=True)
class RunDirOptions:
    panel: ClassVar[str] = "Files"
    run_dir: Annotated[
        Path | None, directory("Parent of a new directory for sockets and logs.", shown="$TMPDIR")
    ] = None


@dataclass(frozen=True)
class TraceOptions:
    panel: ClassVar[str] = "Files"
    trace_dir: Annotated[Path | None, directory("Write Chrome traces of KV transfers here.")] = None


@dataclass(frozen=True)
class LogOptions:
    panel: ClassVar[str] = "Files"
    log_dir: Annotated[
        Path | None, directory("Keep logs here.", shown="the run directory, removed at the end")
    ] = None


@dataclass(frozen=True)
class LogLineOptions:
    panel: ClassVar[str] = "Logs and traces"
    log_format: Annotated[Literal["text", "json"], opt("Format of a log line: for people, or JSON.")] = "text"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        opt("Lowest level that is logged. debug follows each request from process to process.")
    ] = "info"  # fmt: skip


@dataclass(frozen=True)
class ObserveOptions(LogLineOptions):
    """Logs and traces. OTEL_EXPORTER_OTLP_ENDPOINT is the default of the flag."""

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
