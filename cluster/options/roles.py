"""Options of each process of a role, and all options of a worker, a router and a picker."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from baton.cluster.options.engine import EngineOptions, ModelOptions
from baton.cluster.options.parameters import (
    NO_ARGV,
    OLD_FILE,
    PORT,
    advanced,
    argument,
    between,
    check_size,
    directory,
    opt,
)

if TYPE_CHECKING:
    from baton.router.admission.keys import ApiKey
    from baton.rpc.tls import TlsFiles


@dataclass(frozen=True)
class WorkerOptions:
    """Where a worker listens. With port 0 the system chooses a port, and the log shows it."""

    panel: ClassVar[str] = "Network"
    host: str = opt("127.0.0.1", "Address at which routers reach this worker.", "ADDRESS")
    port: int = opt(0, "Port of gRPC, for routers.", "PORT", **PORT)
    kv_host: str | None = advanced(
        None,
        "Addresses or interfaces of the network for KV, of one card or several.",
        "NIC,NIC",
        shown="as --host; of all addresses the card nearest to the GPU",
    )
    kv_port: int = opt(0, "Port of KV lanes.", "PORT", **PORT)
    metrics_port: int = opt(0, "Port of Prometheus metrics.", "PORT", **PORT)
    kv_events_endpoint: str | None = advanced(
        None,
        "Publish what enters and leaves the prefix cache there (ZeroMQ), as vLLM does.",
        "tcp://ADDRESS:PORT",
    )
    kv_events_topic: str = advanced("", "Topic of the events of --advanced.kv-events-endpoint.", "TEXT")
    group: str | None = opt(
        None, "The group of this worker, which started it, as a JSON object.", "JSON", hidden=True
    )


@dataclass(frozen=True)
class MembershipOptions:
    panel: ClassVar[str] = "Workers"
    worker: list[str] = opt([], "gRPC address of a worker of either role; repeat it.", "HOST:PORT")
    workers_file: Path | None = opt(
        None, "File with one worker address per line, watched for changes.", dir_okay=False
    )
    kubernetes_service: list[str] = opt(
        [], "Service in this pod's namespace whose ready endpoints are workers; repeat it.", "NAME"
    )
    decode_only: bool = advanced(
        False,
        "The cluster has no prefill workers: be ready with a decode worker, which computes prompts, too.",
    )
    cluster_file: Path | None = opt(
        None, "File in which a supervisor reports all roles (JSON), for /status.", dir_okay=False, hidden=True
    )
    admin_socket: Path | None = opt(
        None,
        "Unix socket on which a supervisor asks for health and metrics; clients cannot fill it.",
        dir_okay=False,
        hidden=True,
    )


@dataclass(frozen=True)
class RoleOptions:
    """The identity of a role's process, and its tie to its supervisor."""

    panel: ClassVar[str] = "Process"
    index: int = opt(0, "Number of this worker or router, for people.", "N", check=between(0), hidden=True)
    title: str = opt(
        "baton", "Prefix of the process titles; `baton serve` adds its port.", "TEXT", hidden=True
    )
    ready_fd: int | None = opt(
        None,
        "Report progress as JSON lines to this descriptor, and end when its reader ends.",
        "FD",
        check=between(3),
        hidden=True,
    )


@dataclass(frozen=True)
class FileOptions:
    panel: ClassVar[str] = "Files"
    run_dir: Path | None = directory(
        "Parent of a new directory for sockets and logs.", shown="$TMPDIR", advanced=True
    )
    trace_dir: Path | None = directory("Write Chrome traces of KV transfers here.", advanced=True)


@dataclass(frozen=True)
class LogOptions:
    panel: ClassVar[str] = "Files"
    log_dir: Path | None = directory("Keep logs here.", shown="the run directory, removed at the end")


@dataclass(frozen=True)
class LogLineOptions:
    panel: ClassVar[str] = "Logs and traces"
    log_format: Literal["text", "json"] = opt("text", "Format of a log line: for people, or JSON.")
    log_level: Literal["debug", "info", "warning", "error"] = opt(
        "info", "Lowest level that is logged. debug follows each request from process to process."
    )


@dataclass(frozen=True)
class ObserveOptions(LogLineOptions):
    """Logs and traces. OTEL_EXPORTER_OTLP_ENDPOINT is the default of the flag."""

    otlp_endpoint: str | None = advanced(
        None,
        "Send OpenTelemetry traces to this OTLP/gRPC receiver.",
        "URL",
        shown="OTEL_EXPORTER_OTLP_ENDPOINT, or none",
    )

    @property
    def endpoint(self) -> str | None:
        return self.otlp_endpoint or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or None


def tls_files(prefix: str, *files: Path | None, mutual: bool = False) -> TlsFiles | None:
    from baton.rpc.tls import TlsFiles

    certfile, keyfile, ca_certs = (None if path is None else str(path) for path in files)
    return TlsFiles.of(prefix, certfile, keyfile, ca_certs, mutual=mutual)


@dataclass(frozen=True)
class SecretOptions:
    panel: ClassVar[str] = "Cluster"
    cluster_secret_file: Path | None = opt(
        None,
        "Secret that routers and workers share, which commands to workers need, too.",
        shown="BATON_CLUSTER_SECRET, or that of a `baton serve` of yours on this machine, by --url",
        **OLD_FILE,
    )
    cluster_ssl_certfile: Path | None = opt(
        None,
        "Certificate (PEM) of this process, for mutual TLS between routers and workers. A worker's "
        "certificate must have the name baton-worker.",
        shown="made from the secret",
        **OLD_FILE,
    )
    cluster_ssl_keyfile: Path | None = opt(None, "Private key (PEM) of --cluster-ssl-certfile.", **OLD_FILE)
    cluster_ssl_ca_certs: Path | None = opt(
        None, "Authorities (PEM) that sign these certificates.", **OLD_FILE
    )

    def tls(self) -> TlsFiles | None:
        """The TLS files of this process; None: the secret makes one. Raises ValueError for unusable files."""
        return tls_files(
            "cluster-ssl",
            self.cluster_ssl_certfile,
            self.cluster_ssl_keyfile,
            self.cluster_ssl_ca_certs,
            mutual=True,
        )


@dataclass(frozen=True)
class ServerTlsOptions:
    """TLS for the clients of a process."""

    ssl_certfile: Path | None = opt(
        None, "Certificate chain (PEM) to serve clients with TLS.", shown="no TLS", **OLD_FILE
    )
    ssl_keyfile: Path | None = opt(None, "Private key (PEM) of --ssl-certfile.", **OLD_FILE)
    ssl_ca_certs: Path | None = opt(
        None, "Authorities (PEM) that must have signed the clients' certificates.", **OLD_FILE
    )

    def tls(self) -> TlsFiles | None:
        """The TLS files for clients; None without TLS. Raises ValueError for unusable files."""
        return tls_files("ssl", self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs)


@dataclass(frozen=True)
class TransferOptions:
    panel: ClassVar[str] = "KV transfer"
    kv_lanes: int = advanced(
        4, "TCP connections to each worker from which KV is fetched.", "N", check=between(1)
    )
    kv_connector: Literal["auto", "tcp", "nixl"] = opt(
        "auto",
        "How KV moves between workers. auto: workers of one host read it from memory of each other "
        "where a test copy succeeds; all others use TCP. nixl: workers with this setting read it with "
        "NIXL, which must be installed.",
    )
    kv_encrypt: bool = opt(
        False, "Encrypt KV that moves over TCP (AES-256-GCM). All workers of a cluster must use it."
    )
    kv_store: str | None = opt(
        None,
        "A store for KV that all workers share, and that outlives them: the master of a Mooncake Store. "
        "`serve` starts one for local[?size=SIZE].",
        "mooncake://HOST:PORT|local",
    )
    kv_bind: str | None = advanced(
        None,
        "Interfaces or local addresses over which a worker spreads the lanes that it opens.",
        "NIC,NIC",
        shown="those of --advanced.kv-host, if it has several; by route",
    )
    kv_slot_size: str = advanced(
        "2MiB", "Size of a slice of KV and of a slot of the staging arena.", "SIZE", check=check_size
    )
    kv_slots: int = advanced(
        64, "Slots of each of a worker's two staging arenas: one sends, one receives.", "N", check=between(1)
    )


@dataclass(frozen=True)
class DeadlineOptions:
    """How a worker tells failures."""

    panel: ClassVar[str] = "Deadlines"
    failure_timeout: float = opt(
        10.0,
        "A silent process or KV transfer has failed after this time, a silent peer after half of it. A "
        "finished prefill waits three times as long for a decode worker.",
        "S",
    )


@dataclass(frozen=True)
class DrainOptions:
    panel: ClassVar[str] = "Deadlines"
    drain_timeout: float = opt(60.0, "After SIGTERM, time for running requests to finish.", "S")


@dataclass(frozen=True)
class FrontOptions(ServerTlsOptions):
    panel: ClassVar[str] = "Clients"
    host: str = opt("127.0.0.1", "Address to listen on; :: is all addresses, of IPv4, too.", "ADDRESS")
    port: int = opt(8000, "Port of the OpenAI API.", "PORT", **PORT)
    grpc_port: int | None = opt(None, "Port of the gRPC API (baton.v1.Inference).", "PORT", **PORT)
    router_processes: int = opt(
        1, "Router processes that listen on the same ports.", "N", check=between(1, 256)
    )
    admin_port: int | None = opt(
        None,
        "Port of metrics, status and health of all router processes. --port then has no metrics.",
        "PORT",
        shown="none; with several processes the system chooses",
        **PORT,
    )
    admin_host: str = advanced("127.0.0.1", "Address of the admin port.", "ADDRESS")
    chat_template: Path | None = opt(None, "A Jinja file.", shown="the model's own", **OLD_FILE)
    tool_call_parser: (
        Literal[
            "deepseek_v3",
            "deepseek_v31",
            "deepseek_v32",
            "deepseek_v4",
            "gemma4",
            "glm45",
            "glm47",
            "hermes",
            "kimi_k2",
            "lfm2",
            "llama3_json",
            "minimax_m2",
            "mistral",
            "openai",
            "pythonic",
            "qwen3_coder",
            "seed_oss",
        ]
        | None
    ) = opt(None, "How the model writes tool calls.", shown="as in the chat template")
    reasoning_parser: (
        Literal[
            "deepseek_r1",
            "deepseek_v3",
            "gemma4",
            "glm45",
            "kimi_k2",
            "mistral",
            "openai_gptoss",
            "qwen3",
            "seed_oss",
            "step3p5",
            "none",
        ]
        | None
    ) = opt(None, "How the model writes its reasoning.", shown="as in the chat template")
    generation_config: str = advanced(
        "auto",
        "Sampling defaults: auto (the model's generation_config.json), vllm (none) or a directory with "
        "that file.",
        "auto|vllm|PATH",
    )
    enable_per_request_metrics: bool = advanced(
        False, "Tell clients how long the parts of their request took."
    )
    enable_force_include_usage: bool = advanced(False, "Each chunk of a stream has its usage.")
    return_tokens_as_token_ids: bool = advanced(
        False, "Log probabilities name each token by its id, token_id:N."
    )
    allowed_origins: list[str] = opt(
        [], "Let pages of these origins use the API in a browser (CORS); * is any.", "ORIGIN"
    )
    api_key: list[str] = opt([], f"Require one of these keys from clients. {NO_ARGV}", "KEY")
    api_key_file: Path | None = opt(
        None, "TOML file of keys, names and limits; see docs/secure.md.", **OLD_FILE
    )
    admin_key: str | None = advanced(
        None,
        "Key of calls that replace weights or pause workers. Prefer BATON_ADMIN_KEY, which others "
        "cannot read.",
        "KEY",
        shown="there are no such calls",
    )
    admin_key_file: Path | None = opt(
        None,
        "File with the key of calls that replace weights or pause workers.",
        shown="BATON_ADMIN_KEY, or there are no such calls",
        **OLD_FILE,
    )
    max_body_size: str = advanced(
        "16MiB",
        "Largest body of a request, and most bytes of images that it names by URL.",
        "SIZE",
        check=check_size,
    )
    allowed_media_domains: list[str] = opt(
        [], "Fetch images of requests from this host; repeat it.", "HOST", shown="no image is fetched"
    )
    max_images: int = advanced(256, "Most images of a request.", "N", check=between(1, 256))
    max_wait: float = opt(
        60.0,
        "A request that is expected to wait longer for its turn gets 429 at once; the header x-max-wait "
        "lowers this.",
        "S",
        check=between(0, 86_400),
    )
    batch_dir: Path | None = directory("Keep files and batches of OpenAI's API here.", shown="there are none")
    batch_dir_size: str = advanced("4GiB", "Bytes of the files in --batch-dir.", "SIZE", check=check_size)
    ttft_target: float | None = opt(
        None,
        "Target time to first token. Requests are placed by it, and the prefill pool grows to meet it.",
        "MS",
        shown="20 times the target between tokens; 1000 to grow the pool",
        check=between(1),
    )
    request_timeout: float = opt(600.0, "Longest duration of a request.", "S", check=between(1, 1_000_000))
    client_timeout: float = advanced(
        30.0, "Longest time to receive a body, or for a client to read.", "S", check=between(0.1)
    )
    timeout_keep_alive: float = advanced(
        75.0, "Longest idle time of a connection, or to receive headers.", "S", check=between(0.1)
    )
    worker_wait: float = advanced(
        60.0, "Longest wait of a request while a pool has no worker.", "S", check=between(0)
    )
    no_overflow: bool = advanced(False, "Only handovers: no worker both prefills and decodes a request.")
    no_prefix_fetches: bool = advanced(
        False, "Workers compute what only another worker has in its prefix cache."
    )
    no_split_prompts: bool = advanced(
        False, "Each prompt is computed by one worker, and never by several at once."
    )
    record_plans: str | None = advanced(
        None, "Write what plans follow from to a file whose name begins so, to find a defect.", "PATH"
    )
    no_access_log: bool = advanced(
        False, "Write no line to the router's log for each request: key, status, tokens and times."
    )
    routing_policy: Literal["sticky", "round-robin"] = advanced(
        "sticky", "How the router chooses a prefill worker."
    )

    def keys(self) -> tuple[ApiKey, ...]:
        """The API keys of both options. Raises ValueError for an invalid key."""
        from baton.router.admission.keys import api_keys

        return api_keys(self.api_key, None if self.api_key_file is None else str(self.api_key_file))

    def key_of_admin(self) -> ApiKey | None:
        """The key of either option. Raises ValueError if there are two, or if it is empty."""
        from baton.router.admission.keys import MAX_FILE_BYTES, ApiKey

        if self.admin_key_file is None:
            return None if self.admin_key is None else ApiKey.of("admin", self.admin_key)
        if self.admin_key is not None:
            raise ValueError("--admin-key-file: leave out --advanced.admin-key and BATON_ADMIN_KEY")
        try:
            with self.admin_key_file.open(errors="replace") as file:
                return ApiKey.of("admin", file.read(MAX_FILE_BYTES))
        except OSError as error:
            raise ValueError(f"--admin-key-file {self.admin_key_file}: {error.strerror}") from error


@dataclass(frozen=True)
class PickerOptions(ServerTlsOptions):
    panel: ClassVar[str] = "Gateways and routers"
    host: str = opt("127.0.0.1", "Address to listen on; :: is all addresses, of IPv4, too.", "ADDRESS")
    port: int = opt(9002, "Port of gRPC (Envoy's ext_proc), for gateways.", "PORT", **PORT)
    router: list[str] = opt([], "HTTP address of a router, as the gateway names it; repeat it.", "IP:PORT")
    kubernetes_service: list[str] = opt(
        [], "Service in this pod's namespace whose ready endpoints (port http) are routers.", "NAME"
    )
    router_metrics_port: int | None = advanced(
        None, "Port of each router's metrics.", "PORT", shown="that of its address", **PORT
    )


@dataclass(frozen=True)
class PickerRole:
    picker: PickerOptions
    drain: DrainOptions
    logs: LogLineOptions


@dataclass(frozen=True)
class StoreAction:
    action: Literal["serve", "clear"] = argument("serve: give memory. clear: remove the KV of this cluster.")


@dataclass(frozen=True)
class StoreOptions:
    panel: ClassVar[str] = "Store"
    kv_store: str | None = opt(
        None,
        "The store. Without it, serve starts a master. With it, serve adds memory to that store.",
        "mooncake://HOST:PORT",
    )
    host: str = opt("127.0.0.1", "Address at which workers and other stores reach this one.", "ADDRESS")
    port: int = opt(
        50051,
        "Port of the master; with --kv-store, of the process that gives memory.",
        "PORT",
        check=between(1, 65535),
    )
    metrics_port: int = opt(0, "Port of the master's Prometheus metrics.", "PORT", **PORT)
    size: str = opt("4GiB", "Memory that this machine gives; 0: none.", "SIZE", check=check_size)
    protocol: Literal["tcp", "rdma"] = advanced("tcp", "How objects move.")
    etcd: str | None = advanced(None, "etcd with which several masters elect one that leads.", "HOST:PORT")
    tenant: str | None = advanced(
        None, "clear: only the KV of this key of --api-key-file.", "NAME", shown="all"
    )
    api_key_file: Path | None = opt(None, "TOML file of API keys, as for routers.", **OLD_FILE)


@dataclass(frozen=True)
class StoreRole:
    command: StoreAction
    store: StoreOptions
    secret: SecretOptions
    process: RoleOptions = RoleOptions()


@dataclass(frozen=True)
class WorkerRole:
    model: ModelOptions
    engine: EngineOptions
    network: WorkerOptions = WorkerOptions()
    transfer: TransferOptions = TransferOptions()
    deadlines: DeadlineOptions = DeadlineOptions()
    drain: DrainOptions = DrainOptions()
    secret: SecretOptions = SecretOptions()
    process: RoleOptions = RoleOptions()
    files: FileOptions = FileOptions()
    observe: ObserveOptions = ObserveOptions()

    def of_encoder(self) -> WorkerRole:
        """These options without what only a language model has. Raises ValueError for those that leave an
        encoder nothing to do."""
        if self.engine.engine != "baton":
            raise ValueError("--engine vllm: only Baton's own encoder serves a pool; leave it out")
        if self.model.language_model_only:
            raise ValueError("--language-model-only: no request has images then, so there is no encoder")
        engine = replace(
            self.engine,
            encoder_pool=False,
            tensor_parallel_size=1,
            data_parallel_size=1,
            enable_expert_parallel=False,
            enable_prefix_caching=False,
            host_cache_size="0",
            disk_cache_size="0",
            speculative_config=None,
            replace_engine=False,
            no_standby=False,
        )
        # Embeddings lie in memory of the host, whose arena peers of this host read.
        connector = "auto" if self.transfer.kv_connector == "nixl" else self.transfer.kv_connector
        return replace(
            self, engine=engine, transfer=replace(self.transfer, kv_store=None, kv_connector=connector)
        )


@dataclass(frozen=True)
class RouterRole:
    model: ModelOptions
    front: FrontOptions
    membership: MembershipOptions
    drain: DrainOptions
    secret: SecretOptions
    process: RoleOptions = RoleOptions()
    observe: ObserveOptions = ObserveOptions()
