"""Fetches the beginnings of prompts from the prefix caches of other workers, instead of computing them.

Life of a fetch:

1. A router names a worker that has more of a prompt cached. The engine reserves blocks for what is missing
   here, if there is room. Otherwise the prompt is computed.
2. The receiver asks for these chunks. The other worker pins those that it has, and sends them.
3. When all of them are verified, they enter the prefix cache. The prompt is then added to the engine.

If the fetch fails, or takes longer than it should, the prompt is computed. Prompts that begin with the same
missing chunk wait for one fetch. They hold nothing while they wait.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from content import CHUNK_TOKENS
from engine import Engine, EngineRequest
from kv_transfer import MAX_CHUNKS, Closed, FetchFailed, Injected, KVLayout, Receiver
from worker.messages import ContentSource, RequestCounts

LONGEST = 5.0
"""Seconds that a fetch may take if the speed of prefills is not known."""
SLACK = 1.0
"""Seconds that a fetch may take beyond twice the time to compute its tokens."""
MEMORY = 0.7
"""Weight of the fetches before, against the newest one, in the measured bandwidth. Bytes and seconds are
added up, so that short fetches hardly count: their time is mostly latency."""
FORGET = 0.97
"""What is left of the measured seconds after each prompt that is computed because of them. Otherwise one slow
fetch would be the last one."""


@dataclass(slots=True, eq=False)
class _Fetch:
    first_chunk: int
    key: bytes  # the name of the first missing chunk
    bytes: int  # of all chunks that are asked for
    started: float  # time.monotonic()
    until: float
    waiting: dict[bytes, Callable[[], None]] = field(default_factory=dict)  # by request id


class PrefixFetches:
    """Owns the imports of the engine, and their fetches at the receiver, which it shares with the decode
    role."""

    def __init__(
        self, engine: Engine, receiver: Receiver, layout: KVLayout, incarnation: int, counts: RequestCounts
    ) -> None:
        self._engine = engine
        self._receiver = receiver
        self._token_bytes = layout.bytes_per_token
        self._incarnation = incarnation
        self._counts = counts
        self._fetches: dict[bytes, _Fetch] = {}  # by fetch id, until the receiver writes no more
        self._open: dict[bytes, bytes] = {}  # key → fetch id, of those that prompts may wait for
        self._bytes = self._seconds = 0.0  # of recent fetches

    def start(self, request: EngineRequest, source: ContentSource, then: Callable[[], None]) -> bool:
        """Fetches what is missing of a prompt, and calls `then` when this has ended, in any way.

        False: there is nothing to wait for, and `then` will not be called."""
        fetch_id, exchange = os.urandom(16), self._engine.prefix_exchange
        if exchange is None or source.incarnation == self._incarnation:
            return False
        wanted = exchange.start_import(fetch_id, request)
        if wanted is None:
            return False
        key, chunks = wanted.chunks[0], wanted.chunks[:MAX_CHUNKS]
        seconds = self._compute_seconds(len(chunks))
        if key in self._open:
            exchange.end_import(fetch_id, 0)
            self._fetches[self._open[key]].waiting[request.id] = then
            return True
        if seconds and self._transfer_seconds(len(chunks)) >= seconds:
            exchange.end_import(fetch_id, 0)
            self._seconds *= FORGET
            return False
        size, now = len(chunks) * CHUNK_TOKENS * self._token_bytes, time.monotonic()
        until = now + (SLACK + 2 * seconds if seconds else LONGEST)
        self._fetches[fetch_id] = _Fetch(wanted.first_chunk, key, size, now, until, {request.id: then})
        self._open[key] = fetch_id
        self._receiver.fetch_content(
            fetch_id,
            chunks=chunks,
            first_chunk=wanted.first_chunk,
            kv_address=source.kv_address,
            incarnation=source.incarnation,
            block_ids=wanted.block_ids,
        )
        return True

    def _compute_seconds(self, chunks: int) -> float:
        """0: the speed of prefills is not known."""
        speed = self._engine.prefill_tokens_per_s
        return chunks * CHUNK_TOKENS / speed if speed else 0.0

    def _transfer_seconds(self, chunks: int) -> float:
        """0: the bandwidth is not known."""
        return chunks * CHUNK_TOKENS * self._token_bytes * self._seconds / self._bytes if self._bytes else 0.0

    def _measured(self, size: int, seconds: float) -> None:
        self._bytes = MEMORY * self._bytes + size
        self._seconds = MEMORY * self._seconds + seconds

    def cancel(self, request_id: bytes) -> None:
        """The request has ended. Its `then` is not called."""
        for fetch_id, fetch in self._fetches.items():
            if fetch.waiting.pop(request_id, None) is not None and not fetch.waiting:
                self._give_up(fetch_id, fetch)

    def handle(self, event: Injected | FetchFailed | Closed) -> None:
        """Handles an event of the receiver about a fetch from here."""
        fetch, exchange = self._fetches.pop(event.decode_id), self._engine.prefix_exchange
        assert exchange is not None, "it started an import"
        if self._open.get(fetch.key) == event.decode_id:
            del self._open[fetch.key]
        tokens = 0
        if isinstance(event, Injected):
            stats = event.stats
            fetched = stats.bytes // self._token_bytes
            tokens = fetch.first_chunk * CHUNK_TOKENS + fetched
            self._counts.prefix_fetched_tokens += fetched
            self._measured(stats.bytes, stats.fetch_seconds)
        exchange.end_import(event.decode_id, tokens)
        for then in fetch.waiting.values():
            then()

    def expire(self) -> None:
        """Computes the prompts that wait for a fetch which takes too long."""
        now = time.monotonic()
        for fetch_id, fetch in self._fetches.items():
            if fetch.waiting and fetch.until <= now:
                if self._receiver.began(fetch_id):  # else the time says nothing about the bandwidth
                    self._measured(fetch.bytes, now - fetch.started)
                waiting, fetch.waiting = fetch.waiting, {}
                self._give_up(fetch_id, fetch)
                for then in waiting.values():
                    then()

    def _give_up(self, fetch_id: bytes, fetch: _Fetch) -> None:
        """No prompt waits any more. The blocks come back when the receiver has reported Closed."""
        self._open.pop(fetch.key, None)
        self._receiver.cancel(fetch_id)
