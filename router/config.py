"""The configuration of a router."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from yarl import URL

from baton.router.admission.keys import ApiKey
from baton.router.discovery import Discovery, FileDiscovery, is_address
from baton.router.policy.settings import PlanSettings
from baton.rpc.tls import TlsFiles
from baton.system import logs
from baton.system.role_config import RoleConfig


@dataclass(frozen=True, kw_only=True)
class RouterConfig(PlanSettings, RoleConfig):
    """The configuration of one router. Raises ValueError naming the flag and the remedy.

    `baton router --help` describes the fields that are its options. Times are seconds.
    """

    model: str | None
    """A Hugging Face directory, a GGUF file, or a hub id. The router reads only its tokenizer. None: the
    model of the workers; `ask_workers` asks them for it before the router runs."""
    secret: bytes = field(repr=False)
    """The cluster secret."""
    served_model_name: tuple[str, ...] = ()
    """The model ids for clients. Responses have the first one. Empty: `model`."""
    revision: str | None = None
    tokenizer: str | None = None
    chat_template: str | None = None
    tool_call_parser: str | None = None
    """One of `router.tools.formats.FORMATS`. None: found in the chat template."""
    reasoning_parser: str | None = None
    """One of `router.tools.reasoning.REASONING`, or "none". None: found in the chat template."""
    generation_config: str = "auto"
    grpc_port: int | None = None
    """Port of `baton.v1.Inference`. None: no gRPC."""
    tls: TlsFiles | None = None
    """For HTTP and gRPC clients. With `ca_certs` clients must show a certificate."""
    cluster_tls: TlsFiles | None = None
    """For connections to workers. None: certificates are made from the secret."""
    enable_per_request_metrics: bool = False
    enable_force_include_usage: bool = False
    return_tokens_as_token_ids: bool = False
    allowed_origins: tuple[str, ...] = ()
    api_keys: tuple[ApiKey, ...] = field(default=(), repr=False)
    """If there are any, clients must send one of them."""
    api_key_file: str | None = None
    """The file that has some of them. It may change."""
    read_api_keys: Callable[[], tuple[ApiKey, ...]] = field(default=tuple, repr=False)
    """Reads `api_keys` again."""
    admin_key: ApiKey | None = field(default=None, repr=False)
    """The key of calls that replace weights or pause workers. None: there are no such calls over HTTP."""
    workers: tuple[str, ...] = ()
    """gRPC addresses of workers that are always there."""
    workers_file: str | None = None
    discovery: Discovery | None = None
    """Another source of worker addresses, in place of list and file."""
    cluster_file: str | None = None
    request_timeout: float = 600.0
    client_timeout: float = 30.0
    keep_alive: float = 75.0
    worker_wait: float = 60.0
    max_body_bytes: int = 16 << 20
    """Of the body of a request and, apart from it, of all files that it names by URL."""
    allowed_media_domains: tuple[str, ...] = ()
    """Hosts from which images are fetched. Empty: none are fetched."""
    max_images: int = 256
    """Of a request."""
    language_model_only: bool = False
    """Whether requests have no images, also if the model could take some."""
    max_wait: float = 60.0
    batch_dir: str | None = None
    """Where the router keeps files and batches of OpenAI's API. None: it has none."""
    batch_bytes: int = 4 << 30
    """Of these files."""
    access_log: bool = True
    """Whether each request is logged, at level info."""
    record_plans: str | None = None
    """Beginning of the path of a file: what plans follow from is written to it. None: to none."""
    processes: int = 1
    admin_host: str = "127.0.0.1"
    admin_port: int | None = None
    """Port of `/metrics` and `/status` for all processes. None: one process serves them on `port`."""
    admin_socket: str | None = None
    """Path of a Unix socket for whatever started the router, which clients cannot reach. It has the pages of
    the admin port, or those of `port` if there is none."""
    process_number: int | None = None
    """Number of this process among those of a supervisor. None: there is no supervisor."""
    control_fd: int | None = None
    """End of a socket pair, for commands of the supervisor."""
    keys_fd: int | None = None
    """Memory of `KeyCounts`, which all processes of the supervisor share."""
    forks_fd: int | None = None
    """Socket to the `ForkServer`, likewise."""
    id: bytes = field(default_factory=lambda: os.urandom(16))
    """Random id of this start of the router, for workers and logs."""

    def __post_init__(self) -> None:
        """Checks what the options of the command line do not check: they know the range of each number."""
        if self.drain_timeout < 0:
            raise ValueError(f"--drain-timeout must be at least 0, not {self.drain_timeout}")
        if self.batch_dir is not None and self.processes > 1:
            raise ValueError("--batch-dir: one process keeps files and batches; leave out --router-processes")
        if self.decode_only and not self.overflow:
            raise ValueError(
                "--advanced.no-overflow: without prefill workers (--advanced.decode-only, or `baton serve "
                "--prefill 0`) decode workers must compute the prompts; leave it out"
            )
        for origin in self.allowed_origins:
            if origin != "*" and re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin) is None:
                text = "must be * or an origin such as https://chat.example"
                raise ValueError(f"--allowed-origins {text}, not {origin!r}")
        for domain in self.allowed_media_domains:
            host_of(domain)
        for address in self.workers:
            if not is_address(address):
                raise ValueError(f"--worker must be HOST:PORT or [IPV6]:PORT, not {address!r}")

    @property
    def process_title(self) -> str:
        """Of the process, without its number among several."""
        return f"{self.title}: router {self.index}"

    @property
    def incarnation(self) -> str:
        return self.id[:8].hex()

    @property
    def supervised(self) -> bool:
        """True for a process that a supervisor started."""
        return self.process_number is not None

    @property
    def model_names(self) -> tuple[str, ...]:
        """All names of the model for clients."""
        if self.served_model_name:
            return self.served_model_name
        assert self.model is not None, "the router runs after its model is known"
        return (self.model,)

    @property
    def model_name(self) -> str:
        """The name of the model in responses and metrics."""
        return self.model_names[0]

    def discovered(self) -> Discovery:
        """Returns the source of worker addresses."""
        if self.discovery is not None:
            return self.discovery
        return FileDiscovery(self.workers_file, self.workers)

    def logging(self) -> dict[str, Any]:
        process = {"role": "router", "index": self.index, "incarnation": self.incarnation}
        return logs.log_config(self.log_format, self.log_level, process, exception_text=False)


def host_of(domain: str) -> str:
    """A host as URLs have it. Raises ValueError for what is no host."""
    try:
        host = URL.build(scheme="http", host=domain).raw_host
    except ValueError:
        host = None
    if not host or "*" in host:
        raise ValueError(f"--allowed-media-domains must be hosts such as images.example.com, not {domain!r}")
    return host.lower()
