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
from baton.worker.engine_process.start import EngineProcessConfig
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


class StoreTier(SharedStore):
    """The engine's end of the shared store, as the loop uses it.

    Attributes:
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
        """Raises `ValueError` for a model that the store does not take."""
        exchange = engine.prefix_exchange
        if exchange is None:
            raise ValueError(
                "--kv-store: needs the prefix cache, and a model without state layers; leave it out"
            )
        arena_fd, channel = config.store_fds
        super().__init__(
            paged_kv(engine), arena_fd, socket.socket(fileno=channel),
            pin=exchange.pin, unpin=exchange.unpin, known=cached_chunks.stored,
        )  # fmt: skip
        self._engine = engine
        links = PrefixLinks()
        self._link = links.to(SOURCE)
        self._link.paused_until = math.inf
        self._was_open = False
        self.fetches = PrefixFetches(engine, self, config.incarnation, counts, links, trace, limits=limits)

    @property
    def stats(self) -> StoreStats:
        speed = self._link.tokens_per_s.value
        return StoreStats(self.is_open, speed, self.written, self.refused, self.missed)

    def entered(self, blocks: Iterable[CachedBlock]) -> None:
        """These blocks are in the prefix cache now."""
        for block in blocks:
            for chunk, name in enumerate(block.chunks, block.first_chunk):
                self.offer(name, chunk)

    def pump(self) -> None:
        self.move(busy=self._engine.has_work)
        if self.is_open is not self._was_open:  # no prompt waits while it is closed
            self._was_open = self.is_open
            self._link.paused_until = 0.0 if self._was_open else math.inf
        for event in self.poll():
            self.fetches.handle(event)
        self.fetches.expire()
