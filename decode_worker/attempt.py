"""One request on a decode worker, from its reservation to its end."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from baton.worker.messages import PrefillSource


class AttemptPhase(Enum):
    FETCHING = auto()  # the receiver may write into the blocks
    IMPORTING = auto()  # the prefix cache fetches the beginning of the prompt; the attempt has no blocks
    TAKING = auto()  # a prefill of this worker has the KV, or will have it; the attempt has no blocks
    FAILED = auto()  # the KV did not arrive; the blocks wait for a Retarget, a Cancel or the deadline
    CLOSING = auto()  # ended; the blocks are freed when the receiver no longer writes into them
    RUNNING = auto()  # in the engine's batch: the request decodes, or its prompt is prefilled on this worker


@dataclass(slots=True)
class Attempt:
    prompt_tokens: int
    output_tokens: int  # number of tokens emitted before this attempt
    source: PrefillSource | None  # None: the prompt is prefilled on this worker
    deadline: float  # time.monotonic(), before which the KV must arrive
    phase: AttemptPhase = AttemptPhase.FETCHING
    block_ids: Sequence[int] = ()  # of a reservation
    state_slot: int = 0  # of a reservation, if the model has state layers
    cached: int = 0  # positions from the start on, with their KV in the prefix cache already
    fetched: int = 0  # tokens of a prompt that is computed here, with KV from another worker's prefix cache
    joined_at: float = 0.0  # time.monotonic() at which the request joined the batch with its prompt computed
    first_token_at: float | None = None  # when COMMIT named the first token; None after the second token
    tokens: int = 0  # number of tokens that this worker sampled
