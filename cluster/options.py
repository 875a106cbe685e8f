"""Every option of every command, once. See `parameters` for how these become flags, variables and file keys.

Names are vLLM's where vLLM has the thing. A group is what several commands have in common, or what belongs
together in `--help`; `baton serve` passes groups on to the roles it starts.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

import typer
from typer.models import OptionInfo

if TYPE_CHECKING:
    from router.keys import ApiKey
    from rpc import TlsFiles


def opt(
    text: str,
    metavar: str | None = None,
    *,
    shown: str | bool = True,
    check: Callable[[Any], Any] | None = None,
    **more: Any,
) -> OptionInfo:
    """A typer option: its help, what its value is called, how its default is shown where that is no value."""
    return typer.Option(help=text, metavar=metavar, show_default=shown, callback=check, **more)


def directory(text: str, *, shown: str | bool = True) -> OptionInfo:
    return opt(text, "DIR", shown=shown, file_okay=False)


def between(least: float, most: float = math.inf) -> Callable[[Any], Any]:
    """A check of a number's range; typer's own would fill the columns of `--help`."""

    def check(value: Any) -> Any:
        if value is not None and not least <= value <= most:
            bound = f"at least {least}" if most == math.inf else f"{least} to {most}"
            raise typer.BadParameter(f"{value} is out of range: {bound}.")
        return value

    return check


PORT: dict[str, Any] = {"check": between(0, 65535)}
OLD_FILE: dict[str, Any] = {"exists": True, "dir_okay": False}
NO_ARGV = "Rather set BATON_API_KEY: arguments are visible to everybody on the machine."


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
    enable_prefix_caching: Annotated[bool, opt("Keep the KV of common prompt prefixes.")] = False
    block_size: Annotated[
        int | None,
        opt("Tokens in one KV block.", "TOKENS", shown="128 on GPUs, 16 on CPUs", check=between(1)),
    ] = None
    num_blocks: Annotated[
        int | None, opt("KV blocks in the pool.", "N", shown="what fits the memory", check=between(2))
    ] = None
    gpu_memory_utilization: Annotated[
        float, opt("Share of the GPU's memory for weights and KV.", "SHARE", check=between(0.05, 1.0))
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


@dataclass(frozen=True)
class TransferOptions:
    """How KV travels."""

    panel: ClassVar[str] = "KV transfer"
    kv_lanes: Annotated[
        int, opt("TCP connections from a decode worker to each prefill worker.", "N", check=between(1))
    ] = 4
    kv_slot_bytes: Annotated[
        int, opt("One slice of KV on the wire, one slot of the staging arena.", "BYTES", check=between(1))
    ] = 1 << 20
    kv_slots: Annotated[int, opt("Slots of a worker's staging arena.", "N", check=between(1))] = 64


@dataclass(frozen=True)
class DeadlineOptions:
    """How long a worker waits for anything, in seconds."""

    panel: ClassVar[str] = "Deadlines"
    hold_timeout: Annotated[float, opt("A finished prefill waits for a decode worker.", "S")] = 30.0
    transfer_timeout: Annotated[float, opt("A KV transfer makes no progress.", "S")] = 10.0
    tombstone_timeout: Annotated[float, opt("The id of a closed transfer is remembered.", "S")] = 60.0
    peer_timeout: Annotated[float, opt("The other end of the lanes is silent.", "S")] = 5.0
    engine_timeout: Annotated[float, opt("An engine gives no sign of life.", "S")] = 10.0


@dataclass(frozen=True)
class DrainOptions:
    panel: ClassVar[str] = "Deadlines"
    drain_timeout: Annotated[float, opt("Running requests finish after SIGTERM.", "S")] = 60.0


def _tls(prefix: str, *files: Path | None, mutual: bool = False) -> TlsFiles | None:
    from rpc import TlsFiles

    certfile, keyfile, ca_certs = (None if path is None else str(path) for path in files)
    return TlsFiles.of(prefix, certfile, keyfile, ca_certs, mutual=mutual)


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
        return _tls("ssl", self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs)

    def keys(self) -> tuple[ApiKey, ...]:
        """Raises ValueError naming what is wrong with one."""
        from router import api_keys

        return api_keys(self.api_key, None if self.api_key_file is None else str(self.api_key_file))


class PoolSize(NamedTuple):
    """`2`, or `1:4` for a pool that grows and shrinks with its load."""

    least: int
    most: int

    @classmethod
    def parse(cls, value: object) -> PoolSize:
        if isinstance(value, PoolSize):
            return value
        words = str(value).split(":")
        try:
            least, most = int(words[0]), int(words[-1])
        except ValueError:
            least = most = 0
        if not 1 <= least <= most or len(words) > 2:
            raise typer.BadParameter(f"{value} is neither a number of workers (2) nor a range of it (1:4).")
        return cls(least, most)

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}:{self.most}"


ONE = PoolSize(1, 1)


def pool_size(text: str) -> OptionInfo:
    return opt(text, "N or MIN:MAX", shown="1", parser=PoolSize.parse)


@dataclass(frozen=True)
class PoolOptions:
    """What `baton serve` starts."""

    panel: ClassVar[str] = "Cluster"
    prefill: Annotated[PoolSize, pool_size("Prefill workers; 1:4 follows the load.")] = ONE
    decode: Annotated[PoolSize, pool_size("Decode workers; 1:4 follows the load.")] = ONE
    ttft_target: Annotated[
        float, opt("Prefill grows to give the first token within it.", "MS", check=between(1))
    ] = 1000.0
    ttit_target: TtitTarget = None
    shrink_after: Annotated[
        float, opt("A worker was too many for this long before it goes.", "S", check=between(5))
    ] = 60.0


@dataclass(frozen=True)
class StartOptions:
    panel: ClassVar[str] = "Cluster"
    timings: Annotated[
        bool, opt("Show what the start spent its time on; asks for a first token at its end.")
    ] = False


@dataclass(frozen=True)
class RayOptions:
    panel: ClassVar[str] = "Cluster"
    placement: Annotated[
        Literal["spread", "pack", "pair"],
        opt(
            "With --ray-address. spread: the emptiest machine first; pack: fill one to half, then the next; "
            "pair: prefill I beside decode I on one machine, for NVLink between them.",
        ),
    ] = "spread"
    prefill_nodes: Annotated[
        list[str], opt("With --ray-address: prefill workers only on nodes with this label.", "KEY=VALUE")
    ] = field(default_factory=list)
    decode_nodes: Annotated[
        list[str], opt("With --ray-address: decode workers only on nodes with this label.", "KEY=VALUE")
    ] = field(default_factory=list)
    ray_address: Annotated[
        str | None,
        opt(
            "Join this Ray cluster; the workers then outlive this command.",
            "HOST:PORT",
            shown="a local Ray that ends with this command",
        ),
    ] = None


@dataclass(frozen=True)
class SecretOptions:
    panel: ClassVar[str] = "Cluster"
    cluster_secret_file: Annotated[
        Path | None,
        opt("Secret that routers and workers share.", shown="BATON_CLUSTER_SECRET", **OLD_FILE),
    ] = None
    cluster_certfile: Annotated[
        Path | None,
        opt(
            "Mutual TLS between routers and workers: this process' certificate, PEM; a worker's is for the "
            "name baton-worker.",
            shown="no TLS",
            **OLD_FILE,
        ),
    ] = None
    cluster_keyfile: Annotated[Path | None, opt("Its private key, PEM.", shown="none", **OLD_FILE)] = None
    cluster_ca_certs: Annotated[
        Path | None, opt("Who signs these certificates, PEM.", shown="none", **OLD_FILE)
    ] = None

    def tls(self) -> TlsFiles | None:
        """Raises ValueError for files that are missing or cannot be used."""
        return _tls(
            "cluster", self.cluster_certfile, self.cluster_keyfile, self.cluster_ca_certs, mutual=True
        )


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


@dataclass(frozen=True)
class WorkerRole:
    """`baton prefill` and `baton decode`."""

    model: ModelOptions
    engine: EngineOptions
    pace: PaceOptions
    network: WorkerOptions
    transfer: TransferOptions
    deadlines: DeadlineOptions
    drain: DrainOptions
    secret: SecretOptions
    process: RoleOptions
    run_dir: RunDirOptions
    traces: TraceOptions
    observe: ObserveOptions


@dataclass(frozen=True)
class RouterRole:
    """`baton router`."""

    model: ModelOptions
    front: FrontOptions
    membership: MembershipOptions
    drain: DrainOptions
    secret: SecretOptions
    process: RoleOptions
    observe: ObserveOptions
    one_of_several: RouterProcessOptions


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
class DoctorOptions:
    """What `baton doctor` looks at: this machine, unless told otherwise."""

    panel: ClassVar[str] = "Checks"
    cluster: Annotated[bool, opt("Look at a running cluster, through its router at --url.")] = False
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
