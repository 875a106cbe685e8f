"""Tokens in, tokens out: one model, its paged KV cache, and the loop that steps it.

The life of a request in here:

    add ──▶ waiting ──▶ running: prefill in chunks ──▶ first token ──▶ decode … ──▶ finished
                              (handover=True)              └──▶ held until release
    reserve ──▶ reserved (KV arrives from outside) ──▶ join ──▶ running: decode … ──▶ finished

Each `Engine.step` is schedule → run → postprocess: the *scheduler* chooses which tokens of which requests
to compute and gives them blocks of the *block pool*; the *model* computes them, layer by layer, reading and
writing KV through *paged attention*; the *sampler* picks a token for each request whose tokens are now all
computed. A request ends in exactly one way (finished, released, cancelled, handed back, failed) and its
blocks go back to the pool at that moment: an idle engine has a whole pool.

A request with a *grammar* gets only tokens that it allows; it is compiled in a thread, the only one in here.
No sockets, no processes, and nothing that pickles.
"""

from typing import TYPE_CHECKING, Any

from engine.config import EngineConfig
from engine.request import (
    CacheObserver,
    EngineRequest,
    EngineStats,
    KVSink,
    Logprobs,
    Output,
    PrefillChunk,
    StepResult,
)
from engine.sampling_params import SamplingParams
from engine.structured_output import StructuredOutput

if TYPE_CHECKING:
    from engine.engine import Engine

__all__ = [
    "CacheObserver",
    "Engine",
    "EngineConfig",
    "EngineRequest",
    "EngineStats",
    "KVSink",
    "Logprobs",
    "Output",
    "PrefillChunk",
    "SamplingParams",
    "StepResult",
    "StructuredOutput",
]


def __getattr__(name: str) -> Any:
    # Torch costs a second and 250 MB: only who runs an engine pays, not who configures or describes one.
    if name == "Engine":
        from engine.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
