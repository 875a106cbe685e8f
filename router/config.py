"""What a router is told when it starts."""

import os
from dataclasses import dataclass, field
from typing import Any

from router.admission.keys import ApiKey
from router.policy import PREFILL_POLICIES
from router.tools import FORMATS
from router.workers.discovery import Discovery, FileDiscovery, StaticDiscovery
from rpc import TlsFiles, logs


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Raises ValueError naming the flag and the remedy."""

    model: str | None
    """Path of a Hugging Face directory or a GGUF file, or a hub id. Only its tokenizer is read. None: that of
    the workers, to be asked for by `ask_workers` before the router runs."""
    secret: bytes = field(repr=False)
    """The cluster secret."""
    served_model_name: str | None = None
    """The id clients use; None is `model`."""
    revision: str | None = None
    chat_template: str | None = None
    """Path of a Jinja file; None is the model's own."""
    tool_call_parser: str | None = None
    """How the model writes tool calls: one of `router.tools.FORMATS`; None is told from the chat template."""
    host: str = "127.0.0.1"
    port: int = 8000
    """0: chosen by the system, and reported."""
    grpc_port: int | None = None
    """Of `baton.v1.Inference`; 0: chosen by the system, and reported. None: no gRPC."""
    tls: TlsFiles | None = None
    """Of both faces for clients; with `ca_certs` clients must show a certificate."""
    cluster_tls: TlsFiles | None = None
    """Towards workers."""
    api_keys: tuple[ApiKey, ...] = field(default=(), repr=False)
    """When there are any, clients must send one of them."""
    workers: tuple[str, ...] = ()
    """gRPC addresses, for good."""
    workers_file: str | None = None
    """One address a line; read again whenever it is replaced."""
    discovery: Discovery | None = None
    """Finds workers by other means than a list or a file."""
    cluster_file: str | None = None
    """What a supervisor knows of all roles, as JSON, replaced atomically; part of `/status`."""
    request_timeout: float = 600.0
    """Seconds that one request may take in all."""
    client_timeout: float = 30.0
    """Seconds that a client may take to send a body, or to read what waits for it."""
    keep_alive: float = 75.0
    """Seconds that a connection may be idle, and that headers may take."""
    worker_wait: float = 60.0
    """Seconds that a request waits while a role has no worker."""
    drain_timeout: float = 60.0
    """Seconds that running requests have after SIGTERM."""
    overflow: bool = True
    """Decode workers prefill where the second token is there earlier then."""
    routing_policy: str = "sticky"
    """How a prefill worker is chosen: one of `router.policy.PREFILL_POLICIES`."""
    max_body_bytes: int = 16 << 20
    max_waiting_tokens: int = 1_000_000
    """Prompt tokens of requests without a first token; beyond it clients get 429."""
    log_format: logs.Format = "text"
    log_level: logs.Level = "info"
    otlp_endpoint: str | None = None
    """http://HOST:PORT of an OTLP/gRPC receiver of traces; None: no traces."""
    processes: int = 1
    """That listen on the same port, and share the work."""
    admin_host: str = "127.0.0.1"
    admin_port: int | None = None
    """Where `/metrics` and `/status` are answered for all processes; 0: chosen by the system, and reported.
    None: by the one process, on `port`."""
    command: tuple[str, ...] = ()
    """Starts one more process of this router, given further flags. Needed with an admin port."""
    process_number: int | None = None
    """Of this process, when a supervisor started it; then `control_fd` is its end of the socket pair."""
    control_fd: int | None = None
    index: int = 0
    """Its number among the routers, for people."""
    title: str = "baton"
    """What the titles of its processes begin with."""
    ready_fd: int | None = None
    id: bytes = field(default_factory=lambda: os.urandom(16))
    """Names this life of it to workers and in logs."""

    def __post_init__(self) -> None:
        def require(flag: str, holds: bool, bound: str, value: object) -> None:
            if not holds:
                raise ValueError(f"--{flag} must be {bound}, not {value!r}")

        require("port", 0 <= self.port <= 65_535, "0 to 65535", self.port)
        require("grpc-port", 0 <= (self.grpc_port or 0) <= 65_535, "0 to 65535", self.grpc_port)
        require("request-timeout", self.request_timeout > 0, "above 0", self.request_timeout)
        require("client-timeout", self.client_timeout > 0, "above 0", self.client_timeout)
        require("timeout-keep-alive", self.keep_alive > 0, "above 0", self.keep_alive)
        require("worker-wait", self.worker_wait >= 0, "at least 0", self.worker_wait)
        require("drain-timeout", self.drain_timeout >= 0, "at least 0", self.drain_timeout)
        require("max-body-bytes", self.max_body_bytes > 0, "above 0", self.max_body_bytes)
        require("max-waiting-tokens", self.max_waiting_tokens > 0, "above 0", self.max_waiting_tokens)
        require("admin-port", 0 <= (self.admin_port or 0) <= 65_535, "0 to 65535", self.admin_port)
        require("router-processes", self.processes >= 1, "at least 1", self.processes)
        if self.processes > 1 and self.admin_port is None:
            raise ValueError(f"--router-processes {self.processes}: needs --admin-port, to speak for all")
        require("index", self.index >= 0, "at least 0", self.index)
        parsers = ", ".join(FORMATS)
        require(
            "tool-call-parser",
            self.tool_call_parser in (None, *FORMATS),
            f"one of {parsers}",
            self.tool_call_parser,
        )
        names = ", ".join(PREFILL_POLICIES)
        require(
            "routing-policy", self.routing_policy in PREFILL_POLICIES, f"one of {names}", self.routing_policy
        )
        for address in self.workers:
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal() or not 1 <= int(port) <= 65_535:
                raise ValueError(f"--worker must be HOST:PORT, not {address!r}")

    @property
    def incarnation(self) -> str:
        return self.id[:8].hex()

    @property
    def supervised(self) -> bool:
        """It is one of several processes."""
        return self.process_number is not None

    @property
    def model_name(self) -> str:
        name = self.served_model_name or self.model
        assert name is not None, "a router runs once its model is known"
        return name

    def discovered(self) -> Discovery:
        """Where the workers are found."""
        if self.discovery is not None:
            return self.discovery
        if self.workers_file is not None:
            return FileDiscovery(self.workers_file, self.workers)
        return StaticDiscovery(self.workers)

    def logging(self) -> dict[str, Any]:
        speaker = {"role": "router", "index": self.index, "incarnation": self.incarnation}
        return logs.log_config(self.log_format, self.log_level, speaker, exception_text=False)
