"""The shared store beside the engine's loop: what enters the prefix cache is offered, what prompts lack is
fetched."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from baton.engine import CacheChange, CachedBlock, Engine, Kept
from baton.engine.core.link import Link
from baton.engine.core.prefix_exchange import PrefixExchange
from baton.kv_names import CHUNK_TOKENS
from baton.kv_transfer.endpoint.other_ranks import OtherRanks
from baton.kv_transfer.endpoint.shared_store import SharedStore
from baton.kv_transfer.endpoint.store_offers import LATER, PAUSE, Lent
from baton.rpc import worker_pb2 as pb
from baton.worker.engine_process.cached_chunks import CachedChunks
from baton.worker.engine_process.paged_kv import paged_kv
from baton.worker.engine_process.prefix_fetches import LONGEST, RECENT, Place, PrefixFetch
from baton.worker.stats import StoreStats

SLACK = 0.05
"""Seconds that a prompt may wait for the store if computing takes longer: this process may be busy."""
STORE = pb.ContentSource(tier=pb.TIER_STORE)


class StoreSource:
    """The shared store beside the loop, as a `PrefixSource`. It has no pins and no incarnation. A chunk of a
    thin block is not stored.

    Attributes:
        store: the engine's end of it.
        place: where it is, with what fetches took.
    """

    brings_all = True

    def __init__(
        self, engine: Engine, exchange: PrefixExchange, open_store: "Callable[[StoreSource], SharedStore]"
    ) -> None:
        """`open_store` gets the source, for what the store calls."""
        self._engine, self._exchange = engine, exchange
        self.place = Place(STORE, Link())
        self._session = 0  # that the link is of
        self._probe_at = 0.0  # time.monotonic()
        # What the cache had when this session began.
        self._again: Iterator[tuple[bytes, list[bytes]]] | None = None
        self.store = open_store(self)
        self.ends, self.cancel = self.store.ends, self.store.cancel

    @classmethod
    def open(
        cls, engine: Engine, fds: Sequence[int], ranks: OtherRanks, cached_chunks: CachedChunks
    ) -> "StoreSource":
        """Raises `ValueError` without a prefix cache."""
        if engine.prefix_exchange is None:
            raise ValueError("--kv-store: needs the prefix cache; leave out --no-enable-prefix-caching")
        kv = paged_kv(engine)

        def open_store(source: StoreSource) -> SharedStore:
            return SharedStore(
                kv,
                fds,
                ranks,
                kv.layout.fingerprint,
                lend=source.lend,
                known=cached_chunks.stored,
                answered=lambda seconds: source.place.link.waited.add(seconds),  # a probe makes a new average
                probed=lambda waited, seconds: source.place.link.probed(waited, seconds / CHUNK_TOKENS),
            )

        return cls(engine, engine.prefix_exchange, open_store)

    # As a source

    def find(self, hint: pb.ContentSource | None) -> Place | None:
        return self.place

    def limit(self, expected: float, computing: float) -> float:
        """A fetch may take twice what it should, but no longer than computing."""
        return min(computing or LONGEST, max(SLACK, 2 * expected))

    def ask(self, fetch: PrefixFetch) -> None:
        missing = fetch.into.missing
        self.store.fetch_content(
            fetch.id,
            salt=missing.names.salt,
            chunks=missing.chunks,
            first_chunk=missing.first_chunk,
            block_ids=fetch.into.table,
            state_slot=fetch.into.state_slot,
            owner=fetch,
        )

    # Beside the loop

    def measure(self, now: float) -> bool:
        """Has the store probed when its speed is not known, or has made prompts compute. So the speed is
        learnt beside prompts, and not by any that waits: a try would cost it what it lacks of a gain.

        Returns whether the session is another one than at the last call. Then it may be another store."""
        store, link = self.store, self.place.link
        if is_new := store.session != self._session:
            self._session, self._probe_at, link.token_seconds = store.session, now, 0.0
            link.transfers.clear()
        if now >= self._probe_at and (link.refused or not link.token_seconds) and store.probe():
            self._probe_at = now + (RECENT if link.token_seconds else PAUSE)
        # Nor do prompts wait for a store that is silent.
        link.paused_until = 0.0 if link.token_seconds and not store.unanswered else math.inf
        return is_new

    def lend(self, name: bytes, section: int, chunk: int) -> Lent | None:
        """As in `SharedStore`."""
        exchange, cache = self._exchange, self._exchange.cache
        if section:
            lease = None if cache.copies is None else cache.copies.lend(name)
            return None if lease is None else Lent((), lease.slot, lease.end)
        if not cache.is_whole(name):
            return None
        if (pin := exchange.pin([name], chunk) or exchange.pin_remnant(name, chunk)) is None:
            return LATER if exchange.has(name, chunk) else None
        return Lent(pin.table, 0, pin.end)

    def tell(self, status: pb.WorkerStatus) -> None:
        """Adds what routers should know of the store."""
        status.store = "open" if self.store.session else "closed"
        status.store_tokens_per_s = self.place.link.tokens_per_s.value if self.store.session else 0.0

    @property
    def stats(self) -> StoreStats:
        store = self.store
        return StoreStats(store.offers.written, store.offers.refused, store.missed)

    @property
    def copies(self) -> bool:
        """As in `OffloadPump`."""
        return self._again is not None or self.store.copies

    @property
    def idle(self) -> bool:
        return self._again is None and self.store.idle

    def read(self, changes: Iterable[CacheChange]) -> None:
        """Offers what the prefix cache has now."""
        for change in changes:
            match change:
                case CachedBlock():
                    for chunk, name in enumerate(change.chunks, change.first_chunk):
                        self.store.offer(change.salt, name, chunk)
                case Kept(salt, name, chunk, states):
                    self.store.offer(salt, name, chunk, states=states)

    def pump(self) -> None:
        store = self.store
        store.move(busy=self._engine.loop.has_work)
        for event in store.poll():
            event.owner.handle(event)
        if self.measure(time.monotonic()):  # the store may have lost all objects
            self._again = self._exchange.cache.last_used() if store.session else None
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
