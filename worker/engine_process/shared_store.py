"""The shared store beside the engine's loop: what enters the prefix cache is offered, what prompts lack is
fetched."""

import math
import socket
from collections.abc import Iterable

from baton.content import Tier
from baton.engine import CachedBlock, Engine
from baton.kv_transfer import TraceWriter
from baton.kv_transfer.endpoint.shared_store import SharedStore
from baton.worker.engine_process.cached_chunks import CachedChunks
from baton.worker.engine_process.paged_kv import paged_kv
from baton.worker.engine_process.prefix_fetches import LONGEST, PrefixFetches
from baton.worker.engine_process.prefix_links import PrefixLinks
from baton.worker.messages import ContentSource, RequestCounts, StoreStats

ASK = 0.05
"""Seconds that a prompt waits at least for the store to say what it has."""
ASK_SHARE = 0.02
"""Of the seconds that computing takes, how long a prompt may wait for that."""
SOURCE = ContentSource("", 0, Tier.STORE)


def limits(expected: float, computing: float) -> tuple[float, float]:
    """Seconds in which the store must say what it has, and then twice those that reading should take, but no
    more than computing takes. 0: not known."""
    ask = max(ASK, ASK_SHARE * computing)
    return ask, ask + min((seconds for seconds in (2 * expected, computing) if seconds), default=LONGEST)


class StoreTier:
    """Owns the engine's end of the shared store.

    Attributes:
        fetches: the prompts that wait for the store.
    """

    def __init__(
        self,
        engine: Engine,
        arena_fd: int,
        channel: socket.socket,
        incarnation: int,
        counts: RequestCounts,
        trace: TraceWriter,
        cached_chunks: CachedChunks,
    ) -> None:
        """Raises `ValueError` for a model that the store does not take."""
        exchange = engine.prefix_exchange
        if exchange is None:
            raise ValueError(
                "--kv-store: needs the prefix cache, and a model without state layers; leave it out"
            )
        self._store = SharedStore(
            paged_kv(engine), arena_fd, channel,
            pin=exchange.pin, unpin=exchange.unpin, known=cached_chunks.stored,
        )  # fmt: skip
        self._engine = engine
        links = PrefixLinks()
        self._link = links.to(SOURCE)
        self._link.paused_until = math.inf
        self._was_open = False
        self.fetches = PrefixFetches(engine, self._store, incarnation, counts, links, trace, limits=limits)

    @property
    def stats(self) -> StoreStats:
        store = self._store
        speed = self._link.tokens_per_s.value
        return StoreStats(store.is_open, speed, store.written, store.refused, store.missed)

    @property
    def fd(self) -> int:
        """Readable when `pump` has something to do."""
        return self._store.fileno()

    @property
    def copies(self) -> bool:
        """Whether `pump` must be called soon in any case."""
        return self._store.waits

    @property
    def idle(self) -> bool:
        """Whether nothing is to be written, and no block is in use."""
        return self._store.idle and not self._store.writes

    def offer(self, blocks: Iterable[CachedBlock]) -> None:
        for block in blocks:
            for chunk, name in enumerate(block.chunks, block.first_chunk):
                self._store.offer(name, chunk)

    def pump(self) -> None:
        self._store.pump(busy=self._engine.has_work)
        if self._store.is_open is not self._was_open:  # no prompt waits while it is closed
            self._was_open = self._store.is_open
            self._link.paused_until = 0.0 if self._was_open else math.inf
        for event in self._store.poll():
            self.fetches.handle(event)
        self.fetches.expire()

    def close(self) -> None:
        self._store.close()
