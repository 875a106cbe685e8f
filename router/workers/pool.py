"""The connections to all workers, and the choice of a worker for each request."""

import asyncio
import logging
import math
import random
import time
from dataclasses import dataclass, replace

from baton.content import Tier
from baton.router.config import RouterConfig
from baton.router.policy import placement as policy
from baton.router.policy import split as splitting
from baton.router.policy.chunk_table import ChunkTable
from baton.router.policy.decode import DecodePool, FreeCapacity
from baton.router.policy.prefill import PREFILL_POLICIES, PrefillRequest, PrefillSnapshot
from baton.router.policy.prefill_loads import PrefillWork
from baton.router.workers.checks import RouterModel
from baton.router.workers.prefixes import prefix_source
from baton.router.workers.roster import Roster
from baton.router.workers.sharing import share
from baton.router.workers.stream import WorkerStream
from baton.router.workers.worker import POOL_NAMES, Worker
from baton.rpc import worker_pb2 as pb

log = logging.getLogger(__name__)

WINDOW_SECONDS = 1.0
"""How often the prefill window is updated. Workers report as often."""
WINDOW_CHANGE = 0.1
"""It is updated at once if a pool has grown or shrunk by more than this part: not at each change of many."""


@dataclass(frozen=True, slots=True)
class PrefillTarget:
    """A prefill worker that may compute a request."""

    worker: Worker
    work: PrefillWork
    """What the worker would compute."""
    offer: policy.PrefillOffer
    """What is expected if the request is sent now."""
    within: float
    """Seconds in which the prompt should be computed."""
    queues: bool
    """More than one step of prompts, also of other routers, seems to be ahead of the request."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request goes."""

    worker: Worker
    """The worker that decodes the request."""
    work: PrefillWork | None
    """The prompt, if that worker computes it too. None: a prefill worker hands the KV over."""
    within: float
    """Seconds in which the prompt should be computed."""
    why: policy.Placement


class WorkerPool(Roster):
    """Owns the streams to the workers. Runs on the event loop, and never waits for a worker.

    In all choices, workers in `request.avoid` are chosen only if there is no other.
    """

    def __init__(self, config: RouterConfig, model: RouterModel) -> None:
        super().__init__(model, ChunkTable(config.chunks_fd, config.processes, config.process_number or 0))
        self.writes = config.chunks_fd is None
        self._promised_slots = self._promised_positions = 0  # of decode workers, for queued prompts
        self._window = policy.PrefillWindow()
        self._window_until = 0.0  # time.monotonic()
        self._window_pools = 0, 0  # workers of both pools then
        self._may_overflow = config.overflow
        self._policy = PREFILL_POLICIES[config.routing_policy]
        self._choices = 0  # of prefill workers
        self._config = config
        self._rng = random.Random()
        self._streams: dict[str, WorkerStream] = {}  # to the listed workers
        self._retired: set[WorkerStream] = set()  # no longer listed, with open attempts
        self._discovered = False  # there was a list

    async def run(self) -> None:
        """Follows discovery until cancelled, then closes every stream."""
        sharing = asyncio.create_task(share(self, self._config.process_number or 0))
        try:
            async for addresses in self._config.discovered().watch():
                for address in addresses - self.listed.keys():
                    await self.turn()
                    self._open(address)
                for address in self.listed.keys() - addresses:
                    await self.turn()
                    self.retire(address)
                self._discovered = True
                self.changed.set()
            await asyncio.Event().wait()
        finally:
            sharing.cancel()
            await asyncio.gather(*(stream.close() for stream in {*self._streams.values(), *self._retired}))

    def _open(self, address: str) -> None:
        worker = Worker(address, self.loads, lambda: self.on_capacity(), self.breaker_changed)
        self.listed[address] = worker
        self._streams[address] = WorkerStream(worker, self, self._config)

    def retire(self, address: str) -> None:
        """Discovery no longer lists this worker."""
        del self.listed[address]
        stream = self._streams.pop(address)
        self._retired.add(stream)
        stream.retire(self._retired.discard)

    # ------------------------------------------------------------ the workers

    @property
    def connections(self) -> list[Worker]:
        """All listed workers, by name."""
        return sorted(
            self.listed.values(), key=lambda w: (w.description.first_pool, w.description.index, w.address)
        )

    @property
    def _lost_decode(self) -> bool:
        """Whether prefill workers decode what they compute, because the decode pool has lost its last worker.
        A pool that never had one is only starting."""
        return self._may_overflow and self.had_decode and not self.decodes

    @property
    def _decoders(self) -> DecodePool:
        """The workers that decode new requests."""
        return self.prefills if self._lost_decode else self.decodes

    def decodes_instead(self, worker: Worker) -> bool:
        """Whether this prefill worker decodes what it computes, because the decode pool is empty."""
        return self._lost_decode and worker.ready_in(pb.POOL_PREFILL)

    @property
    def pools(self) -> dict[pb.Pool, str]:
        """The pools that the cluster has, with their names."""
        both = not self._config.decode_only
        return {p: name for p, name in POOL_NAMES.items() if both or p == pb.POOL_DECODE}

    @property
    def complete(self) -> bool:
        """Whether each pool of the cluster has a worker."""
        return bool(self.decodes) and (self._config.decode_only or bool(self.prefills))

    @property
    def blind(self) -> bool:
        """Whether this router reaches no worker, though some are listed or there was no list yet. Another
        router may reach them."""
        return not (self.prefills or self.decodes) and (bool(self.listed) or not self._discovered)

    def can_ever_hold(self, tokens: int) -> bool:
        """Whether an idle worker that decodes has blocks for so many positions."""
        return any(load.blocks_total * load.block_size >= tokens for load in self._decoders)

    def free_capacity(self) -> FreeCapacity:
        """Free capacity of all workers that decode. Infinite without such workers.

        Requests then leave the admission queue and wait for a worker instead, for a bounded time.
        """
        return self._decoders.free if self._decoders else FreeCapacity(math.inf, math.inf)

    def prefill_window(self, prompt: int) -> float:
        """Prompt tokens that keep all workers busy, if the next prompt has `prompt` tokens. More would only
        wait at the workers.

        Infinite if no worker can prefill or none can decode, as for `free_capacity`.
        """
        if not self._decoders or not (self.prefills or self._may_overflow):
            return math.inf
        now, pools = time.monotonic(), (len(self.prefills), len(self.decodes))
        changes = zip(self._window_pools, pools, strict=True)
        if now > self._window_until or any(abs(new - old) > WINDOW_CHANGE * old for old, new in changes):
            budgets = [w.description.max_num_batched_tokens for w in self.ready(pb.POOL_PREFILL)]
            paces = [policy.pace(w.status) for w in self.ready(pb.POOL_DECODE)] if self._may_overflow else []
            self._window = policy.prefill_window(budgets, self.loads.tokens_per_s(), paces)
            self._window_until, self._window_pools = now + WINDOW_SECONDS, pools
        return self._window.holding(prompt)

    # ------------------------------------------------------------ choices

    def choose_prefill(self, request: PrefillRequest) -> PrefillTarget | None:
        """Chooses a prefill worker; None if there is none."""
        snapshot = self._snapshot(request)
        return None if snapshot is None else self._target(snapshot, request, self._policy(snapshot, request))

    def _snapshot(self, request: PrefillRequest) -> PrefillSnapshot | None:
        """The prefill workers that may be chosen; None if there are none."""
        listed = (self.listed.get(address) for address in request.avoid)
        avoided = {worker.row for worker in listed if worker is not None and worker.attached}
        request.arrival = self._choices
        snapshot = self.loads.snapshot(request, time.monotonic(), avoided)
        self._choices += snapshot is not None
        return snapshot

    def _target(self, snapshot: PrefillSnapshot, request: PrefillRequest, row: int) -> PrefillTarget:
        worker = self.by_row[row]
        work = PrefillWork(request.tokens - snapshot.cached.of(row), request.chunks)
        queues = self.loads.tokens_queued(row, time.monotonic()) > worker.description.max_num_batched_tokens
        utilisation = self.loads.utilisation(row)
        offer = policy.prefill_offer(snapshot, request, row, worker.status, worker.load, utilisation)
        within = policy.patience(work.tokens / float(snapshot.speed[row]))
        return PrefillTarget(worker, work, offer, within, queues)

    def choose_decode(self, request: PrefillRequest, *, promised: bool = False) -> Worker | None:
        """Chooses a decode worker with capacity for the request; None if there seems to be none.

        What is promised stays free, except for a request that it is `promised` to."""
        if self._promised_slots and not promised:
            free = self.decodes.free
            if (
                free.slots <= self._promised_slots
                or free.positions < self._promised_positions + request.tokens
            ):
                return None
        chosen = self.decodes.choose(request.tokens, self._rng, request.avoid)
        if chosen is None:
            return None
        return self.by_row[self.decode_caches.nearest(self.listed[chosen].row, request, self._rng)]

    def promise(self, tokens: int) -> None:
        """A queued prompt needs a decode with `tokens` positions as soon as it is computed."""
        self._promised_slots += 1
        self._promised_positions += tokens

    def fulfilled(self, tokens: int) -> None:
        """Ends a promise. The request has its decode, or needs none."""
        self._promised_slots -= 1
        self._promised_positions -= tokens

    def place(
        self, worker: Worker, request: PrefillRequest, answer: int, prefill: PrefillTarget | None
    ) -> Place | None:
        """Chooses where a request with at most `answer` tokens to come is computed.

        `worker` is the decode worker that would decode after a handover from `prefill`. None: there is no
        worker that may compute the prompt.
        """
        if not self._may_overflow:
            if prefill is None:
                return None
            return Place(worker, None, prefill.within, policy.Placement("handover"))
        rows = self.decode_caches.candidates(worker.row, request, self._rng)
        now = time.monotonic()
        offers = [self._decode_offer(row, cached, now) for row, cached in rows]
        found = policy.place(request.tokens, answer, None if prefill is None else prefill.offer, offers)
        if found.place == "decode":
            chosen, offer = self.by_row[rows[found.offer][0]], offers[found.offer]
            work = PrefillWork(request.tokens - offer.cached, request.chunks)
            return Place(chosen, work, policy.patience(work.tokens * offer.pace.token_seconds), found)
        assert prefill is not None
        if found.place == "prefill":
            return Place(prefill.worker, prefill.work, prefill.within, found)
        return Place(worker, None, prefill.within, found)

    def _decode_offer(self, row: int, cached: int, now: float) -> policy.DecodeOffer:
        worker = self.by_row[row]
        return policy.decode_offer(worker.status, worker.load, self.loads.tokens_waiting(row, now), cached)

    def place_without_room(self, request: PrefillRequest) -> Place | None:
        """Chooses the prefill worker that computes a request and decodes it, while no decode worker has room
        for the request, or while there is no decode worker. Returns None if the request has to wait."""
        if not self._may_overflow or not (self.decodes or self._lost_decode):
            return None
        snapshot = self._snapshot(request)
        if snapshot is None:
            return None
        rows = snapshot.compared(
            self._policy(snapshot, request),
            lambda row: self.by_row[row].load.fits(request.tokens + 1),
            self._rng,
        )
        targets = [self._target(snapshot, request, row) for row in rows]
        found = policy.place_without_room([target.offer for target in targets])
        if found is None:
            return None
        if self._lost_decode:
            found = replace(found, reason="no_decode")
        chosen = targets[found.offer]
        return Place(chosen.worker, chosen.work, chosen.within, found)

    def split(
        self, request: PrefillRequest, target: PrefillTarget, decode: Worker, alone: float
    ) -> tuple[splitting.Split, list[Worker]] | None:
        """Chooses workers that compute a prompt together with `target`, the first of them, and their ranges.
        If `decode` has nothing to decode it may have the last one, so its KV need not be handed over. None:
        one worker computes the prompt, since that takes about as long. `alone`: seconds until a token, if it
        worker decodes, too.

        A worker that decodes takes no part: its requests would wait for other workers."""
        first, now, described = target.worker, time.monotonic(), target.worker.description
        if not self._config.split_prompts or not _takes_part(first):
            return None
        if not splitting.may_gain(target.work.tokens, self._split_worker(first, first, now)):
            return None
        # The workers of a plan compute what one worker could read from the shared store.
        if first.status.store == "open" and self.loads.index.only_stored(first.row, request.chunks):
            return None
        rows = self.loads.draw(2 * splitting.MOST_WORKERS, self._rng)
        others = {self.by_row[row] for row in rows} - {first, decode}
        free = [worker for worker in others if _takes_part(worker) and worker.address not in request.avoid]
        waits = {worker: self.loads.tokens_waiting(worker.row, now) for worker in free}
        chosen = [first, *sorted(free, key=lambda worker: waits[worker])]
        # Until a prompt that queues begins, the worker would decode others.
        may_decode = self._may_overflow and decode is not first and not target.queues
        may_decode &= decode.address not in request.avoid
        last = decode if may_decode and _takes_part(decode) else None
        cost = splitting.PromptCost(
            request.tokens,
            cached=request.tokens - target.work.tokens,
            doubles_at=described.attention_doubles_at,
            layers=max(1, described.num_layers),
        )
        found = splitting.split(
            cost,
            [self._split_worker(worker, first, now) for worker in chosen],
            None if last is None else self._split_worker(last, first, now),
            alone,
        )
        return None if found is None else (found, [*chosen, decode])

    def _split_worker(self, worker: Worker, first: Worker, now: float) -> splitting.SplitWorker:
        row = worker.row
        speed = max(1.0, worker.status.prefill_tokens_per_s or self.loads.speed(first.row))
        link = worker.prefix_links.get((first.description.incarnation, Tier.DEVICE))
        return splitting.SplitWorker(
            wait=self.loads.tokens_waiting(row, now) / speed,
            speed=splitting.first_speed(speed, worker.status, worker.description.attention_doubles_at),
            step=worker.description.max_num_batched_tokens,
            floor=worker.status.fastest_step_seconds,
            link=math.inf if link is None else link.tokens_per_s,
            utilisation=self.loads.utilisation(row),
        )

    # ------------------------------------------------------------ sources of prefixes

    def content_source(self, worker: Worker, chunks: list[int], tokens: int) -> pb.ContentSource | None:
        """Where `worker` finds more of a prompt than in its own prefix cache; None if nowhere.

        Workers with KV of another dtype have other names for it."""
        source = None
        if self._config.prefix_fetches:
            source = prefix_source(self, worker, chunks, tokens, self._rng)
        if source is None or source.holder.description.content_root != worker.description.content_root:
            return None
        return source.message()


def _takes_part(worker: Worker) -> bool:
    """Whether the worker may compute a part of a prompt now."""
    # What ended since the last report is known of the own requests of this router.
    decodes = worker.load.own or min(worker.status.requests_decoding, worker.load.running)
    return worker.ready and worker.description.attention_doubles_at > 0 and not decodes
