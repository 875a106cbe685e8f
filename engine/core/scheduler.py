"""Chooses the tokens of the next step. Pure; knows no tensor.

Continuous batching (Orca, Yu 2022) with chunked prefill (Sarathi, Agrawal 2023): a step takes one token of
every decoding request, and fills the rest of its token budget with chunks of prefills. Requests are served in
the order of `LiveRequest.order`. A request gets blocks for its whole prompt when it is first scheduled, so a
prefill never stops for lack of blocks. Only a decode needs more blocks. If the pool is empty then, the
request that is last in order is preempted.

Of one priority, tenants get equal shares of the prompt tokens (`FairShares`).
"""

from collections.abc import Callable, Iterator, Sequence
from heapq import merge
from itertools import chain
from operator import attrgetter

from baton.engine.core.live_request import LiveRequest, Phase
from baton.engine.core.meters import MIXED_STEPS, Batch, may_join, prompt_limit
from baton.engine.core.request_lives import RequestLives
from baton.engine.core.request_memory import Verdict
from baton.engine.core.speculation import Speculation
from baton.engine.core.step_builder import Schedule
from baton.engine.model_config import FULL_STEP

_IS_ALONE = attrgetter("alone")


class Scheduler:
    """Schedules steps, and gives running requests the blocks that they grow by.

    Attributes:
        lives: the requests, in their phases.
        preemptions: since the start.
    """

    def __init__(
        self,
        lives: RequestLives,
        *,
        max_num_batched_tokens: int,
        mixed_rows: Sequence[int] = (),
        full_step: int = FULL_STEP,
        speculation: Speculation | None = None,
    ) -> None:
        """Schedules no step yet.

        Args:
            mixed_rows: sizes of steps with decodes and prompts that need no padding, in ascending order.
            full_step: with so many prompt tokens, a step gains nothing from further prompts.
            speculation: None: no token is drafted.
        """
        assert lives.max_num_seqs <= max_num_batched_tokens, "every running request must be able to decode"
        self.lives = lives
        self._pool = lives.pool
        self._memory = lives.memory
        self._running = lives.running
        self._waiting = lives.waiting
        self.max_num_batched_tokens = max_num_batched_tokens
        self._mixed_rows = mixed_rows
        self._full_step = full_step
        self.speculation = speculation
        self.preemptions = 0
        self._mixed_steps = MIXED_STEPS  # since the last step that only decoded
        self._was_alone = False  # whether the last step was for a request that shares no step

    def schedule(self, chunk_limit: Callable[[Batch], int] | None = None) -> Schedule:
        """Schedules the next step and gives its requests their blocks. Decodes go first, so that no prompt
        delays them. Then prompts go in order, those that have begun and those of the queue, while there is
        room. The step has leases on its requests, which the caller ends.

        `chunk_limit`: returns the most prompt tokens of a step with these decodes. It holds while requests
        decode or may join: these may come during the step and then wait for its end."""
        schedule = Schedule(started=self.lives.take_loaded() if self.lives.loaded else [])
        if self.lives.compiling:
            self.lives.queue_compiled()
        alone = self._next_alone()
        ready = [live for live in self._running if (live is alone if alone else not live.alone)]
        prompts = [live for live in ready if not live.decodes]
        budget = self.max_num_batched_tokens
        # In order, so that a preemption, which takes the last request, takes none that the step has already.
        for live in [live for live in ready if live.decodes] if prompts else ready:
            budget -= self._go_on(live, budget, schedule)
        if chunk_limit is not None and (prompts or self._waiting):
            decodes = self.max_num_batched_tokens - budget
            budget = min(budget, self._prompt_limit(decodes, schedule, chunk_limit))
        for live in prompts:
            budget -= self._admit(budget, alone, schedule, before=live)
            if self._may_join(live, schedule) and not self._must_come_later(live, schedule):
                budget -= self._go_on(live, budget, schedule)
        self._admit(budget, alone, schedule)
        if self.speculation is not None:
            self.speculation.draft(schedule, self._memory)
        schedule.lease()
        if schedule.decodes:
            self._mixed_steps = self._mixed_steps + 1 if schedule.prompts else 0
        return schedule

    def _prompt_limit(self, decodes: int, schedule: Schedule, chunk_limit: Callable[[Batch], int]) -> int:
        """Most prompt tokens of a step with the `decodes` of this schedule."""
        if not decodes and not self.some_may_join:
            return self.max_num_batched_tokens
        position = next((position for _, _, position in self.parts_waiting()), 0)
        gap_cost = sum(live.asked.gap_cost for live in schedule.chunks)
        tokens = chunk_limit(Batch(decodes, schedule.decode_context, position, gap_cost))
        first = next((left for left, _ in self.prompts()), 0)
        return prompt_limit(tokens, decodes, self._mixed_steps, self._mixed_rows, first)

    def _admit(
        self, budget: int, alone: LiveRequest | None, schedule: Schedule, before: LiveRequest | None = None
    ) -> int:
        """Starts waiting requests while there is budget, with `before` only those that come before it in
        order. Returns the number of their tokens in the schedule."""
        used = 0
        while self._waiting and budget > used and not schedule.preempted:
            live = self._waiting[0]
            if live is not alone and (alone is not None or live.alone):
                break
            if before is not None and before.order < live.order:
                break
            if not self._may_join(live, schedule):
                break
            if (admission := self.lives.admission).verdict is not Verdict.TAKE:
                break
            self.lives.admit(admission)
            if live.phase is Phase.RUNNING:
                schedule.started.append(live)
                used += self._add_chunk(live, live.num_computable, budget - used, schedule)
        return used

    def _may_join(self, live: LiveRequest, schedule: Schedule) -> bool:
        """Whether the next chunk of a prompt may share the step."""
        return bool(schedule.decodes) or may_join(
            live.num_computable, schedule.prompt_tokens, self._full_step
        )

    @property
    def some_may_join(self) -> bool:
        """Whether a request may join the decodes after the next step: a reservation, but for those of split
        prompts, or one whose prompt is computed and that goes on here."""
        if not all(live.shared.ranges for live in self.lives.reserved):
            return True
        return any(live.goes_on and live.decodes for live in chain(self._running, self.lives.held))

    def _is_held_back(self, live: LiveRequest) -> bool:
        """Whether a step with this prompt would make requests that decode here wait for other workers."""
        if live.shared.awaits is None:
            return False
        return (self.lives.some_decode or self.some_may_join) and live.awaits_kv

    def _must_come_later(self, live: LiveRequest, schedule: Schedule) -> bool:
        """Whether a prompt is held back, or the step would wait for the workers of two prompts. Then those of
        one would end the other, which have done nothing wrong."""
        if self._is_held_back(live):
            return True
        return any(other.awaits_kv for other in schedule.prompts) and live.awaits_kv

    def _go_on(self, live: LiveRequest, budget: int, schedule: Schedule) -> int:
        """Adds the next chunk of a running request to the schedule. Returns its number of tokens."""
        computable = live.num_computable
        if min(computable, budget) <= 0 or live.ends_with_pending or live.phase is not Phase.RUNNING:
            return 0
        if self._memory.lacks(live) and not self._grow(live, schedule):
            return 0
        return self._add_chunk(live, computable, budget, schedule)

    def _add_chunk(self, live: LiveRequest, computable: int, budget: int, schedule: Schedule) -> int:
        """Adds the next chunk of a request to the schedule. Returns its number of tokens. `computable`: as
        `LiveRequest.num_computable`."""
        count, windowed = min(computable, budget), self._pool.windows is not None
        if windowed:
            count = self._memory.within_windows(live, count)
        if live.images is not None:
            room = self.max_num_batched_tokens - sum(map(len, schedule.chunks.values()))
            room = self._memory.within_windows(live, min(computable, room))
            count = live.images.chunk(live.num_computed, count, room)
        if count:
            if self._memory.states is not None:
                count = self._memory.states.until_copy(live, count)
            if windowed:
                self._memory.reach(live, live.num_computed + count + live.slack)
            schedule.chunks[live] = range(live.num_computed, live.num_computed + count)
            if not live.decodes:
                schedule.prompts[live] = schedule.chunks[live]
            if live.tag.tokens > self.lives.shares.now:  # never so for a decode, of which a step has hundreds
                self.lives.shares.served(live.tag.tokens - live.num_left + count)
        return count

    def _next_alone(self) -> LiveRequest | None:
        """The request that has this step to itself, if any. Such requests get every second step while other
        requests are ready."""
        if not self._some_alone:
            self._was_alone = False
            return None
        ready = [*self._running, *(self._waiting[:1] if self.lives.can_admit else ())]
        alone = next((live for live in ready if live.alone), None)
        if self._was_alone and not all(live.alone for live in ready):
            alone = None
        self._was_alone = alone is not None
        return alone

    @property
    def _some_alone(self) -> bool:
        """Whether one that runs, or comes next, shares no step."""
        return any(map(_IS_ALONE, chain(self._running, self._waiting[:1])))

    @property
    def may_look_ahead(self) -> bool:
        """Whether the next step may be scheduled before the tokens of the last one are known. Not if a
        request needs a step of its own, if the next step would have to preempt a request, or if drafts must
        know these tokens."""
        if self._some_alone or (self.speculation is not None and self.speculation.waits):
            return False
        return self._memory.can_grow(self._running, one_block=self.speculation is None)

    def prompts(self) -> Iterator[tuple[int, float]]:
        """Yields (tokens left, due time) of each prompt that is not computed, in order. What the cache had
        when a prompt was queued does not count."""
        begun = (live for live in self._running if not live.decodes)
        for live in merge(begun, self._waiting, key=attrgetter("order")):
            cached = live.cached_when_queued if live.phase is Phase.WAITING else 0
            yield live.num_left - cached, live.due

    def parts_waiting(self) -> Iterator[tuple[bytes, int, int]]:
        """Yields (request, tokens, position of the first) of each prompt that no step computes yet, without
        what the prefix cache has now."""
        for live in self._running:
            if not live.decodes:
                yield live.id, live.num_left, live.num_computed
        for live in self.lives.reserved:
            if live.shared.ranges:
                yield live.id, live.num_left, live.num_computed
        for live in chain(self._waiting, self.lives.compiling, self.lives.loading):
            cached = self._memory.known(live) * self._pool.block_size
            yield live.id, live.num_left - cached, live.num_computed + cached

    def batch(self, position: float) -> Batch:
        """All requests that decode here, beside a prompt at `position`. A prompt whose last tokens are
        computed now does not decode if it is handed over, or ends, after them."""
        decoding = [x for x in self._running if x.decodes and not x.ends_with_pending]
        context, gap_cost = sum(x.num_computed for x in decoding), sum(x.asked.gap_cost for x in decoding)
        return Batch(len(decoding), context, position, gap_cost)

    @property
    def next_prompt(self) -> int:
        """Tokens that a step may compute of the first prompt of the next step. 0: that step decodes, or has
        no prompt."""
        first = 0
        for live in self._running:
            if not live.ends_with_pending:
                if live.decodes:
                    return 0  # mostly the first of hundreds: the loop of the worker asks several times a step
                first = first or live.num_computable
        return first or (self._waiting[0].num_left if self._waiting else 0)

    @property
    def has_work(self) -> bool:
        """Whether a running request has a step now, or has one under way, or the queue may start, or a
        grammar is being compiled for it."""
        if self.lives.compiling or any(not self._is_held_back(live) for live in self._running):
            return True
        return self.lives.can_admit

    @property
    def has_next(self) -> bool:
        """Whether there is anything to compute beyond the steps under way. Not for a prompt that waits for
        an image or a grammar."""
        following = (live for live in self._running if not live.ends_with_pending)
        if any(live.num_computable > 0 and not self._is_held_back(live) for live in following):
            return True
        return self.lives.can_admit or any(live.may_sample for live in self.lives.compiling)

    def launched(self, schedule: Schedule) -> None:
        """Notes that a launched step writes the KV of its chunks. Later steps may read it."""
        for live, positions in schedule.chunks.items():
            live.num_computed = positions.stop
            live.decodes = positions.stop == len(live.token_ids)  # the step samples its next token
            if live.shared.range_stop is not None:
                self.lives.range_launched(live, positions.stop)

    def _grow(self, live: LiveRequest, schedule: Schedule) -> bool:
        """Gives the request the blocks that it needs, and preempts others for it. False: the request itself
        was preempted."""
        while not self._memory.grow(live, self._memory.lacks(live)):
            victim = max((r for r in self._running if not r.handover), key=lambda r: r.order)
            self._preempt(victim, schedule)
            if victim is live:
                return False
        return True

    def _preempt(self, victim: LiveRequest, schedule: Schedule) -> None:
        assert not victim.leases, "no request is preempted while a step that uses its blocks is under way"
        self.preemptions += 1
        schedule.preempted.append(victim)
        if victim.hand_back:
            self.lives.drop(victim)
        else:
            self.lives.requeue(victim)
