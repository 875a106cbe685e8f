"""An engine step by step: it decodes, and computes prompts in the order of `FairShares`.

A step takes one token of each decode, and chunks of prompts. The chunk limit and the averages that a worker
reports are those of the engine. Only the cost of a step is simulated (`steps`).

As in the engine, a step is scheduled before the one under way ends. Requests that come later from other
workers wait for the step after it. A prompt that does not fit into the free KV memory waits, and so do those
behind it.
"""

import heapq
import math
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from operator import attrgetter
from typing import Literal

from baton.engine.core.meters import MIXED_STEPS, Batch, ChunkLimit, Meters, may_join, prompt_limit
from baton.engine.core.pace import EARLY
from baton.engine.core.state_copies import Wanted
from baton.kv_names import CHUNK_TOKENS
from baton.rpc import worker_pb2 as pb
from baton.simulator.cache import KvMemory, Lease
from baton.simulator.clock import Clock
from baton.simulator.copies import Copies
from baton.simulator.placement_outcome import PlacementOutcome
from baton.simulator.requests import Request
from baton.simulator.steps import GRAPH_ROWS, H200_8B, KV_TOKEN_BYTES, Machine
from baton.steps.averages import Average
from baton.steps.learned_steps import LearnedSteps, row_sizes, token_sizes
from baton.steps.measured_steps import measure
from baton.steps.step_model import StepModel

BLOCK = 128
BUDGET = 8_192
"""Prompt tokens of a step."""
LEAD_SECONDS = 1.1e-3
"""Before the end of a step, the engine launches the next one. From traces of an H200."""
SIZES = row_sizes(GRAPH_ROWS[-1]), token_sizes(BUDGET)
"""Of steps that count together."""
LONG_CONTEXT = 4_096
"""As in `engine.execution.warmup`, which measures the steps of a real engine."""


Chunks = list[tuple[Request, int]]
"""Prompts, and how many tokens of each a step takes."""
Rule = Literal["baton", "vllm", "sglang"]
"""How an engine shares steps. Those of vLLM have a fixed size (`Machine.rows`). SGLang computes prompts at
once, in steps of up to `BUDGET` tokens, and decodes wait."""


@lru_cache(16)
def measured(machine: Machine) -> StepModel:
    """Measures as an engine does when it starts."""

    def step(rows: int, context: float, tokens: int, position: float) -> float:
        return machine.step(rows, context, [(tokens, int(position))] if tokens else [])

    return measure(step, *SIZES, LONG_CONTEXT, LONG_CONTEXT)


class _GivenSteps(LearnedSteps):
    """As a real worker has measured them, until its next report."""

    def record(self, rows: int, context: float, tokens: int, position: float, seconds: float) -> None:
        pass


class Worker:
    """Calls the events of its requests.

    Attributes:
        reserved: requests whose KV will come from another worker.
        arriving: when the KV of requests should come, by number, as far as known.
        machine: what it runs on.
        blocks: of its memory.
        kv: its memory.
        copies: of states. None: the model has none.
        slowness: how many times as long its steps take.
        links: that it has measured, by the row of the other worker. None: all are equal.
        sends_until, receives_until: when its link has carried the KV that is under way.
        cache_changed: called when names entered or left the cache.
        fetch_wait: seconds that fetches of prefixes lately took beside the transfer.
    """

    def __init__(
        self,
        name: str,
        clock: Clock,
        outcome: PlacementOutcome,
        *,
        rule: Rule,
        target_steps: float,
        machine: Machine = H200_8B,
    ) -> None:
        self.name = name
        self.reserved = 0
        self.arriving: dict[int, float] = {}
        self.blocks = machine.positions // BLOCK
        self.kv = KvMemory(self.blocks * BLOCK // CHUNK_TOKENS)
        self.copies = None if machine.copies is None else Copies(machine.copies, BLOCK)
        self.slowness = 1.0
        self.fetch_wait = Average()
        self.links: Mapping[int, pb.PrefixLink] | None = None
        self.sends_until = self.receives_until = 0.0
        self.cache_changed: Callable[[], None] = lambda: None
        self._leases: dict[int, Lease] = {}  # by the number of the request
        self._roomless: list[Request] = []  # their KV has come, and there was no room for it
        self._clock = clock
        self._outcome = outcome
        self._rule: Rule = rule
        self.machine = machine
        largest = BUDGET, machine.step(0, 0, [(BUDGET, 0)])
        steps = LearnedSteps(*SIZES, measured(machine))
        self._limit = ChunkLimit(steps, None, BUDGET, target_steps)
        self._meters = Meters(self._limit, largest)
        self._prompts: list[Request] = []
        self._decodes: list[tuple[int, int, Request]] = []  # a heap by `_tokens` at the end
        self._joining: list[Request] = []  # for the next step
        self._arrived: list[Request] = []  # from other workers, for the step that is scheduled next
        self._under_way: Chunks = []  # of the step
        self._staying: list[Request] = []  # the step ends their prompts, and they decode here
        self._scheduled: Chunks | None = None
        self._ends_of_blocks: list[tuple[int, int, Request, int]] = []  # a heap by `_tokens`; the position
        self._context = 0  # positions of all decodes
        self._gap_cost = 0.0  # of all decodes
        self._waits = False  # whether the decodes wait for the step under way
        self._waited = 0.0  # seconds of such steps since the last token of the decodes
        self._tokens = 0  # that a request would have got in all steps up to now
        self._mixed_steps = MIXED_STEPS  # since the last step that only decoded
        self._computed = 0  # prompt tokens
        self._generated = 0
        self._joined = self._stepping = False
        self._step_ends = self._step_seconds = 0.0

    def measured(
        self, machine: Machine, model: StepModel, fastest: float, links: Mapping[int, pb.PrefixLink]
    ) -> None:
        """As in `placement.Measured`."""
        if self.links is None:
            self._meters = Meters(self._limit)  # it has computed no large step
        self.machine, self.links = machine, links
        self._limit.steps = self._meters.steps = _GivenSteps(*SIZES, model)
        self._limit.fastest_seconds = fastest

    # ------------------------------------------------------------ requests

    def reserve(self, request: Request) -> None:
        """Reserves a place for a request. Its KV comes later (`join`)."""
        self.reserved += 1
        self._take(request, request.prompt + request.answer, request.prompt)

    def prefill(self, request: Request) -> None:
        """Computes the prompt, and then calls `first_token`."""
        request.begin(self.usable(request))
        request.alone = self._computed + request.untaken if self._rule == "baton" else 0
        insort(self._prompts, request, key=attrgetter("alone"))
        self.wake()

    def decode(self, request: Request) -> None:
        """Decodes a request, after this worker has computed its prompt."""
        self._joining.append(request)

    def join(self, request: Request) -> None:
        """The KV of a reserved request has come."""
        if not self._take(request, request.prompt + request.answer, request.prompt):
            self._roomless.append(request)
            return
        self._publish(request, request.prompt)
        self.reserved -= 1
        del self.arriving[request.number]
        self._joined = True
        self._arrived.append(request)
        self.wake()

    def release(self, request: Request, *, handed_over: bool = False) -> None:
        """The worker needs the KV of this request no more. It stays in the cache. `handed_over`: another
        worker has it, too."""
        self.kv.release(self._leases.pop(request.number), handed_over=handed_over)
        roomless, self._roomless = self._roomless, []
        for waiting in roomless:
            self.join(waiting)
        self.wake()

    def usable(self, request: Request) -> int:
        """Tokens of the prompt that it need not compute."""
        cached = self.kv.cached(request.prompt_names, request.prompt - 1)
        return cached if self.copies is None else self.copies.usable(request.names, cached)

    def imported(self, names: Sequence[int]) -> None:
        """These chunks have come from the cache of another worker, with the states at their end."""
        lease = self.kv.take(names, len(names) * CHUNK_TOKENS, len(names) * CHUNK_TOKENS)
        if lease is not None:
            self.kv.publish(lease, names)
            self.kv.release(lease)
            if self.copies is not None and names:
                self.copies.begin(names, len(names) * CHUNK_TOKENS)
            self._changed()

    def _take(self, request: Request, positions: int, most_cached: int) -> bool:
        """Takes memory for the request, unless it has some. False: there is no room."""
        if request.number not in self._leases:
            lease = self.kv.take(request.prompt_names, positions, most_cached)
            if lease is None:
                return False
            self._leases[request.number] = lease
            self._changed()
        return True

    def _changed(self) -> None:
        if self.copies is not None:
            self.copies.drop(self.kv.evicted)
        self.cache_changed()

    def _publish(self, request: Request, positions: int) -> None:
        """The KV of so many positions is there."""
        self.kv.publish(self._leases[request.number], request.names[: positions // CHUNK_TOKENS])
        self._changed()

    def fetch_delay(self, holder: "Worker") -> float:
        """Seconds that a fetch of a prefix takes beside the transfer. Engines that schedule ahead begin it,
        and show what they have, between two steps. What they show is read behind the next one."""
        if not self.machine.ahead:
            return 0.0
        return self._step_left + holder._step_left + holder._step_seconds * holder._stepping

    @property
    def _step_left(self) -> float:
        return max(0.0, self._step_ends - self._clock.now)

    @property
    def idle(self) -> bool:
        return not (self._stepping or self.reserved or self._leases or self._context)

    @property
    def step_model(self) -> StepModel | None:
        """What its steps cost, as it would report now."""
        return self._limit.steps.model

    def waiting(self) -> Counter[int]:
        """Prompt tokens that it has not computed, by router."""
        waiting = Counter[int]()
        for request in self._prompts:
            waiting[request.router] += request.untaken
        for request, count in (*(self._scheduled or ()), *self._under_way):
            waiting[request.router] += count
        return waiting

    def status(self) -> pb.WorkerStatus:
        limit = self._limit
        decoding = len(self._decodes) + len(self._joining) + len(self._arrived)
        joining = [*self._joining, *self._arrived]
        gap_cost = self._gap_cost + sum(request.gap_cost for request in joining)
        batch = Batch(decoding, self._context, self._meters.prefill_position, gap_cost)
        long = limit.long_step(batch)
        started = sum(request.number in self._leases for request in self._prompts)
        return pb.WorkerStatus(
            requests_running=decoding + started,
            requests_decoding=decoding,
            decode_context=self._context + sum(request.prompt + 1 for request in joining),
            gap_cost=gap_cost,
            reservations=self.reserved,
            tokens_waiting=self.waiting().total(),
            blocks_free=self.kv.free * CHUNK_TOKENS // BLOCK,
            blocks_spare=self.kv.spare * CHUNK_TOKENS // BLOCK,
            blocks_total=self.blocks,
            requests_waiting=len(self._prompts) - started,
            prefill_tokens_per_s=self._meters.prefill_tokens_per_s,
            prefill_position=self._meters.prefill_position,
            step_seconds=self._meters.step_seconds,
            computed_prompt_tokens=self._computed,
            generation_tokens=self._generated,
            mixed_step_tokens=self.machine.rows if self.machine.rows < BUDGET else 0,
            long_chunk_tokens=long.tokens,
            long_chunk_seconds=long.seconds,
            fastest_step_seconds=limit.fastest_seconds,
            gap_target_seconds=limit.gap_target,
            kv_links=self._links(),
        )

    def _links(self) -> list[pb.KvLink]:
        """All workers have the same incarnation, and this one's link is one for all."""
        if self.machine.link == math.inf:
            return []
        waiting = max(0.0, self.receives_until - self._clock.now) * self.machine.link
        rate = self.machine.link * KV_TOKEN_BYTES
        return [pb.KvLink(bytes_per_s=rate, bytes_waiting=int(waiting * KV_TOKEN_BYTES))]

    # ------------------------------------------------------------ steps

    def wake(self) -> None:
        """There may be something to compute."""
        if not self._stepping:
            self._step()

    def _schedule(self, begins: float) -> None:
        """Chooses what the next step computes, as far as it is known. `begins`: when it should begin."""
        self._joining += self._arrived
        self._arrived.clear()
        decodes = len(self._decodes) + len(self._joining) + len(self._staying)
        chunks = list(self._chunks(self._prompt_budget(decodes, begins), decodes))
        self._scheduled = chunks if chunks or decodes else None

    def _step(self) -> None:
        if self._scheduled is None or not (self._scheduled or self._decodes or self._joining):
            self._schedule(self._clock.now)
        chunks, self._scheduled = self._scheduled or [], None
        self._waits = self._rule == "sglang" and bool(chunks)
        joining: list[Request] = []
        if not self._waits:
            joining, self._joining = self._joining, joining
        for request in joining:
            # No step decodes the first token.
            heapq.heappush(self._decodes, (self._tokens + request.answer - 1, request.number, request))
            self._await_end_of_block(request, request.prompt)
            self._context += request.prompt + 1
            self._gap_cost += request.gap_cost
        self._stepping = bool(self._decodes or chunks)
        if not self._stepping:
            return
        self._under_way, tokens = chunks, sum(count for _, count in chunks)
        decodes, context = (0, 0) if self._waits else (len(self._decodes), self._context)
        if self._decodes:
            self._mixed_steps = self._mixed_steps + 1 if tokens else 0
        starts = [(count, request.computed) for request, count in chunks]
        position = sum(count * (start + count / 2) for count, start in starts) / max(1, tokens)
        now, seconds = self._clock.now, self.machine.step(decodes, context, starts)
        seconds *= self.slowness
        seconds = max(seconds, *(request.earliest_end(self, seconds) - now for request, _ in chunks), 0.0)
        last = []
        for request, count in chunks:
            if self.copies is not None:
                start = request.computed
                self.copies.made(request.names, _wanted(request), start, start + count, request.prompt)
            request.step_begins(self, count, seconds, now)
            if not request.untaken:
                request.ends(now + seconds)
                last.append(request)
        self._staying = [request for request in last if request.positions > request.prompt]
        self._step_ends, self._step_seconds = now + seconds, seconds
        self._clock.after(seconds, partial(self._end_step, seconds, tokens, position, last, joining))
        if self._rule == "sglang":
            self._schedule(now + seconds)
        if self._rule == "baton":
            self._schedule_next(tokens, position, seconds)

    def _schedule_next(self, tokens: int, position: float, seconds: float) -> None:
        """The step under way has `tokens` prompt tokens, at a mean `position`, and takes `seconds`."""
        expected, early = seconds, seconds - LEAD_SECONDS
        if tokens:
            expected = self._meters.step_expected(len(self._decodes), self._context, tokens, position)
            early = EARLY * expected - LEAD_SECONDS
        if self.machine.ahead:
            early = 0.0
        begins = self._clock.now + expected
        if early < seconds:
            self._clock.after(max(0.0, early), partial(self._schedule, begins))

    def _prompt_budget(self, decodes: int, begins: float) -> int:
        joined, self._joined = self._joined, False
        if not self._prompts:
            return 0  # what is below would take a third of the time of a simulation
        if self._rule == "vllm":
            return self.machine.rows - decodes
        if self._rule == "sglang":
            return BUDGET
        most = min(BUDGET, self.machine.rows) - decodes
        if not (decodes or self.reserved):
            return most
        joins_at = math.inf
        if not self.machine.ahead:
            joins_at = self._clock.now if joined else min(self.arriving.values(), default=math.inf)
        prompts_left = [request for request in self._prompts if request.untaken]
        joining = [*self._joining, *self._staying]
        context = self._context + sum(request.prompt + 1 for request in joining)
        gap_cost = self._gap_cost + sum(request.gap_cost for request in joining)
        batch = Batch(decodes, context, prompts_left[0].computed if prompts_left else 0, gap_cost)
        prompts = [(request.untaken, request.due) for request in prompts_left]
        tokens = self._limit.tokens(batch, prompts, begins, joins_at)
        first = prompts[0][0] if prompts else 0
        return min(most, prompt_limit(tokens, decodes, self._mixed_steps, GRAPH_ROWS, first))

    def _chunks(self, budget: int, decodes: int) -> Iterator[tuple[Request, int]]:
        tokens, full = 0, False
        for request in self._prompts:
            if not request.computable:  # the step under way has the last tokens, or a range has not begun
                continue
            if (decodes or self.reserved) and request.earliest_end(self, 0.0) > self._clock.now:
                continue  # the decodes would wait for another worker
            if request.number not in self._leases:
                if full or not self._begin(request):
                    full = True  # those that have begun go on, as in the engine
                    continue
                request.started()
            if (count := min(budget, request.computable)) <= 0:
                return
            if self.copies is not None:
                start = request.computed
                count = self.copies.cut(_wanted(request), start, start + count, request.prompt) - start
            if self._rule != "sglang" and not decodes and not may_join(request.computable, tokens):
                return
            budget -= count
            tokens += count
            request.take(count)
            yield request, count

    def _begin(self, request: Request) -> bool:
        """Gives the prompt memory, and what is cached of it. False: there is no room."""
        usable = self.usable(request)
        cached = self.kv.cached(request.prompt_names, request.prompt - 1) // BLOCK * BLOCK
        if not self._take(request, request.positions, usable):
            return False
        request.begin(usable)
        if self.copies is not None:
            request.branch = cached if cached > usable else 0
            if usable:
                self.copies.begin(request.names, usable)
        return True

    def _await_end_of_block(self, request: Request, computed: int) -> None:
        """The next copy of the states of a request that decodes, after so many positions."""
        if self.copies is None:
            return
        position = self.copies.next_of_answer(computed)
        if position < request.prompt + request.answer:
            heapq.heappush(
                self._ends_of_blocks, (self._tokens + position - computed, request.number, request, position)
            )

    def _end_step(
        self, seconds: float, tokens: int, position: float, computed: list[Request], joined: list[Request]
    ) -> None:
        now, outcome = self._clock.now, self._outcome
        decodes = 0 if self._waits else len(self._decodes)
        self._under_way = []
        self._meters.record(decodes, tokens, seconds, position, self._context if decodes else 0)
        self._computed += tokens
        self._generated += decodes + len(computed)
        outcome.seconds = now
        outcome.busy[self.name] += seconds
        outcome.most = max(outcome.most, decodes)
        if self._waits:
            self._waited = self._waited + seconds if self._decodes else 0.0
        else:
            self._decoded(seconds, joined)
        for request in computed:
            self._prompts.remove(request)
            self._publish(request, request.prompt)
            request.token_at = now
            request.first_token()
        self._staying = []
        self._step()

    def _decoded(self, seconds: float, joined: list[Request]) -> None:
        """A step of `seconds` gave a token to each decode, of which some have `joined` with it."""
        now, decodes, outcome = self._clock.now, len(self._decodes), self._outcome
        self._tokens += 1
        self._context += decodes
        seconds, self._waited = seconds + self._waited, 0.0
        if outcome.measures:
            outcome.gaps[seconds] += decodes - len(joined)
            for request in joined:
                outcome.gaps[now - request.token_at] += 1
                outcome.first_gaps.append(now - request.token_at)
        while self._ends_of_blocks and self._ends_of_blocks[0][0] <= self._tokens:
            _, _, request, end = heapq.heappop(self._ends_of_blocks)
            assert self.copies is not None, "it makes copies"
            self.copies.reached(request.number, request.names, end)
            self._await_end_of_block(request, end)
        while self._decodes and self._decodes[0][0] <= self._tokens:
            end, _, request = heapq.heappop(self._decodes)
            self._context -= request.prompt + request.answer + self._tokens - end
            self._gap_cost = self._gap_cost - request.gap_cost if self._decodes else 0.0
            self._publish(request, request.prompt + request.answer - 1)
            if self.copies is not None:
                self.copies.end(request.number)
            self.release(request)
            if request.measured:
                outcome.answers.append(request.answered(now))
            request.ended()


def _wanted(request: Request) -> Wanted:
    return Wanted(request.cached, request.branch)
