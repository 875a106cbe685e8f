"""`baton router`, `prefill`, `decode` and `picker`: turns options into a configuration and runs the role."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from baton.cluster import model, options
from baton.cluster.options.parameters import to_argv
from baton.cluster.supervision import lifeline

if TYPE_CHECKING:
    from baton.router.config import RouterConfig
    from baton.router.workers.discovery import Discovery
    from baton.rpc.worker_pb2 import WorkerDescription
    from baton.worker.config import WorkerConfig


def run_worker(role: Literal["prefill", "decode"], given: options.WorkerRole) -> int:
    def start() -> int:
        from baton.rpc.auth import load_secret

        model.download_to(given.model.download_dir)
        found = model.resolve(given.model.model)
        model.reach_hub(found.location)
        model.check_context(found.location, given.model.revision, given.engine.max_model_len)
        config = worker_config(role, given, found, load_secret(given.secret.cluster_secret_file))
        from baton.worker.service_process.service import run

        return run(config)

    return _supervised(given.process.ready_fd, start)


def worker_config(
    role: Literal["prefill", "decode"], given: options.WorkerRole, found: model.ResolvedModel, secret: bytes
) -> WorkerConfig:
    """The configuration of a worker on this machine. Raises ValueError for options that it cannot have."""
    from baton.cluster.gpus import default_device, gpu_gib
    from baton.cluster.options.declare import size_in_bytes
    from baton.cluster.options.optimize import choose
    from baton.engine import EngineConfig
    from baton.kv_transfer.config import TransferDeadlines
    from baton.worker.config import WorkerConfig

    device = given.engine.device or default_device()
    memory = None if device == "cpu" else gpu_gib()
    chosen = choose(given.engine, given.pace.ttit_target, device, memory)
    return WorkerConfig(
        role=role,
        engine_module="baton.cluster.engine_process",
        index=given.process.index,
        title=given.process.title,
        secret=secret,
        tls=given.secret.tls(),
        served_model_name=(given.model.served_model_name or [found.name])[0],
        engine=EngineConfig(
            model=found.location,
            revision=given.model.revision,
            tokenizer=given.model.tokenizer,
            device=device,
            dtype=given.engine.dtype,
            kv_cache_dtype=given.engine.kv_cache_dtype,
            load_format=given.engine.load_format,
            quantization=given.engine.quantization,
            block_size=given.engine.block_size,
            num_blocks=given.engine.num_blocks,
            gpu_memory_utilization=given.engine.gpu_memory_utilization,
            max_model_len=given.engine.max_model_len,
            max_num_seqs=chosen.max_num_seqs,
            max_num_batched_tokens=chosen.max_num_batched_tokens,
            enable_prefix_caching=given.engine.enable_prefix_caching is not False,
            host_cache_size=size_in_bytes(given.engine.host_cache_size),
            disk_cache_size=size_in_bytes(given.engine.disk_cache_size),
            disk_cache_dir=_path(given.engine.disk_cache_dir),
            ttit_target=given.pace.ttit_target and given.pace.ttit_target / 1000,
            ttit_target_steps=chosen.target_steps,
            seed=given.engine.seed,
            num_threads=given.engine.num_threads,
            tensor_parallel_size=given.engine.tensor_parallel_size,
            enable_expert_parallel=given.engine.enable_expert_parallel,
        ),
        settings=chosen.summary,
        host=given.network.host,
        port=given.network.port,
        kv_host=given.network.kv_host,
        kv_port=given.network.kv_port,
        metrics_port=given.network.metrics_port,
        kv_bind=tuple((given.transfer.kv_bind or "").replace(",", " ").split()),
        kv_connector=given.transfer.kv_connector,
        kv_encrypt=given.transfer.kv_encrypt,
        kv_lanes=given.transfer.kv_lanes,
        kv_slot_bytes=given.transfer.kv_slot_bytes,
        kv_slots=given.transfer.kv_slots,
        deadlines=TransferDeadlines(
            fetch_wait=given.deadlines.hold_timeout,
            hold=given.deadlines.hold_timeout,
            progress=given.deadlines.transfer_timeout,
            tombstone=given.deadlines.tombstone_timeout,
            peer_dead=given.deadlines.peer_timeout,
            engine_dead=given.deadlines.engine_timeout,
        ),
        drain_timeout=given.drain.drain_timeout,
        run_dir=_path(given.run_dir.run_dir),
        trace_dir=_path(given.traces.trace_dir),
        log_format=given.observe.log_format,
        log_level=given.observe.log_level,
        otlp_endpoint=given.observe.endpoint,
        ready_fd=given.process.ready_fd,
    )


def _path(path: Path | None) -> str | None:
    return None if path is None else str(path)


def run_router(given: options.RouterRole) -> int:
    def start() -> int:
        import uvloop

        from baton import router
        from baton.rpc.auth import load_secret

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
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            if config.model is None:
                from baton.router.workers.ask import ask_workers

                described = ask_workers(
                    config.discovered(), config.secret, config.cluster_tls, config.logging(), runner
                )
                if described is None:
                    return 0
                config = _with_model(config, described)
            return router.main(config, runner)

    return _supervised(given.process.ready_fd, start)


def router_config(
    given: options.RouterRole, found: model.ResolvedModel | None, secret: bytes
) -> RouterConfig:
    """The configuration of a router. Raises ValueError for options that it cannot have."""
    from baton.router.config import RouterConfig

    several = given.front.router_processes > 1
    return RouterConfig(
        index=given.process.index,
        title=given.process.title,
        secret=secret,
        model=None if found is None else found.location,
        revision=given.model.revision,
        tokenizer=given.model.tokenizer,
        served_model_name=tuple(given.model.served_model_name or ([] if found is None else [found.name])),
        host=given.front.host,
        port=given.front.port,
        grpc_port=given.front.grpc_port,
        processes=given.front.router_processes,
        admin_host=given.front.admin_host,
        admin_port=0 if given.front.admin_port is None and several else given.front.admin_port,
        command=(sys.executable, "-m", "baton.cluster.cli", *sys.argv[1:]),
        process_number=given.one_of_several.process_number,
        control_fd=given.one_of_several.control_fd,
        chat_template=_path(given.front.chat_template),
        tool_call_parser=given.front.tool_call_parser,
        reasoning_parser=given.front.reasoning_parser,
        generation_config=given.front.generation_config,
        tls=given.front.tls(),
        cluster_tls=given.secret.tls(),
        allowed_origins=tuple(given.front.allowed_origins),
        api_keys=given.front.keys(),
        read_api_keys=None if given.front.api_key_file is None else given.front.keys,
        client_timeout=given.front.client_timeout,
        keep_alive=given.front.timeout_keep_alive,
        request_timeout=given.front.request_timeout,
        worker_wait=given.front.worker_wait,
        overflow=not given.front.no_overflow,
        prefix_fetches=not given.front.no_prefix_fetches,
        decode_only=given.membership.decode_only,
        routing_policy=given.front.routing_policy,
        drain_timeout=given.drain.drain_timeout,
        max_body_bytes=given.front.max_body_bytes,
        max_waiting_tokens=given.front.max_waiting_tokens,
        workers=tuple(given.membership.worker),
        workers_file=_path(given.membership.workers_file),
        discovery=_kubernetes(given.membership.kubernetes_service, "grpc"),
        log_format=given.observe.log_format,
        log_level=given.observe.log_level,
        otlp_endpoint=given.observe.endpoint,
        cluster_file=_path(given.membership.cluster_file),
        ready_fd=given.process.ready_fd,
    )


def _with_model(config: RouterConfig, described: WorkerDescription) -> RouterConfig:
    """`config` with the model of a worker. Raises ValueError if that model is not on this machine."""
    found = model.of_workers(described.model, described.served_model_name)
    model.reach_hub(found.location)
    named = {
        "model": found.location,
        "revision": config.revision or described.revision or None,
        "served_model_name": config.served_model_name or (found.name,),
    }
    # Router processes must not ask again: another worker could answer with another model.
    command = (*config.command, *to_argv(**named))
    return replace(config, command=command, **named)


def run_picker(given: options.PickerRole) -> int:
    from baton.endpoint_picker import PickerConfig, main
    from baton.router.workers.discovery import StaticDiscovery

    picker = given.picker
    if bool(picker.router) == bool(picker.kubernetes_service):
        raise ValueError("a picker needs routers: --router IP:PORT (repeatable) or --kubernetes-service NAME")
    config = PickerConfig(
        routers=_kubernetes(picker.kubernetes_service, "http") or StaticDiscovery(tuple(picker.router)),
        metrics_port=picker.router_metrics_port,
        host=picker.host,
        port=picker.port,
        tls=picker.tls(),
        drain_timeout=given.drain.drain_timeout,
        log_format=given.logs.log_format,
        log_level=given.logs.log_level,
    )
    return main(config)


def _kubernetes(services: Sequence[str], port: str) -> Discovery | None:
    """Finds the ready endpoints of `services`, at the Service port of this name."""
    if not services:
        return None
    from baton.cluster.discovery.kubernetes_discovery import KubernetesDiscovery

    return KubernetesDiscovery(services, port)


def _supervised(ready_fd: int | None, start: Callable[[], int]) -> int:
    """Runs a role. With `ready_fd`, ties it to its supervisor and reports a ValueError to the supervisor."""
    if ready_fd is not None:
        lifeline.tie_to_parent(ready_fd)
    try:
        return start()
    except ValueError as error:
        lifeline.report_error(ready_fd, str(error))
        raise
