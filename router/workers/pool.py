"""The workers that there are right now, and which of them to ask.

Follows discovery, keeps a connection to each address, and tells requests that wait for a worker when
one has come.
"""

import asyncio
import itertools
import math
import random
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from router.generation.retries import RetryQueue
from router.generation.retry_budget import RetryBudget
from router.policy import (
    ChunkOffer,
    FreeRoom,
    PrefillPolicy,
    PrefillWork,
    Reason,
    free_room,
    overflow,
    two_choices,
)
from router.workers.connection import State, WorkerConnection
from router.workers.discovery import Discovery
from router.workers.fit import RouterModel, check_fit
from router.workers.members import Members, PrefillChoice
from rpc import TlsFiles
from rpc import worker_pb2 as pb

WINDOW_STEPS = 2
"""Of each prefill worker: one that it computes, and one to choose from."""
SPARE_EVERY = 1.0
"""Seconds: as often as workers report."""


@dataclass(frozen=True, slots=True)
class Overflow:
    """A decode worker shall prefill a request."""

    worker: WorkerConnection
    tokens: int
    """That it has to compute."""
    reason: Reason


class WorkerWaiter(Protocol):
    def on_workers(self) -> None:
        """A worker came. Whoever still waits says so again."""
        ...


class WorkerPool:
    """Owns the connections. All of it runs on the event loop; nothing here waits.

    Attributes:
        retries: requests that wait until they may be prefilled again.
        waiters: requests that wait for a worker of some role, as keys in order.
        changed: set whenever a worker comes or goes; cleared by its one reader.
        on_change: called then, and whenever a decode worker may have become less busy.
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
    ) -> None:
        self.retries = RetryQueue(RetryBudget())
        self.waiters: dict[WorkerWaiter, None] = {}
        self.changed = asyncio.Event()
        self.on_change: Callable[[], None] = lambda: None
        self._step_tokens = 0  # of all prefill workers: prompt tokens in one step of each
        self._chunk_tokens = 0  # the same of decode workers, beside their own work
        self._spare = 0.0  # what decode workers prefill beside their own work, as a share of prefill's speed
        self._spare_at = 0.0  # time.monotonic()
        self._overflow = overflow
        self._model = model
        self._secret = secret
        self._tls = tls
        self._discovery = discovery
        self._router_id = router_id
        self._rng = random.Random()
        self._arrivals = itertools.count()
        self._connections: dict[str, WorkerConnection] = {}
        self._serving: set[WorkerConnection] = set()  # that are given work
        self._retired: set[WorkerConnection] = set()  # off the list, but not yet empty
        self._members = Members(policy)
        self._capacity: int | None = None
        self._sliding_window = False

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

    # ------------------------------------------------------------ who is there

    @property
    def connections(self) -> list[WorkerConnection]:
        """For people: by role and index."""
        return sorted(
            self._connections.values(), key=lambda c: (c.description.role, c.description.index, c.address)
        )

    def ready(self, role: "pb.Role") -> list[WorkerConnection]:
        """Those that take new work."""
        return [c for c in self._connections.values() if c.ready and c.description.role == role]

    @property
    def has_decode(self) -> bool:
        return bool(self._members.decodes)

    def can_hold(self, tokens: int) -> bool:
        """Whether a decode worker has room for so many positions when it is idle."""
        return any(load.blocks_total * load.block_size >= tokens for load in self._members.decodes)

    @property
    def complete(self) -> bool:
        """Whether there is a worker of each role."""
        return self._members.has_prefill and self.has_decode

    @property
    def capacity(self) -> int | None:
        """Positions that one request may have anywhere; None while no worker is known."""
        return self._capacity

    @property
    def sliding_window(self) -> bool:
        """Whether it is the model's sliding window that ends the context at `capacity`."""
        return self._sliding_window

    def arrival(self) -> int:
        """A new request's place in the order in which they came."""
        self.retries.requested()
        return next(self._arrivals)

    # ------------------------------------------------------------ choices

    def choose_prefill(
        self, key: int, chunks: list[int], tokens: int, avoid: Collection[str]
    ) -> PrefillChoice | None:
        """For a session's 64-bit key and `tokens` positions, which begin with these 64-token chunks (their
        hashes); None when there is no worker."""
        return self._members.choose_prefill(key, chunks, tokens, avoid)

    def choose_decode(self, tokens: int, avoid: Collection[str]) -> WorkerConnection | None:
        """With room for `tokens` positions; None when there seems to be none (or no worker at all)."""
        chosen = two_choices(self._members.decodes, tokens=tokens, rng=self._rng, avoid=avoid)
        return None if chosen is None else self._connections[chosen]

    def room(self) -> FreeRoom:
        """That decode workers have free. Infinite while there is none: a request waits for one by itself, and
        that wait is bounded in time."""
        return free_room(self._members.decodes) if self.has_decode else FreeRoom(math.inf, math.inf)

    def window(self) -> float:
        """Prompt tokens that keep all workers busy: more would only wait there. Infinite while there is no
        worker to prefill or none to decode: a request waits for one by itself, and that wait is bounded in
        time."""
        if not self.has_decode or not (self._step_tokens or self._overflow):
            return math.inf
        now = time.monotonic()
        if self._overflow and now > self._spare_at + SPARE_EVERY:
            offers = [c.status for c in self.ready(pb.ROLE_DECODE) if c.status.chunk_tokens]
            spare = sum(offer.chunk_tokens / offer.chunk_seconds for offer in offers if offer.chunk_seconds)
            speed = self._members.prefill_tokens_per_s()
            self._spare = spare / speed if speed else 0.0
            self._chunk_tokens = sum(offer.chunk_tokens for offer in offers)
            self._spare_at = now
        if not self._step_tokens:
            return WINDOW_STEPS * self._chunk_tokens
        return WINDOW_STEPS * self._step_tokens * (1 + self._spare)

    def overflow(
        self,
        worker: WorkerConnection,
        chunks: list[int],
        tokens: int,
        choice: PrefillChoice | None,
        avoid: Collection[str],
    ) -> Overflow | None:
        """Which decode worker should prefill so many tokens, which begin with these chunks; None: it is left
        to that choice, and `worker` decodes them."""
        if not self._overflow:
            return None
        holders = self._members.holders(worker, chunks=chunks, tokens=tokens, rng=self._rng, avoid=avoid)
        workers = [worker, *(self._connections[address] for address, _ in holders[1:])]
        offers = [_offer(worker, cached) for worker, (_, cached) in zip(workers, holders, strict=True)]
        found = overflow(tokens, None if choice is None else choice.seconds, offers)
        if found is None:
            return None
        index, reason = found
        return Overflow(workers[index], tokens - offers[index].cached, reason)

    # ------------------------------------------------------------ what connections report

    def check(self, connection: WorkerConnection) -> None:
        others = [c for c in self._connections.values() if c.accepted and c is not connection]
        check_fit(connection.description, self._model, {str(c): c.description for c in others})

    def membership_changed(self, connection: WorkerConnection) -> None:
        self._serve(connection, connection.ready)
        described = [c.description for c in self._connections.values() if c.state is not State.REFUSED]
        sizes = [min(d.max_model_len, d.num_blocks * d.block_size) for d in described if d.num_blocks]
        self._capacity = min(sizes, default=None)
        self._sliding_window = any(d.sliding_window == self._capacity for d in described)
        budgets = (c.description.max_num_batched_tokens for c in self.ready(pb.ROLE_PREFILL))
        self._step_tokens = sum(budgets)  # before `_use`, which lets the queue go on
        self._use(connection.description.role)
        self.changed.set()
        if connection.ready:
            waiters, self.waiters = self.waiters, {}
            for waiter in waiters:
                waiter.on_workers()

    def load_changed(self, connection: WorkerConnection) -> None:
        self.on_change()

    def prefill_reported(self, connection: WorkerConnection) -> None:
        self._members.prefill_reported(connection)

    def prefill_sent(self, connection: WorkerConnection, work: PrefillWork) -> None:
        self._members.prefill_sent(connection, work)

    def cache_changed(self, connection: WorkerConnection, events: pb.CacheEvents) -> None:
        self._members.cache_changed(connection, events)

    def prefill_ended(self, connection: WorkerConnection, work: PrefillWork, *, computed: bool) -> None:
        self._members.prefill_ended(connection, work, computed=computed)

    def breaker_changed(self, connection: WorkerConnection) -> None:
        self._use(connection.description.role)
        if out_for := connection.breaker.out_for(time.monotonic()):
            asyncio.get_running_loop().call_later(out_for, self._use, connection.description.role)

    def _use(self, role: "pb.Role") -> None:
        """Tells who of a role is given work: whose breaker is closed. Where all are open it is not the
        workers, or there is nothing to lose: all of them."""
        ready, now = self.ready(role), time.monotonic()
        admitted = {c for c in ready if c.breaker.admits(now)} or set(ready)
        for connection in ready:
            if (connection in admitted) is not (connection in self._serving):
                self._serve(connection, connection in admitted)
        self.on_change()

    def _serve(self, connection: WorkerConnection, serves: bool) -> None:
        (self._serving.add if serves else self._serving.discard)(connection)
        self._members.membership_changed(connection, serves=serves)


def _offer(worker: WorkerConnection, cached: int) -> ChunkOffer:
    status = worker.status
    waiting = status.tokens_waiting + worker.started_tokens
    return ChunkOffer(status.chunk_tokens, status.chunk_seconds, status.step_seconds, waiting, cached)
