"""`baton router`, `prefill`, `decode` and `picker`: turns options into a configuration and runs the role."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from baton.cluster import model
from baton.cluster.options.roles import PickerRole, RouterRole, WorkerRole
from baton.cluster.supervision.processes import tie_to_parent
from baton.machine import available_memory
from baton.machine.system import report

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
_ENCODER_MODULE = "baton.cluster.encoder_process"
Role = Literal["prefill", "decode", "encode"]


def run_worker(role: Role, given: WorkerRole) -> int:
    with supervised(given.process.ready_fd):
        from baton.rpc.auth import load_secret

        given = given.of_encoder() if role == "encode" else given
        model.download_to(given.model.download_dir)
        found = model.resolve(given.model.model, given.engine.engine)
        model.reach_hub(found.location)
        model.check_context(found.location, given.model.revision, given.engine.max_model_len)
        secret = load_secret(given.secret.cluster_secret_file)
        config = worker_config(role, given, found, secret)
        if given.engine.data_parallel_size > 1 and config.group is None:
            from baton.cluster.supervision.runner import BATON
            from baton.cluster.supervision.worker_group import run as run_group

            return run_group(role, given, secret, BATON)
        from baton.worker.service_process.service import run

        return run(config)


def worker_config(role: Role, given: WorkerRole, found: model.ResolvedModel, secret: bytes) -> WorkerConfig:
    """The configuration of a worker on this machine. Raises ValueError for options that it cannot have.

    `given`: of an encoder as `WorkerRole.of_encoder` returns them."""
    from baton.cluster.gpus import default_device, gpu_gib, present_gpus
    from baton.cluster.options.optimize import choose, host_cache
    from baton.cluster.options.parameters import size_in_bytes
    from baton.engine import EngineConfig, SpeculativeConfig
    from baton.kv_transfer.config import TransferDeadlines
    from baton.worker.config import WorkerConfig
    from baton.worker.group import Group

    device = given.engine.device or default_device()
    memory = None if device == "cpu" else gpu_gib()
    encodes = role == "encode"
    chosen = choose(given.engine, device, memory)
    host_bytes = host_cache(given.engine, device, present_gpus(), available_memory())
    group = None if given.network.group is None else Group.parse(given.network.group)
    experts_of_group = given.engine.tensor_parallel_size == 1 < given.engine.data_parallel_size
    engine = _configured(
        EngineConfig,
        given,
        model=found.location,
        device=device,
        max_num_seqs=chosen.max_num_seqs,
        enable_expert_parallel=given.engine.enable_expert_parallel and not experts_of_group,
        max_num_batched_tokens=chosen.max_num_batched_tokens,
        enable_prefix_caching=given.engine.enable_prefix_caching is not False,
        host_cache_size=host_bytes,
        disk_cache_size=size_in_bytes(given.engine.disk_cache_size),
        ttit_target=given.engine.ttit_target and given.engine.ttit_target / 1000,
        ttit_target_steps=chosen.target_steps,
        speculative_config=(drafts := given.engine.speculative_config) and SpeculativeConfig.of(drafts),
    )
    if given.engine.no_standby and not given.engine.replace_engine:
        raise ValueError("--no-standby: only with --replace-engine; leave it out")
    return _configured(
        WorkerConfig,
        given,
        role=role,
        engine_module=_ENCODER_MODULE if encodes else _ENGINE_MODULES[given.engine.engine],
        engine=engine,
        engine_args=_engine_args(given.engine, engine, group),
        group=group,
        secret=secret,
        standby=given.engine.replace_engine and not given.engine.no_standby,
        tls=given.secret.tls(),
        served_model_name=(given.model.served_model_name or [found.name])[0],
        settings=None if encodes else f"{chosen.summary}, --host-cache-size {host_bytes / (1 << 30):.3g}GiB",
        kv_bind=tuple((given.transfer.kv_bind or "").replace(",", " ").split()),
        deadlines=TransferDeadlines(
            fetch_wait=given.deadlines.hold_timeout,
            hold=given.deadlines.hold_timeout,
            progress=given.deadlines.transfer_timeout,
            peer_dead=given.deadlines.peer_timeout,
            engine_dead=given.deadlines.engine_timeout,
        ),
        otlp_endpoint=given.observe.endpoint,
    )


def _engine_args(given: EngineOptions, engine: EngineConfig, group: Group | None) -> tuple[str, ...] | None:
    """Returns vLLM's own arguments. None: the engine is Baton's. Raises ValueError for what vLLM cannot have,
    and if it is not installed."""
    if given.engine == "baton":
        if given.vllm_args or given.vllm_untested:
            raise ValueError("--vllm-args and --vllm-untested: need --engine vllm")
        if engine.enable_lora:
            raise ValueError(
                "--enable-lora: needs --engine vllm; for Baton's own engine merge the adapter into the "
                "weights of --model"
            )
        if given.data_parallel_size > 1:
            raise ValueError(
                f"--data-parallel-size {given.data_parallel_size}: needs --engine vllm; for Baton's own "
                "engine start more workers"
            )
        return None
    if engine.encoder_pool:
        raise ValueError("--encoder-pool: only for Baton's engine; leave it out with --engine vllm")
    from baton.vllm_worker import options, version

    version.check_version(untested=given.vllm_untested)
    return options.engine_args(engine, given.vllm_args, group, experts=given.enable_expert_parallel)


def _configured(config: Callable[..., Config], given: Any, **others: Any) -> Config:
    """Makes a configuration of the options of a role that it has under the same names, and of `others`.

    `others` win. Configurations have paths as text and lists as tuples.
    """
    names = signature(config).parameters.keys() - others.keys()
    values: dict[str, Any] = {}
    for group in vars(given).values():
        for name, value in vars(group).items():
            if name in names:
                values[name] = tuple(value) if isinstance(value, list) else value
                if isinstance(value, Path):
                    values[name] = str(value)
    return config(**values, **others)


def run_router(given: RouterRole) -> int:
    with supervised(given.process.ready_fd):
        from baton import router
        from baton.rpc.auth import load_secret

        if given.front.api_key_file is not None:
            # Until the router handles the signal, which then reads the file again in any case.
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        members = given.membership
        if members.kubernetes_service and (members.worker or members.workers_file is not None):
            raise ValueError("--kubernetes-service: finds all workers; leave out --worker and --workers-file")
        if not members.kubernetes_service and not members.worker and members.workers_file is None:
            raise ValueError(
                "a router needs workers: --worker HOST:PORT (repeatable), --workers-file FILE or "
                "--kubernetes-service NAME"
            )
        model.download_to(given.model.download_dir)
        found = None if given.model.model is None else model.resolve(given.model.model)
        if found is not None:
            model.reach_hub(found.location)
        config = router_config(given, found, load_secret(given.secret.cluster_secret_file))
        if config.model is None:
            from baton.router.ask import ask_workers

            described = ask_workers(config)
            if described is None:
                return 0
            config = _with_model(config, described)
        return router.main(config)


def router_config(given: RouterRole, found: model.ResolvedModel | None, secret: bytes) -> RouterConfig:
    """The configuration of a router. Raises ValueError for options that it cannot have."""
    from baton.cluster.options.parameters import size_in_bytes
    from baton.router.config import RouterConfig

    several = given.front.router_processes > 1
    return _configured(
        RouterConfig,
        given,
        secret=secret,
        model=None if found is None else found.location,
        served_model_name=tuple(given.model.served_model_name or ([] if found is None else [found.name])),
        processes=given.front.router_processes,
        admin_port=0 if given.front.admin_port is None and several else given.front.admin_port,
        tls=given.front.tls(),
        cluster_tls=given.secret.tls(),
        api_keys=given.front.keys(),
        admin_key=given.front.key_of_admin(),
        read_api_keys=given.front.keys,
        batch_bytes=size_in_bytes(given.front.batch_dir_size),
        keep_alive=given.front.timeout_keep_alive,
        ttft_target=None if given.front.ttft_target is None else given.front.ttft_target / 1000,
        overflow=not given.front.no_overflow,
        prefix_fetches=not given.front.no_prefix_fetches,
        split_prompts=not given.front.no_split_prompts,
        workers=tuple(given.membership.worker),
        discovery=_kubernetes(given.membership.kubernetes_service, "grpc"),
        otlp_endpoint=given.observe.endpoint,
    )


def _with_model(config: RouterConfig, described: WorkerDescription) -> RouterConfig:
    """`config` with the model of a worker. Raises ValueError if that model is not on this machine."""
    found = model.of_workers(described.model, described.served_model_name)
    model.reach_hub(found.location)
    return replace(
        config,
        model=found.location,
        revision=config.revision or described.revision or None,
        served_model_name=config.served_model_name or (found.name,),
    )


def run_picker(given: PickerRole) -> int:
    from baton.endpoint_picker import PickerConfig, main
    from baton.router.discovery import FileDiscovery, is_address

    picker = given.picker
    if bool(picker.router) == bool(picker.kubernetes_service):
        raise ValueError("a picker needs routers: --router IP:PORT (repeatable) or --kubernetes-service NAME")
    for address in picker.router:
        if not is_address(address):
            raise ValueError(f"--router must be IP:PORT, not {address!r}")
    config = _configured(
        PickerConfig,
        given,
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
