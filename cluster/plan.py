"""From the options of `baton serve` to the exact command of every process it starts."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cluster import model, options
from cluster.parameters import to_argv
from cluster.role_process import RoleState

if TYPE_CHECKING:
    from rpc import TlsFiles

RoleName = Literal["prefill", "decode", "router"]
Placement = Literal["spread", "pack", "pair"]


@dataclass(frozen=True)
class RoleSpec:
    """One role to keep running: `baton ROLE ARGS…`, plus what only its own machine can tell."""

    role: RoleName
    index: int
    args: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)  # secrets: never in argv
    gpus: int = 0
    cpus: int = 1
    placement: Placement = "spread"
    labels: Mapping[str, str] = field(default_factory=dict)  # of the machines that it may run on
    tls: TlsFiles | None = None
    """With which whoever starts it asks for its health."""

    @property
    def name(self) -> str:
        return f"{self.role} {self.index}"


@dataclass(frozen=True)
class Plan:
    """Everything `baton serve` was asked for."""

    model: options.ModelOptions
    pool: options.PoolOptions
    start: options.StartOptions
    ray: options.RayOptions
    front: options.FrontOptions
    engine: options.EngineOptions
    transfer: options.TransferOptions
    deadlines: options.DeadlineOptions
    drain: options.DrainOptions
    secret: options.SecretOptions
    run_dir: options.RunDirOptions
    logs: options.LogOptions
    traces: options.TraceOptions
    observe: options.ObserveOptions

    @property
    def url(self) -> str:
        """Where clients on this machine reach the router."""
        host = "127.0.0.1" if self.front.host in ("", "0.0.0.0", "::") else self.front.host
        scheme = "http" if self.front.ssl_certfile is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.front.port}"

    @property
    def title(self) -> str:
        """What the titles of its processes begin with: tells two clusters on one machine apart."""
        return f"baton {self.front.port}"

    def admin_url(self, states: Sequence[tuple[RoleSpec, RoleState]]) -> str:
        """Where the router, which is ready, tells about the cluster."""
        readies = (state.ready for role, state in states if role.role == "router" and state.ready)
        return next((str(ready["admin_url"]) for ready in readies if "admin_url" in ready), self.url)

    def served_name(self) -> str:
        """What clients call the model."""
        return self.model.served_model_name or model.resolve(self.model.model).name

    def roles(self) -> list[RoleSpec]:
        """The workers, then the router. Raises ValueError for what cannot be used."""
        found = model.resolve(self.model.model)
        named = replace(
            self.model,
            model=found.location,
            served_model_name=self.served_name(),
        )
        device = self.engine.device or default_device()
        engine = replace(
            self.engine, device=device, num_threads=self.engine.num_threads or self._threads(device)
        )
        shared = {"BATON_CLUSTER_SECRET": self._cluster_secret()}
        observe = replace(self.observe, otlp_endpoint=self.observe.endpoint)
        tls = self.secret.tls()
        shared_args = to_argv(
            named, self.drain, observe, replace(self.secret, cluster_secret_file=None), title=self.title
        )
        worker_args = (
            *shared_args,
            *to_argv(engine, self.transfer, self.deadlines, self.traces, ttit_target=self.pool.ttit_target),
        )
        pairs = self._pairs()
        workers = [
            RoleSpec(
                role,
                index,
                worker_args,
                shared,
                gpus=engine.tensor_parallel_size if device.startswith("cuda") else 0,
                cpus=engine.num_threads or 1,
                placement="pair" if index < pairs else "pack" if self.ray.placement == "pack" else "spread",
                labels=_labels(f"--{role}-nodes", nodes),
                tls=tls,
            )
            for role, size, nodes in (
                ("prefill", self.pool.prefill, self.ray.prefill_nodes),
                ("decode", self.pool.decode, self.ray.decode_nodes),
            )
            for index in range(size.least)
        ]
        self.front.tls()
        self.front.keys()
        several = self.front.router_processes > 1 or self.front.ssl_certfile is not None
        if several and self.front.admin_port is None:  # whoever watches it knows no certificates of clients
            front = replace(self.front, api_key=[], admin_port=0)
        else:
            front = replace(self.front, api_key=[])
        keys = {"BATON_API_KEY": " ".join(self.front.api_key)} if self.front.api_key else {}
        router = RoleSpec("router", 0, (*shared_args, *to_argv(front)), shared | keys)
        return [*workers, router]

    def gpus(self, roles: Sequence[RoleSpec]) -> list[str]:
        """The GPUs that the roles of one machine share. Raises ValueError where the pools could need more."""
        each = {spec.role: spec.gpus for spec in roles}
        pools: dict[RoleName, options.PoolSize] = {"prefill": self.pool.prefill, "decode": self.pool.decode}
        needed = sum(each[role] * size.most for role, size in pools.items())
        present = visible_gpus()
        if needed > len(present):
            sizes = " ".join(f"--{role} {size}" for role, size in pools.items())
            raise ValueError(
                f"{sizes}: these workers need {needed} GPUs, and this machine shows {len(present)}; ask for "
                "fewer workers, or run them on the CPU with --device cpu"
            )
        return present

    def _pairs(self) -> int:
        """How many prefill workers have a decode worker to stand beside."""
        if self.ray.placement != "pair":
            return 0
        for name, size in (("prefill", self.pool.prefill), ("decode", self.pool.decode)):
            if size.least < size.most:
                raise ValueError(f"--placement pair: needs pools of a fixed size, not --{name} {size}")
        return min(self.pool.prefill.least, self.pool.decode.least)

    def _cluster_secret(self) -> str:
        from rpc.auth import SECRET_VARIABLE, load_secret

        if self.secret.cluster_secret_file is not None or SECRET_VARIABLE in os.environ:
            return load_secret(self.secret.cluster_secret_file).decode()
        return secrets.token_hex(32)  # all that need it are started from here

    def _threads(self, device: str) -> int:
        """Each engine's share of the cores: engines that all use all of them only get in each other's way."""
        if device.startswith("cuda"):
            return 1
        cores = len(os.sched_getaffinity(0))
        return max(1, cores // (self.pool.prefill.most + self.pool.decode.most))


def _labels(flag: str, given: list[str]) -> dict[str, str]:
    """KEY=VALUE, as `ray start --labels` has them. Raises ValueError."""
    labels = {}
    for label in given:
        key, is_, value = label.partition("=")
        if not (key and is_ and value):
            raise ValueError(
                f"{flag} {label}: not of the form KEY=VALUE, as in `ray start --labels KEY=VALUE`"
            )
        labels[key] = value
    return labels


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES may name here: the GPUs that the driver shows and the user does not hide.

    Told without importing torch.
    """
    present = [str(number) for number, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not present or chosen is None:
        return present
    return [name for name in chosen.replace(" ", "").split(",") if name not in ("", "-1")]


def default_device() -> str:
    return "cuda" if visible_gpus() else "cpu"
