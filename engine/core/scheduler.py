"""Which tokens of which requests the next step computes, and who gets blocks. Pure; knows no tensor.

Continuous batching (Orca, Yu 2022) with chunked prefill (Sarathi, Agrawal 2023): each step takes one token of
every request that decodes, and fills the rest of its token budget with pieces of prefills, in order of
(priority, interrupted before new, arrival). A request gets blocks for its whole prompt when it is first
scheduled, so a prefill never stops for lack of blocks. Only decoding grows; when the pool is empty the
youngest request makes room.
"""

from array import array
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.api.request import CacheObserver, EngineRequest
from engine.core.block_pool import BlockPool, extend_hash_chain, salted_root
from engine.core.live_request import LiveRequest, Phase


class Chunk(NamedTuple):
    """Positions [start, stop) of one request, to be computed in this step."""

    live: LiveRequest
    start: int
    stop: int


@dataclass(slots=True)
class Schedule:
    chunks: list[Chunk] = field(default_factory=list)
    """Decodes (one token each) before prefills."""
    started: list[LiveRequest] = field(default_factory=list)
    """Requests that got their blocks just now."""
    handed_back: list[LiveRequest] = field(default_factory=list)
    """Joined requests that had to go for lack of blocks; their blocks are free already."""
    recomputed: list[LiveRequest] = field(default_factory=list)
    """Requests sent back to the queue, to be prefilled again, for lack of blocks."""

    @property
    def prompt_tokens(self) -> int:
        return sum(stop - start for _, start, stop in self.chunks if stop - start > 1)

    @property
    def decodes(self) -> int:
        return sum(stop - start == 1 for _, start, stop in self.chunks)


class Scheduler:
    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefix_cache_root: bytes | None = None,
        cache_observer: CacheObserver | None = None,
    ) -> None:
        """`prefix_cache_root`: what the hash chains of the prefix cache start from; None turns it off. Of
        what `cache_observer` is told, evictions come from the pool itself."""
        assert max_num_seqs <= max_num_batched_tokens, "every running request must be able to decode"
        self.pool = pool
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.prefix_cache_root = prefix_cache_root
        self._cache_observer = cache_observer
        if cache_observer is not None:
            pool.on_evicted = cache_observer.evicted
        self.watermark = max(1, pool.num_blocks // 100)
        """Blocks that whoever will grow must leave free when it comes in, so that those who run can grow."""
        self.requests: dict[bytes, LiveRequest] = {}
        self.waiting: list[LiveRequest] = []  # sorted by order
        self.running: list[LiveRequest] = []  # sorted by order
        self.held: set[LiveRequest] = set()
        self.reserved: set[LiveRequest] = set()
        self._leaving: set[LiveRequest] = set()  # dropped, while a launched step has them
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._arrivals = 0
        self._was_alone = False  # the last step had one request that shares none

    # Coming in

    def add(self, request: EngineRequest, *, handover: bool) -> LiveRequest:
        """Queues a request for prefill."""
        live = self._register(request, Phase.WAITING)
        live.handover = handover
        insort(self.waiting, live, key=lambda r: r.order)
        return live

    def reserve(self, request: EngineRequest) -> LiveRequest | None:
        """Blocks for a request whose KV comes from elsewhere, and for its first token; None: no room."""
        need = self._blocks_for(len(request.prompt_ids) + len(request.output_ids) + 1)
        if self._seats <= 0 or need + self._headroom > self.pool.free:
            return None
        live = self._register(request, Phase.RESERVED)
        live.hand_back = True
        live.blocks.extend(self.pool.allocate(need))
        self.reserved.add(live)
        return live

    def start(self, request: EngineRequest) -> LiveRequest | None:
        """Blocks at once for a request that is prefilled here and goes on here; None: no room."""
        live = self._register(request, Phase.WAITING)
        if self._seats <= 0 or not self._fits(live):
            del self.requests[live.id]
            return None
        live.hand_back = True
        self._begin(live)
        return live

    def extend_reservation(self, live: LiveRequest, output_ids: list[int]) -> bool:
        """The reservation shall hold a longer output; False: no room, and it stays as it was."""
        assert live.phase is Phase.RESERVED
        tokens = array("i", [*live.request.prompt_ids, *output_ids])
        assert len(tokens) >= len(live.token_ids), "an emitted token is never taken back"
        need = self._blocks_for(len(tokens) + 1) - len(live.blocks)
        if need > self.pool.free:
            return False
        live.token_ids = tokens
        live.blocks.extend(self.pool.allocate(max(0, need)))
        return True

    def join(self, live: LiveRequest) -> None:
        """All KV of a reservation has come: with its first token it decodes."""
        assert live.phase is Phase.RESERVED
        self.reserved.remove(live)
        live.num_computed = len(live.token_ids)
        live.phase = Phase.RUNNING
        insort(self.running, live, key=lambda r: r.order)

    def _register(self, request: EngineRequest, phase: Phase) -> LiveRequest:
        assert request.id not in self.requests, "ids are unique"
        self._arrivals += 1
        live = self.requests[request.id] = LiveRequest(request, phase, self._arrivals)
        return live

    # The step

    def schedule(self, chunk_limit: int | None = None) -> Schedule:
        """`chunk_limit`: prompt tokens that a step may take of those who were started beside others that
        decode, or are about to."""
        plan = Schedule()
        budget = self.max_num_batched_tokens
        alone = self._next_alone()
        # Decodes go first, so that no prefill delays them, and the oldest goes first of all: the victim of a
        # preemption is younger than whoever was scheduled before.
        in_turn = [r for r in self.running if (r is alone if alone else not r.alone)]
        prefills = [r for r in in_turn if r.num_left > 1]
        for live in [r for r in in_turn if r.num_left <= 1] if prefills else in_turn:
            budget -= self._go_on(live, budget, plan)
        started = any(live.hand_back for live in prefills)
        if started and chunk_limit is not None and (plan.chunks or self.reserved):
            budget = min(budget, chunk_limit)
        for live in prefills:
            budget -= self._go_on(live, budget, plan)
        while budget and not plan.recomputed and not plan.handed_back and self.can_admit:
            if self.waiting[0] is not alone and (alone is not None or self.waiting[0].alone):
                break
            live = self._admit()
            count = min(live.num_computable, budget)
            plan.started.append(live)
            if count:
                plan.chunks.append(Chunk(live, live.num_computed, live.num_computed + count))
            budget -= count
        return plan

    def _go_on(self, live: LiveRequest, budget: int, plan: Schedule) -> int:
        """Tokens that the step computes of one who runs."""
        count = min(live.num_computable, budget)
        if not count or live.ends_with_pending or live.phase is not Phase.RUNNING:
            return 0
        if self._grows(live) and not self._grow(live, plan):
            return 0
        plan.chunks.append(Chunk(live, live.num_computed, live.num_computed + count))
        return count

    def _next_alone(self) -> LiveRequest | None:
        """Whose step this is, where somebody shares none: every second one, as long as there are others."""
        ready = [*self.running, *(self.waiting[:1] if self.can_admit else ())]
        alone = next((live for live in ready if live.alone), None)
        if self._was_alone and not all(live.alone for live in ready):
            alone = None
        self._was_alone = alone is not None
        return alone

    @property
    def may_look_ahead(self) -> bool:
        """Whether a step may be scheduled while another is under way, its tokens unknown: nobody shares no
        step, or would have to make room."""
        if any(live.alone for live in self.running):
            return False
        if self.waiting and self.waiting[0].alone:
            return False
        free = self.pool.free  # nobody grows by more than one
        return len(self.running) <= free or sum(self._grows(live) for live in self.running) <= free

    @property
    def has_next(self) -> bool:
        """Whether a step could compute anything beyond what is under way."""
        return self.can_admit or any(not live.ends_with_pending for live in self.running)

    def launched(self, chunks: Sequence[Chunk]) -> None:
        """A step writes the chunks' KV, before anything that is launched later."""
        for live, _, stop in chunks:
            live.num_computed = stop
            live.flights += 1

    def landed(self, chunks: Sequence[Chunk]) -> None:
        """That step is over, and touches the chunks' blocks no more."""
        for live, _, _ in chunks:
            live.flights -= 1
            if not live.flights and live in self._leaving:
                self._leaving.remove(live)
                self._free(live)

    def verified(self, live: LiveRequest, computed: int) -> None:
        """Logits that depend on the KV of the first `computed` positions were finite: full blocks of these
        may be shared from now on."""
        full = computed // self.block_size
        if self.prefix_cache_root is not None and full > live.num_published:
            self._hash_blocks(live, self.prefix_cache_root)
            entered = [
                (index, live.block_hashes[index])
                for index in range(live.num_published, full)
                if self.pool.publish(live.blocks[index], live.block_hashes[index])
            ]
            live.num_published = full
            if entered and self._cache_observer is not None:
                self._cache_observer.cached(live.request, live.token_ids, entered)

    def _grows(self, live: LiveRequest) -> bool:
        """Whether its next token needs a block that it has not."""
        return len(live.blocks) * self.block_size <= live.num_computed and not live.ends_with_pending

    def _grow(self, live: LiveRequest, plan: Schedule) -> bool:
        """Makes sure of a block for the token to compute; False: `live` itself had to make room."""
        while self._grows(live):
            if self.pool.free:
                live.blocks.extend(self.pool.allocate(1))
                break
            victim = max((r for r in self.running if not r.handover), key=lambda r: r.order)
            self._preempt(victim, plan)
            if victim is live:
                return False
        return True

    def _preempt(self, victim: LiveRequest, plan: Schedule) -> None:
        assert not victim.flights, "somebody has to make room only where nothing is under way"
        if victim.hand_back:
            self.drop(victim)
            plan.handed_back.append(victim)
            return
        self.running.remove(victim)
        self.pool.release(victim.blocks)
        del victim.blocks[:]
        victim.num_computed = 0
        victim.phase = Phase.WAITING
        insort(self.waiting, victim, key=lambda r: r.order)
        plan.recomputed.append(victim)

    # Admission

    @property
    def can_admit(self) -> bool:
        """Whether the first in the queue could start now. Nobody overtakes it."""
        if not self.waiting or self._seats <= 0:
            return False
        return self._fits(self.waiting[0])

    def _fits(self, live: LiveRequest) -> bool:
        hits = self._prefix_hits(live)
        need = self._blocks_for(len(live.token_ids)) - len(hits) + self.pool.unreferenced(hits)
        # What is prefilled for a handover leaves without growing.
        return need + (0 if live.handover else self._headroom) <= self.pool.free

    def _admit(self) -> LiveRequest:
        live = self.waiting.pop(0)
        self._begin(live)
        return live

    def _begin(self, live: LiveRequest) -> None:
        """Gives it blocks for all that is to be computed, and a place in the batch."""
        hits = self._prefix_hits(live)
        self.pool.share(hits)
        own = self.pool.allocate(self._blocks_for(len(live.token_ids)) - len(hits))
        live.blocks = array("i", [*hits, *own])
        live.num_computed = live.num_cached = len(hits) * self.block_size
        live.num_published = len(hits)
        live.phase = Phase.RUNNING
        insort(self.running, live, key=lambda r: r.order)
        if self.prefix_cache_root is not None:
            self.prefix_queries += len(live.token_ids)
            self.prefix_hits += live.num_cached

    def _prefix_hits(self, live: LiveRequest) -> list[int]:
        """Cached blocks of the beginning of `live`; its last position is computed anyway, for the logits."""
        if self.prefix_cache_root is None:
            return []
        usable = (len(live.token_ids) - 1) // self.block_size
        self._hash_blocks(live, self.prefix_cache_root)
        return self.pool.lookup(live.block_hashes[:usable])

    def _hash_blocks(self, live: LiveRequest, root: bytes) -> None:
        root = salted_root(root, live.request.cache_salt)
        extend_hash_chain(live.block_hashes, live.token_ids, live.num_known, self.block_size, root)

    @property
    def tokens_waiting(self) -> int:
        """Prompt tokens still to be computed, by what the prefix cache has now."""
        prefilling = sum(live.num_left for live in self.running if live.num_left > 1)
        cached = sum(len(self._prefix_hits(live)) for live in self.waiting) * self.block_size
        return prefilling + sum(live.num_left for live in self.waiting) - cached

    @property
    def _headroom(self) -> int:
        """The watermark; a request alone in the pool may have all of it, else a long one could never run."""
        return 0 if self.pool.free == self.pool.num_blocks else self.watermark

    @property
    def _seats(self) -> int:
        """How many requests could join the batch. One that only waits for its last token is in no step any
        more."""
        seated = sum(not live.ends_with_pending for live in self.running)
        return self.max_num_seqs - seated - len(self.reserved)

    def to_drop(
        self, wanted: Callable[[bytes], bool], closing: Iterable[bytes], spare: Iterable[bytes]
    ) -> list[bytes]:
        """The first of the `spare` requests, as many as must be dropped so that the first waiting one that is
        `wanted` can start. Those before it in the queue start before it. `closing` ones go anyway."""
        if not any(wanted(live.id) for live in self.waiting):
            return []
        need, headroom, hits = 0, 0, set[int]()
        for live in self.waiting[: max(0, self._seats)]:  # the others wait for a seat, whatever is dropped
            cached = self._prefix_hits(live)
            hits.update(cached)
            need += self._blocks_for(len(live.token_ids)) - len(cached)
            headroom = max(headroom, 0 if live.handover else self._headroom)
            if wanted(live.id):
                break
        going = [live.blocks for live in self._leaving]
        going += [self.requests[request_id].blocks for request_id in closing]
        dropped: list[bytes] = []
        for request_id in spare:
            if need + headroom <= self.pool.free_after(going, hits):
                break
            going.append(self.requests[request_id].blocks)
            dropped.append(request_id)
        return dropped

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # Going out

    def hold(self, live: LiveRequest) -> None:
        """Prefill is over: the request leaves the batch and keeps its blocks."""
        self.running.remove(live)
        live.phase = Phase.HELD
        self.held.add(live)

    def drop(self, live: LiveRequest) -> None:
        """The end of a request, in any phase. Its blocks are free at once, or when the last step that was
        launched with it is over: until then they are nobody's."""
        match live.phase:
            case Phase.WAITING:
                self.waiting.remove(live)
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
            self._leaving.add(live)
        else:
            self._free(live)

    def _free(self, live: LiveRequest) -> None:
        self.pool.release(live.blocks)
        del live.blocks[:]

    def assert_whole(self) -> None:
        """Without requests nothing is left of any."""
        left = [self.requests, self.waiting, self.running, self.held, self.reserved, self._leaving]
        assert not any(left), f"requests left behind: {left}"
        self.pool.assert_whole()
