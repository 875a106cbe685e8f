"""Options of the client side of a router."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from baton.cluster.options.declare import NO_ARGV, OLD_FILE, PORT, between, opt
from baton.cluster.options.security import ServerTlsOptions

if TYPE_CHECKING:
    from baton.router.admission.keys import ApiKey


@dataclass(frozen=True)
class FrontOptions(ServerTlsOptions):
    """How a router serves clients."""

    panel: ClassVar[str] = "Clients"
    host: Annotated[str, opt("Address to listen on; 0.0.0.0 is all interfaces.", "ADDRESS")] = "127.0.0.1"
    port: Annotated[int, opt("Port of the OpenAI API.", "PORT", **PORT)] = 8000
    grpc_port: Annotated[
        int | None, opt("Port of the gRPC API (baton.v1.Inference).", "PORT", shown="none", **PORT)
    ] = None
    router_processes: Annotated[
        int, opt("Router processes that listen on the same ports.", "N", check=between(1, 256))
    ] = 1
    admin_port: Annotated[
        int | None,
        opt(
            "Port of metrics, status and health of all router processes. --port then has no metrics.",
            "PORT",
            shown="none; with several processes the system chooses",
            **PORT,
        ),
    ] = None
    admin_host: Annotated[str, opt("Address of the admin port.", "ADDRESS")] = "127.0.0.1"
    chat_template: Annotated[Path | None, opt("A Jinja file.", shown="the model's own", **OLD_FILE)] = None
    tool_call_parser: Annotated[
        Literal["hermes", "llama3_json", "mistral"] | None,
        opt("How the model writes tool calls.", shown="as in the chat template"),
    ] = None
    reasoning_parser: Annotated[
        Literal["deepseek_r1", "qwen3", "none"] | None,
        opt("How the model writes its reasoning.", shown="as in the chat template"),
    ] = None
    generation_config: Annotated[
        str,
        opt(
            "Sampling defaults: auto (the model's generation_config.json), vllm (none) or a directory with "
            "that file.",
            "auto|vllm|PATH",
        ),
    ] = "auto"
    allowed_origins: Annotated[
        list[str],
        opt("Let pages of these origins use the API in a browser (CORS); * is any.", "ORIGIN", shown="none"),
    ] = field(default_factory=list)
    api_key: Annotated[list[str], opt(f"Require one of these keys from clients. {NO_ARGV}", "KEY")] = field(
        default_factory=list
    )
    api_key_file: Annotated[
        Path | None,
        opt("TOML file of keys, names and limits; see docs/operations.md.", shown="none", **OLD_FILE),
    ] = None
    max_body_bytes: Annotated[int, opt("Largest body of a request.", "BYTES", check=between(1))] = 16 << 20
    max_waiting_tokens: Annotated[
        int,
        opt("Most prompt tokens of requests without a first token; then 429.", "TOKENS", check=between(1)),
    ] = 1_000_000
    request_timeout: Annotated[float, opt("Longest duration of a request.", "S", check=between(1))] = 600.0
    client_timeout: Annotated[
        float, opt("Longest time to receive a body, or for a client to read.", "S", check=between(0.1))
    ] = 30.0
    timeout_keep_alive: Annotated[
        float, opt("Longest idle time of a connection, or to receive headers.", "S", check=between(0.1))
    ] = 75.0
    worker_wait: Annotated[
        float, opt("Longest wait of a request while a pool has no worker.", "S", check=between(0))
    ] = 60.0  # fmt: skip
    no_overflow: Annotated[bool, opt("Only handovers: no worker both prefills and decodes a request.")] = (
        False
    )
    no_prefix_fetches: Annotated[
        bool, opt("Workers compute what only another worker has in its prefix cache.")
    ] = False
    routing_policy: Annotated[
        Literal["sticky", "round-robin"], opt("How the router chooses a prefill worker.")
    ] = "sticky"

    def keys(self) -> tuple[ApiKey, ...]:
        """The API keys of both options. Raises ValueError for an invalid key."""
        from baton.router.admission.keys import api_keys

        return api_keys(self.api_key, None if self.api_key_file is None else str(self.api_key_file))
