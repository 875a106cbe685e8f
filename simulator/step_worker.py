"""An engine step by step: it decodes, and computes prompts in the order of their arrival.

A step takes one token of each decode, and chunks of prompts. The chunk limit and the averages that a worker
reports are those of the engine. Only the cost of a step is simulated (`steps`).

As in the engine, a step is scheduled before the one under way ends. Requests that come later from other
workers wait for the step after it.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from baton.engine.core.meters import MIXED_STEPS, ChunkLimit, Meters, may_join, prompt_limit
from baton.engine.core.pace import EARLY
from baton.router.policy.split import HOP_SECONDS
from baton.rpc import worker_pb2 as pb
from baton.simulator.clock import Clock
from baton.simulator.placement_outcome import PlacementOutcome
from baton.simulator.steps import GRAPH_ROWS, LAYERS, step_seconds

BLOCK = 128
BLOCKS = 6_888
"""Of a worker: 880 thousand positions."""
BUDGET = 8_192
"""Prompt tokens of a step."""
COLOCATED_BUDGET = 512
"""Tokens of a step of a colocated engine."""
LEAD_SECONDS = 1.1e-3
"""Before the end of a step, the engine launches the next one. From traces of an H200."""
OVERHEAD_SECONDS = 3e-3
"""Between the client and the engine, until the first token."""
TOKENIZE_SECONDS = 1.4e-6
"""Of a prompt token, before its request arrives at the router's queue."""
FIRST_CONTEXT = 16
"""Positions of the first request of each worker. No later step that only decodes is as fast."""


Event = Callable[[], None]
Chunks = list[tuple["Request", int]]
"""Prompts, and how many tokens of each a step takes."""


def _nothing() -> None: ...


@dataclass(slots=True, eq=False)
class Request:
    """One request for at least two tokens.

    Attributes:
        left: prompt tokens that no step has taken.
        computed: prompt tokens that steps have begun to compute.
        due: when the prompt should be computed.
        token_at: time of its first token.
        started: called when the first step takes tokens of the prompt.
        ends: called when the last step takes tokens of it, with the time when that is over.
        first_token: called when the prompt is computed, or the part of this worker.
        ended: called when the request has its last token.
    """

    number: int
    prompt: int
    answer: int
    arrived: float
    measured: bool
    left: int = 0
    computed: int = 0
    due: float = 0.0
    token_at: float = 0.0
    started: Event = _nothing
    ends: Callable[[float], None] = lambda _: None
    first_token: Event = _nothing
    ended: Event = _nothing

    @property
    def tokens(self) -> int:
        """That this worker computes."""
        return self.prompt

    @property
    def computable(self) -> int:
        """Tokens that the next step may take."""
        return self.left

    def take(self, count: int) -> None:
        """The next step takes `count` tokens."""
        self.left -= count

    def earliest_end(self, worker: "Worker", seconds: float) -> float:
        """When a step of this worker that takes `seconds` can end."""
        return 0.0

    def step_begins(self, worker: "Worker", count: int, seconds: float, now: float) -> None:
        """A step computes `count` tokens."""
        self.computed += count


@dataclass(slots=True, eq=False)
class SharedPrompt:
    """A prompt that several workers compute.

    Attributes:
        ranges: the worker and the positions of each range, in order.
        begun: how many ranges have begun, with all of their steps, as the next worker knows.
        computes: the worker whose step began last.
        ends: when that step ends.
    """

    ranges: Sequence[tuple["Worker", range]]
    clock: Clock
    begun: int = 0
    computes: "Worker | None" = None
    ends: float = 0.0

    def begin_next(self) -> None:
        self.begun += 1
        if self.begun < len(self.ranges):
            self.ranges[self.begun][0].wake()


@dataclass(slots=True, eq=False)
class Part(Request):
    """What one worker computes of a prompt: the ranges with the numbers `own`.

    A range begins when the one before has begun, and each step of it ends a layer after the last one there.
    """

    prompt_of: SharedPrompt = field(kw_only=True)
    own: deque[int] = field(kw_only=True)
    total: int = field(init=False)
    in_range: int = 0
    """Tokens of its present range that no step has taken."""
    stop: int = 0
    """Of this range."""

    def __post_init__(self) -> None:
        self.total = sum(len(self.prompt_of.ranges[number][1]) for number in self.own)

    @property
    def tokens(self) -> int:
        return self.total

    @property
    def computable(self) -> int:
        if not self.in_range and self.own and self.own[0] <= self.prompt_of.begun:
            positions = self.prompt_of.ranges[self.own.popleft()][1]
            self.computed, self.stop, self.in_range = positions.start, positions.stop, len(positions)
        return self.in_range

    def take(self, count: int) -> None:
        self.left -= count
        self.in_range -= count

    def earliest_end(self, worker: "Worker", seconds: float) -> float:
        shared = self.prompt_of
        return shared.ends + _lag(seconds) if shared.computes not in (None, worker) else 0.0

    def step_begins(self, worker: "Worker", count: int, seconds: float, now: float) -> None:
        shared = self.prompt_of
        self.computed += count
        shared.computes, shared.ends = worker, now + seconds
        if self.computed == self.stop:
            shared.clock.after(_lag(seconds), shared.begin_next)


def _lag(seconds: float) -> float:
    """From the beginning of a step to that of the step of the next range: a layer, and its way."""
    return seconds / LAYERS + HOP_SECONDS


class Worker:
    """Calls the events of its requests.

    Attributes:
        reserved: requests whose KV will come from another worker.
        arriving: when the KV of requests should come, by number, as far as known.
    """

    def __init__(
        self,
        name: str,
        clock: Clock,
        outcome: PlacementOutcome,
        *,
        colocated: bool,
        target_steps: float,
    ) -> None:
        self.name = name
        self.reserved = 0
        self.arriving: dict[int, float] = {}
        self._clock = clock
        self._outcome = outcome
        self._colocated = colocated
        largest = BUDGET, step_seconds(0, 0, [(BUDGET, 0)])
        self._limit = ChunkLimit(None, BUDGET, target_steps)
        self._limit.record(True, 0, step_seconds(1, FIRST_CONTEXT, []))
        self._meters = Meters(self._limit, largest)
        self._prompts: deque[Request] = deque()
        self._decodes: list[tuple[int, int, Request]] = []  # a heap by `_tokens` at the end
        self._joining: list[Request] = []  # for the next step
        self._arrived: list[Request] = []  # from other workers, for the step that is scheduled next
        self._under_way = 0  # prompt tokens of the step
        self._scheduled: Chunks | None = None
        self._context = 0  # positions of all decodes
        self._positions = 0  # that the requests which decode here need in the end
        self._tokens = 0  # that a request would have got in all steps up to now
        self._mixed_steps = MIXED_STEPS  # since the last step that only decoded
        self._computed = 0  # prompt tokens
        self._joined = self._stepping = False

    # ------------------------------------------------------------ requests

    def reserve(self, request: Request) -> None:
        """Reserves a place for a request. Its KV comes later (`join`)."""
        self.reserved += 1
        self._positions += request.prompt + request.answer

    def prefill(self, request: Request) -> None:
        """Computes the prompt, and then calls `first_token`."""
        request.left = request.tokens
        self._prompts.append(request)
        self.wake()

    def decode(self, request: Request) -> None:
        """Decodes a request, after this worker has computed its prompt."""
        self._positions += request.prompt + request.answer
        self._joining.append(request)

    def join(self, request: Request) -> None:
        """The KV of a reserved request has come."""
        self.reserved -= 1
        del self.arriving[request.number]
        self._joined = True
        self._arrived.append(request)
        self.wake()

    @property
    def idle(self) -> bool:
        return not (self._stepping or self.reserved or self._positions or self._context)

    def status(self) -> pb.WorkerStatus:
        limit = self._limit
        short, long = limit.mixed_step(limit.short_seconds), limit.mixed_step(limit.long_seconds)
        decoding = len(self._decodes) + len(self._joining) + len(self._arrived)
        started = sum(request.left < request.tokens for request in self._prompts)
        left = sum(request.left for request in self._prompts)
        scheduled = sum(count for _, count in self._scheduled or ())
        return pb.WorkerStatus(
            requests_running=decoding + started,
            requests_decoding=decoding,
            reservations=self.reserved,
            tokens_waiting=left + scheduled + self._under_way,  # all that are not computed
            blocks_free=BLOCKS - self._positions // BLOCK,
            blocks_total=BLOCKS,
            requests_waiting=len(self._prompts) - started,
            prefill_tokens_per_s=self._meters.prefill_tokens_per_s,
            prefill_position=self._meters.prefill_position,
            step_seconds=self._meters.step_seconds,
            prompt_tokens=self._computed,
            chunk_tokens=short.tokens,
            chunk_seconds=short.seconds,
            long_chunk_tokens=long.tokens,
            long_chunk_seconds=long.seconds,
            decode_seconds=limit.step_seconds,
            fastest_step_seconds=limit.fastest_seconds,
        )

    # ------------------------------------------------------------ steps

    def wake(self) -> None:
        """There may be something to compute."""
        if not self._stepping:
            self._step()

    def _schedule(self, begins: float) -> None:
        """Chooses what the next step computes, as far as it is known. `begins`: when it should begin."""
        self._joining += self._arrived
        self._arrived.clear()
        decodes = len(self._decodes) + len(self._joining)
        chunks = list(self._chunks(self._prompt_budget(decodes, begins), decodes))
        self._scheduled = chunks if chunks or decodes else None

    def _step(self) -> None:
        if self._scheduled is None or not (self._scheduled or self._decodes or self._joining):
            self._schedule(self._clock.now)
        chunks, self._scheduled = self._scheduled or [], None
        joining, self._joining = self._joining, []
        for request in joining:
            # No step decodes the first token.
            heapq.heappush(self._decodes, (self._tokens + request.answer - 1, request.number, request))
            self._context += request.prompt + 1
        self._stepping = bool(self._decodes or chunks)
        if not self._stepping:
            return
        self._under_way = tokens = sum(count for _, count in chunks)
        if self._decodes:
            self._mixed_steps = self._mixed_steps + 1 if tokens else 0
        starts = [(count, request.computed) for request, count in chunks]
        position = sum(count * (start + count / 2) for count, start in starts) / max(1, tokens)
        now, seconds = self._clock.now, step_seconds(len(self._decodes), self._context, starts)
        seconds = max(seconds, *(request.earliest_end(self, seconds) - now for request, _ in chunks), 0.0)
        last = []
        for request, count in chunks:
            request.step_begins(self, count, seconds, now)
            if not request.left:
                request.ends(now + seconds)
                last.append(request)
        self._clock.after(seconds, partial(self._end_step, seconds, tokens, position, last, joining))
        if not self._colocated:
            self._schedule_next(tokens, seconds)

    def _schedule_next(self, tokens: int, seconds: float) -> None:
        """The step under way has `tokens` prompt tokens and takes `seconds`."""
        expected, early = seconds, seconds - LEAD_SECONDS
        if tokens:
            speed = self._meters.prefill_tokens_per_s
            expected = self._limit.mixed_seconds(tokens) if self._decodes else tokens / speed
            early = EARLY * expected - LEAD_SECONDS if self._decodes or self.reserved else 0.0
        begins = self._clock.now + expected
        if early < seconds:
            self._clock.after(max(0.0, early), partial(self._schedule, begins))

    def _prompt_budget(self, decodes: int, begins: float) -> int:
        joined, self._joined = self._joined, False
        if not self._prompts:
            return 0  # what is below would take a third of the time of a simulation
        if self._colocated:
            return COLOCATED_BUDGET - decodes
        if not decodes and not self.reserved:
            return BUDGET
        joins_at = self._clock.now if joined else min(self.arriving.values(), default=math.inf)
        prompts = ((request.left, request.due) for request in self._prompts if request.left)
        tokens = self._limit.tokens(prompts, begins, joins_at)
        return min(BUDGET - decodes, prompt_limit(tokens, decodes, self._mixed_steps, GRAPH_ROWS))

    def _chunks(self, budget: int, decodes: int) -> Iterator[tuple[Request, int]]:
        taken = 0
        for request in self._prompts:
            if not request.computable:  # the step under way has the last tokens, or a range has not begun
                continue
            if (count := min(budget, request.computable)) <= 0:
                return
            if not decodes and not may_join(request.computable, taken):
                return
            if request.left == request.tokens:
                request.started()
            budget -= count
            taken += count
            request.take(count)
            yield request, count

    def _end_step(
        self, seconds: float, tokens: int, position: float, computed: list[Request], joined: list[Request]
    ) -> None:
        now, decodes, outcome = self._clock.now, len(self._decodes), self._outcome
        self._under_way = 0
        self._meters.record(decodes > 0, tokens, seconds, position)
        self._computed += tokens
        self._tokens += 1
        self._context += decodes
        outcome.seconds = now
        if outcome.measures:
            outcome.gaps[seconds] += decodes - len(joined)
            for request in joined:
                outcome.gaps[now - request.token_at] += 1
                outcome.first_gaps.append(now - request.token_at)
        while self._decodes and self._decodes[0][0] <= self._tokens:
            end, _, request = heapq.heappop(self._decodes)
            self._context -= request.prompt + request.answer + self._tokens - end
            self._positions -= request.prompt + request.answer
            if request.measured:
                ttft = request.token_at - request.arrived + OVERHEAD_SECONDS
                outcome.answers.append((ttft, (now - request.token_at) / (request.answer - 1)))
            request.ended()
        for request in computed:
            self._prompts.remove(request)
            request.token_at = now
            if request.measured:
                seconds = OVERHEAD_SECONDS + request.prompt * TOKENIZE_SECONDS
                outcome.ttft.append(now - request.arrived + seconds)
            request.first_token()
        self._step()
