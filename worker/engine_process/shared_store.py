"""The shared store beside the engine's loop: what enters the prefix cache is offered, what prompts lack is
fetched."""

import socket
from collections.abc import Iterable

from baton.content import Tier
from baton.engine import CachedBlock, Engine
from baton.kv_transfer import TraceWriter
from baton.kv_transfer.endpoint.shared_store import ASK, SharedStore
from baton.worker.engine_process.cached_chunks import CachedChunks
from baton.worker.engine_process.paged_kv import paged_kv
from baton.worker.engine_process.prefix_fetches import LONGEST, PrefixFetches
from baton.worker.engine_process.prefix_links import PrefixLinks
from baton.worker.messages import ContentSource, RequestCounts

SOURCE = ContentSource("", 0, Tier.STORE)


def longest(expected: float, computing: float) -> float:
    """Seconds that a prompt waits for the store: twice as long as expected, but no longer than computing
    takes. 0: not known."""
    return ASK + min((seconds for seconds in (2 * expected, computing) if seconds), default=LONGEST)


class StoreTier:
    """Owns the engine's end of the shared store.

    Attributes:
        fetches: the prompts that wait for the store.
        speed: tokens in a second of recent fetches. 0: not known.
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
        self.fetches = PrefixFetches(engine, self._store, incarnation, counts, links, trace, longest=longest)

    @property
    def speed(self) -> float:
        return self._link.tokens_per_s.value

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
        for event in self._store.poll():
            self.fetches.handle(event)
        self.fetches.expire()

    def close(self) -> None:
        self._store.close()
