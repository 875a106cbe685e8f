"""One request on a decode worker, from its reservation to its end."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from worker.messages import Source


class Phase(Enum):
    FETCHING = auto()  # the receiver may be writing into its blocks
    FAILED = auto()  # the KV did not come: the blocks wait for a Retarget, a Cancel or the deadline
    CLOSING = auto()  # ended; its blocks go once the receiver is through with them
    RUNNING = auto()  # in the engine's hands: decoding, or prefilled here


@dataclass(slots=True)
class Attempt:
    prompt_tokens: int
    output_tokens: int  # emitted before this attempt
    block_ids: Sequence[int]
    source: Source | None  # None: prefilled here
    deadline: float  # time.monotonic(); until then its KV must have come
    phase: Phase = Phase.FETCHING
    joined_at: float = 0.0  # time.monotonic(); once its prompt is computed
    first_token_at: float | None = None  # when prefill's token was known here; None once decode's followed
    tokens: int = 0  # sampled here
