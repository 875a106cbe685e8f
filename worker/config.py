"""Everything one worker is told at its start, typed and checked once.

Built by the command line (flags over environment over file) and handed to `prefill_worker.main` or
`decode_worker.main`. Errors are `ValueError`s that name the flag as a user types it.
"""

from __future__ import annotations

import fcntl
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rpc import logs
from rpc.tls import TlsFiles

if TYPE_CHECKING:
    from engine import EngineConfig

Role = Literal["prefill", "decode"]

_SIOCGIFADDR = 0x8915
_WILDCARDS = ("", "0.0.0.0", "::", "[::]")
# sun_path holds 108 bytes with its terminating zero; what is added to run_dir is "/baton-XXXXXXXX/engine".
_MAX_RUN_DIR = 107 - len("/baton-XXXXXXXX/engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """How long each wait of a worker may last, in seconds. Each has one owner; none is ever a time of day."""

    hold: float = 30.0
    """A prefill held without FETCH or ACK; a FETCH that waits for its prefill id."""
    transfer: float = 10.0
    """A transfer without progress."""
    tombstone: float = 60.0
    """How long a closed transfer's id is remembered."""
    peer: float = 5.0
    """Silence after which the other end of the lanes counts as dead."""
    engine: float = 10.0
    """An engine (or a transfer process) without a sign of life."""
    drain: float = 60.0
    """From SIGTERM to the exit."""

    def __post_init__(self) -> None:
        for name in ("hold", "transfer", "tombstone", "peer", "engine", "drain"):
            value = getattr(self, name)
            if not 0 < value <= 86_400:
                raise ValueError(
                    f"--{name}-timeout: {value} is not a time in seconds (above 0, at most a day)"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """One worker: its place in the cluster, its engine, its ports and its deadlines."""

    role: Role
    engine: EngineConfig
    secret: bytes = field(repr=False)
    """The cluster secret, 16 bytes or more: authenticates routers (gRPC) and peers (KV lanes)."""
    tls: TlsFiles | None = None
    """Of the gRPC face; routers must show a certificate, too. None: no TLS."""
    index: int = 0
    """Its place in its role, for people: process names, logs, `baton status`."""
    title: str = "baton"
    """What the titles of its processes begin with."""
    served_model_name: str | None = None
    """Label `model_name` of its metrics; None: the model as given to the engine."""
    host: str = "127.0.0.1"
    port: int = 0
    """gRPC; 0 chooses a free port, which `ready_fd` tells."""
    kv_host: str | None = None
    """The address of the KV lanes, told to decode workers, or the network interface that has it.
    None: `host`, or where that is a wildcard this machine's own address."""
    kv_port: int = 0
    metrics_port: int = 0
    kv_bind: tuple[str, ...] = ()
    """Decode: interfaces, or addresses of this machine, that KV lanes take in turn. Empty: by route."""
    kv_lanes: int = 4
    """TCP connections to each prefill worker."""
    kv_slot_bytes: int = 2 << 20
    """One slice of KV on the wire and one slot of the staging arena; a few MiB at most."""
    kv_slots: int = 64
    """Slots of the arena: it takes kv_slots × kv_slot_bytes of host memory."""
    deadlines: Deadlines = field(default_factory=Deadlines)
    run_dir: str | None = None
    """Where the directory of the local sockets is made (mode 0700, gone once the worker is up).
    None: the system's temporary directory."""
    trace_dir: str | None = None
    """Where every process writes its trace (Chrome trace events, a line each). None: no trace."""
    log_format: logs.Format = "text"
    log_level: logs.Level = "info"
    otlp_endpoint: str | None = None
    """http://HOST:PORT of an OTLP/gRPC receiver of traces; None: no traces."""
    ready_fd: int | None = None
    """An inherited descriptor that gets progress, then the ready line or the error; see `worker.ready`."""

    def __post_init__(self) -> None:
        if self.role not in ("prefill", "decode"):
            raise ValueError(f"role: {self.role!r} is neither 'prefill' nor 'decode'")
        if len(self.secret) < 16:
            raise ValueError("--cluster-secret-file: the cluster secret must have at least 16 bytes")
        if self.index < 0:
            raise ValueError(f"--index: {self.index} is negative")
        for flag, port in (
            ("--port", self.port),
            ("--kv-port", self.kv_port),
            ("--metrics-port", self.metrics_port),
        ):
            if not 0 <= port <= 65_535:
                raise ValueError(f"{flag}: {port} is not a port (1 to 65535, or 0 to have one chosen)")
        if not 1 <= self.kv_lanes <= 64:
            raise ValueError(f"--kv-lanes: {self.kv_lanes} is out of range (1 to 64)")
        if self.kv_slot_bytes % 4096 or not 1 << 16 <= self.kv_slot_bytes <= 1 << 26:
            raise ValueError(
                f"--kv-slot-bytes: {self.kv_slot_bytes} must be a multiple of 4096 from 64 KiB to 64 MiB"
            )
        if not 2 * self.kv_lanes <= self.kv_slots <= 1 << 16:
            raise ValueError(
                f"--kv-slots: {self.kv_slots} is out of range (at least two for each of the {self.kv_lanes} "
                "lanes, at most 65536)"
            )
        from kv_transfer.arena import MAX_STEP_IDS  # late: the command line imports this module for its help

        most = MAX_STEP_IDS // 2  # two steps may be under way
        if self.engine.max_num_seqs > most:
            raise ValueError(f"--max-num-seqs: {self.engine.max_num_seqs} is above {most}")
        for source in self.kv_bind:
            _check_source(source)
        if self.kv_host in _WILDCARDS:
            raise ValueError(
                f"--kv-host: {self.kv_host!r} cannot be told to decode workers; give the address of the "
                "network that carries KV"
            )
        self.kv_address()  # a ValueError now, not once the weights are loaded
        if self.run_dir is not None and len(str(Path(self.run_dir).absolute()).encode()) > _MAX_RUN_DIR:
            raise ValueError(
                f"--run-dir: {self.run_dir} is too long for a local socket ({_MAX_RUN_DIR} bytes at most)"
            )

    @property
    def name(self) -> str:
        """What processes and logs call it: `prefill 0`."""
        return f"{self.role} {self.index}"

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.engine.model

    def reachable_host(self) -> str:
        """`host`, or where that is a wildcard this machine's own address. Raises ValueError if it has
        none."""
        if self.host not in _WILDCARDS:
            return self.host
        name = socket.gethostname()
        try:
            own = socket.gethostbyname(name)
        except OSError as error:
            raise ValueError(
                f"--host {self.host}: give an address, since {name} has none ({error})"
            ) from error
        if own.startswith("127."):
            raise ValueError(f"--host {self.host}: give an address, since {name} is only known as {own}")
        return own

    def kv_address(self) -> str | None:
        """`kv_host`, or the IPv4 address of the interface of that name. Raises ValueError if it has none."""
        if self.kv_host is None or self.kv_host not in (name for _, name in socket.if_nameindex()):
            return self.kv_host
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            request = self.kv_host.encode().ljust(40, b"\0")  # struct ifreq
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
            except OSError as error:
                raise ValueError(
                    f"--kv-host: the interface {self.kv_host} has no IPv4 address ({error.strerror}); "
                    "give an address"
                ) from error
        return socket.inet_ntoa(answer[20:24])

    def reachable_kv_host(self) -> str:
        """Where decode workers connect to."""
        return self.kv_address() or self.reachable_host()

    def logging(self, incarnation: int, process: str = "") -> dict[str, Any]:
        """The logging configuration of the service process, or of one of its children."""
        speaker: dict[str, str | int] = {"role": self.role, "index": self.index}
        if process:
            speaker["process"] = process
        speaker["incarnation"] = f"{incarnation:016x}"
        return logs.log_config(self.log_format, self.log_level, speaker)

    def trace_path(self, process: str) -> str | None:
        """The trace file of one of its processes ("engine", "transfer")."""
        if self.trace_dir is None:
            return None
        return str(Path(self.trace_dir) / f"{self.role}-{self.index}-{process}.trace")


def _check_source(source: str) -> None:
    """ValueError unless `source` is an interface or an address of this machine."""
    interfaces = [name for _, name in socket.if_nameindex()]
    if source in interfaces:
        return
    try:
        family = socket.AF_INET6 if ":" in source else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((source, 0))
    except OSError as error:
        raise ValueError(
            f"--kv-bind: {source!r} is no address of this machine ({error}); its interfaces are "
            + ", ".join(interfaces)
        ) from error
