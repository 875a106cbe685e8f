"""Statistics of an engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.kv_names import Tier
from baton.steps.step_model import StepModel


@dataclass(frozen=True, slots=True)
class ExpertStats:
    """The load of the experts of a mixture. The device counts, and the counts may be seconds old."""

    tokens: list[int]
    """Of each expert since the start, in all layers together."""
    imbalance: float
    """Tokens of a layer's busiest expert, as a multiple of the mean of its experts: recent steps, mean of all
    layers. 0 before the first."""
    used: float
    """Experts with tokens in one layer of one step, which reads only these: recent steps, mean. 0 before the
    first."""


@dataclass(frozen=True, slots=True)
class OffloadStats:
    """Blocks of the prefix cache in one tier. Counts are since the start. Those of copies and damage include
    copies of states."""

    tier: Tier
    blocks_total: int
    blocks_used: int
    tokens_per_s: float
    """Speed of recent loads. 0: not known."""
    saved: int
    """Blocks copied to the tier."""
    loaded_tokens: int
    """Prompt tokens with KV copied back."""
    dropped: int
    """Copies to the tier that came to nothing, since their blocks were needed before their end."""
    failed: int
    """Copies to the tier that came to nothing, since the disk was full or did not work."""
    damaged: int
    """Blocks that came back with other bytes than they were saved with. No request used them."""


class MixedStep(NamedTuple):
    """A step that both decodes and computes prompt tokens, as expected from recent ones."""

    tokens: int
    """Prompt tokens. 0: none fit, or not known yet."""
    seconds: float


UNKNOWN_STEP = MixedStep(0, 0.0)


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Drafts of tokens since the start."""

    steps: int
    """Of requests that had drafts."""
    drafts: int
    accepted: int
    """How many of them were right, and so became tokens."""


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Bytes of one rank that blocks of KV share with states, or with window blocks."""

    kv_memory_bytes: int
    """Of blocks that have memory, used or not."""
    state_memory_bytes: int
    """The same of states of requests and their copies."""
    window_memory_bytes: int
    """The same of window blocks."""
    free_bytes: int
    moved_bytes: int
    """That went from one to the other since the start."""
    moving_seconds: float
    """How long this took."""


@dataclass(frozen=True, slots=True)
class EncoderStats:
    """What an encoder has done since its start, and what it has to do now."""

    images_encoded: int
    tokens: int
    """Of these images."""
    seconds: float
    """In which they were encoded. The rest of the time the encoder had none."""
    hits: int
    """Images that were kept, or being encoded, when they were asked for."""
    images_waiting: int
    """Images that are asked for now, and not encoded."""
    kept_bytes: int
    """Of embeddings."""
    encode_token_seconds: float
    """For each token of an image. 0: not known."""
    encode_queue_seconds: float
    """In which the waiting images are encoded, if nothing decodes here."""


@dataclass(frozen=True, slots=True)
class StepStats:
    """What the recent steps of an engine cost, and what the next ones will."""

    step_seconds: float = 0.0
    """Running average of a step. 0 before the first."""
    fastest_step_seconds: float = 0.0
    """The fastest step that only decoded. 0 before the first."""
    prefill_tokens_per_s: float = 0.0
    """Running average over steps with prefills, which may decode, too. 0 before the first."""
    prefill_position: float = 0.0
    """Mean position of these tokens. A later one costs more, by its attention."""
    long: MixedStep = UNKNOWN_STEP
    """A step with decodes, and with as many prompt tokens as the gap target allows. Decoding requests get it
    only if a prompt would otherwise be late."""
    step_table: StepModel | None = None
    """What steps cost, without the factors. None: not known yet."""
    step_factors: tuple[float, float] = (1.0, 1.0)
    """How many times as long decodes and prompts take now as in the table."""
    decode_context: int = 0
    """Positions that the requests which decode read in a step."""
    gap_cost: float = 0.0
    """Of the requests that decode, as in `EngineRequest`."""
    gap_target_seconds: float = 0.0
    """0 before the first step that only decoded, if the target is given in such steps."""
    mixed_step_tokens: int = 0
    """Tokens of the largest step that also decodes. 0: as of one with prompts alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats(StepStats):
    """The state of an engine at one moment, and averages over its recent steps. A worker reports the fields
    that `WorkerStatus` in proto/worker.proto has under the same names, as of `memory` and `encoder`."""

    requests_running: int
    requests_decoding: int
    """The part of these whose prompts are computed."""
    requests_waiting: int
    tokens_waiting: int
    """Prompt tokens of waiting and running requests that no step has computed yet, and that the prefix cache
    does not have now."""
    blocks_free: int
    """Blocks that a request can get now: free ones, and cached ones that no request holds."""
    blocks_spare: int
    """The part of these that has nothing which only this worker has cached."""
    blocks_total: int
    blocks_cached: int
    """Blocks in the prefix cache, held by a request or not."""
    held_prefills: int
    """Requests that are prefilled for a handover and keep their blocks."""
    reservations: int
    """Requests that wait here for KV from a prefill worker."""
    preemptions: int
    """Since the start. Counts requests that were recomputed here and those that were handed back."""
    prefix_cache_queries: int
    """Tokens looked up in the prefix cache since the start."""
    prefix_cache_hits: int
    """How many of these the cache had."""
    experts: ExpertStats | None = None
    """None: a dense model."""
    offload: Sequence[OffloadStats] = ()
    """One entry for each tier below the device."""
    speculation: SpeculationStats | None = None
    """None: no token is drafted."""
    memory: MemoryStats | None = None
    """None: KV and states keep the memory that they begin with, or the model has no states."""
    encoder: EncoderStats | None = None
    """None: the engine encodes no images."""
