"""`baton router`, `baton prefill`, `baton decode`: from options to the role's configuration, and into it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Literal

from cluster import lifeline, model, options


def run_worker(
    role: Literal["prefill", "decode"],
    chosen: options.ModelOptions,
    engine: options.EngineOptions,
    network: options.WorkerOptions,
    transfer: options.TransferOptions,
    deadlines: options.DeadlineOptions,
    secret: options.SecretOptions,
    process: options.RoleOptions,
    run_dir: options.RunDirOptions,
    traces: options.TraceOptions,
) -> int:
    def start() -> int:
        from cluster.plan import default_device
        from engine import EngineConfig
        from rpc.auth import load_secret
        from worker.config import Deadlines, WorkerConfig

        found = model.resolve(chosen.model)
        config = WorkerConfig(
            role=role,
            index=process.index,
            secret=load_secret(secret.cluster_secret_file),
            served_model_name=chosen.served_model_name or found.name,
            engine=EngineConfig(
                model=found.location,
                revision=chosen.revision,
                device=engine.device or default_device(),
                dtype=engine.dtype,
                load_format=engine.load_format,
                block_size=engine.block_size,
                num_blocks=engine.num_blocks,
                gpu_memory_utilization=engine.gpu_memory_utilization,
                max_model_len=engine.max_model_len,
                max_num_seqs=engine.max_num_seqs,
                max_num_batched_tokens=engine.max_num_batched_tokens,
                enable_prefix_caching=engine.enable_prefix_caching,
                seed=engine.seed,
                num_threads=engine.num_threads,
            ),
            host=network.host,
            port=network.port,
            kv_host=network.kv_host,
            kv_port=network.kv_port,
            metrics_port=network.metrics_port,
            kv_lanes=transfer.kv_lanes,
            kv_slot_bytes=transfer.kv_slot_bytes,
            kv_slots=transfer.kv_slots,
            deadlines=Deadlines(
                hold=deadlines.hold_timeout,
                transfer=deadlines.transfer_timeout,
                tombstone=deadlines.tombstone_timeout,
                peer=deadlines.peer_timeout,
                engine=deadlines.engine_timeout,
                drain=deadlines.drain_timeout,
            ),
            run_dir=str(run_dir.run_dir) if run_dir.run_dir else None,
            trace_dir=str(traces.trace_dir) if traces.trace_dir else None,
            ready_fd=process.ready_fd,
        )
        return importlib.import_module(f"{role}_worker").main(config)

    return _supervised(process.ready_fd, start)


def run_router(
    chosen: options.ModelOptions,
    front: options.FrontOptions,
    membership: options.MembershipOptions,
    secret: options.SecretOptions,
    process: options.RoleOptions,
) -> int:
    def start() -> int:
        import router
        from rpc.auth import load_secret

        if not membership.worker and membership.workers_file is None:
            raise ValueError("a router needs workers: --worker HOST:PORT (repeatable) or --workers-file FILE")
        found = model.resolve(chosen.model)
        config = router.RouterConfig(
            index=process.index,
            secret=load_secret(secret.cluster_secret_file),
            model=found.location,
            revision=chosen.revision,
            served_model_name=chosen.served_model_name or found.name,
            host=front.host,
            port=front.port,
            chat_template=str(front.chat_template) if front.chat_template else None,
            api_keys=tuple(front.api_key),
            request_timeout=front.request_timeout,
            worker_wait=front.worker_wait,
            workers=tuple(membership.worker),
            workers_file=str(membership.workers_file) if membership.workers_file else None,
            ready_fd=process.ready_fd,
        )
        return router.main(config)

    return _supervised(process.ready_fd, start)


def _supervised(ready_fd: int | None, start: Callable[[], int]) -> int:
    """Runs a role. Under a supervisor it ends with that, and tells it what its user got wrong."""
    if ready_fd is not None:
        lifeline.tie_to_parent(ready_fd)
    try:
        return start()
    except ValueError as error:
        lifeline.report_error(ready_fd, str(error))
        raise
