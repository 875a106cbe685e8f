"""Chooses the tokens of the next step, and assigns KV blocks to requests. Pure; knows no tensor.

Continuous batching (Orca, Yu 2022) with chunked prefill (Sarathi, Agrawal 2023): a step takes one token of
every decoding request, and fills the rest of its token budget with chunks of prefills. Requests are served in
the order of `LiveRequest.order`. A request gets blocks for its whole prompt when it is first scheduled, so a
prefill never stops for lack of blocks. Only a decode needs more blocks. If the pool is empty then, the
request that is last in order is preempted.

Of one priority, tenants get equal shares of the prompt tokens (`FairShares`).

One engine may prefill for other workers and decode for them at the same time. What waits for blocks or seats:

    waiting   ──▶ a seat, blocks and a state slot, which running, held and reserved requests have
    held      ──▶ a transfer to a reservation on another worker, or a seat here (`resume`)
    reserved  ──▶ a prefill on another worker, which may be waiting there
    running   ──▶ nothing
    pinned, importing (`prefix_exchange`) ──▶ a transfer into blocks that are reserved

Every holder of blocks or seats ends, so nothing waits in a circle:

- A loading request waits only for copies from the memory or the disk of the host. Then it runs, or it waits
  again.
- A running request waits for nothing. If it must grow and no block is free, the last running request in
  order is preempted, at worst itself. So the first one always goes on to its end.
- A held request that is fetched waits only for its transfer: the reservation has all its blocks.
- A held request that is not fetched can go on here. For that it needs only a seat, and a running request
  leaves its seat at its end. The caller resumes it between two steps, so before a waiting request.
- A reservation ends if its prefill has started on the other worker. If the prefill is waiting there, that
  worker makes room for it (`making_room`): it drops held requests that are not fetched. If this is not
  enough, and no request is running, it drops reservations with a prefill that has not started. Otherwise
  two workers that are full of reservations for each other's waiting prefills would wait forever.
- The first waiting request gets what the holders leave: a request of `reserve` or `start` comes in only if
  a seat and enough blocks remain for it.
"""

from array import array
from bisect import insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from baton.engine.api.request import EngineRequest
from baton.engine.core.block_pool import BlockPool, StatePool
from baton.engine.core.chunk_limit import FULL_STEP, MIXED_STEPS, may_join, prompt_limit
from baton.engine.core.live_request import FairShares, LiveRequest, Phase
from baton.engine.core.offload_tier import OffloadTier
from baton.engine.core.prefix_cache import PrefixCache
from baton.engine.core.prefix_exchange import PrefixExchange
from baton.engine.core.request_memory import RequestMemory
from baton.engine.core.step_builder import Schedule


class Scheduler:
    """Owns all requests of an engine, each in the list of its phase, and the pools of blocks and states.

    Attributes:
        requests: by id, all but those that have ended.
        leaving: requests that have ended while a launched step or a load uses their blocks.
        preemptions: since the start.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        mixed_rows: Sequence[int] = (),
        full_step: int = FULL_STEP,
        cache: PrefixCache | None = None,
        states: StatePool | None = None,
    ) -> None:
        """Makes a scheduler without requests.

        Args:
            mixed_rows: sizes of steps with decodes and prompts that need no padding, in ascending order.
            full_step: with so many prompt tokens, a step gains nothing from further prompts.
            cache: None: there is no prefix cache.
            states: the state slots of a model with state layers.
        """
        assert max_num_seqs <= max_num_batched_tokens, "every running request must be able to decode"
        self.pool = pool
        self.states = states
        self.cache = cache
        self.offload: Sequence[OffloadTier] = () if cache is None else cache.offload
        """The tiers of the prefix cache below the device, the fastest first."""
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self._mixed_rows = mixed_rows
        self._full_step = full_step
        self.prefix_exchange: PrefixExchange | None = None
        # Transfers of prefixes carry no states, and without states a prefix is of no use.
        if cache is not None and states is None:
            self.prefix_exchange = PrefixExchange(pool, cache, block_size, lambda: self._spare_blocks)
        self.memory = RequestMemory(pool, states, cache, block_size)
        self.requests: dict[bytes, LiveRequest] = {}
        self._of_phase: Mapping[Phase, list[LiveRequest]] = {phase: [] for phase in Phase}  # sorted by order
        self.waiting = self._of_phase[Phase.WAITING]
        self.loading = self._of_phase[Phase.LOADING]
        self.running = self._of_phase[Phase.RUNNING]
        self.held = self._of_phase[Phase.HELD]
        self.reserved = self._of_phase[Phase.RESERVED]
        self.leaving = self._of_phase[Phase.GONE]
        self.preemptions = 0
        self._loaded: list[LiveRequest] = []  # since the last schedule
        self._arrivals = 0
        self._shares = FairShares()
        self._mixed_steps = MIXED_STEPS  # since the last step that only decoded
        self._was_alone = False  # whether the last step was for a request that shares no step

    # Coming in

    def add(self, request: EngineRequest, *, handover: bool) -> LiveRequest:
        """Queues a request for prefill."""
        live = self._new(request)
        live.handover = handover
        self._register(live, self._tag(live))
        self._enter(live, Phase.WAITING)
        return live

    def reserve(self, request: EngineRequest) -> LiveRequest | None:
        """Gives a request blocks for KV that comes from another worker, and for one more token. None: no
        room."""
        live = self._new(request)
        live.phase = Phase.RESERVED
        tokens, hits = len(live.token_ids) + 1, self.memory.hits(live)
        if not self._has_room_beside_queue(self.memory.need(tokens, hits)):
            return None
        self._register(live, self._shares.now)  # nothing of its prompt is computed here
        live.hand_back = True
        self.memory.take(live, tokens, hits)
        self._enter(live, Phase.RESERVED)
        return live

    def start(self, request: EngineRequest) -> LiveRequest | None:
        """Gives a request its blocks at once, to be prefilled and decoded here. None: no room."""
        live = self._new(request)
        hits = self.memory.hits(live)
        if not self._has_room_beside_queue(self.memory.need(len(live.token_ids), hits)):
            return None
        self._register(live, self._tag(live))
        live.hand_back = True
        self._begin(live, hits)
        return live

    def extend_reservation(self, live: LiveRequest, output_ids: list[int]) -> bool:
        """Extends a reservation to a longer output. False: no room, and nothing changes."""
        assert live.phase is Phase.RESERVED
        tokens = array("i", [*live.request.prompt_ids, *output_ids])
        assert len(tokens) >= len(live.token_ids), "an emitted token is never taken back"
        need = self.memory.blocks_for(len(tokens) + 1) - len(live.blocks)
        if need > self.pool.free:
            return False
        live.token_ids = tokens
        live.blocks.extend(self.pool.allocate(max(0, need)))
        return True

    def join(self, live: LiveRequest) -> None:
        """Moves a reservation with all its KV to the batch. The caller then appends its first token."""
        assert live.phase is Phase.RESERVED
        live.num_computed = len(live.token_ids)
        live.decodes = True
        self._move(live, Phase.RUNNING)

    def resume(self, live: LiveRequest, request_id: bytes) -> bool:
        """Moves a held request back to the batch, under a new id. It keeps its blocks and tokens. If it is
        preempted it is handed back. False: no seat is free, and nothing changes."""
        assert live.phase is Phase.HELD
        assert not live.pending, "a request that failed has no token to go on from"
        if self.seats <= 0:
            return False
        del self.requests[live.id]
        live.request = replace(live.request, id=request_id)
        live.id = request_id
        self._register(live, live.tag)
        live.handover, live.hand_back = False, True
        self._move(live, Phase.RUNNING)
        return True

    def _new(self, request: EngineRequest) -> LiveRequest:
        self._arrivals += 1
        return LiveRequest(request, Phase.WAITING, self._arrivals)

    def _tag(self, live: LiveRequest) -> int:
        """The tag of a request whose prompt is computed here, as far as it is not cached."""
        cached = self.memory.known(live) * self.block_size
        return self._shares.tag(live.request.tenant, live.num_left - cached)

    def _register(self, live: LiveRequest, tag: int) -> None:
        assert live.id not in self.requests, "ids are unique"
        self.requests[live.id] = live
        live.tag = tag

    def _enter(self, live: LiveRequest, phase: Phase) -> None:
        live.phase = phase
        insort(self._of_phase[phase], live, key=lambda r: r.order)

    def _move(self, live: LiveRequest, phase: Phase) -> None:
        self._of_phase[live.phase].remove(live)
        self._enter(live, phase)

    # The step

    def schedule(self, chunk_limit: int | None = None) -> Schedule:
        """Plans the next step and gives its requests their blocks. Decodes go first, so that no prompt delays
        them. Then prompts go in order, those that have begun and those of the queue, while there is room.

        `chunk_limit`: most prompt tokens of a step while requests decode or are reserved. Reserved requests
        count because they may join during the step and then wait for its end."""
        plan = Schedule(started=[live for live in self._loaded if live.phase is Phase.RUNNING])
        self._loaded.clear()
        alone = self._next_alone()
        ready = [live for live in self.running if (live is alone if alone else not live.alone)]
        prompts = [live for live in ready if not live.decodes]
        budget = self.max_num_batched_tokens
        # In order, so that a preemption, which takes the last request, takes none that the step has already.
        for live in [live for live in ready if live.decodes] if prompts else ready:
            budget -= self._go_on(live, budget, plan)
        if chunk_limit is not None:
            budget = min(budget, self._prompt_limit(self.max_num_batched_tokens - budget, chunk_limit))
        for live in prompts:
            budget -= self._admit(budget, alone, plan, before=live)
            if self._may_join(live, plan):
                budget -= self._go_on(live, budget, plan)
        self._admit(budget, alone, plan)
        if plan.decodes:
            self._mixed_steps = self._mixed_steps + 1 if plan.prompts else 0
        return plan

    def _prompt_limit(self, decodes: int, chunk_limit: int) -> int:
        """Most prompt tokens of a step with so many decodes."""
        if not decodes and not self.reserved:
            return self.max_num_batched_tokens
        return prompt_limit(chunk_limit, decodes, self._mixed_steps, self._mixed_rows)

    def _admit(
        self, budget: int, alone: LiveRequest | None, plan: Schedule, before: LiveRequest | None = None
    ) -> int:
        """Starts waiting requests while there is budget, with `before` only those that come before it in
        order. Returns the number of their tokens in the plan."""
        used = 0
        while budget > used and not plan.preempted and self.can_admit:
            live = self.waiting[0]
            if live is not alone and (alone is not None or live.alone):
                break
            if before is not None and before.order < live.order:
                break
            if not self._may_join(live, plan):
                break
            self.waiting.pop(0)
            self._begin(live, self.memory.hits(live))
            if live.phase is Phase.RUNNING:
                plan.started.append(live)
                used += self._add_chunk(live, budget - used, plan)
        return used

    def _may_join(self, live: LiveRequest, plan: Schedule) -> bool:
        """Whether the next chunk of a prompt may share the step."""
        return bool(plan.decodes) or may_join(live.num_left, plan.prompt_tokens, self._full_step)

    def _go_on(self, live: LiveRequest, budget: int, plan: Schedule) -> int:
        """Adds the next chunk of a running request to the plan. Returns its number of tokens."""
        count = min(live.num_computable, budget)
        if not count or live.ends_with_pending or live.phase is not Phase.RUNNING:
            return 0
        if self.memory.grows(live) and not self._grow(live, plan):
            return 0
        return self._add_chunk(live, budget, plan)

    def _add_chunk(self, live: LiveRequest, budget: int, plan: Schedule) -> int:
        """Adds the next chunk of a request to the plan. Returns its number of tokens."""
        count = min(live.num_computable, budget)
        if count:
            count = self.memory.until_copy(live, count)
            plan.chunks[live] = range(live.num_computed, live.num_computed + count)
            if not live.decodes:
                plan.prompts[live] = plan.chunks[live]
            if live.tag > self._shares.now:  # never so for a decode, of which a step has hundreds
                self._shares.served(live.tag - live.num_left + count)
        return count

    def _next_alone(self) -> LiveRequest | None:
        """The request that has this step to itself, if any. Such requests get every second step while other
        requests are ready."""
        ready = [*self.running, *(self.waiting[:1] if self.can_admit else ())]
        alone = next((live for live in ready if live.alone), None)
        if self._was_alone and not all(live.alone for live in ready):
            alone = None
        self._was_alone = alone is not None
        return alone

    @property
    def may_look_ahead(self) -> bool:
        """Whether the next step may be scheduled before the tokens of the last one are known. Not if a
        request needs a step of its own, or if the next step would have to preempt a request."""
        if any(live.alone for live in self.running):
            return False
        if self.waiting and self.waiting[0].alone:
            return False
        free = self.pool.free  # a request grows by at most one block in a step
        return len(self.running) <= free or sum(self.memory.grows(live) for live in self.running) <= free

    @property
    def next_prompt(self) -> int:
        """Tokens that the first prompt of the next step lacks. 0: that step decodes, or has no prompt."""
        first = 0
        for live in self.running:
            if not live.ends_with_pending:
                if live.decodes:
                    return 0  # mostly the first of hundreds: the loop of the worker asks several times a step
                first = first or live.num_left
        return first or (self.waiting[0].num_left if self.waiting else 0)

    @property
    def decoding(self) -> int:
        """Number of requests that decode here. A prompt whose last tokens are computed now does not if it is
        handed over, or ends, after them."""
        return sum(live.decodes and not live.ends_with_pending for live in self.running)

    @property
    def has_next(self) -> bool:
        """Whether there is anything to compute beyond the steps under way."""
        return self.can_admit or any(not live.ends_with_pending for live in self.running)

    def launched(self, plan: Schedule) -> None:
        """Notes that a launched step writes the KV of its chunks. Later steps may read it."""
        for live, positions in plan.chunks.items():
            live.num_computed = positions.stop
            live.decodes = positions.stop == len(live.token_ids)  # the step samples its next token
            live.flights += 1

    def landed(self, requests: Iterable[LiveRequest]) -> None:
        """Notes that a step or a load of these requests is over and uses their blocks no more."""
        for live in requests:
            live.flights -= 1
            if live.phase is Phase.GONE and not live.flights:
                self.leaving.remove(live)
                self.memory.free(live)

    def verified(self, live: LiveRequest, computed: int) -> None:
        """The logits computed from the KV of the first `computed` positions were finite, so other requests
        may share it."""
        self.memory.publish(live, computed)

    def _grow(self, live: LiveRequest, plan: Schedule) -> bool:
        """Gives the request the block that it needs, and preempts others for it. False: the request itself
        was preempted."""
        while self.memory.grows(live):
            if self.pool.free:
                live.blocks.extend(self.pool.allocate(1))
                break
            victim = max((r for r in self.running if not r.handover), key=lambda r: r.order)
            self._preempt(victim, plan)
            if victim is live:
                return False
        return True

    def _preempt(self, victim: LiveRequest, plan: Schedule) -> None:
        assert not victim.flights, "no request is preempted while a step that uses its blocks is under way"
        self.preemptions += 1
        plan.preempted.append(victim)
        if victim.hand_back:
            self.drop(victim)
        else:
            self._requeue(victim)

    def _requeue(self, live: LiveRequest) -> None:
        self.memory.free(live)
        live.num_computed = 0
        live.decodes = False
        self._move(live, Phase.WAITING)

    # Admission

    @property
    def can_admit(self) -> bool:
        """Whether the first request of the queue could start now. No other request overtakes it."""
        if not self.waiting or self._places <= 0:
            return False
        return self._need(self.waiting[0]) + self.memory.headroom <= self.pool.free

    def _has_room_beside_queue(self, need: int) -> bool:
        """Whether a request that is not queued may take a seat and `need` blocks. The first request of the
        queue keeps a seat and its blocks, or requests that are not queued could delay it forever."""
        return self._places > bool(self.waiting) and need <= self._spare_blocks

    @property
    def _spare_blocks(self) -> int:
        """Blocks that may be taken without a delay for the first request of the queue."""
        first = self._need(self.waiting[0]) if self.waiting else 0
        return max(0, self.pool.free - self.memory.headroom - first)

    def _need(self, live: LiveRequest) -> int:
        """Blocks that a waiting request takes from the free ones when it starts."""
        return self.memory.need(len(live.token_ids), self.memory.hits(live))

    def _begin(self, live: LiveRequest, hits: Sequence[int]) -> None:
        """Gives the request blocks for all its tokens, and a seat in the batch. It runs at once, or after
        what the tiers below have of it is loaded."""
        self.memory.take(live, len(live.token_ids), hits)
        if self.memory.load(live, partial(self._load_ended, live)):
            live.flights += 1
            self._enter(live, Phase.LOADING)
        else:
            live.num_computed = live.num_cached
            self._enter(live, Phase.RUNNING)

    def _load_ended(self, live: LiveRequest, whole: bool) -> None:
        self.landed([live])
        if live.phase is Phase.GONE:
            return
        if whole:
            live.num_computed = live.num_cached
            self._move(live, Phase.RUNNING)
            self._loaded.append(live)
        else:
            self._requeue(live)

    def prompts(self) -> Iterator[tuple[int, float]]:
        """Yields (tokens left, due time) of each prompt that is not computed, about in the order of the
        queue."""
        for live in self.running:
            if not live.decodes:
                yield live.num_left, live.due
        for live in self.waiting:
            yield live.num_left, live.due

    @property
    def tokens_waiting(self) -> int:
        """Prompt tokens that no step computes yet, without those that the prefix cache has now."""
        prefilling = sum(live.num_left for live in self.running if not live.decodes)
        cached = sum(self.memory.known(live) for live in (*self.waiting, *self.loading)) * self.block_size
        return prefilling + sum(live.num_left for live in (*self.waiting, *self.loading)) - cached

    @property
    def seats(self) -> int:
        """How many more requests fit into the batch. A request that only waits for its last token is in no
        further step, so it takes no seat."""
        seated = sum(not live.ends_with_pending for live in self.running)
        return self.max_num_seqs - seated - len(self.loading) - len(self.reserved)

    @property
    def _places(self) -> int:
        """How many more requests can get blocks: each takes a seat and, if the model has states, a slot."""
        return self.seats if self.states is None else min(self.seats, self.states.free)

    # Going out

    def hold(self, live: LiveRequest) -> None:
        """Takes a prefilled request out of the batch. It keeps its blocks."""
        self._move(live, Phase.HELD)

    def drop(self, live: LiveRequest) -> None:
        """Ends a request in any phase. Its blocks are free at once, or when the last launched step and the
        load that use them are over. No request owns them meanwhile."""
        assert live.phase is not Phase.GONE, "a request ends once"
        if live.grammar is not None:
            live.grammar.abandon()
        del self.requests[live.id]
        self._move(live, Phase.GONE)
        if not live.flights:
            self.leaving.remove(live)
            self.memory.free(live)

    def assert_whole(self) -> None:
        """Asserts, when idle, that no request and no block was left behind."""
        assert not any(self._of_phase.values()), f"requests left behind: {self._of_phase}"
        assert not self.requests, f"requests left behind: {self.requests}"
        exchange = self.prefix_exchange
        assert exchange is None or exchange.empty, "a pin or an import was left behind"
        for tier in self.offload:
            tier.assert_whole()
        self.pool.assert_whole()
        if self.states is not None:
            self.states.assert_whole()
        if self.cache is not None and self.cache.copies is not None:
            self.cache.copies.assert_whole()
