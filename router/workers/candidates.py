"""The workers that the routing policies choose from, kept current with the reports of the connections."""

import asyncio
import math
import random
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from baton.content import CHUNK_TOKENS, Tier
from baton.router.policy import (
    DecodeCaches,
    DecodeLoad,
    DecodeOffer,
    PrefillLoads,
    PrefillOffer,
    PrefillPolicy,
    PrefillRequest,
    PrefillSnapshot,
    PrefillWork,
    apply_cache_events,
    apply_report,
    decode_offer,
    prefill_offer,
)
from baton.router.workers.checks import RefusedWorker
from baton.router.workers.connection import WorkerConnection
from baton.rpc import worker_pb2 as pb

DRAWN = 2
"""Holders of a prefix to compare. More would all ask the fastest one."""
STALE_PART = 1024
"""Chunks of cleared workers to remove from the index at once. It takes a millisecond."""


@dataclass(frozen=True, slots=True)
class PrefillTarget:
    """A prefill worker that may compute a request."""

    worker: WorkerConnection
    work: PrefillWork
    """What the worker would compute."""
    offer: PrefillOffer
    """What is expected if the request is sent now."""
    alone: float
    """Estimated time that the worker takes for this prompt alone."""
    queues: bool
    """More than one step of prompts, also of other routers, seems to be ahead of the request."""


class PrefixSource(NamedTuple):
    """A worker with more of a prompt than another one, and the slowest tier with a part of it."""

    holder: WorkerConnection
    tier: Tier

    def seconds(self, asker: WorkerConnection, tokens: int) -> float:
        """Time in which the asker fetches so many tokens, by its recent measurements. 0: it has none."""
        link = asker.prefix_links.get((self.holder.description.incarnation, self.tier))
        return link.wait + tokens / link.tokens_per_s if link is not None else 0.0


class Candidates:
    """All attached workers. Each has one row in the tables of both pools, and serves in at most one of them.

    So a worker that moves to the other pool keeps its prefix cache, its load and its open work in the tables.

    Attributes:
        decodes: the decode loads of workers of the decode pool that take new work.
        prefills: likewise, of the prefill pool.
    """

    def __init__(self, policy: PrefillPolicy) -> None:
        self.decodes: list[DecodeLoad] = []
        self.prefills: list[DecodeLoad] = []
        self._policy = policy
        self._loads = PrefillLoads()
        self._decode_caches = DecodeCaches(self._loads.index)
        self._rows: dict[WorkerConnection, int] = {}
        self._workers: dict[int, WorkerConnection] = {}
        self._decode_loads: dict[int, DecodeLoad] = {}  # of `decodes`, by row
        self._prefill_loads: dict[int, DecodeLoad] = {}  # of `prefills`, by row
        self._all = 0  # a set of rows
        self._choices = 0
        self._dropping = False  # `_drop_part` will run again

    # ------------------------------------------------------------ reports of the connections

    def availability_changed(self, connection: WorkerConnection, *, serves: bool) -> None:
        """`serves`: the worker takes new work of its pool."""
        row = self._rows.get(connection)
        if row is None:
            if not connection.attached:
                return
            row = self._join(connection)
        pool = connection.pool if serves and connection.attached else pb.POOL_UNSPECIFIED
        self._loads.serve(row, pool == pb.POOL_PREFILL)
        self._decode_caches.serve(row, pool == pb.POOL_DECODE)
        if self._list(row, self._prefill_loads, pool == pb.POOL_PREFILL):
            self.prefills = list(self._prefill_loads.values())
        if self._list(row, self._decode_loads, pool == pb.POOL_DECODE):
            self.decodes = list(self._decode_loads.values())
        if not connection.attached:
            self._loads.leave(row)
            self._decode_caches.leave(row)
            del self._rows[connection], self._workers[row]
            self._all ^= 1 << row
            self._drop_stale()

    def _drop_stale(self) -> None:
        """Removes what the index has of cleared workers, a part in each round of the event loop."""
        if self._loads.index.has_stale and not self._dropping:
            self._dropping = True
            asyncio.get_running_loop().call_soon(self._drop_part)

    def _drop_part(self) -> None:
        self._dropping = False
        self._loads.index.drop_stale(STALE_PART)
        self._drop_stale()

    def _join(self, connection: WorkerConnection) -> int:
        load, block_size = connection.attempts.load, connection.description.block_size
        assert load is not None
        row = self._loads.join(connection.address, block_size=block_size, now=time.monotonic())
        self._decode_caches.join(row, load)
        self._rows[connection], self._workers[row] = row, connection
        self._all |= 1 << row
        self.prefill_reported(connection)
        return row

    def _list(self, row: int, loads: dict[int, DecodeLoad], serves: bool) -> bool:
        """Adds a worker to `loads`, or removes it. Returns whether this changes anything."""
        if serves is (row in loads):
            return False
        if serves:
            loads[row] = self._decode_caches.loads[row]
        else:
            del loads[row]
        return True

    def prefill_reported(self, connection: WorkerConnection) -> None:
        alone = connection.pool == pb.POOL_PREFILL
        apply_report(self._loads, self._rows[connection], connection.status, alone, time.monotonic())

    def cache_changed(self, connection: WorkerConnection, events: pb.CacheEvents) -> None:
        """Raises RefusedWorker if it reports more chunks than fit into its blocks, on its host included."""
        described, row, index = connection.description, self._rows[connection], self._loads.index
        apply_cache_events(index, row, events)
        self._drop_stale()
        blocks = described.num_blocks + described.offload_blocks
        if index.reported(row) > blocks * -(-described.block_size // CHUNK_TOKENS):
            raise RefusedWorker(f"it reports more cached chunks than fit into {blocks} blocks")

    def prefill_sent(self, connection: WorkerConnection, work: PrefillWork) -> None:
        self._loads.sent(self._rows[connection], work, time.monotonic())

    def prefill_ended(self, connection: WorkerConnection, work: PrefillWork, *, computed: bool) -> None:
        self._loads.ended(self._rows[connection], work, computed=computed, now=time.monotonic())

    # ------------------------------------------------------------ choices

    def prefill_tokens_per_s(self) -> float:
        """Measured speed of all prefill workers together."""
        return self._loads.tokens_per_s()

    @property
    def has_prefill(self) -> bool:
        return self._loads.serving > 0

    def choose_prefill(
        self, key: int, chunks: list[int], tokens: int, avoid: Collection[str]
    ) -> PrefillTarget | None:
        """As `WorkerPool.choose_prefill`."""
        asked = self._ask(key, chunks, tokens, avoid)
        return None if asked is None else self._target(*asked)

    def prefill_targets(
        self, key: int, chunks: list[int], tokens: int, rng: random.Random, avoid: Collection[str]
    ) -> list[PrefillTarget]:
        """The choice of `choose_prefill`, and others that have room to decode the request, to compare it
        with. Empty: there is no prefill worker."""
        asked = self._ask(key, chunks, tokens, avoid)
        if asked is None:
            return []
        snapshot, request, chosen = asked
        loads = self._decode_caches.loads
        rows = snapshot.compared(chosen, lambda row: loads[row].fits(tokens + 1), rng)
        return [self._target(snapshot, request, row) for row in rows]

    def _ask(
        self, key: int, chunks: list[int], tokens: int, avoid: Collection[str]
    ) -> tuple[PrefillSnapshot, PrefillRequest, int] | None:
        """The prefill workers, the request, and the row that the policy chooses. None: there is no worker."""
        request = PrefillRequest(key=key, tokens=tokens, chunks=chunks, arrival=self._choices)
        avoided = (
            [row for connection, row in self._rows.items() if connection.address in avoid] if avoid else ()
        )
        snapshot = self._loads.snapshot(request, time.monotonic(), avoided)
        if snapshot is None:
            return None
        self._choices += 1
        return snapshot, request, self._policy(snapshot, request)

    def _target(self, snapshot: PrefillSnapshot, request: PrefillRequest, row: int) -> PrefillTarget:
        worker, now = self._workers[row], time.monotonic()
        work = PrefillWork(request.tokens - snapshot.cached.of(row), request.chunks)
        queues = self._loads.tokens_queued(row, now) > worker.description.max_num_batched_tokens
        load, utilisation = self._decode_caches.loads[row], self._loads.utilisation(row)
        offer = prefill_offer(snapshot, request, row, worker.status, load, utilisation)
        return PrefillTarget(worker, work, offer, work.tokens / float(snapshot.speed[row]), queues)

    def prefix_source(
        self, worker: WorkerConnection, chunks: list[int], tokens: int, rng: random.Random
    ) -> PrefixSource | None:
        """A worker of any pool that has more of a prompt cached than `worker`.

        None: there is no such worker, or fetching takes more than twice as long as computing. The bound is
        loose, because the worker decides in the end: it knows better what a few tokens of a long prompt cost.

        Only reported chunks count: a worker that will compute the prompt has nothing to send yet. A few
        workers are drawn at random, and the best of them is taken. So many requests do not go to one worker.
        """
        if worker not in self._rows:
            return None
        index, row = self._loads.index, self._rows[worker]
        cached = index.overlap(chunks, tokens, CHUNK_TOKENS, self._all)
        own = cached.of(row)
        best, most_saved = None, -math.inf
        for found, rows in cached.levels():
            if found < own + CHUNK_TOKENS:
                break
            wanted = chunks[own // CHUNK_TOKENS : found // CHUNK_TOKENS]
            have = [holder for holder in rows if index.has_reported(holder, wanted[-1])]
            for holder in have if len(have) <= DRAWN else rng.sample(have, DRAWN):
                source = PrefixSource(self._workers[holder], index.slowest_tier(holder, wanted))
                computing = self._loads.seconds(row, found - own)
                saved = computing - source.seconds(worker, found - own)
                if saved > max(most_saved, -computing):
                    best, most_saved = source, saved
        return best

    def offered(self, holder: WorkerConnection, chunks: list[int]) -> PrefixSource:
        """A worker that offers a prefix, and the tier in which it has that."""
        return PrefixSource(holder, self._loads.index.slowest_tier(self._rows[holder], chunks))

    def nearest_decode(
        self,
        chosen: WorkerConnection,
        *,
        chunks: list[int],
        tokens: int,
        rng: random.Random,
        avoid: Collection[str],
    ) -> WorkerConnection:
        """The worker to decode a prompt: `chosen`, or one with more of it cached."""
        row = self._rows[chosen]
        return self._workers[
            self._decode_caches.nearest(row, chunks=chunks, tokens=tokens, rng=rng, avoid=avoid)
        ]

    def decode_offers(
        self,
        chosen: WorkerConnection,
        *,
        chunks: list[int],
        tokens: int,
        rng: random.Random,
        avoid: Collection[str],
    ) -> list[tuple[WorkerConnection, DecodeOffer]]:
        """The decode workers that may compute the prompt: the chosen one, and perhaps one with more of it."""
        row, now = self._rows[chosen], time.monotonic()
        found = self._decode_caches.candidates(row, chunks=chunks, tokens=tokens, rng=rng, avoid=avoid)
        return [(self._workers[row], self._decode_offer(row, cached, now)) for row, cached in found]

    def _decode_offer(self, row: int, cached: int, now: float) -> DecodeOffer:
        status, load = self._workers[row].status, self._decode_caches.loads[row]
        return decode_offer(status, load, self._loads.tokens_waiting(row, now), cached)
