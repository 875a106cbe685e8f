"""The connections to all workers, and the choice of a worker for each request."""

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from baton.content import CHUNK_TOKENS, prompt_hints
from baton.router.policy import (
    DecodeLoad,
    FreeCapacity,
    Placement,
    PrefillPolicy,
    PrefillWindow,
    PrefillWork,
    free_capacity,
    pace,
    patience,
    place,
    place_without_room,
    prefill_window,
    report_seconds,
    two_choices,
)
from baton.router.workers.candidates import Candidates, PrefillTarget, PrefixSource
from baton.router.workers.checks import RouterModel, check_fit
from baton.router.workers.connection import POOL_NAMES, WorkerConnection, WorkerState
from baton.router.workers.discovery import Discovery
from baton.rpc import worker_pb2 as pb
from baton.rpc.tls import TlsFiles

WINDOW_SECONDS = 1.0
"""How often the prefill window is updated. Workers report as often."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request goes."""

    decode: WorkerConnection
    """The worker that decodes the request."""
    work: PrefillWork | None
    """The prompt, if that worker computes it too. None: a prefill worker hands the KV over."""
    within: float
    """Seconds in which the prompt should be computed."""
    why: Placement


class WorkerPool:
    """Owns the connections. Runs on the event loop, and never waits for a worker.

    Attributes:
        changed: set when a worker comes or goes. Its only reader clears it.
        on_capacity: called when a worker comes or goes, and when a decode worker may have free capacity.
        on_ready: called when a worker becomes ready.
    """

    def __init__(
        self,
        secret: bytes,
        router_id: bytes,
        discovery: Discovery,
        policy: PrefillPolicy,
        model: RouterModel,
        tls: TlsFiles | None = None,
        *,
        overflow: bool = True,
        prefix_fetches: bool = True,
        decode_only: bool = False,
    ) -> None:
        self.changed = asyncio.Event()
        self.on_capacity: Callable[[], None] = lambda: None
        self.on_ready: Callable[[], None] = lambda: None
        self._budgets: list[int] = []  # prompt tokens of a step of each prefill worker
        self._had_decode = False  # the decode pool had a worker once
        self._promised_slots = self._promised_positions = 0  # of decode workers, for queued prompts
        self._window = PrefillWindow()
        self._window_until = 0.0  # time.monotonic()
        self._may_overflow = overflow
        self._may_fetch_prefixes = prefix_fetches
        self._decode_only = decode_only
        self._model = model
        self._secret = secret
        self._tls = tls
        self._discovery = discovery
        self._router_id = router_id
        self._rng = random.Random()
        self._connections: dict[str, WorkerConnection] = {}
        self._serving: set[WorkerConnection] = set()  # get new work
        self._retired: set[WorkerConnection] = set()  # no longer listed, with open attempts
        self._candidates = Candidates(policy)
        self._breaker_timer: asyncio.TimerHandle | None = None  # at the end of the first open breaker
        self._max_positions: int | None = None
        self._content_root = b""

    async def run(self) -> None:
        """Follows discovery until cancelled, then closes every connection."""
        try:
            async for addresses in self._discovery.watch():
                for address in addresses - self._connections.keys():
                    connection = WorkerConnection(address, self._secret, self._router_id, self, self._tls)
                    self._connections[address] = connection
                for address in self._connections.keys() - addresses:
                    self._retire(self._connections.pop(address))
            await asyncio.Event().wait()
        finally:
            await asyncio.gather(*(c.close() for c in {*self._connections.values(), *self._retired}))

    def _retire(self, connection: WorkerConnection) -> None:
        self._retired.add(connection)
        connection.when_closed(self._retired.discard)
        connection.retire()

    # ------------------------------------------------------------ the workers

    @property
    def connections(self) -> list[WorkerConnection]:
        """All listed workers, by name."""
        return sorted(
            self._connections.values(),
            key=lambda c: (c.description.first_pool, c.description.index, c.address),
        )

    def ready(self, pool: "pb.Pool") -> list[WorkerConnection]:
        """The workers that take the new work of a pool."""
        return [c for c in self._connections.values() if c.ready_in(pool)]

    @property
    def has_decode(self) -> bool:
        return bool(self._candidates.decodes)

    @property
    def _lost_decode(self) -> bool:
        """Whether prefill workers decode what they compute, because the decode pool has lost its last worker.
        A pool that never had one is only starting."""
        return self._may_overflow and self._had_decode and not self.has_decode

    @property
    def _decoders(self) -> list[DecodeLoad]:
        """The workers that decode new requests."""
        return self._candidates.prefills if self._lost_decode else self._candidates.decodes

    def decodes_instead(self, worker: WorkerConnection) -> bool:
        """Whether this prefill worker decodes what it computes, because the decode pool is empty."""
        return self._lost_decode and worker.ready_in(pb.POOL_PREFILL)

    @property
    def pools(self) -> dict[pb.Pool, str]:
        """The pools that the cluster has, with their names."""
        return {p: name for p, name in POOL_NAMES.items() if p == pb.POOL_DECODE or not self._decode_only}

    @property
    def complete(self) -> bool:
        """Whether each pool of the cluster has a worker."""
        return self.has_decode and (self._decode_only or self._candidates.has_prefill)

    @property
    def max_positions(self) -> int | None:
        """Positions that one request may have on any worker; None while no worker is known."""
        return self._max_positions

    @property
    def content_root(self) -> bytes:
        """The root of the names of the workers' KV. Empty while no worker is known."""
        return self._content_root

    def can_ever_hold(self, tokens: int) -> bool:
        """Whether an idle worker that decodes has blocks for so many positions."""
        return any(load.blocks_total * load.block_size >= tokens for load in self._decoders)

    def free_capacity(self) -> FreeCapacity:
        """Free capacity of all workers that decode. Infinite without such workers.

        Requests then leave the admission queue and wait for a worker instead, for a bounded time.
        """
        return free_capacity(self._decoders) if self._decoders else FreeCapacity(math.inf, math.inf)

    def prefill_window(self, prompt: int) -> float:
        """Prompt tokens that keep all workers busy, if the next prompt has `prompt` tokens. More would only
        wait at the workers.

        Infinite if no worker can prefill or none can decode, as for `free_capacity`.
        """
        if not self._decoders or not (self._budgets or self._may_overflow):
            return math.inf
        now = time.monotonic()
        if now > self._window_until:
            paces = [pace(c.status) for c in self.ready(pb.POOL_DECODE)] if self._may_overflow else []
            speed = self._candidates.prefill_tokens_per_s()
            self._window = prefill_window(self._budgets, speed, paces)
            self._window_until = now + WINDOW_SECONDS
        return self._window.holding(prompt)

    # ------------------------------------------------------------ choices

    def choose_prefill(
        self, key: int, chunks: list[int], tokens: int, avoid: Collection[str]
    ) -> PrefillTarget | None:
        """Chooses a prefill worker; None if there is none.

        `key` is the session's 64-bit hash. `tokens` positions are needed, which begin with the 64-token
        `chunks`. Workers in `avoid` are chosen only if there is no other.
        """
        return self._candidates.choose_prefill(key, chunks, tokens, avoid)

    def prefix_source(
        self, worker: WorkerConnection, chunks: list[int], tokens: int
    ) -> pb.ContentSource | None:
        """Where `worker` finds more of a prompt than in its own prefix cache; None if nowhere.

        Workers with KV of another dtype have other names for it."""
        if not self._may_fetch_prefixes:
            return None
        source = self._candidates.prefix_source(worker, chunks, tokens, self._rng)
        if source is None or not source.holder.description.kv_address:
            return None  # a worker of an older version may serve no KV
        if source.holder.description.content_root != worker.description.content_root:
            return None
        return _content_source(source)

    def choose_decode(
        self, chunks: list[int], tokens: int, avoid: Collection[str], *, promised: bool = False
    ) -> WorkerConnection | None:
        """Chooses a decode worker with capacity for `tokens` positions; None if there seems to be none.

        The positions begin with the 64-token `chunks`. What is promised stays free, except for a request that
        it is `promised` to."""
        if self._promised_slots and not promised:
            free = free_capacity(self._candidates.decodes)
            if free.slots <= self._promised_slots or free.positions < self._promised_positions + tokens:
                return None
        chosen = two_choices(self._candidates.decodes, tokens=tokens, rng=self._rng, avoid=avoid)
        if chosen is None:
            return None
        return self._candidates.nearest_decode(
            self._connections[chosen], chunks=chunks, tokens=tokens, rng=self._rng, avoid=avoid
        )

    def promise(self, tokens: int) -> None:
        """A queued prompt needs a decode with `tokens` positions as soon as it is computed."""
        self._promised_slots += 1
        self._promised_positions += tokens

    def fulfilled(self, tokens: int) -> None:
        """Ends a promise. The request has its decode, or needs none."""
        self._promised_slots -= 1
        self._promised_positions -= tokens

    def place(
        self,
        worker: WorkerConnection,
        chunks: list[int],
        tokens: int,
        answer: int,
        prefill: PrefillTarget | None,
        avoid: Collection[str],
    ) -> Place | None:
        """Chooses where a request of `tokens` positions, and with at most `answer` to come, is computed.

        `worker` is the decode worker that would decode after a handover from `prefill`. None: there is no
        worker that may compute the prompt.
        """
        if not self._may_overflow:
            if prefill is None:
                return None
            return Place(worker, None, patience(prefill.alone), Placement("handover"))
        offers = self._candidates.decode_offers(
            worker, chunks=chunks, tokens=tokens, rng=self._rng, avoid=avoid
        )
        found = place(
            tokens, answer, None if prefill is None else prefill.offer, [offer for _, offer in offers]
        )
        if found.place == "decode":
            chosen, offer = offers[found.offer]
            computes = tokens - offer.cached
            within = patience(computes * offer.pace.token_seconds)
            return Place(chosen, PrefillWork(computes, chunks), within, found)
        assert prefill is not None
        within = patience(prefill.alone)
        if found.place == "prefill":
            return Place(prefill.worker, prefill.work, within, found)
        return Place(worker, None, within, found)

    def place_without_room(
        self, key: int, chunks: list[int], tokens: int, avoid: Collection[str]
    ) -> Place | None:
        """Chooses the prefill worker that computes a request and decodes it, while no decode worker has room
        for the request, or while there is no decode worker. The arguments are those of `choose_prefill`.
        Returns None if the request has to wait."""
        if not self._may_overflow or not (self.has_decode or self._lost_decode):
            return None
        targets = self._candidates.prefill_targets(key, chunks, tokens, self._rng, avoid)
        found = place_without_room([target.offer for target in targets])
        if found is None:
            return None
        if self._lost_decode:
            found = replace(found, reason="no_decode")
        chosen = targets[found.offer]
        return Place(chosen.worker, chosen.work, patience(chosen.alone), found)

    # ------------------------------------------------------------ reports of the connections

    @property
    def report_seconds(self) -> float:
        return report_seconds(len(self._connections))

    def check(self, connection: WorkerConnection) -> None:
        others = [c for c in self._connections.values() if c.accepted and c is not connection]
        check_fit(connection.description, self._model, {str(c): c.description for c in others})

    def availability_changed(self, connection: WorkerConnection) -> None:
        """A worker came, went, drains, or moved to another pool. Requests then see only what is there now."""
        self._serve(connection, connection.ready)
        self._had_decode |= self.has_decode
        self._derive_limits()  # first: the next line calls `on_capacity`, and requests start
        self._apply_breakers()
        self.changed.set()
        if connection.ready:
            self.on_ready()

    def _derive_limits(self) -> None:
        """Derives from the workers' descriptions: the longest request, the names of KV, and the window."""
        connected = [c.description for c in self._connections.values() if c.state is not WorkerState.REFUSED]
        described = [worker for worker in connected if worker.num_blocks]
        prefilling = [c.description for c in self.ready(pb.POOL_PREFILL)]
        sizes = (min(worker.max_model_len, worker.num_blocks * worker.block_size) for worker in described)
        self._max_positions = min(sizes, default=None)
        self._content_root = _root_of_most(described, prefilling)
        self._budgets = [worker.max_num_batched_tokens for worker in prefilling]
        self._window_until = 0.0

    def load_changed(self, connection: WorkerConnection) -> None:
        self.on_capacity()

    def prefill_reported(self, connection: WorkerConnection) -> None:
        self._candidates.prefill_reported(connection)

    def prefill_sent(self, connection: WorkerConnection, work: PrefillWork) -> None:
        self._candidates.prefill_sent(connection, work)

    def cache_changed(self, connection: WorkerConnection, events: pb.CacheEvents) -> None:
        self._candidates.cache_changed(connection, events)

    def prefill_ended(self, connection: WorkerConnection, work: PrefillWork, *, computed: bool) -> None:
        self._candidates.prefill_ended(connection, work, computed=computed)

    def offered(self, connection: WorkerConnection, offer: pb.Offer) -> None:
        """Tells the worker that would compute prompts with this prefix to fetch it. Declines the offer if
        that worker has the prefix, or cannot fetch it."""
        described, prefix = connection.description, offer.prefix
        chunks = prompt_hints(prefix.token_ids, described.content_root, prefix.cache_salt)
        target = None
        if chunks and self._may_fetch_prefixes:
            tokens = len(prefix.token_ids)
            target = self._candidates.choose_prefill(chunks[0], chunks, tokens, {connection.address})
        if target is None or target.worker is connection or not _lacks(target, described.content_root):
            connection.decline(offer)
        else:
            source = self._candidates.offered(connection, chunks)
            target.worker.fetch_prefix(prefix, _content_source(source))

    def breaker_changed(self, connection: WorkerConnection) -> None:
        self._apply_breakers()

    def _apply_breakers(self) -> None:
        """Gives work only to workers whose breaker is closed. If all breakers of a pool are open, all its
        workers get work: the cause is then probably not the workers.

        Runs again when the first open breaker may have closed. uvloop fires timers up to a millisecond early,
        so the breaker may still be open then, and the timer is set once more."""
        now = time.monotonic()
        first = math.inf
        for pool in POOL_NAMES:
            ready = self.ready(pool)
            open_ = {c: seconds for c in ready if (seconds := c.breaker.open_for(now))}
            first = min(first, *open_.values(), math.inf)
            for connection in ready:
                serves = connection not in open_ or len(open_) == len(ready)
                if serves is not (connection in self._serving):
                    self._serve(connection, serves)
        if self._breaker_timer is not None:
            self._breaker_timer.cancel()
        loop = asyncio.get_running_loop()
        self._breaker_timer = loop.call_later(first, self._apply_breakers) if first < math.inf else None
        self.on_capacity()

    def _serve(self, connection: WorkerConnection, serves: bool) -> None:
        (self._serving.add if serves else self._serving.discard)(connection)
        self._candidates.availability_changed(connection, serves=serves)


def _root_of_most(
    described: Sequence[pb.WorkerDescription], prefilling: Sequence[pb.WorkerDescription]
) -> bytes:
    """The root of the KV names of most prefill workers, so that requests find the prefixes that these cache.

    Workers with another format have another root. Without prefill workers the other workers decide."""
    roots = Counter(worker.content_root for worker in described)
    computing = Counter(worker.content_root for worker in prefilling)
    return max(roots, key=lambda root: (computing[root], roots[root], root), default=b"")


def _content_source(source: PrefixSource) -> pb.ContentSource:
    described = source.holder.description
    return pb.ContentSource(
        kv_address=described.kv_address,
        incarnation=described.incarnation,
        tier=pb.Tier.Name(source.tier),
    )


def _lacks(target: PrefillTarget, content_root: bytes) -> bool:
    """Whether a worker lacks at least a chunk of a prefix with names of this root, and can fetch it."""
    described = target.worker.description
    if not described.fetches_prefixes or described.content_root != content_root:
        return False
    return target.work.tokens > max(CHUNK_TOKENS, described.block_size)
