"""The shared store beside the engine's loop: what enters the prefix cache is offered, what prompts lack is
fetched."""

import math
import time
from collections.abc import Iterator

from baton.content import Tier
from baton.engine import CachedBlock, Engine, EngineRequest
from baton.engine.core.prefix_exchange import MissingPrefix, PrefixExchange
from baton.kv_transfer import TraceWriter
from baton.kv_transfer.endpoint.shared_store import SharedStore
from baton.kv_transfer.endpoint.store_offers import LATER, PAUSE, Lent
from baton.kv_transfer.protocol.messages import MAX_CHUNKS
from baton.worker.engine_process.cached_chunks import CachedChunks
from baton.worker.engine_process.paged_kv import paged_kv
from baton.worker.engine_process.prefix_fetches import LONGEST, PrefixFetch, PrefixFetches, Provider
from baton.worker.engine_process.prefix_links import RECENT, Link, PrefixLinks
from baton.worker.engine_process.start import EngineProcessConfig
from baton.worker.messages import ContentSource, RequestCounts, StoreStats

SLACK = 0.05
"""Seconds that a prompt may wait for the store if computing takes longer: this process may be busy."""
SOURCE = ContentSource("", 0, Tier.STORE)


class Store(Provider):
    """The store, which has no pins and no incarnation."""

    def __init__(self, engine: Engine, store: SharedStore, link: Link) -> None:
        """`link`: to `SOURCE`."""
        self._engine = engine
        self._store = store
        self._link = link
        self._session = 0  # that the link is of
        self._probe_at = 0.0  # time.monotonic()
        self.ends = store.ends
        self.began = store.began
        self.cancel = store.cancel

    def measure(self, now: float) -> bool:
        """Has the store probed when its speed is not known, or has made prompts compute. So the speed is
        learnt beside prompts, and not by any that waits: a try would cost it what it lacks of a gain.

        Returns whether the session is another one than at the last call. Then it may be another store."""
        store, link = self._store, self._link
        if is_new := store.session != self._session:
            self._session, self._probe_at, link.chunk_seconds = store.session, now, 0.0
            link.transfers.clear()
        if now >= self._probe_at and (link.refused or not link.chunk_seconds) and store.probe():
            self._probe_at = now + (RECENT if link.chunk_seconds else PAUSE)
        # Nor do prompts wait for a store that is silent.
        link.paused_until = 0.0 if link.chunk_seconds and not store.unanswered else math.inf
        return is_new

    @property
    def exchange(self) -> PrefixExchange | None:
        return self._engine.store_exchange

    def missing(self, exchange: PrefixExchange, request: EngineRequest) -> MissingPrefix | None:
        return exchange.missing(request, MAX_CHUNKS, remnant=True)

    def limit(self, expected: float, computing: float) -> float:
        """A fetch may take twice what it should, but no longer than computing."""
        return min(computing or LONGEST, max(SLACK, 2 * expected))

    def ask(self, fetch: PrefixFetch, source: ContentSource) -> None:
        missing = fetch.into.missing
        self._store.fetch_content(
            fetch.id,
            salt=missing.names.salt,
            chunks=missing.chunks,
            first_chunk=missing.first_chunk,
            block_ids=fetch.into.table,
            state_slot=fetch.into.state_slot,
            owner=fetch,
        )


class StoreTier:
    """The shared store beside the loop.

    Attributes:
        store: the engine's end of it.
        fetches: the prompts that wait for the store.
    """

    def __init__(
        self,
        engine: Engine,
        config: EngineProcessConfig,
        counts: RequestCounts,
        trace: TraceWriter,
        cached_chunks: CachedChunks,
    ) -> None:
        """Raises `ValueError` without a prefix cache."""
        if engine.store_exchange is None:
            raise ValueError("--kv-store: needs the prefix cache; leave out --no-enable-prefix-caching")
        assert config.store is not None, "the service made it"
        self._engine, self._exchange = engine, engine.store_exchange
        links = PrefixLinks()
        self._link = link = links.to(SOURCE)
        kv = paged_kv(engine)
        self.store = SharedStore(
            kv,
            config.store,
            f"{kv.layout.fingerprint} {engine.content_root.hex()}",
            lend=self._lend,
            known=cached_chunks.stored,
            answered=lambda seconds: link.waited.add(seconds),  # a probe makes a new average
            probed=link.probed,
        )
        cached_chunks.offer = self._entered
        # What the cache had when this session began.
        self._again: Iterator[tuple[bytes, list[bytes]]] | None = None
        self._provider = Store(engine, self.store, link)
        self.fetches = PrefixFetches(engine, self._provider, config.incarnation, counts, links, trace)

    def _lend(self, name: bytes, part: int, chunk: int) -> Lent | None:
        exchange = self._exchange
        if part:
            lease = exchange.lend_states(name)
            return None if lease is None else Lent((), lease.slot, lease.end)
        if (pin := exchange.pin([name], chunk) or exchange.pin_remnant(name, chunk)) is None:
            return LATER if exchange.has(name, chunk) else None
        return Lent(pin.table, 0, pin.end)

    @property
    def stats(self) -> StoreStats:
        store = self.store
        is_open = bool(store.session)
        speed = self._link.tokens_per_s.value if is_open else 0.0
        return StoreStats(is_open, speed, store.offers.written, store.offers.refused, store.missed)

    @property
    def copies(self) -> bool:
        """As in `OffloadPump`."""
        return self._again is not None or self.store.copies

    @property
    def idle(self) -> bool:
        return self._again is None and self.store.idle

    def _entered(self, block: CachedBlock) -> None:
        """The block is in the prefix cache now."""
        for chunk, name in enumerate(block.chunks, block.first_chunk):
            self.store.offer(block.salt, name, chunk)

    def pump(self) -> None:
        store = self.store
        store.move(busy=self._engine.loop.has_work)
        for event in store.poll():
            event.owner.handle(event)
        self.fetches.expire()
        if self._provider.measure(time.monotonic()):  # the store may have lost all objects
            self._again = self._exchange.last_used() if store.session else None
        if self._again is not None and not store.offers.writes:
            prefix = next(self._again, None)
            if prefix is None:
                self._again = None
            else:
                salt, chunks = prefix
                for chunk, name in enumerate(chunks):
                    store.offer(salt, name, chunk)

    def close(self) -> None:
        self.store.close()
