"""The lives of all requests of an engine, from `add`, `reserve` or `start` to their end: which phase each is
in, and which of them gets blocks and seats. Pure; knows no tensor.

One engine may prefill for other workers and decode for them at the same time. What waits for blocks or seats:

    compiling ──▶ its grammar; it holds nothing and is not in the queue
    waiting   ──▶ a seat, blocks and a state slot, which running, held and reserved requests have
    held      ──▶ a transfer to a reservation on another worker, or a seat here (`resume`)
    part      ──▶ running requests, here and on other workers, and transfers (`prefill_worker.parts`)
    reserved  ──▶ a prefill on another worker, which may be waiting there
    running   ──▶ nothing
    not yet here, as memory moves for it (`elastic`) ──▶ steps, which move it; it holds nothing
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

import sys
from array import array
from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import attrgetter

from baton.engine.api.request import EngineRequest
from baton.engine.core.block_pool import BlockPool
from baton.engine.core.cells import Cells
from baton.engine.core.elastic import Budget
from baton.engine.core.fair_shares import FairShares, Tag
from baton.engine.core.leases import Leases, Owner
from baton.engine.core.live_request import WHOLE, LiveRequest, Phase, SharedPrompt
from baton.engine.core.offload_tier import OffloadTier
from baton.engine.core.prefix_cache import PrefixCache
from baton.engine.core.prefix_exchange import PrefixExchange
from baton.engine.core.request_loads import RequestLoads
from baton.engine.core.request_memory import REFUSED, Admission, RequestMemory, Verdict, Wants

LOADING = "a load from a tier"
"""Holds a lease on the request that waits for it."""


class RequestLives:
    """Owns all requests, each in the list of its phase, and the pools of blocks and states.

    Iteration gives all but those that have ended.

    Attributes:
        leaving: requests that have ended while a step, a load or a transfer uses their blocks.
        loaded: requests of which a load has ended since the last schedule.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_model_len: int = sys.maxsize,
        cache: PrefixCache | None = None,
        states: Cells[bytes] | None = None,
        budget: Budget | None = None,
    ) -> None:
        """Makes no request yet.

        Args:
            max_model_len: most tokens of a request.
            cache: None: there is no prefix cache.
            states: the state slots of a model with state layers.
            budget: the memory that the pools share. None: each keeps its own.
        """
        self.budget = budget
        self.pool = pool
        self.states = states
        self.cache = cache
        self.offload: Sequence[OffloadTier] = () if cache is None else cache.offload
        """The tiers of the prefix cache below the device, the fastest first."""
        self.max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self.memory = RequestMemory(pool, states, cache, budget)
        self.prefix_exchange: PrefixExchange | None = None
        if cache is not None:
            self.prefix_exchange = PrefixExchange(pool, cache, self.memory, self._may_take)
        self._loads = None if cache is None else RequestLoads(pool, cache, self.memory)
        self._of_phase: Mapping[Phase, list[LiveRequest]] = {phase: [] for phase in Phase}  # sorted by order
        self.waiting = self._of_phase[Phase.WAITING]
        self.compiling = self._of_phase[Phase.COMPILING]
        self.loading = self._of_phase[Phase.LOADING]
        self.running = self._of_phase[Phase.RUNNING]
        self.held = self._of_phase[Phase.HELD]
        self.reserved = self._of_phase[Phase.RESERVED]
        self.leaving = self._of_phase[Phase.GONE]
        self.loaded: list[LiveRequest] = []
        self._admission = REFUSED
        """Of the first request of the queue."""
        self._asked: tuple[LiveRequest, int] | None = None
        """That request, and `RequestMemory.moves` then."""
        self._arrivals = 0
        self.shares = FairShares()
        if budget is not None:
            budget.decodes = lambda: self.some_decode

    def __iter__(self) -> Iterator[LiveRequest]:
        return chain.from_iterable(of for phase, of in self._of_phase.items() if phase is not Phase.GONE)

    @property
    def some(self) -> bool:
        """Whether there is a request in any phase, or one that has ended with leases on it."""
        return any(self._of_phase.values())

    @property
    def some_decode(self) -> bool:
        """Whether requests decode here."""
        return any(live.decodes and not live.handover for live in self.running)

    @property
    def is_moving_memory(self) -> bool:
        """Whether steps move memory for a request that found no room. It may ask again."""
        return self.budget is not None and self.budget.lacking is not None

    @property
    def blocks_free(self) -> int:
        """Blocks for further requests, with those that other memory could become. Fewer than the pool has, if
        there are too few window blocks for a long one."""
        windows = self.pool.windows
        free = self.pool.free + (0 if self.budget is None else self.budget.more_blocks)
        if windows is not None and not self.memory.has_room(0, 0, windows.most):
            free = min(free, windows.grantable)
        return max(0, free)

    @property
    def blocks_spare(self) -> int:
        """The part of these that has nothing which is cached here only."""
        return max(0, self.pool.spare + (0 if self.budget is None else self.budget.more_blocks))

    # Coming in

    # In all of these, `owner` is what hooks name the request by. Its leases are those of the request.

    def add(self, request: EngineRequest, *, handover: bool, owner: Owner | None = None) -> LiveRequest:
        """Queues a request for prefill."""
        live = self._new(request, owner)
        live.handover = handover
        self._queue(live)
        self._enter(live, Phase.WAITING)
        return live

    def await_grammar(self, live: LiveRequest) -> None:
        """Takes a request of `add` out of the queue until its grammar is ready. Until then it needs no
        blocks (as in vLLM and SGLang). One of `reserve` or `start` has its blocks already."""
        if live.phase is Phase.WAITING and not live.may_sample:
            self._move(live, Phase.COMPILING)

    def queue_compiled(self) -> None:
        """Requests with grammars that are ready join the queue, at their places in the order."""
        for live in [live for live in self.compiling if live.may_sample]:
            self._move(live, Phase.WAITING)

    def reserve(self, request: EngineRequest, owner: Owner | None = None) -> LiveRequest | None:
        """Gives a request blocks for KV that comes from another worker, and for one more token. None: no
        room."""
        live = self._new(request, owner)
        live.phase = Phase.RESERVED
        tokens = len(live.token_ids) + 1
        if (hits := self._hits_if_spare(live, tokens)) is None:
            return None
        live.tag = Tag(self.shares.now, self.shares.now)  # nothing of its prompt is computed here
        live.hand_back = True
        self.memory.take(live, tokens, hits)
        self._enter(live, Phase.RESERVED)
        return live

    def start(self, request: EngineRequest, owner: Owner | None = None) -> LiveRequest | None:
        """Gives a request its blocks at once, to be prefilled and decoded here. None: no room."""
        live = self._new(request, owner)
        if (hits := self._hits_if_spare(live, len(live.token_ids))) is None:
            return None
        self._queue(live)
        live.hand_back = True
        self._begin(live, hits)
        return live

    def start_part(
        self,
        request: EngineRequest,
        ranges: Sequence[range],
        read_at: Sequence[int] = (),
        owner: Owner | None = None,
    ) -> LiveRequest | None:
        """Gives a request its blocks at once. These ranges of its prompt are computed here, each after
        `begin_range`, and the caller writes the KV of the other positions, as far as the ranges read it.
        `read_at`: as in `SharedPrompt`. None: no room."""
        live = self._new(request, owner)
        live.shared = shared = SharedPrompt(deque(ranges), read_at=read_at, unverified=True)
        tokens = len(live.token_ids)
        if (hits := self._hits_if_spare(live, tokens)) is None:
            return None
        live.handover = True
        self.memory.take(live, tokens, hits)
        live.num_computed = live.num_cached
        uncached = (range(max(each.start, live.num_cached), each.stop) for each in ranges)
        shared.ranges = deque(filter(None, uncached))
        self._tag(live, live.num_left)
        states = self.memory.states
        if states is not None and live.shared.ranges and live.shared.ranges[0].start > live.num_cached:
            states.forget_restore(live)  # they come from the worker of the range before
        self._enter(live, Phase.RESERVED)
        return live

    def begin_range(self, live: LiveRequest, awaits: Callable[[], bool] | None = None) -> None:
        """Lets steps compute the next range. They may wait in `Hooks.layer_done` for the KV before it, as
        long as `awaits` says that some is still to come. Such a step has no decodes, comes when none may join
        it, and waits for one prompt only."""
        shared = live.shared
        positions = shared.ranges.popleft()
        self.memory.begin_range(live, positions.start)
        live.num_computed, shared.range_stop, shared.awaits = positions.start, positions.stop, awaits
        self._move(live, Phase.RUNNING)

    def range_launched(self, live: LiveRequest, stop: int) -> None:
        """A step computes its range up to `stop`. Behind its end the request waits for the next one."""
        shared = live.shared
        shared.awaits = None  # the step has waited for all KV before the range
        if stop == shared.range_stop:
            shared.range_stop = None
            if shared.ranges:
                self._move(live, Phase.RESERVED)

    def verified(self, live: LiveRequest) -> None:
        """All KV that came for a request of `start_part` was complete, so the prefix cache may share it. The
        request is held."""
        assert live.shared is not WHOLE, "it computes a part"
        live.shared.unverified = False
        self.memory.publish(live, live.num_computed)

    def extend_reservation(self, live: LiveRequest, output_ids: list[int]) -> bool:
        """Extends a reservation to a longer output. False: no room, and nothing changes."""
        assert live.phase is Phase.RESERVED
        tokens = array("i", [*live.request.prompt_ids, *output_ids])
        assert len(tokens) >= len(live.token_ids), "an emitted token is never taken back"
        if not self.memory.extend(live, len(tokens)):
            return False
        live.token_ids = tokens
        return True

    def join(self, live: LiveRequest) -> None:
        """Moves a reservation with all its KV to the batch. The caller then appends its first token."""
        assert live.phase is Phase.RESERVED
        live.num_computed = len(live.token_ids)
        self.memory.came(live)
        live.decodes = True
        self._move(live, Phase.RUNNING)

    def resume(self, live: LiveRequest, request_id: bytes, owner: Owner | None = None) -> bool:
        """Moves a held request back to the batch, under a new id, for a new owner. It keeps its blocks and
        tokens. If it is preempted it is handed back. False: no seat is free, and nothing changes."""
        assert live.phase is Phase.HELD
        assert not live.pending, "a request that failed has no token to go on from"
        if not self._has_seats(1):
            return False
        live.request = replace(live.request, id=request_id)
        live.id = request_id
        assert not live.leases, "neither a transfer nor a step uses it"
        live.owner, live.leases = (request_id, Leases()) if owner is None else (owner, owner.leases)
        live.handover, live.hand_back, live.goes_on = False, True, False
        self.memory.end_windows(live, goes_on=True)
        self._move(live, Phase.RUNNING)
        return True

    def _new(self, request: EngineRequest, owner: Owner | None) -> LiveRequest:
        self._arrivals += 1
        live = LiveRequest(request, self._arrivals, request.id, self._max_model_len)
        if owner is not None:
            live.owner, live.leases = owner, owner.leases
        return live

    def _queue(self, live: LiveRequest) -> None:
        """The prompt is computed here, as far as it is not cached."""
        cached = live.cached_when_queued = self.memory.known(live) * self.pool.block_size
        self._tag(live, live.num_left - cached)

    def _tag(self, live: LiveRequest, tokens: int) -> None:
        """Gives a request with so many tokens to compute its place, and those that it overtakes theirs."""
        live.tag, overtaken = self.shares.tag(live.request.tenant, tokens)
        for each in self._of_phase.values() if overtaken else ():
            each.sort(key=attrgetter("order"))

    def _enter(self, live: LiveRequest, phase: Phase) -> None:
        live.phase = phase
        insort(self._of_phase[phase], live, key=lambda r: r.order)

    def _move(self, live: LiveRequest, phase: Phase) -> None:
        self._of_phase[live.phase].remove(live)
        self._enter(live, phase)

    # Admission

    @property
    def can_admit(self) -> bool:
        """Whether the queue has a request, and the first one could start now. No other request overtakes
        it."""
        return self.admission.verdict is Verdict.TAKE

    @property
    def admission(self) -> Admission:
        """Of the first request of the queue. The queue is looked at several times a step."""
        if not self.waiting or not self._has_seats(1):
            return REFUSED
        first, memory = self.waiting[0], self.memory
        asked = first, memory.moves
        if self._asked != asked or self.budget is not None:  # what a budget may move also depends on time
            tokens = len(first.token_ids)
            wants = Wants(tokens, memory.hits(first), memory.headroom, 1, memory.window_need(tokens))
            self._admission, self._asked = memory.admit(wants), asked
        return self._admission

    def _hits_if_spare(self, live: LiveRequest, tokens: int) -> Sequence[int] | None:
        """The cached blocks with which a request that is not queued may take a seat and memory for so many
        tokens. None: it may not. The first request of the queue keeps a seat and its blocks, or requests that
        are not queued could delay it forever."""
        first = bool(self.waiting)
        if not self._has_seats(1 + first):
            return None
        kept, windows = self._kept
        hits, memory = self.memory.hits(live), self.memory
        if not memory.need(tokens, hits):
            kept = 0
        windows += memory.window_need(tokens, live.shared)
        answer = memory.admit(Wants(tokens, hits, kept, 1 + first, windows))
        return answer.hits if answer.verdict is Verdict.TAKE else None

    def _may_take(self, blocks: int, windows: int, hits: Collection[int]) -> bool:
        """Whether so many free blocks and window blocks may be taken without a delay for the first request of
        the queue, and the cached blocks `hits`. `blocks` counts those of them that nothing holds."""
        kept, kept_windows = self._kept
        if blocks and blocks + kept > self.pool.free:
            return False
        windows += kept_windows + self.memory.kept_windows if windows else 0
        blocks = min(blocks + kept, self.pool.free)
        return self.memory.has_room(blocks, 0, windows, hits) and self.memory.is_at_once(blocks, 0, windows)

    @property
    def _kept(self) -> tuple[int, int]:
        """Blocks and window blocks that the first request of the queue, and running ones, find free."""
        if not self.waiting:
            return self.memory.headroom, 0
        tokens = len(self.waiting[0].token_ids)
        need = self.memory.need(tokens, self.memory.hits(self.waiting[0]))
        return self.memory.headroom + need, self.memory.window_need(tokens)

    def admit(self, admission: Admission) -> LiveRequest:
        """Takes the first request out of the queue. Nothing has changed since its `admission`."""
        assert admission.verdict is Verdict.TAKE, "there is no room"
        live = self.waiting.pop(0)
        self._begin(live, admission.hits)
        return live

    def take_loaded(self) -> list[LiveRequest]:
        """The requests that run since the last call because what they waited for was loaded."""
        loaded = [live for live in self.loaded if live.phase is Phase.RUNNING]
        self.loaded.clear()
        return loaded

    def _begin(self, live: LiveRequest, hits: Sequence[int]) -> None:
        """Gives the request blocks for all its tokens, and a seat in the batch. It runs at once, or after
        what the tiers below have of it is loaded. `hits`: those of its admission. It begins with more if a
        tier has the states behind these."""
        tokens = len(live.token_ids)
        if self.offload:
            more, windows = self.memory.hits(live, on_device=False), self.memory.window_need(tokens)
            if self.memory.has_room(self.memory.need(tokens, more), 1, windows, more):
                hits = more
        self.memory.take(live, tokens, hits)
        if self._loads is not None and self._loads.load(live, partial(self._load_ended, live)):
            live.leases.begin(LOADING)
            self._enter(live, Phase.LOADING)
        else:
            live.num_computed = live.num_cached
            self._enter(live, Phase.RUNNING)

    def _load_ended(self, live: LiveRequest, has_kv: bool) -> None:
        live.leases.end(LOADING)
        if live.phase is Phase.GONE:
            return
        if has_kv:
            live.num_computed = live.num_cached
            self._move(live, Phase.RUNNING)
            self.loaded.append(live)
        else:
            self.requeue(live)

    def requeue(self, live: LiveRequest) -> None:
        """Takes the memory of a request, which waits again."""
        self.memory.free(live)
        live.num_computed = 0
        live.decodes = False
        self._move(live, Phase.WAITING)

    @property
    def seats(self) -> int:
        """How many more requests fit into the batch. A request that only waits for its last token is in no
        further step, so it takes no seat."""
        seated = sum(not live.ends_with_pending for live in self.running)
        return self.max_num_seqs - seated - len(self.loading) - len(self.reserved)

    def _has_seats(self, count: int) -> bool:
        """Whether so many are free. Mostly the number of requests says it."""
        taken = len(self.running) + len(self.loading) + len(self.reserved)
        return taken + count <= self.max_num_seqs or count <= self.seats

    # Going out

    def hold(self, live: LiveRequest) -> None:
        """Takes a prefilled request out of the batch. It keeps its blocks."""
        self._move(live, Phase.HELD)

    def drop(self, live: LiveRequest) -> None:
        """Ends a request in any phase. Its blocks are free at once, or with the last lease on it. No request
        owns them meanwhile."""
        if live.grammar is not None:
            live.grammar.abandon()
        self._move(live, Phase.GONE)
        live.leases.close(partial(self._over, live))

    def _over(self, live: LiveRequest) -> None:
        """The request has ended, and nothing uses its memory."""
        self.leaving.remove(live)
        taken = len(live.blocks) - live.num_cached // self.pool.block_size
        self.memory.free(live)
        if self.budget is not None:
            self.budget.ended(taken, self.memory.watermark)
        live.owner = None  # which mostly names the request

    def assert_whole(self) -> None:
        """Asserts, when idle, that no request and no block was left behind."""
        assert not self.some, f"requests left behind: {self._of_phase}"
        exchange = self.prefix_exchange
        assert exchange is None or exchange.empty, "a pin or an import was left behind"
        for tier in self.offload:
            tier.assert_whole()
        self.pool.assert_whole()
        if self.states is not None:
            self.states.assert_whole()
        if self.cache is not None and self.cache.copies is not None:
            self.cache.copies.assert_whole()
        if self.budget is not None:
            self.budget.assert_whole()
