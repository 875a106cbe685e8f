"""Chooses the tokens of the next step, and assigns KV blocks to requests. Pure; knows no tensor.

Continuous batching (Orca, Yu 2022) with chunked prefill (Sarathi, Agrawal 2023): a step takes one token of
every decoding request, and fills the rest of its token budget with chunks of prefills. Requests are served in
the order of `LiveRequest.order`. A request gets blocks for its whole prompt when it is first scheduled, so a
prefill never stops for lack of blocks. Only a decode needs more blocks. If the pool is empty then, the
request that is last in order is preempted.

Of one priority, tenants get equal shares of the prompt tokens (`fair_shares`).

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from baton.content import Tier
from baton.engine.api.request import CacheObserver, EngineRequest
from baton.engine.core.block_pool import BlockPool, StatePool
from baton.engine.core.chunk_limit import FULL_STEP, MIXED_STEPS, without_padding
from baton.engine.core.fair_shares import FairShares
from baton.engine.core.live_request import LiveRequest, Phase
from baton.engine.core.offload_tier import OffloadTier
from baton.engine.core.prefix_cache import PrefixCache
from baton.engine.core.prefix_exchange import PrefixExchange
from baton.engine.core.request_memory import RequestMemory
from baton.engine.core.schedule import Chunk, Schedule
from baton.engine.core.state_copies import StateCopies


class Scheduler:
    """Owns all requests of an engine, in exactly one phase each, and the pools of blocks and states."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        mixed_rows: Sequence[int] = (),
        full_step: int = FULL_STEP,
        content_root: bytes | None = None,
        cache_observer: CacheObserver | None = None,
        states: StatePool | None = None,
        copies: StateCopies | None = None,
        offload_places: Mapping[Tier, int] | None = None,
        prompt_tokens_per_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Makes a scheduler without requests.

        Args:
            mixed_rows: sizes of steps with decodes and prompts that need no padding, in ascending order.
            full_step: with so many prompt tokens, a step gains nothing from further prompts.
            content_root: root of the names in the prefix cache. None: there is no prefix cache.
            states: the state slots of a model with state layers. The prefix cache has `copies` of states.
            offload_places, prompt_tokens_per_s: as in `PrefixCache`. None: no tier below the device.
        """
        assert max_num_seqs <= max_num_batched_tokens, "every running request must be able to decode"
        self.pool = pool
        self.states = states
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self._mixed_rows = mixed_rows
        self._full_step = full_step
        self.cache: PrefixCache | None = None
        self.prefix_exchange: PrefixExchange | None = None
        if content_root is not None:
            self.cache = PrefixCache(
                pool,
                block_size,
                content_root,
                cache_observer,
                offload_places or {},
                prompt_tokens_per_s,
                copies,
            )
        # Transfers of prefixes carry no states, and without states a prefix is of no use.
        if self.cache is not None and states is None:
            self.prefix_exchange = PrefixExchange(pool, self.cache, block_size, lambda: self._spare_blocks)
        self.memory = RequestMemory(pool, states, self.cache, block_size)
        self.requests: dict[bytes, LiveRequest] = {}
        self.waiting: list[LiveRequest] = []  # sorted by order
        self.loading: set[LiveRequest] = set()
        self._loaded: list[LiveRequest] = []  # since the last schedule
        self.running: list[LiveRequest] = []  # sorted by order
        self.held: set[LiveRequest] = set()
        self.reserved: set[LiveRequest] = set()
        self.leaving: set[LiveRequest] = set()  # dropped, but a launched step still uses their blocks
        self._arrivals = 0
        self._shares = FairShares()
        self._mixed_steps = MIXED_STEPS  # since the last step that only decoded
        self._was_alone = False  # whether the last step was for a request that shares no step

    @property
    def offload(self) -> Sequence[OffloadTier]:
        """The tiers of the prefix cache below the device, the fastest first."""
        return () if self.cache is None else self.cache.offload

    # Coming in

    def add(self, request: EngineRequest, *, handover: bool) -> LiveRequest:
        """Queues a request for prefill."""
        live = self._new(request, Phase.WAITING)
        self._register(live, self._tag(live))
        live.handover = handover
        insort(self.waiting, live, key=lambda r: r.order)
        return live

    def reserve(self, request: EngineRequest) -> LiveRequest | None:
        """Gives a request blocks for KV that comes from another worker, and for one more token. None: no
        room."""
        live = self._new(request, Phase.RESERVED)
        tokens, hits = len(live.token_ids) + 1, self.memory.hits(live)
        if not self._has_room_beside_queue(self.memory.need(tokens, hits)):
            return None
        self._register(live, self._shares.now)  # nothing of its prompt is computed here
        live.hand_back = True
        self.memory.take(live, tokens, hits)
        self.reserved.add(live)
        return live

    def start(self, request: EngineRequest) -> LiveRequest | None:
        """Gives a request its blocks at once, to be prefilled and decoded here. None: no room."""
        live = self._new(request, Phase.WAITING)
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
        self.reserved.remove(live)
        live.num_computed = len(live.token_ids)
        live.decodes = True
        live.phase = Phase.RUNNING
        insort(self.running, live, key=lambda r: r.order)

    def resume(self, live: LiveRequest, request_id: bytes) -> bool:
        """Moves a held request back to the batch, under a new id. It keeps its blocks and tokens. If it is
        preempted it is handed back. False: no seat is free, and nothing changes."""
        assert live.phase is Phase.HELD
        assert not live.pending, "a request that failed has no token to go on from"
        if self.seats <= 0:
            return False
        self.held.remove(live)
        del self.requests[live.id]
        assert request_id not in self.requests, "ids are unique"
        live.request = replace(live.request, id=request_id)
        live.id = request_id
        self.requests[request_id] = live
        live.handover, live.hand_back = False, True
        live.phase = Phase.RUNNING
        insort(self.running, live, key=lambda r: r.order)
        return True

    def _new(self, request: EngineRequest, phase: Phase) -> LiveRequest:
        self._arrivals += 1
        return LiveRequest(request, phase, self._arrivals)

    def _tag(self, live: LiveRequest) -> int:
        """The tag of a request whose prompt is computed here, as far as it is not cached."""
        cached = self.memory.known(live) * self.block_size
        return self._shares.tag(live.request.tenant, live.num_left - cached)

    def _register(self, live: LiveRequest, tag: int) -> None:
        assert live.id not in self.requests, "ids are unique"
        self.requests[live.id] = live
        live.tag = tag

    # The step

    def schedule(self, chunk_limit: int | None = None) -> Schedule:
        """Plans the next step and gives its requests their blocks.

        `chunk_limit`: most prompt tokens of a step while requests decode or are reserved. Reserved requests
        count because they may join during the step and then wait for its end."""
        plan = Schedule()
        plan.started += [live for live in self._loaded if live.phase is Phase.RUNNING]
        self._loaded.clear()
        budget = self.max_num_batched_tokens
        alone = self._next_alone()
        # Decodes go first, so that no prefill delays them. They go in order, so that a preemption, which
        # takes the last request, never takes one that this step has already.
        candidates = [r for r in self.running if (r is alone if alone else not r.alone)]
        prefills = [r for r in candidates if not r.decodes]
        for live in [r for r in candidates if r.decodes] if prefills else candidates:
            budget -= self._go_on(live, budget, plan)
        plan.decodes = bool(plan.chunks)
        if chunk_limit is not None:
            decodes = self.max_num_batched_tokens - budget if plan.decodes else 0
            budget = min(budget, self._prompt_limit(decodes, chunk_limit))
        room = budget
        for live in prefills:
            room -= self._admit(room, alone, plan, before=live)
            if self._may_join(live, plan):
                room -= self._go_on(live, room, plan)
        room -= self._admit(room, alone, plan)
        if plan.decodes:
            self._mixed_steps = self._mixed_steps + 1 if room < budget else 0
        return plan

    def _prompt_limit(self, decodes: int, chunk_limit: int) -> int:
        """Most prompt tokens of a step with so many decodes."""
        if not decodes and not self.reserved:
            return self.max_num_batched_tokens
        if decodes and self._mixed_steps >= MIXED_STEPS:
            return 0
        return without_padding(chunk_limit, decodes, self._mixed_rows)

    def _admit(
        self, budget: int, alone: LiveRequest | None, plan: Schedule, before: LiveRequest | None = None
    ) -> int:
        """Starts waiting requests while there is budget, with `before` only those that come before it in
        order. Returns the number of their tokens in the plan."""
        used = 0
        while budget > used and not plan.recomputed and not plan.handed_back and self.can_admit:
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
        """Whether the next chunk of a prompt may share the step. Without decodes, prompts go one after
        another: together they would take as long, and the first would wait for the last."""
        return plan.decodes or not plan.chunks or plan.prompt_tokens + live.num_left <= self._full_step

    def _add_chunk(self, live: LiveRequest, budget: int, plan: Schedule) -> int:
        """Adds the next chunk of a request to the plan. Returns its number of tokens."""
        count = min(live.num_computable, budget)
        if count:
            count = self.memory.until_copy(live, count)
            plan.chunks.append(Chunk(live, live.num_computed, live.num_computed + count, live.decodes))
            if live.tag > self._shares.now:  # never so for a decode, of which a step has hundreds
                self._shares.served(live.tag - live.num_left + count)
        return count

    def _go_on(self, live: LiveRequest, budget: int, plan: Schedule) -> int:
        """Adds the next chunk of a running request to the plan. Returns its number of tokens."""
        count = min(live.num_computable, budget)
        if not count or live.ends_with_pending or live.phase is not Phase.RUNNING:
            return 0
        if self.memory.grows(live) and not self._grow(live, plan):
            return 0
        return self._add_chunk(live, budget, plan)

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

    def launched(self, chunks: Sequence[Chunk]) -> None:
        """Notes that a launched step writes the KV of these chunks. Later steps may read it."""
        for live, _, stop, _ in chunks:
            live.num_computed = stop
            live.decodes = stop == len(live.token_ids)  # the step samples its next token
            live.flights += 1

    def landed(self, chunks: Sequence[Chunk]) -> None:
        """Notes that the step of these chunks is over and uses their blocks no more."""
        for live, *_ in chunks:
            live.flights -= 1
            if not live.flights and live in self.leaving:
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
        if victim.hand_back:
            self.drop(victim)
            plan.handed_back.append(victim)
            return
        self.running.remove(victim)
        self._requeue(victim)
        plan.recomputed.append(victim)

    def _requeue(self, live: LiveRequest) -> None:
        self.memory.free(live)
        live.num_computed = 0
        live.decodes = False
        live.phase = Phase.WAITING
        insort(self.waiting, live, key=lambda r: r.order)

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
        places = self._places
        if self.waiting:
            places -= 1
            need += self._need(self.waiting[0])
        return places > 0 and need + self.memory.headroom <= self.pool.free

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
            live.phase = Phase.LOADING
            self.loading.add(live)
        else:
            self._run(live)

    def _run(self, live: LiveRequest) -> None:
        live.num_computed = live.num_cached
        live.phase = Phase.RUNNING
        insort(self.running, live, key=lambda r: r.order)

    def _load_ended(self, live: LiveRequest, whole: bool) -> None:
        live.flights -= 1
        if live.phase is Phase.GONE:
            self.leaving.remove(live)
            self.memory.free(live)
            return
        self.loading.remove(live)
        if whole:
            self._run(live)
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
        self.running.remove(live)
        live.phase = Phase.HELD
        self.held.add(live)

    def drop(self, live: LiveRequest) -> None:
        """Ends a request in any phase. Its blocks are free at once, or when the last launched step and the
        load that use them are over. No request owns them meanwhile."""
        match live.phase:
            case Phase.WAITING:
                self.waiting.remove(live)
            case Phase.LOADING:
                self.loading.remove(live)
            case Phase.RUNNING:
                self.running.remove(live)
            case Phase.HELD:
                self.held.remove(live)
            case Phase.RESERVED:
                self.reserved.remove(live)
            case Phase.GONE:
                raise AssertionError("a request ends once")
        if live.grammar is not None:
            live.grammar.abandon()
        live.phase = Phase.GONE
        del self.requests[live.id]
        if live.flights:
            self.leaving.add(live)
        else:
            self.memory.free(live)

    def assert_whole(self) -> None:
        """Asserts, when idle, that no request and no block was left behind."""
        left = [
            self.requests, self.waiting, self.loading, self.running, self.held, self.reserved, self.leaving
        ]  # fmt: skip
        assert not any(left), f"requests left behind: {left}"
        exchange = self.prefix_exchange
        assert exchange is None or exchange.empty, "a pin or an import was left behind"
        for tier in self.offload:
            tier.assert_whole()
        self.pool.assert_whole()
        if self.states is not None:
            self.states.assert_whole()
        if self.cache is not None and self.cache.copies is not None:
            self.cache.copies.assert_whole()
