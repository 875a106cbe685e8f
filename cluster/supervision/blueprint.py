"""Turns the options of `baton serve` into the exact command of every process that it starts."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args
from urllib.parse import parse_qsl, urlencode

from baton.cluster import model
from baton.cluster.gpu_pools import GpuPools
from baton.cluster.gpus import default_device, visible_gpus
from baton.cluster.options import roles as options
from baton.cluster.options.engine import AUTO, EngineOptions, ModelOptions
from baton.cluster.options.optimize import host_cache
from baton.cluster.options.parameters import size_in_bytes, to_argv
from baton.cluster.options.pools import PoolOptions, PoolSize, RayOptions
from baton.cluster.supervision.role_process import RoleState
from baton.system import available_memory, usable_cpus
from baton.system.addresses import WILDCARDS, cannot_listen, free_port, listening_socket, url_host
from baton.system.words import counted

if TYPE_CHECKING:
    from baton.rpc.tls import TlsFiles

Pool = Literal["prefill", "decode"]
POOLS: tuple[Pool, ...] = get_args(Pool)
RoleName = Literal["prefill", "decode", "encode", "router", "store"]
WORKERS: tuple[RoleName, ...] = (*POOLS, "encode")


@dataclass(frozen=True)
class RoleSpec:
    """One role to keep running, as `baton ROLE ARGS…`. The machine of the role adds flags of its own.

    Attributes:
        environment: secrets, which never belong in argv. With Ray it is empty, as Ray stores what actors get.
        secret_file: with Ray, the file of the cluster secret on each machine. None: it is in the environment.
        cluster: with Ray, names the secret.
        cpus, gpus: what the role uses on its machine.
        workers: those of a group (`--data-parallel-size`), which this role starts; 1: it is one worker.
        labels: labels of the Ray nodes that may run the role; empty means every node.
        tls: the files with which its supervisor connects to the role.
        patience: seconds without an answer after which the role counts as dead.
    """

    role: RoleName
    index: int
    args: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    secret_file: str | None = None
    cluster: str = ""
    gpus: int = 0
    cpus: int = 1
    workers: int = 1
    placement: Literal["spread", "pack", "pair"] = "spread"
    labels: Mapping[str, str] = field(default_factory=dict)
    tls: TlsFiles | None = None
    patience: float = options.DeadlineOptions.failure_timeout

    @property
    def name(self) -> str:
        return f"{self.role} {self.index}" if self.workers == 1 else f"{self.role} group {self.index}"

    @property
    def indices(self) -> range:
        """Of its workers: their numbers for people."""
        return range(self.index * self.workers, (self.index + 1) * self.workers)

    @property
    def secret(self) -> bytes:
        """That of the cluster. Raises ValueError if this machine does not have it."""
        from baton.rpc.auth import SECRET_VARIABLE, load_secret

        secret = self.environment.get(SECRET_VARIABLE)
        return load_secret(self.secret_file) if secret is None else secret.encode()


@dataclass(frozen=True)
class Blueprint:
    """All options of `baton serve`."""

    model: ModelOptions
    pool: PoolOptions
    ray: RayOptions
    front: options.FrontOptions
    engine: EngineOptions
    transfer: options.TransferOptions
    deadlines: options.DeadlineOptions
    drain: options.DrainOptions
    secret: options.SecretOptions
    files: options.FileOptions
    logs: options.LogOptions
    observe: options.ObserveOptions

    @property
    def url(self) -> str:
        """The URL at which clients on this machine reach the router."""
        host = "127.0.0.1" if self.front.host in WILDCARDS else self.front.host
        scheme = "http" if self.front.ssl_certfile is None else "https"
        return f"{scheme}://{url_host(host)}:{self.front.port}"

    @property
    def title(self) -> str:
        """The prefix of its process titles. The port distinguishes two clusters on one machine."""
        return f"baton {self.front.port}"

    def admin_url(self, states: Sequence[tuple[RoleSpec, RoleState]]) -> str:
        """The URL of status, metrics and health: a ready router's admin port, else the port of clients."""
        readies = (state.ready for role, state in states if role.role == "router" and state.ready)
        return next((str(ready["admin_url"]) for ready in readies if "admin_url" in ready), self.url)

    def served_names(self) -> list[str]:
        """The model's names for clients. Responses have the first one."""
        return self.model.served_model_name or [model.resolve(self.model.model, self.engine.engine).name]

    def roles(self) -> list[RoleSpec]:
        """The workers, then the router. Raises ValueError for options that cannot be used."""
        shared, keys = self._secrets()
        shared["patience"] = self.deadlines.failure_timeout
        tls, pairs = self.secret.tls(), self._pairs()
        specs: list[RoleSpec] = []
        nodes_of = (self.ray.prefill_nodes, self.ray.decode_nodes)
        for pool, size, nodes in zip(POOLS, self.pool.sizes, nodes_of, strict=True):
            labels = _labels(f"--advanced.{pool}-nodes", nodes)
            first = self._spec(pool, self.worker(pool), **shared, labels=labels, tls=tls)
            workers = [replace(first, index=index) for index in range(size.least)]
            specs += (replace(each, placement="pair") for each in workers[:pairs])
            specs += workers[pairs:]
        if self.pool.encode:
            first = self._spec("encode", self.encoder(), **shared, tls=tls)
            specs += (replace(first, index=index) for index in range(self.pool.encode))
        self.front.tls()
        self.front.keys()
        self.front.key_of_admin()
        front = {"environment": shared["environment"] | keys}
        router = RoleSpec("router", 0, self._args(self.router()), **(shared | front))
        _, store = self._store
        if store is None:
            return [*specs, router]
        args = "serve", *to_argv(store, options.RoleOptions(title=self.title))
        return [*specs, router, RoleSpec("store", 0, args, **shared)]

    @cached_property
    def _store(self) -> tuple[str | None, options.StoreOptions | None]:
        """The URL of the store, and what to run for it on this machine. Raises ValueError."""
        url = self.transfer.kv_store
        name, _, settings = (url or "").partition("?")
        if name != "local":
            return url, None
        if self.ray.ray_address is not None:
            raise ValueError(
                "--kv-store local: is for one machine; run `baton store serve`, and give mooncake://HOST:PORT"
            )
        more = dict(parse_qsl(settings))
        store = options.StoreOptions(size=more.pop("size", "1GiB"), port=free_port())
        size_in_bytes(store.size)
        query = f"?{urlencode(more)}" if more else ""
        return f"mooncake://127.0.0.1:{store.port}{query}", store

    def worker(self, pool: Pool) -> options.WorkerRole:
        """The options of the workers that start in a pool, less those that each has for itself."""
        fields: dict[str, Any] = {
            "engine": self.engine_of(pool),
            "files": replace(self.files, run_dir=None),  # the runner of a worker names its own
        }
        return options.WorkerRole(**self._shared(options.WorkerRole) | fields)

    def _spec(self, role: RoleName, worker: options.WorkerRole, **more: Any) -> RoleSpec:
        """Of the first worker, or group of workers, with this role."""
        engine = worker.engine
        on_gpus = str(engine.device).startswith("cuda")
        return RoleSpec(
            role,
            0,
            self._args(worker),
            gpus=engine.tensor_parallel_size * engine.data_parallel_size if on_gpus else 0,
            workers=engine.data_parallel_size,
            cpus=engine.num_threads or 1,
            placement="pack" if self.ray.placement == "pack" else "spread",
            **more,
        )

    def encoder(self) -> options.WorkerRole:
        """The options of encoders, as `worker`."""
        return self.worker("prefill").of_encoder()

    def router(self) -> options.RouterRole:
        """The options of the routers, less those that each has for itself, and without API keys."""
        shared = self._shared(options.RouterRole)
        front = replace(self.front, api_key=[], admin_key=None)
        # Health checks have no client certificate, and must reach all processes: choose an admin port.
        if front.admin_port is None and (front.router_processes > 1 or front.ssl_certfile is not None):
            front = replace(front, admin_port=0)
        fields: dict[str, Any] = {
            "front": front,
            "membership": options.MembershipOptions(decode_only=not self.pool.sizes[0].most),
        }
        return options.RouterRole(**shared | fields)

    def _shared(self, role: type) -> dict[str, Any]:
        """The groups of options that a role has under the same names."""
        groups = vars(self) | {
            "model": replace(
                self.model,
                model=model.resolve(self.model.model, self.engine.engine).location,
                served_model_name=self.served_names(),
                tokenizer=model.absolute(self.model.tokenizer),
            ),
            "transfer": replace(self.transfer, kv_store=self._store[0]),
            "observe": replace(self.observe, otlp_endpoint=self.observe.endpoint),
            "secret": replace(self.secret, cluster_secret_file=None),
            "process": options.RoleOptions(title=self.title),
        }
        return {each.name: groups[each.name] for each in fields(role) if each.name in groups}

    def _args(self, role: options.WorkerRole | options.RouterRole) -> tuple[str, ...]:
        return tuple(to_argv(*vars(role).values()))

    def engine_of(self, pool: Pool) -> EngineOptions:
        """The options of the engines of a pool, which may have a group size and a KV dtype of its own. If
        only the other pool has several ranks, expert parallelism is for that one.

        Each engine has its share of the cores. Engines that all use every core would slow each other down.
        """
        size = self.engine.tensor_parallel_size
        sizes = {
            "prefill": self.pool.prefill_tensor_parallel_size or size,
            "decode": self.pool.decode_tensor_parallel_size or size,
        }
        dtypes = {"prefill": self.pool.prefill_kv_cache_dtype, "decode": self.pool.decode_kv_cache_dtype}
        replicas = self.engine.data_parallel_size
        alone = sizes[pool] * replicas == 1 < max(sizes.values())
        device = self.engine.device or default_device()
        workers = self.pool.encode + sum(size.most for size in self.pool.sizes) * replicas
        threads = max(1, usable_cpus() // workers)
        if device.startswith("cuda"):
            threads = sizes[pool]  # one for each rank
        engine = replace(self.engine, tensor_parallel_size=sizes[pool])
        if device.startswith("cuda") and self.ray.ray_address is None:
            gpus = replicas * sum(
                size.most * sizes[pool] for pool, size in zip(POOLS, self.pool.sizes, strict=True)
            )
            host_bytes = host_cache(engine, device, gpus, self._available)
            engine = replace(engine, host_cache_size=str(host_bytes))
        return replace(
            engine,
            device=device,
            encoder_pool=self.engine.encoder_pool or self.pool.encode > 0,
            num_threads=self.engine.num_threads or threads,
            kv_cache_dtype=dtypes[pool] or self.engine.kv_cache_dtype,
            enable_expert_parallel=self.engine.enable_expert_parallel and not alone,
        )

    @property
    def chooses_pools(self) -> bool:
        """Whether the user leaves it to this machine how many workers there are."""
        has_sizes = self.pool.prefill is not None or self.pool.decode is not None or self.pool.encode > 0
        device = self.engine.device or default_device()
        alone = self.ray.ray_address is None and self.engine.data_parallel_size == 1
        return not has_sizes and device == "cuda" and alone

    def with_pools(self, chosen: GpuPools) -> Blueprint:
        """These options, as if the user had given what was chosen."""
        pool = replace(
            self.pool,
            prefill=PoolSize(chosen.prefill, chosen.prefill),
            decode=PoolSize(chosen.decode, chosen.decode),
            prefill_tensor_parallel_size=chosen.ranks.prefill,
            decode_tensor_parallel_size=chosen.ranks.decode,
        )
        return replace(self, pool=pool)

    @property
    def host_cache_text(self) -> str | None:
        """A line for the user: the memory of the host that is taken by default. None: none."""
        cache_sizes = [self.engine_of(pool).host_cache_size for pool in POOLS]
        if self.engine.host_cache_size != AUTO or AUTO in cache_sizes:
            return None
        sizes = [size.most * int(each) for size, each in zip(self.pool.sizes, cache_sizes, strict=True)]
        if not sum(sizes):
            return None
        return (
            f"Up to {sum(sizes) / (1 << 30):.0f} GiB of this host's memory are for cached KV that leaves the "
            "GPUs. Choose otherwise with --host-cache-size, for one worker; 0 turns it off."
        )

    @cached_property
    def _available(self) -> int:
        """Bytes that the host has left, before any worker starts."""
        return available_memory()

    def gpus(self, roles: Sequence[RoleSpec]) -> list[str]:
        """The GPUs of this machine. Raises ValueError if the pools could need more of them."""
        each = {spec.role: spec.gpus for spec in roles}
        prefill, decode = self.pool.sizes
        pools = [(prefill, each.get("prefill", 0)), (decode, each.get("decode", 0))]
        if all(size.least < size.most for size, _ in pools):
            # Such pools flip workers. So a worker of either size may be started in the place of the other.
            pools = [(size, max(gpus for _, gpus in pools)) for size, _ in pools]
        total = sum(size.most * gpus for size, gpus in pools) + self.pool.encode * each.get("encode", 0)
        present = visible_gpus()
        if total > len(present):
            sizes = {
                "--tensor-parallel-size": self.engine.tensor_parallel_size,
                "--data-parallel-size": self.engine.data_parallel_size,
                "--prefill-tensor-parallel-size": self.pool.prefill_tensor_parallel_size or 1,
                "--decode-tensor-parallel-size": self.pool.decode_tensor_parallel_size or 1,
            }
            large = {flag: size for flag, size in sizes.items() if size > 1}
            flags = f" --encode {self.pool.encode}" if self.pool.encode else ""
            flags += "".join(f" {flag} {size}" for flag, size in large.items())
            remedy = "".join(f", lower {flag}" for flag in large)
            raise ValueError(
                f"--prefill {prefill} --decode {decode}{flags}: these workers need "
                f"{counted(total, 'GPU')}, but this machine has {len(present)}; start fewer "
                f"workers{remedy}, or run them on the CPU with --device cpu"
            )
        return present

    def _pairs(self) -> int:
        """The number of pairs of a prefill and a decode worker that share one machine."""
        if self.ray.placement != "pair":
            return 0
        for name, size in zip(POOLS, self.pool.sizes, strict=True):
            if size.least < size.most:
                raise ValueError(
                    f"--advanced.placement pair: needs pools of a fixed size, not --{name} {size}; give one "
                    "number"
                )
        return min(size.least for size in self.pool.sizes)

    def _secrets(self) -> tuple[dict[str, Any], dict[str, str]]:
        """The fields of a `RoleSpec` with the cluster secret, and variables with API keys for routers. Raises
        ValueError if roles on Ray could not have them."""
        from baton.rpc.auth import SECRET_VARIABLE, cluster_name, load_secret

        file, keys, admin = self.secret.cluster_secret_file, self.front.api_key, self.front.admin_key
        has_secret = file is not None or SECRET_VARIABLE in os.environ
        if self.ray.ray_address is None:
            # Without a secret this command makes one, as it starts every process that needs it.
            secret = load_secret(file).decode() if has_secret else secrets.token_hex(32)
            return (
                {"environment": {SECRET_VARIABLE: secret}},
                ({"BATON_API_KEY": " ".join(keys)} if keys else {})
                | ({} if admin is None else {"BATON_ADMIN_KEY": admin}),
            )
        if keys:
            raise ValueError(
                "--api-key, BATON_API_KEY: Ray stores what an actor is started with; with --ray-address give "
                "the keys in --api-key-file, a file on the machine of the router"
            )
        if admin is not None:
            raise ValueError(
                "--advanced.admin-key, BATON_ADMIN_KEY: Ray stores what an actor is started with; with "
                "--ray-address give the key in --admin-key-file, a file on the machine of the router"
            )
        if not has_secret:
            raise ValueError(
                "--ray-address: roles on other machines need the cluster secret; name a file that has it on "
                f"every machine with --cluster-secret-file, or set {SECRET_VARIABLE} for this command and "
                "for `ray start` on every machine"
            )
        path = None if file is None else str(file.absolute())
        return {"environment": {}, "secret_file": path, "cluster": cluster_name(load_secret(file))}, {}


def _labels(flag: str, texts: list[str]) -> dict[str, str]:
    """Parses labels of the form KEY=VALUE. Raises ValueError for another form."""
    labels = {}
    for label in texts:
        key, is_, value = label.partition("=")
        if not (key and is_ and value):
            raise ValueError(
                f"{flag} {label}: must have the form KEY=VALUE, as in `ray start --labels KEY=VALUE`"
            )
        labels[key] = value
    return labels


def check_ports(front: options.FrontOptions) -> None:
    """Raises ValueError if the router could not listen on one of its ports."""
    ports = [("port", front.host, front.port), ("grpc-port", front.host, front.grpc_port)]
    ports.append(("admin-port", front.admin_host, front.admin_port))
    with contextlib.ExitStack() as probes:  # all are held to the end, to find a port that is given twice
        for flag, host, port in ports:
            if port is None:
                continue
            try:
                probes.enter_context(listening_socket(host, port))
            except OSError as error:
                raise ValueError(cannot_listen(f"--{flag}", host, port, error)) from error
