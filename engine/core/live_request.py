"""The engine's state of a request, from `add`, `reserve` or `start` until its end. Pure."""

import math
import struct
import sys
from array import array
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import InitVar, dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

import numpy as np

from baton.engine.api.request import EngineRequest, Logprobs
from baton.engine.core.block_pool import Held
from baton.engine.core.fair_shares import Tag
from baton.engine.core.leases import Leases
from baton.engine.core.prefix_names import PrefixNames
from baton.engine.core.prompt_images import PromptImages
from baton.engine.core.state_copies import Copy, CopyLease
from baton.engine.core.window_blocks import WindowSpan
from baton.engine.grammar import CompiledGrammar
from baton.kv_names import packed
from baton.kv_names.cache_kinds import Window, first_read

PENDING = -1
"""Placeholder in `LiveRequest.token_ids`: a launched step samples this token; the host does not know it
yet."""


DRAW = np.dtype(
    [("seed", "u8"), ("temperature", "f4"), ("top_k", "i4"), ("top_p", "f4"), ("min_p", "f4")], align=True
)
"""Sampling parameters of one request as a record. Joining the records of a batch gives one array."""
_draw = struct.Struct("=Qfiff").pack
"""A `DRAW` record, packed ten times as fast as numpy does."""
assert DRAW.itemsize == struct.calcsize("=Qfiff")


class Phase(Enum):
    WAITING = auto()
    """Queued for prefill. Has no blocks."""
    COMPILING = auto()
    """Joins the queue for prefill when its grammar is compiled. Has no blocks."""
    LOADING = auto()
    """Has blocks for the whole prompt. The KV of its beginning is on its way from the host tier."""
    RUNNING = auto()
    """In prefill or decode. Has blocks for the whole prompt from the start."""
    HELD = auto()
    """Prefilled for a handover. Keeps its blocks until the KV transfer is over, or until it is resumed."""
    RESERVED = auto()
    """Has blocks. Their KV is on its way from a prefill worker, or that of the positions before its next
    range is."""
    GONE = auto()
    """Ended. A launched step may still have the request."""


class Asked(NamedTuple):
    """What the client of a request asks for, as steps need it. Never changes."""

    longest: int
    """Number of tokens, prompt included, at which the request ends."""
    plain_from: float
    """Number of tokens from which on `draw` alone says how the next token is chosen."""
    draw: bytes
    """A `DRAW` record."""
    repetitions: "array[int]"
    """Each token of the prompt once, if a repetition penalty asks for them. No other penalty does."""
    scores_to: int
    """Positions [0, scores_to) predict a token of the prompt whose log probability is asked for."""
    due: float
    """When the prompt should be computed; infinite if it is in no hurry."""
    gap_cost: float
    """As in `EngineRequest`."""


def asked_of(request: EngineRequest, max_model_len: int) -> Asked:
    p, prompt = request.sampling, len(request.prompt_ids)
    penalised = p.repetition_penalty != 1 or bool(p.presence_penalty or p.frequency_penalty)
    special = penalised or p.has_grammar or p.logit_bias or p.logprobs is not None
    seed = p.seed & (1 << 64) - 1
    return Asked(
        longest=min(prompt + p.max_tokens, max_model_len),
        plain_from=math.inf if special else prompt + p.min_tokens,
        draw=_draw(seed, p.temperature, p.top_k, p.top_p, p.min_p),
        repetitions=packed(list({*request.prompt_ids}) if p.repetition_penalty != 1 else []),
        scores_to=0 if p.prompt_logprobs is None else prompt - 1,
        due=request.arrived + request.first_token_within,
        gap_cost=request.gap_cost,
    )


@dataclass(slots=True, eq=False)
class SharedPrompt:
    """The ranges of a prompt that this engine computes. Other workers compute the positions between them."""

    ranges: deque[range] = field(default_factory=deque)
    """Those that no step has begun."""
    range_stop: int | None = None
    """The end of the range that steps compute now. None: steps compute none, or all are computed."""
    awaits: Callable[[], bool] | None = None
    """Whether KV from other workers is still to come before that range. None: never."""
    read_at: Sequence[int] = ()
    """Where ranges of other workers begin, which read KV of this one before them."""
    unverified: bool = False
    """KV from other workers is not known to be complete."""
    spans: dict[int, WindowSpan] = field(default_factory=dict)
    """By position: what is read before it of layers with windows. Either a later range begins there, or one
    of another worker. Written by `RequestMemory`."""
    passed: deque[tuple[int, WindowSpan]] = field(default_factory=deque)
    """What steps under way read of earlier ranges, with the ends of these."""

    def read_by_others(self, windows: Collection[Window]) -> list[int]:
        """Those of `read_at` from which a window reaches back to a range of this worker."""
        return [
            position
            for position in self.read_at
            if any(
                each.start < position and first_read(windows, position) < each.stop for each in self.ranges
            )
        ]


WHOLE = SharedPrompt()
"""This engine computes all of the prompt. It never changes."""


@dataclass(slots=True, eq=False)
class States:
    """The slots of the states of a request, which it has as long as it has blocks."""

    slot: int
    kept: int | None = None
    """Has its states before the step under way, which has drafts. None: the step has none."""
    copy: CopyLease | None = None
    """On the cached copy with which the next step begins. That step ends it."""
    begins_with: int | None = None
    """Slot that its next step copies to `slot` first: of `copy`, or `kept`. None: the states are there."""
    copies: list[Copy] = field(default_factory=list)
    """Those that launched steps write and that have no name yet."""
    of_answer: Copy | None = None
    """The last verified copy of an answer. It gets a name when the request ends."""
    branch: int = 0
    """As in `Wanted`."""


@dataclass(slots=True, eq=False)
class Guesses:
    """What is guessed of a request, and how well."""

    tokens: Sequence[int] = ()
    """Of the newest launched step, from `position` on."""
    position: int = 0
    tested: float = 0.0
    """Drafts that were compared with their tokens, recent ones."""
    accepted: float = 0.0
    """How many of these were right."""

    def of(self, position: int, count: int) -> Sequence[int]:
        """The guesses of `count` tokens from this position on."""
        first = position - self.position
        return self.tokens[first : first + count]


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One request in the engine. Each group of fields has one writer."""

    # Set once, by `RequestLives`

    request: EngineRequest
    arrival: int
    """Serial number of the request in this engine."""
    owner: Any = None
    """What the caller knows the request by. Hooks name it."""
    max_model_len: InitVar[int] = sys.maxsize
    id: bytes = field(init=False)
    asked: Asked = field(init=False)
    leases: Leases = field(default_factory=Leases)
    """Of launched steps, of a load from a tier and of transfers: they use its blocks and its states. These
    are free when the request has ended and the last lease has ended. The owner has the same ones."""

    # Its phase and what is computed of it: written by `RequestLives` and, while it runs, by the `Scheduler`.
    # `Outputs` takes back what wrong drafts have computed.

    phase: Phase = Phase.WAITING
    tag: Tag = field(default_factory=lambda: Tag(0, 0))
    """Orders the prompts of all tenants (`FairShares`)."""
    handover: bool = False
    hand_back: bool = False
    """On preemption the request goes back to its sender and is not recomputed here."""
    started: float | None = None
    """When the request got its blocks for prefill here. None: still waiting, or prefilled elsewhere."""
    grammar: CompiledGrammar | None = None
    """Limits the next token. None: any token is allowed. Set by the `Engine`."""
    images: PromptImages | None = None
    """Those of its prompt. None: there are none. Set by the `Engine`."""
    shared: SharedPrompt = WHOLE
    num_computed: int = 0
    """KV of positions [0, num_computed) is in the cache, or a launched step writes it."""
    decodes: bool = False
    """Whether the KV of all its tokens is computed but for the newest ones."""

    # Blocks, slots and names: written by `RequestMemory`

    held: Held = field(default_factory=Held)
    """Its blocks. Without a block table it holds nothing."""
    states: States | None = None
    """None: the model has no state layers, or the request has no blocks."""
    cached_when_queued: int = 0
    """How many positions were in the cache, in any tier, when the request was queued."""
    num_cached: int = 0
    """How many positions came from the prefix cache."""
    names: PrefixNames | None = None
    """Names of the full blocks of `token_ids`, written by `PrefixCache`. None until they are needed,
    and without a prefix cache."""
    found: "tuple[tuple[object, ...], list[int]]" = ((), [])
    """The cached blocks that it would begin with, and all that they depend on."""
    num_verified: int = 0
    """KV of positions [0, num_verified) is known to be right: a token was sampled from it."""
    num_published: int = 0
    """Number of leading blocks that were offered to the prefix cache."""
    thin: Sequence[range] = ()
    """The indices of blocks that are thin (`prefix_cache`). The prefix cache had none of these."""
    private: bool = False
    """Some of its KV is of weights before the present ones: what is computed from now on gets no name."""
    handed_over: bool = False
    """Another worker has all its KV, and goes on with it."""
    goes_on: bool = False
    """A decode of this worker takes it over after its first token (`resume`). Set by its owner."""

    # Tokens: written by the step loop and by `Outputs`, with the methods below

    token_ids: "array[int]" = field(init=False)
    """Prompt and output, indexed by position. The last `pending` entries are `PENDING`."""
    pending: int = 0
    row: int = 0
    """Row of the newest pending token among the sampled rows of its step."""
    slack: int = 0
    """Drafts of the steps under way: so many more tokens these may give beside the pending ones."""
    making: int = 0
    """Guesses that a draft head makes in the newest launched step, which come after its token."""
    alone: bool = field(init=False)
    """The request shares no step. Cleared by its first token, which shows that it crashes nothing."""
    num_scored: int = 0
    """How many of the positions below `Asked.scores_to` have been computed."""
    first_logprobs: Logprobs | None = None
    """Log probabilities of the first token of a held request, if it asked for them."""

    # Drafts: written by `Speculation`

    guesses: Guesses = field(default_factory=Guesses)

    def __post_init__(self, max_model_len: int) -> None:
        self.id = self.request.id
        self.alone = self.request.alone
        self.asked = asked_of(self.request, max_model_len)
        self.token_ids = packed(self.request.prompt_ids) + packed(self.request.output_ids)

    @property
    def blocks(self) -> "array[int]":
        """The block table."""
        return self.held.table

    @property
    def window_spans(self) -> "list[WindowSpan]":
        """All that it reads of layers with windows."""
        shared = self.shared
        return [self.held.windows, *shared.spans.values(), *(span for _, span in shared.passed)]

    @property
    def order(self) -> tuple[int, bool, int, int]:
        """Sort key; the least is served first: by priority, then retried before new, then by tag."""
        return self.request.priority, not self.request.retried, self.tag.tokens, self.arrival

    @property
    def num_left(self) -> int:
        """Tokens that this engine computes before the next token can be sampled: those of a split prompt
        that are in ranges of its own."""
        shared = self.shared
        if not shared.ranges:
            return len(self.token_ids) - self.num_computed
        begun = 0 if shared.range_stop is None else shared.range_stop - self.num_computed
        return begun + sum(map(len, shared.ranges))

    @property
    def due(self) -> float:
        """When the KV of its prompt should be computed, and of its answer so far. A stream that has begun
        waits in one of its gaps, so it is late."""
        return -math.inf if len(self.token_ids) > len(self.request.prompt_ids) else self.asked.due

    @property
    def next_range(self) -> range | None:
        """Of a split prompt. None: steps compute a range, or all are computed."""
        return self.shared.ranges[0] if self.phase is Phase.RESERVED else None

    @property
    def state_slot(self) -> int:
        """Where its states are, if it has some."""
        return 0 if self.states is None else self.states.slot

    @property
    def awaits_kv(self) -> bool:
        """Whether a step that computes its next chunk may wait for other workers."""
        return self.shared.awaits is not None and self.shared.awaits()

    @property
    def num_known(self) -> int:
        """Tokens that are not pending."""
        return len(self.token_ids) - self.pending

    @property
    def ends_with_pending(self) -> bool:
        """Whether the pending token is surely the last one computed here. It may be any token."""
        return self.pending > 0 and (self.handover or len(self.token_ids) >= self.asked.longest)

    def promise(self, row: int, drafts: int = 0, making: int = 0) -> None:
        """Notes that a launched step samples the next token, in this row, and those after so many drafts.
        `making`: as in the attribute."""
        self.token_ids.append(PENDING)
        self.pending += 1
        self.slack += drafts
        self.row = row
        self.making = making

    def learn(self, token: int) -> int:
        """Sets the oldest pending token. Returns its position."""
        position = len(self.token_ids) - self.pending
        self.token_ids[position] = token
        self.pending -= 1
        self.alone = False
        return position

    def learn_after_draft(self, token: int) -> int:
        """Adds a token behind the known ones: the draft before it was accepted. Returns its position."""
        position = len(self.token_ids) - self.pending
        self.token_ids.insert(position, token)
        self.num_computed += 1
        return position

    @property
    def num_computable(self) -> int:
        """Tokens that a step may compute now: `num_left`, or one less while the grammar compiles. Computing
        the last one would sample the next token. Those of an image wait until it is encoded."""
        if self.shared is WHOLE and self.images is None:  # as each of hundreds of decodes
            return len(self.token_ids) - self.num_computed - (not self.may_sample)
        stop = self.shared.range_stop
        left = self.num_left if stop is None else stop - self.num_computed
        count = left if self.may_sample else min(left, self.num_left - 1)
        if self.images is None or self.phase is not Phase.RUNNING:  # what is cached of it is not known yet
            return count
        return self.images.computable(self.num_computed, count)

    @property
    def may_sample(self) -> bool:
        """Whether no grammar is being compiled for the next token."""
        return self.grammar is None or self.grammar.ready

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_ids)

    def finish_reason(self, position: int, eos_ids: Collection[int]) -> str:
        """`Output.finish_reason` for the token at `position`. The sampler enforces min_tokens."""
        sampling = self.request.sampling
        token = self.token_ids[position]
        if token in sampling.stop_token_ids or (token in eos_ids and not sampling.ignore_eos):
            return "stop"
        return "length" if position + 1 >= self.asked.longest else ""
