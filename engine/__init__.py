"""Tokens in, tokens out: one model, its paged KV cache, and the loop that steps it.

The life of a request:

    add ──▶ waiting ──▶ running: prefill in chunks ──▶ first token ──▶ decode … ──▶ finished
               │ ▲      ▲     (handover=True)              └──▶ held until release, or
               ▼ │      │                                       resume ──▶ running: decode … ──▶ finished
             loading ───┘
    reserve ──▶ reserved (KV arrives from outside) ──▶ join ──▶ running: decode … ──▶ finished

The layers, from the outside in. Each imports only layers below it:

    build        from a configuration to an engine that is ready
    engine       requests from their start to their end
    step_loop    the step: schedule → run → postprocess
    core         scheduler, block pool, prefix cache, chunk limit: pure, without torch
    grammar      the tokens that a structured output allows
    execution    one rank: computes its part of steps of plain arrays (`step`), knows no request
    loader, models, layers, kernels      from a checkpoint to a forward pass
    step, api    the arrays of a step; requests, sampling parameters, outputs, statistics

A request ends in exactly one way (finished, released, cancelled, handed back, failed), and its blocks go back
to the pool at that moment: an idle engine has a whole pool. The package has no sockets, no processes, and
nothing that pickles.
"""

from typing import TYPE_CHECKING, Any

from baton.engine.api.config import EngineConfig
from baton.engine.api.request import (
    CachedBlock,
    CachedPrefix,
    CacheObserver,
    EngineRequest,
    KVSink,
    Logprobs,
    Output,
    PrefillChunk,
    PromptLogprobs,
    Reservation,
    StepResult,
    check_request,
)
from baton.engine.api.sampling_params import Reasoning, SamplingParams, StructuredOutput
from baton.engine.api.stats import EngineStats, ExpertStats, MixedStep, OffloadStats

if TYPE_CHECKING:
    from baton.engine.build import build_engine
    from baton.engine.engine import Engine

__all__ = [
    "CacheObserver",
    "CachedBlock",
    "CachedPrefix",
    "Engine",
    "EngineConfig",
    "EngineRequest",
    "EngineStats",
    "ExpertStats",
    "KVSink",
    "Logprobs",
    "MixedStep",
    "OffloadStats",
    "Output",
    "PrefillChunk",
    "PromptLogprobs",
    "Reasoning",
    "Reservation",
    "SamplingParams",
    "StepResult",
    "StructuredOutput",
    "build_engine",
    "check_request",
]


def __getattr__(name: str) -> Any:
    # Torch costs a second and 250 MB: only a process that runs an engine imports it.
    if name == "Engine":
        from baton.engine.engine import Engine

        return Engine
    if name == "build_engine":
        from baton.engine.build import build_engine

        return build_engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
