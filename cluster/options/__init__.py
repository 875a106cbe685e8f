"""Every option of every command, once. See `parameters` for how these become flags, variables and file keys.

Names are vLLM's where vLLM has the thing. A group is what several commands have in common, or what belongs
together in `--help`; `baton serve` passes groups on to the roles it starts.
"""

from cluster.options.clients import (
    ChatOptions,
    DoctorOptions,
    EndpointOptions,
    SizingOptions,
    StatusOptions,
    TopOptions,
)
from cluster.options.engine import EngineOptions, ModelOptions, PaceOptions
from cluster.options.front import FrontOptions
from cluster.options.pools import PoolOptions, PoolSize, RayOptions, StartOptions, StopOptions
from cluster.options.process import (
    LogOptions,
    MembershipOptions,
    ObserveOptions,
    RoleOptions,
    RouterProcessOptions,
    RunDirOptions,
    TraceOptions,
    WorkerOptions,
)
from cluster.options.roles import RouterRole, WorkerRole
from cluster.options.security import SecretOptions
from cluster.options.transfer import DeadlineOptions, DrainOptions, TransferOptions

__all__ = [
    "ChatOptions",
    "DeadlineOptions",
    "DoctorOptions",
    "DrainOptions",
    "EndpointOptions",
    "EngineOptions",
    "FrontOptions",
    "LogOptions",
    "MembershipOptions",
    "ModelOptions",
    "ObserveOptions",
    "PaceOptions",
    "PoolOptions",
    "PoolSize",
    "RayOptions",
    "RoleOptions",
    "RouterProcessOptions",
    "RouterRole",
    "RunDirOptions",
    "SecretOptions",
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
