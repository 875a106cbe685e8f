"""The configuration of one worker, typed and checked once.

The command line builds it (flags over environment over file) and passes it to
`worker.service_process.service.run`. A wrong value raises a ValueError that names the flag as the user types
it.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil

from baton.kv_transfer import shared_store
from baton.kv_transfer.config import SLOT_BYTES, SLOTS, TransferDeadlines
from baton.kv_transfer.heartbeat import MAX_STEP_IDS
from baton.kv_transfer.memory_reader import MemoryReader, reader_of
from baton.system import logs
from baton.system.addresses import WILDCARDS, family, numeric_address
from baton.system.role_config import RoleConfig

if TYPE_CHECKING:
    from baton.engine import EngineConfig
    from baton.rpc.tls import TlsFiles
    from baton.worker.group import Group

Role = Literal["prefill", "decode", "encode"]

# A socket path (sun_path) has 108 bytes with its terminating zero. `worker.ipc` appends this suffix to
# run_dir.
_MAX_RUN_DIR = 107 - len("/baton-XXXXXXXX/engine")


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(RoleConfig):
    """One worker: its role, its engine, its ports and its deadlines."""

    role: Role
    engine_module: str
    """Run with `-m`, it is the engine process. It puts the engine and the roles together."""
    engine: EngineConfig
    engine_args: tuple[str, ...] | None = None
    """Arguments of vLLM beside `engine`. None: the engine is Baton's own."""
    secret: bytes = field(repr=False)
    """The cluster secret, at least 16 bytes. It authenticates routers (gRPC) and peers (KV lanes)."""
    tls: TlsFiles | None = None
    """Files for the gRPC port. Routers must show a certificate, too. None: they are made from the secret."""
    group: Group | None = None
    """The workers with which this one shares experts. None: it computes alone."""
    served_model_name: str | None = None
    """The label `model_name` of its metrics. None: the model as given to the engine."""
    settings: str | None = None
    """A line for the log of its start: the settings that the command chose, and why."""
    kv_host: tuple[str, ...] = ()
    """The addresses of the KV lanes that decode workers connect to, or the network interfaces with these.

    Empty: `host`, or this machine's own address if `host` is a wildcard.
    """
    kv_port: int = 0
    metrics_port: int = 0
    kv_events_endpoint: str | None = None
    """ZeroMQ address that publishes what enters and leaves the prefix cache, as vLLM does. None: nothing
    does."""
    kv_events_topic: str = ""
    kv_bind: tuple[str, ...] = ()
    """Decode: interfaces or addresses of this machine that KV lanes use in turn.

    Empty: the kernel's route.
    """
    kv_connector: Literal["auto", "tcp", "nixl"] = "auto"
    """auto: workers of one host read KV from memory of each other, where a test copy succeeds. They must run
    as the same user, or use GPUs with peer access. nixl: with NIXL, from arena to arena, or from GPU to GPU
    where NICs read their memory; see `TransferConfig`."""
    kv_encrypt: bool = False
    """Encrypt KV lanes, and refuse peers that do not."""
    kv_store: str | None = None
    """The URL of a store for KV that all workers share (`kv_transfer.shared_store`). None: there is none."""
    kv_lanes: int = 4
    """Decode: TCP connections to each prefill worker."""
    kv_slot_bytes: int = SLOT_BYTES
    """Bytes of one arena slot, which carries one KV frame."""
    kv_slots: int = SLOTS
    """Slots of each of the two staging arenas. Each takes kv_slots × kv_slot_bytes of host memory."""
    deadlines: TransferDeadlines = field(default_factory=TransferDeadlines)
    """Of KV transfer. An engine or transfer process without a sign of life for `engine_dead` counts as
    hung."""
    replace_engine: bool = False
    """Start another engine process in place of one that dies or hangs, with its published KV. Attempts wait
    for it. False: the worker ends."""
    standby: bool = False
    """With `replace_engine`: start that process before it is needed, up to the memory of KV."""
    run_dir: str | None = None
    """The parent of the directory of the local socket (mode 0700), which is removed when the worker is up.

    None: the system's temporary directory.
    """
    trace_dir: str | None = None
    """Directory in which every process writes its trace (one Chrome trace event per line). None: no trace."""

    def __post_init__(self) -> None:
        """Checks what the options of the command line do not check: they know ports, and the file of the
        secret."""
        most = MAX_STEP_IDS // 2  # two steps may be under way
        if self.engine.max_num_seqs > most:
            raise ValueError(f"--max-num-seqs: {self.engine.max_num_seqs} is above {most}")
        if self.run_dir is not None and len(str(Path(self.run_dir).absolute()).encode()) > _MAX_RUN_DIR:
            raise ValueError(
                f"--advanced.run-dir: {self.run_dir} is too long for a local socket ({_MAX_RUN_DIR} bytes at "
                "most)"
            )
        for flag, seconds in (("failure", self.deadlines.engine_dead), ("drain", self.drain_timeout)):
            if not 0 < seconds <= 86_400:
                raise ValueError(
                    f"--{flag}-timeout: {seconds} is not a time in seconds (above 0, at most a day)"
                )
        if self.replace_engine and self.engine_args is not None:
            raise ValueError("--replace-engine: only for Baton's engine; leave it out")
        if self.standby and not self.replace_engine:
            raise ValueError("a standby: only with --replace-engine")
        self._check_transfer()

    def _check_transfer(self) -> None:
        if not 1 <= self.kv_lanes <= 64:
            raise ValueError(f"--advanced.kv-lanes: {self.kv_lanes} is out of range (1 to 64)")
        if self.kv_slot_bytes % 4096 or not 1 << 16 <= self.kv_slot_bytes <= 1 << 26:
            raise ValueError(
                f"--advanced.kv-slot-size: {self.kv_slot_bytes} must be a multiple of 4 KiB from 64 KiB "
                "to 64 MiB"
            )
        if not max(4, 2 * self.kv_lanes) <= self.kv_slots <= 1 << 16:
            raise ValueError(
                f"--advanced.kv-slots: {self.kv_slots} is out of range (at least two for each of the "
                f"{self.kv_lanes} lanes and four in all, at most 65536)"
            )
        if (reader := self.reader) is not None:
            reader.check(encrypt=self.kv_encrypt)
        if self.kv_store is not None:
            shared_store.check(self.kv_store)
            if self.engine_args is not None:
                raise ValueError("--kv-store: vLLM's engine cannot use it; leave it out with --engine vllm")
        for source in self.kv_bind:
            _check_source(source)
        if not {*WILDCARDS}.isdisjoint(self.kv_host):
            raise ValueError(
                f"--advanced.kv-host: {','.join(self.kv_host)!r} is not an address that decode workers can "
                "connect to; give the address of the network that carries KV"
            )
        self.kv_addresses()  # a wrong --advanced.kv-host must fail before the weights are loaded

    @property
    def reader(self) -> type[MemoryReader] | None:
        """What reads memory of peers in the transfer process. None: nothing does."""
        return reader_of(self.kv_connector)

    def reader_device(self) -> str | None:
        """As in `TransferConfig`."""
        return None if self.reader is None else self.reader.device_of(self.engine.device)

    @property
    def name(self) -> str:
        """The name of the worker in process titles and logs, such as `prefill 0`."""
        return f"{self.role} {self.index}"

    @property
    def ranks(self) -> int:
        """Processes of the engine that the worker starts. vLLM starts its own."""
        return self.engine.tensor_parallel_size if self.engine_args is None else 1

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.engine.model

    def reachable_host(self) -> str:
        """Returns the address that routers connect to: `host`, or this machine's own if `host` is a wildcard.

        Raises ValueError if this machine has no address that others can reach.
        """
        if self.host not in WILDCARDS:
            return self.host
        name = socket.gethostname()
        try:
            address = numeric_address(name)
        except OSError as error:
            raise ValueError(
                f"--host {self.host}: the host name {name} has no address ({error}); give an address"
            ) from error
        if ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            raise ValueError(
                f"--host {self.host}: the host name {name} has only the loopback address {address}; "
                "give an address"
            )
        return address

    def kv_addresses(self) -> tuple[str, ...]:
        """Returns `kv_host` as numeric addresses: of an interface its IPv4 address if it has one.

        Raises ValueError for what is neither, or an interface without an address that reaches further than a
        link."""
        return tuple(map(_card, self.kv_host))

    def reachable_kv_hosts(self) -> tuple[str, ...]:
        """Returns the numeric addresses that decode workers connect to. Raises ValueError if there is
        none."""
        return self.kv_addresses() or (_numeric("--host", self.reachable_host()),)

    def kv_listen_hosts(self) -> tuple[str, ...]:
        """Returns the addresses on which KV lanes are accepted: perhaps a name, or a wildcard."""
        return self.kv_addresses() or (self.host.strip("[]"),)

    @property
    def lane_sources(self) -> tuple[str, ...]:
        """Interfaces or own addresses from which lanes go out, in turn. Empty: by route."""
        cards = self.kv_addresses()
        return self.kv_bind or (cards if len(cards) > 1 else ())

    def logging(self, incarnation: int, process: str = "") -> dict[str, Any]:
        """Returns the logging configuration of the child `process`, or of the service process if it is ""."""
        description: dict[str, str | int] = {"role": self.role, "index": self.index}
        if process:
            description["process"] = process
        description["incarnation"] = f"{incarnation:016x}"
        return logs.log_config(self.log_format, self.log_level, description)

    def trace_path(self, process: str, replacements: int) -> str | None:
        """Returns the trace file of a process ("engine", "transfer"), or None if there is no `trace_dir`.
        `replacements`: how many engine processes this worker has had before."""
        if self.trace_dir is None:
            return None
        number = f"-{replacements + 1}" if replacements else ""
        return str(Path(self.trace_dir) / f"{self.role}-{self.index}-{process}{number}.trace")


def _card(name: str) -> str:
    """The numeric address of an interface, an address or a name."""
    if (addresses := psutil.net_if_addrs().get(name)) is None:
        return _numeric("--advanced.kv-host", name)
    found = [each for each in addresses if each.family in (socket.AF_INET, socket.AF_INET6)]
    # Only this machine knows which link an address such as fe80::1%eth0 is of.
    routed = [each for each in found if "%" not in each.address]
    if not routed:
        raise ValueError(f"--advanced.kv-host: the interface {name} has no IP address; give an address")
    return min(routed, key=lambda each: each.family != socket.AF_INET).address


def _numeric(flag: str, host: str) -> str:
    """The address of `host`, which may be a name. Peers look up no name, as that would block their lanes.

    Raises ValueError if it has no address."""
    try:
        return numeric_address(host)
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"{flag}: {host!r} is neither an interface of this machine nor a name with an address "
            f"({error}); give an address"
        ) from error


def _check_source(source: str) -> None:
    """Raises ValueError if `source` is neither an interface nor an address of this machine."""
    interfaces = [name for _, name in socket.if_nameindex()]
    if source in interfaces:
        return
    try:
        with socket.socket(family(source), socket.SOCK_STREAM) as probe:
            probe.bind((source, 0))
    except OSError as error:
        raise ValueError(
            f"--advanced.kv-bind: {source!r} is neither an interface nor an address of this machine "
            f"({error}); its interfaces are {', '.join(interfaces)}"
        ) from error
