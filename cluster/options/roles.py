"""All options of a worker and of a router."""

from __future__ import annotations

from dataclasses import dataclass

from baton.cluster.options.engine import EngineOptions, ModelOptions, PaceOptions, RouterModelOptions
from baton.cluster.options.front import FrontOptions
from baton.cluster.options.process import (
    MembershipOptions,
    ObserveOptions,
    RoleOptions,
    RouterProcessOptions,
    RunDirOptions,
    TraceOptions,
    WorkerOptions,
)
from baton.cluster.options.security import SecretOptions
from baton.cluster.options.transfer import DeadlineOptions, DrainOptions, TransferOptions


@dataclass(frozen=True)
class WorkerRole:
    """The options of `baton prefill` and `baton decode`."""

    model: ModelOptions
    engine: EngineOptions
    pace: PaceOptions
    network: WorkerOptions
    transfer: TransferOptions
    deadlines: DeadlineOptions
    drain: DrainOptions
    secret: SecretOptions
    process: RoleOptions
    run_dir: RunDirOptions
    traces: TraceOptions
    observe: ObserveOptions


@dataclass(frozen=True)
class RouterRole:
    """The options of `baton router`."""

    model: RouterModelOptions
    front: FrontOptions
    membership: MembershipOptions
    drain: DrainOptions
    secret: SecretOptions
    process: RoleOptions
    observe: ObserveOptions
    one_of_several: RouterProcessOptions
