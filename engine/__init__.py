"""Tokens in, tokens out: one model, its paged KV cache, and the loop that steps it.

The life of a request:

    add ──▶ waiting ──▶ running: prefill in chunks ──▶ first token ──▶ decode … ──▶ finished
               │ ▲      ▲     (handover=True)              └──▶ held until cancel, or
               ▼ │      │                                       resume ──▶ running: decode … ──▶ finished
             loading ───┘
    reserve ──▶ reserved (KV arrives from outside) ──▶ join ──▶ running: decode … ──▶ finished
    start_part ──▶ reserved ◀──▶ running: a range of the prompt (begin_range) … ──▶ held

README.md has the layers.

A request ends in exactly one way (finished, cancelled, handed back, failed). Its blocks go back to the pool
then, or with the last lease on it: an idle engine has a whole pool. The package has no sockets, no processes,
and nothing that pickles.
"""

from typing import TYPE_CHECKING, Any

from baton.engine.api.config import EngineConfig, SpeculativeConfig
from baton.engine.api.request import (
    CacheChange,
    CachedBlock,
    EngineRequest,
    Hooks,
    Image,
    Kept,
    Logprobs,
    Moved,
    Output,
    PromptLogprobs,
    StepResult,
    check_request,
)
from baton.engine.api.sampling_params import Reasoning, SamplingParams, StructuredOutput
from baton.engine.api.stats import (
    EncoderStats,
    EngineStats,
    ExpertStats,
    MemoryStats,
    MixedStep,
    OffloadStats,
    SpeculationStats,
)

if TYPE_CHECKING:
    from baton.engine.engine import Engine, build_engine


def __getattr__(name: str) -> Any:
    # Torch costs a second and 250 MB: only a process that runs an engine imports it.
    if name in ("Engine", "build_engine"):
        from baton.engine import engine

        return getattr(engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
