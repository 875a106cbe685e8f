"""The requests that simulated workers compute, and prompts that several workers share."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.kv_names import CHUNK_TOKENS
from baton.router.policy.split import HOP_SECONDS
from baton.simulator.clock import Clock
from baton.simulator.placement_outcome import Answer

OVERHEAD_SECONDS = 5e-3
"""Between the client and the engine, until the first token."""
TOKENIZE_SECONDS = 1.4e-6
"""Of a prompt token, before its request arrives at the router's queue."""

Event = Callable[[], None]


def idle_seconds(prompt: int) -> float:
    """What clients wait for a first token beside the prompt itself, at idle workers."""
    return OVERHEAD_SECONDS + prompt * TOKENIZE_SECONDS


def _nothing() -> None: ...


@dataclass(slots=True, eq=False)
class Request:
    """One request.

    Attributes:
        key: of its session.
        max_answer: tokens that the client allows. The router expects an answer like earlier ones.
        names: of the full chunks of prompt and answer. Empty: no other request has any of them.
        first: it is the first turn of its session.
        positions: whose KV the worker that computes the prompt reserves: with the answer, if it decodes, too.
        cached: prompt tokens that this worker had.
        branch: where the prompt left what the worker had, if it could not begin there. 0: it did.
        alone: orders the prompts of a worker, as in `engine.core.fair_shares.Tag`.
        untaken: prompt tokens that no step has taken.
        computed: the position from which the next step computes.
        due: when the prompt should be computed.
        began: time when the first step took tokens of the prompt.
        comes: time when the link has carried its KV to the worker that decodes.
        token_at: time of its first token.
        router: number of the one that has it.
        started: called when the first step takes tokens of the prompt.
        ends: called when the last step takes tokens of it, with the time when that is over.
        first_token: called when the prompt is computed, or the part of this worker.
        ended: called when the request has its last token.
        then: called after that, by the router. The client goes on.
    """

    number: int
    prompt: int
    answer: int
    arrived: float
    measured: bool
    key: int = 0
    names: tuple[int, ...] = ()
    first: bool = True
    max_answer: int = 0
    positions: int = 0
    cached: int = 0
    branch: int = 0
    alone: int = 0
    untaken: int = 0
    computed: int = 0
    due: float = 0.0
    gap_cost: float = 0.0
    began: float = 0.0
    comes: float = 0.0
    token_at: float = 0.0
    router: int = 0
    started: Event = _nothing
    ends: Callable[[float], None] = lambda _: None
    first_token: Event = _nothing
    ended: Event = _nothing
    then: Event = _nothing

    @property
    def tokens(self) -> int:
        """That this worker computes."""
        return self.prompt

    @property
    def answer_names(self) -> tuple[int, str]:
        return self.key, ""

    @property
    def prompt_names(self) -> tuple[int, ...]:
        return self.names[: self.prompt // CHUNK_TOKENS]

    @property
    def computable(self) -> int:
        """Tokens that the next step may take."""
        return self.untaken

    def begin(self, cached: int) -> None:
        """The worker has so many tokens of the prompt, and computes the others."""
        self.cached, self.untaken, self.computed = cached, self.tokens - cached, cached

    def take(self, count: int) -> None:
        """The next step takes `count` tokens."""
        self.untaken -= count

    def answered(self, now: float) -> Answer:
        """What the client has seen, with the last token."""
        ttft = self.token_at - self.arrived + idle_seconds(self.prompt)
        gap = (now - self.token_at) / max(1, self.answer - 1)
        return Answer(self.first, self.prompt, self.cached, self.answer, ttft, gap)

    def earliest_end(self, worker: object, seconds: float) -> float:
        """When a step of this worker that takes `seconds` can end."""
        return 0.0

    def step_begins(self, worker: object, count: int, seconds: float, now: float) -> None:
        """A step computes `count` tokens."""
        self.computed += count


@dataclass(slots=True, eq=False)
class SharedPrompt:
    """A prompt that several workers compute.

    Attributes:
        ranges: what wakes the worker, and the positions of each range, in order.
        layers: of the model.
        begun: how many ranges have begun, with all of their steps, as the next worker knows.
        computes: the worker whose step began last.
        ends: when that step ends.
    """

    ranges: Sequence[tuple[Event, range]]
    layers: int
    clock: Clock
    begun: int = 0
    computes: object = None
    ends: float = 0.0

    def lag(self, seconds: float) -> float:
        """From the beginning of a step to that of the step of the next range: a layer, and its way."""
        return seconds / self.layers + HOP_SECONDS

    def begin_next(self) -> None:
        self.begun += 1
        if self.begun < len(self.ranges):
            self.ranges[self.begun][0]()


@dataclass(slots=True, eq=False)
class Part(Request):
    """What one worker computes of a prompt: the ranges with the numbers `range_numbers`.

    A range begins when the one before has begun, and each step of it ends a layer after the last one there.
    """

    prompt_of: SharedPrompt = field(kw_only=True)
    range_numbers: deque[int] = field(kw_only=True)
    total: int = field(init=False)
    in_range: int = 0
    """Tokens of its present range that no step has taken."""
    stop: int = 0
    """Of this range."""

    def __post_init__(self) -> None:
        self.total = sum(len(self.prompt_of.ranges[number][1]) for number in self.range_numbers)

    @property
    def tokens(self) -> int:
        return self.total

    @property
    def computable(self) -> int:
        if not self.in_range and self.range_numbers and self.range_numbers[0] <= self.prompt_of.begun:
            positions = self.prompt_of.ranges[self.range_numbers.popleft()][1]
            self.computed, self.stop, self.in_range = positions.start, positions.stop, len(positions)
        return self.in_range

    def begin(self, cached: int) -> None:
        """Its ranges begin after what the plan found in the cache."""
        self.untaken = self.tokens

    def take(self, count: int) -> None:
        self.untaken -= count
        self.in_range -= count

    def earliest_end(self, worker: object, seconds: float) -> float:
        shared = self.prompt_of
        return shared.ends + shared.lag(seconds) if shared.computes not in (None, worker) else 0.0

    def step_begins(self, worker: object, count: int, seconds: float, now: float) -> None:
        shared = self.prompt_of
        self.computed += count
        shared.computes, shared.ends = worker, now + seconds
        if self.computed == self.stop:
            shared.clock.after(shared.lag(seconds), shared.begin_next)
