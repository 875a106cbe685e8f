"""Declares every option of every command once. `parameters` turns them into flags, variables and file keys.

An option has its vLLM name if vLLM has the option. A group holds options that several commands share, or that
`--help` shows together. `baton serve` passes groups to the roles that it starts.
"""

from baton.cluster.options.clients import (
    ChatOptions,
    DoctorOptions,
    EndpointOptions,
    FlipOptions,
    SizingOptions,
    StatusOptions,
    TopOptions,
)
from baton.cluster.options.engine import (
    EngineOptions,
    ModelOptions,
    Optimize,
    PaceOptions,
    RouterModelOptions,
    ServedModel,
)
from baton.cluster.options.pools import PoolOptions, PoolSize, RayOptions, StartOptions, StopOptions
from baton.cluster.options.roles import (
    DeadlineOptions,
    DrainOptions,
    FrontOptions,
    LogOptions,
    MembershipOptions,
    ObserveOptions,
    PickerRole,
    RoleOptions,
    RouterProcessOptions,
    RouterRole,
    RunDirOptions,
    SecretOptions,
    TraceOptions,
    TransferOptions,
    WorkerOptions,
    WorkerRole,
)

__all__ = [
    "ChatOptions",
    "DeadlineOptions",
    "DoctorOptions",
    "DrainOptions",
    "EndpointOptions",
    "EngineOptions",
    "FlipOptions",
    "FrontOptions",
    "LogOptions",
    "MembershipOptions",
    "ModelOptions",
    "ObserveOptions",
    "Optimize",
    "PaceOptions",
    "PickerRole",
    "PoolOptions",
    "PoolSize",
    "RayOptions",
    "RoleOptions",
    "RouterModelOptions",
    "RouterProcessOptions",
    "RouterRole",
    "RunDirOptions",
    "SecretOptions",
    "ServedModel",
    "SizingOptions",
    "StartOptions",
    "StatusOptions",
    "StopOptions",
    "TopOptions",
    "TraceOptions",
    "TransferOptions",
    "WorkerOptions",
    "WorkerRole",
]
