"""`baton router`, `prefill`, `decode` and `picker`: turns options into a configuration and runs the role."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from baton.cluster import model
from baton.cluster.options.roles import PickerRole, RouterRole, WorkerRole
from baton.processes.children import report
from baton.processes.tree import tie_to_parent
from baton.system import available_memory
from baton.system.addresses import WILDCARDS
from baton.system.cpu_engines import share_of_cpus

if TYPE_CHECKING:
    from baton.cluster.options.engine import EngineOptions
    from baton.engine import EngineConfig
    from baton.router.config import RouterConfig
    from baton.router.discovery import Discovery
    from baton.rpc.worker_pb2 import WorkerDescription
    from baton.worker.config import WorkerConfig
    from baton.worker.group import Group

Config = TypeVar("Config")
_ENGINE_MODULES = {"baton": "baton.cluster.engine_process", "vllm": "baton.vllm_worker.engine_process"}
_ENCODER_MODULE = "baton.encode_worker.process"
Role = Literal["prefill", "decode", "encode"]


def run_worker(role: Role, flags: WorkerRole) -> int:
    with supervised(flags.process.ready_fd):
        from baton.rpc.auth import load_secret

        flags = flags.of_encoder() if role == "encode" else flags
        resolved = model.resolve(flags.model.model, flags.engine.engine)
        model.reach_hub(resolved.location)
        model.check_context(resolved.location, flags.model.revision, flags.engine.max_model_len)
        secret = load_secret(flags.secret.cluster_secret_file)
        config = worker_config(role, flags, resolved, secret)
        if flags.engine.data_parallel_size > 1 and config.group is None:
            from baton.cluster.supervision.runner import BATON
            from baton.cluster.supervision.worker_group import run as run_group

            return run_group(role, flags, secret, BATON)
        from baton.worker.service_process.service import run

        return run(config)


def worker_config(
    role: Role, flags: WorkerRole, resolved: model.ResolvedModel, secret: bytes
) -> WorkerConfig:
    """The configuration of a worker on this machine. Raises ValueError for options that it cannot have.

    `flags`: of an encoder as `WorkerRole.of_encoder` returns them."""
    from baton.cluster.gpus import default_device, gpu_gib, present_gpus
    from baton.cluster.kv_card import card_near
    from baton.cluster.options.optimize import choose, host_cache
    from baton.cluster.options.parameters import size_in_bytes
    from baton.engine import EngineConfig, SpeculativeConfig
    from baton.kv_transfer.config import TransferDeadlines
    from baton.worker.config import WorkerConfig
    from baton.worker.group import Group

    device = flags.engine.device or default_device()
    memory = None if device == "cpu" else gpu_gib()
    encodes = role == "encode"
    chosen = choose(flags.engine, device, memory)
    host_bytes = host_cache(flags.engine, device, present_gpus(), available_memory())
    group = None if flags.network.group is None else Group.parse(flags.network.group)
    shares_cpus = device == "cpu" and flags.engine.engine == "baton"
    kv_host, settings = _cards(flags.network.kv_host), chosen.summary
    if not kv_host and flags.network.host in WILDCARDS and (near := card_near(device)) is not None:
        kv_host, settings = (near,), f"{settings}, --advanced.kv-host {near} (the card nearest to the GPU)"
    experts_of_group = flags.engine.tensor_parallel_size == 1 < flags.engine.data_parallel_size
    engine = _configured(
        EngineConfig,
        flags,
        model=resolved.location,
        device=device,
        num_threads=flags.engine.num_threads or (share_of_cpus(os.getpid()) if shares_cpus else None),
        max_num_seqs=chosen.max_num_seqs,
        enable_expert_parallel=flags.engine.enable_expert_parallel and not experts_of_group,
        max_num_batched_tokens=chosen.max_num_batched_tokens,
        enable_prefix_caching=flags.engine.enable_prefix_caching is not False,
        host_cache_size=host_bytes,
        disk_cache_size=size_in_bytes(flags.engine.disk_cache_size),
        itl_target=flags.engine.itl_target and flags.engine.itl_target / 1000,
        itl_target_steps=chosen.target_steps,
        speculative_config=(drafts := flags.engine.speculative_config) and SpeculativeConfig.of(drafts),
    )
    if flags.engine.no_standby and not flags.engine.replace_engine:
        raise ValueError("--advanced.no-standby: only with --replace-engine; leave it out")
    return _configured(
        WorkerConfig,
        flags,
        role=role,
        engine_module=_ENCODER_MODULE if encodes else _ENGINE_MODULES[flags.engine.engine],
        engine=engine,
        engine_args=_engine_args(flags.engine, engine, group),
        group=group,
        secret=secret,
        standby=flags.engine.replace_engine and not flags.engine.no_standby,
        tls=flags.secret.tls(),
        served_model_name=(flags.model.served_model_name or [resolved.name])[0],
        settings=None if encodes else f"{settings}, --host-cache-size {host_bytes / (1 << 30):.3g}GiB",
        kv_host=kv_host,
        kv_bind=_cards(flags.transfer.kv_bind),
        kv_slot_bytes=size_in_bytes(flags.transfer.kv_slot_size),
        deadlines=TransferDeadlines.after(flags.deadlines.failure_timeout),
        otlp_endpoint=flags.observe.endpoint,
    )


def _cards(names: str | None) -> tuple[str, ...]:
    """Returns the interfaces or addresses of "NIC,NIC"."""
    return () if names is None else tuple(name.strip() for name in names.split(","))


def _engine_args(flags: EngineOptions, engine: EngineConfig, group: Group | None) -> tuple[str, ...] | None:
    """Returns vLLM's own arguments. None: the engine is Baton's. Raises ValueError for what vLLM cannot have,
    and if it is not installed."""
    if flags.engine == "baton":
        if flags.vllm_args or flags.vllm_untested:
            raise ValueError("--vllm-args and --advanced.vllm-untested: need --engine vllm")
        if engine.loads_adapters:
            raise ValueError(
                "--lora-modules and settings of adapters: need --engine vllm; for Baton's own engine merge "
                "the adapter into the weights of --model"
            )
        if flags.data_parallel_size > 1:
            raise ValueError(
                f"--data-parallel-size {flags.data_parallel_size}: needs --engine vllm; for Baton's own "
                "engine start more workers"
            )
        return None
    if engine.encoder_pool:
        raise ValueError("--advanced.encoder-pool: only for Baton's engine; leave it out with --engine vllm")
    from baton.vllm_worker import options, version

    version.check_version(untested=flags.vllm_untested)
    return options.engine_args(engine, flags.vllm_args, group, experts=flags.enable_expert_parallel)


def _configured(config: Callable[..., Config], flags: Any, **overrides: Any) -> Config:
    """Makes a configuration of the options of a role that it has under the same names, and of `overrides`.

    `overrides` win. Configurations have paths as text and lists as tuples.
    """
    names = signature(config).parameters.keys() - overrides.keys()
    values: dict[str, Any] = {}
    for group in vars(flags).values():
        for name, value in vars(group).items():
            if name in names:
                values[name] = tuple(value) if isinstance(value, list) else value
                if isinstance(value, Path):
                    values[name] = str(value)
    return config(**values, **overrides)


def run_router(flags: RouterRole) -> int:
    with supervised(flags.process.ready_fd):
        from baton import router
        from baton.rpc.auth import load_secret

        if flags.front.api_key_file is not None:
            # Until the router handles the signal, which then reads the file again in any case.
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        members = flags.membership
        if members.kubernetes_service and (members.worker or members.workers_file is not None):
            raise ValueError("--kubernetes-service: finds all workers; leave out --worker and --workers-file")
        if not members.kubernetes_service and not members.worker and members.workers_file is None:
            raise ValueError(
                "a router needs workers: --worker HOST:PORT (repeatable), --workers-file FILE or "
                "--kubernetes-service NAME"
            )
        resolved = None if flags.model.model is None else model.resolve(flags.model.model)
        if resolved is not None:
            model.reach_hub(resolved.location)
        config = router_config(flags, resolved, load_secret(flags.secret.cluster_secret_file))
        if config.model is None:
            from baton.router.ask import ask_workers

            described = ask_workers(config)
            if described is None:
                return 0
            config = _with_model(config, described)
        return router.main(config)


def router_config(flags: RouterRole, resolved: model.ResolvedModel | None, secret: bytes) -> RouterConfig:
    """The configuration of a router. Raises ValueError for options that it cannot have."""
    from baton.cluster.options.parameters import size_in_bytes
    from baton.router.config import RouterConfig

    several = flags.front.router_processes > 1
    return _configured(
        RouterConfig,
        flags,
        secret=secret,
        model=None if resolved is None else resolved.location,
        served_model_name=tuple(
            flags.model.served_model_name or ([] if resolved is None else [resolved.name])
        ),
        processes=flags.front.router_processes,
        admin_port=0 if flags.front.admin_port is None and several else flags.front.admin_port,
        tls=flags.front.tls(),
        cluster_tls=flags.secret.tls(),
        api_keys=flags.front.keys(),
        admin_key=flags.front.key_of_admin(),
        read_api_keys=flags.front.keys,
        max_body_bytes=size_in_bytes(flags.front.max_body_size),
        batch_bytes=size_in_bytes(flags.front.batch_dir_size),
        keep_alive=flags.front.timeout_keep_alive,
        ttft_target=None if flags.front.ttft_target is None else flags.front.ttft_target / 1000,
        overflow=not flags.front.no_overflow,
        prefix_fetches=not flags.front.no_prefix_fetches,
        split_prompts=not flags.front.no_split_prompts,
        record_plans=flags.front.record_plans,
        access_log=not flags.front.no_access_log,
        workers=tuple(flags.membership.worker),
        discovery=_kubernetes(flags.membership.kubernetes_service, "grpc"),
        otlp_endpoint=flags.observe.endpoint,
    )


def _with_model(config: RouterConfig, described: WorkerDescription) -> RouterConfig:
    """`config` with the model of a worker. Raises ValueError if that model is not on this machine."""
    resolved = model.of_workers(described.model, described.served_model_name)
    model.reach_hub(resolved.location)
    return replace(
        config,
        model=resolved.location,
        revision=config.revision or described.revision or None,
        served_model_name=config.served_model_name or (resolved.name,),
    )


def run_picker(flags: PickerRole) -> int:
    from baton.endpoint_picker import PickerConfig, main
    from baton.router.discovery import FileDiscovery, is_address

    picker = flags.picker
    if bool(picker.router) == bool(picker.kubernetes_service):
        raise ValueError("a picker needs routers: --router IP:PORT (repeatable) or --kubernetes-service NAME")
    for address in picker.router:
        if not is_address(address):
            raise ValueError(f"--router must be IP:PORT or [IPV6]:PORT, not {address!r}")
    config = _configured(
        PickerConfig,
        flags,
        routers=_kubernetes(picker.kubernetes_service, "http") or FileDiscovery(None, tuple(picker.router)),
        metrics_port=picker.router_metrics_port,
        tls=picker.tls(),
    )
    return main(config)


def _kubernetes(services: Sequence[str], port: str) -> Discovery | None:
    """Finds the ready endpoints of `services`, at the Service port of this name."""
    if not services:
        return None
    from baton.cluster.discovery.kubernetes_discovery import KubernetesDiscovery

    return KubernetesDiscovery(services, port)


@contextlib.contextmanager
def supervised(ready_fd: int | None) -> Generator[None]:
    """For a role. With `ready_fd`, ties it to its supervisor, which is told of a ValueError."""
    if ready_fd is not None:
        tie_to_parent(ready_fd)
    try:
        yield
    except ValueError as error:
        report(ready_fd, {"error": str(error)})
        raise
