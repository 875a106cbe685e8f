"""What clients of a router see."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from cluster.options.declare import NO_ARGV, OLD_FILE, PORT, between, opt
from cluster.options.security import tls_files

if TYPE_CHECKING:
    from router.admission.keys import ApiKey
    from rpc import TlsFiles


@dataclass(frozen=True)
class FrontOptions:
    """What clients see."""

    panel: ClassVar[str] = "Clients"
    host: Annotated[str, opt("Address to listen on; 0.0.0.0 is every interface.", "ADDRESS")] = "127.0.0.1"
    port: Annotated[int, opt("Port of the OpenAI API.", "PORT", **PORT)] = 8000
    grpc_port: Annotated[
        int | None, opt("Port of the same as gRPC (baton.v1.Inference).", "PORT", shown="none", **PORT)
    ] = None
    router_processes: Annotated[
        int, opt("Processes of a router, all listening on these ports.", "N", check=between(1, 256))
    ] = 1
    admin_port: Annotated[
        int | None,
        opt(
            "Metrics, status and health for all processes of a router; then no longer on --port.",
            "PORT",
            shown="none; with several processes one is chosen",
            **PORT,
        ),
    ] = None
    admin_host: Annotated[str, opt("Address of the admin port.", "ADDRESS")] = "127.0.0.1"
    chat_template: Annotated[Path | None, opt("A Jinja file.", shown="the model's own", **OLD_FILE)] = None
    tool_call_parser: Annotated[
        Literal["hermes", "llama3_json", "mistral"] | None,
        opt("How the model writes tool calls.", "FORMAT", shown="told from the chat template"),
    ] = None
    api_key: Annotated[list[str], opt(f"Ask clients for one of these keys. {NO_ARGV}", "KEY")] = field(
        default_factory=list
    )
    api_key_file: Annotated[
        Path | None,
        opt("Keys with their names and limits, as TOML; see docs/operations.md.", shown="none", **OLD_FILE),
    ] = None
    ssl_certfile: Annotated[
        Path | None, opt("Serve clients with TLS: the certificate chain, PEM.", shown="no TLS", **OLD_FILE)
    ] = None
    ssl_keyfile: Annotated[Path | None, opt("Its private key, PEM.", shown="none", **OLD_FILE)] = None
    ssl_ca_certs: Annotated[
        Path | None,
        opt("Clients must show a certificate that one of these signed.", shown="none", **OLD_FILE),
    ] = None
    max_body_bytes: Annotated[int, opt("Longest body of a request.", "BYTES", check=between(1))] = 16 << 20
    max_waiting_tokens: Annotated[
        int, opt("Prompt tokens of requests without an answer; beyond it, 429.", "TOKENS", check=between(1))
    ] = 1_000_000
    request_timeout: Annotated[float, opt("What one request may take in all.", "S", check=between(1))] = 600.0
    client_timeout: Annotated[
        float, opt("A client takes to send a body, or to read what waits for it.", "S", check=between(0.1))
    ] = 30.0
    timeout_keep_alive: Annotated[
        float, opt("A connection is idle, or takes for its headers.", "S", check=between(0.1))
    ] = 75.0
    worker_wait: Annotated[
        float, opt("How long requests wait while a role has no worker.", "S", check=between(0))
    ] = 60.0  # fmt: skip
    no_overflow: Annotated[
        bool, opt("Never let decode workers prefill what is short, or what prefill workers are late with.")
    ] = False
    routing_policy: Annotated[
        Literal["sticky", "round-robin"], opt("How a prefill worker is chosen.", "POLICY")
    ] = "sticky"

    def tls(self) -> TlsFiles | None:
        """Raises ValueError for files that are missing or cannot be used."""
        return tls_files("ssl", self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs)

    def keys(self) -> tuple[ApiKey, ...]:
        """Raises ValueError naming what is wrong with one."""
        from router import api_keys

        return api_keys(self.api_key, None if self.api_key_file is None else str(self.api_key_file))
