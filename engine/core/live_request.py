"""What the engine remembers about a request from `add` or `reserve` until its end."""

import math
import time
from array import array
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol

import numpy as np

from engine.api.request import EngineRequest


class Grammar(Protocol):
    """What a request's next token must satisfy (`engine.grammar`)."""

    @property
    def ready(self) -> bool:
        """Whether it is compiled."""
        ...

    def after(self, token_ids: "array[int]", /) -> Any:
        """The matcher, once it has consumed the request's tokens. Raises `ValueError` if the grammar is not
        valid, meets a limit, or does not allow these tokens."""
        ...

    def abandon(self) -> None:
        """The request has ended."""
        ...


PENDING = -1
"""In `LiveRequest.token_ids`: a token that a launched step samples, and that the host does not know yet."""


DRAW = np.dtype(
    [("seed", "u8"), ("temperature", "f4"), ("top_k", "i4"), ("top_p", "f4"), ("min_p", "f4")], align=True
)
"""How a request wants its tokens drawn, for the sampler to read of many at once."""


class Phase(Enum):
    WAITING = auto()
    """Queued for prefill; has no blocks."""
    RUNNING = auto()
    """In prefill or decode; has blocks for the whole prompt from the start."""
    HELD = auto()
    """Prefilled for a handover; its blocks wait to be fetched."""
    RESERVED = auto()
    """Has blocks whose KV is on its way from a prefill worker."""
    GONE = auto()


@dataclass(slots=True, eq=False)
class LiveRequest:
    request: EngineRequest
    phase: Phase
    arrival: int
    """Ticket number: the engine's n-th request."""
    handover: bool = False
    id: bytes = field(init=False)
    hand_back: bool = False
    """When others need its blocks it goes back to whoever sent it, and is not computed again here."""
    token_ids: "array[int]" = field(init=False)
    """Prompt and output; positions index this list. The last `pending` of them are `PENDING`."""
    pending: int = 0
    row: int = 0
    """Where the newest pending token is among those that its step samples."""
    flights: int = 0
    """Launched steps, not known to be over, that read and write its blocks."""
    longest: int = field(init=False)
    """Tokens at which it ends, whichever they are."""
    plain_from: float = field(init=False)
    """Tokens from which on nothing but `draw` says how the next is chosen."""
    alone: bool = field(init=False)
    """Shares no step: it has not shown yet that it can be computed."""
    draw: bytes = field(init=False)
    """A `DRAW`."""
    blocks: "array[int]" = field(default_factory=lambda: array("i"))
    """Block table: position p lives in slot blocks[p // block_size] * block_size + p % block_size."""
    num_computed: int = 0
    """KV of positions [0, num_computed) is in the cache."""
    num_cached: int = 0
    """Of these, how many the prefix cache had."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Hash chain over the full blocks of `token_ids`; empty without a prefix cache."""
    num_published: int = 0
    """The first so many blocks were offered to the prefix cache."""
    arrived: float = field(default_factory=time.monotonic)
    started: float | None = None
    """When the step began that first computed some of it; None: waiting, or computed elsewhere."""
    grammar: Grammar | None = None
    """What its next token must satisfy; None: nothing."""

    def __post_init__(self) -> None:
        self.id = self.request.id
        self.alone = self.request.alone
        self.token_ids = array("i", [*self.request.prompt_ids, *self.request.output_ids])
        p, prompt = self.request.sampling, len(self.request.prompt_ids)
        self.longest = prompt + p.max_tokens
        penalised = p.repetition_penalty != 1 or bool(p.presence_penalty or p.frequency_penalty)
        structured = p.structured_output is not None
        special = penalised or structured or p.logit_bias or p.logprobs is not None
        self.plain_from = math.inf if special else prompt + p.min_tokens
        seed = p.seed & (1 << 64) - 1
        self.draw = np.array((seed, p.temperature, p.top_k, p.top_p, p.min_p), DRAW).tobytes()

    @property
    def order(self) -> tuple[int, bool, int]:
        """Who is served first: priority, then who was interrupted before who is new, then arrival."""
        return self.request.priority, not self.request.retried, self.arrival

    @property
    def num_left(self) -> int:
        """Tokens to compute before the next one can be sampled: 1 while decoding."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_known(self) -> int:
        return len(self.token_ids) - self.pending

    @property
    def ends_with_pending(self) -> bool:
        """Nothing is left to compute here, whatever the pending token is."""
        return self.pending > 0 and (self.handover or len(self.token_ids) >= self.longest)

    def promise(self, row: int) -> None:
        """A launched step samples its next token."""
        self.token_ids.append(PENDING)
        self.pending += 1
        self.row = row

    def learn(self, token: int) -> int:
        """The oldest pending token is known. Returns its position."""
        position = len(self.token_ids) - self.pending
        self.token_ids[position] = token
        self.pending -= 1
        self.alone = False
        return position

    @property
    def num_computable(self) -> int:
        """The same without the last one, which would be sampled from, while its grammar is being compiled."""
        return self.num_left if self.grammar is None or self.grammar.ready else self.num_left - 1

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_ids)

    def finish_reason(self, position: int, eos_ids: Collection[int]) -> str:
        """Whether the token at `position` ends the request, in the words of `Output.finish_reason`. Of
        min_tokens the sampler takes care."""
        sampling = self.request.sampling
        token = self.token_ids[position]
        if token in sampling.stop_token_ids or (token in eos_ids and not sampling.ignore_eos):
            return "stop"
        return "length" if position + 1 >= self.longest else ""
