"""Fetches the beginnings of prompts from the prefix caches of other workers, instead of computing them.

Life of a fetch:

1. A router names a worker that has more of a prompt cached. If fetching takes longer than computing, the
   prompt is computed.
2. The engine reserves blocks for what is missing here, if there is room. Otherwise the prompt is computed.
3. The receiver asks for these chunks. The other worker pins those that it has, and sends them.
4. When all of them are verified, they enter the prefix cache. The prompt then goes to the engine.

If the fetch fails, or takes longer than it should, the prompt is computed. Prompts that begin with the same
missing chunk wait for one fetch. They hold nothing while they wait. Then each of them fetches what is still
missing, by the same rule.
"""

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from baton.content import CHUNK_TOKENS, Tier
from baton.engine import Engine, EngineRequest
from baton.engine.core.prefix_exchange import Import, MissingPrefix, PrefixExchange
from baton.kv_transfer import Closed, FetchFailed, Injected, Receiver, TraceWriter
from baton.kv_transfer.protocol.messages import MAX_CHUNKS, Reason
from baton.worker.engine_process.attempt import Attempt, Lease
from baton.worker.engine_process.prefix_links import Link, PrefixLinks
from baton.worker.messages import ContentSource, RequestCounts

LONGEST = 5.0
"""Seconds that a fetch may take if the speed of prefills is not known."""
SLACK = 1.0
"""Seconds that a fetch may take beyond twice the time to compute its tokens."""
PAUSE = 10.0
"""Seconds without fetches from a worker that did not answer, or with which a transfer failed. Otherwise each
prompt would wait for it again."""


@dataclass(slots=True, eq=False)
class Waiting(Lease[Attempt]):
    """A prompt waits for a fetch. `source` is None if it waits for its own fetch."""

    fetch: "PrefixFetch"
    request: EngineRequest
    source: ContentSource | None
    then: Callable[[int], None]

    def revoke(self, reason: Reason) -> None:
        """The request has ended. `then` is not called."""
        del self.fetch.waiting[self]
        self.end()
        if not self.fetch.waiting:
            self.fetch.give_up()


@dataclass(slots=True, eq=False)
class PrefixFetch:
    """A fetch from a provider, until nothing writes into its blocks."""

    fetches: "PrefixFetches"
    id: bytes
    into: Import
    key: bytes  # the name of the first missing chunk
    tokens: int  # that are asked for
    tier: Tier
    link: Link
    started: float  # time.monotonic(), and the next
    until: float
    waiting: dict[Waiting, None] = field(default_factory=dict)  # in order of arrival

    def give_up(self) -> None:
        """No prompt waits any more. The blocks come back when the receiver has reported Closed."""
        self.fetches.close(self)
        self.fetches.provider.cancel(self.id)

    def handle(self, event: Injected | FetchFailed | Closed) -> None:
        """Handles the end of the fetch."""
        self.fetches.ended(self, event)

    def take_waiting(self) -> Iterable[Waiting]:
        """Ends the leases of the prompts that wait. They wait no more."""
        waiting, self.waiting = self.waiting, {}
        for each in waiting:
            each.end()
        return waiting


class Provider(Protocol):
    """Where prefixes come from: other workers, or the shared store."""

    @property
    def exchange(self) -> PrefixExchange | None:
        """The prefix cache that gets them. None: there is none."""

    def missing(self, exchange: PrefixExchange, request: EngineRequest) -> MissingPrefix | None: ...

    def limit(self, expected: float, computing: float) -> float:
        """Seconds in which a fetch must end, from the seconds that it should take and those to compute its
        tokens. 0: not known."""

    def ends(self, fetch_id: bytes) -> float:
        """When a fetch will have ended, at the speed that it has. 0: not known."""

    def ask(self, fetch: PrefixFetch, source: ContentSource) -> None:
        """Starts a fetch, which is the owner of its events."""

    def began(self, fetch_id: bytes, /) -> bool:
        """Whether there was an answer."""

    def cancel(self, fetch_id: bytes, /) -> None: ...


class Workers(Provider):
    """The prefix caches of other workers."""

    def __init__(self, engine: Engine, receiver: Receiver) -> None:
        self._engine = engine
        self._receiver = receiver
        self.began = receiver.began
        self.cancel = receiver.cancel

    @property
    def exchange(self) -> PrefixExchange | None:
        return self._engine.prefix_exchange

    def missing(self, exchange: PrefixExchange, request: EngineRequest) -> MissingPrefix | None:
        return exchange.missing(request, MAX_CHUNKS)

    def limit(self, expected: float, computing: float) -> float:
        return SLACK + 2 * computing if computing else LONGEST

    def ends(self, fetch_id: bytes) -> float:
        return 0.0

    def ask(self, fetch: PrefixFetch, source: ContentSource) -> None:
        missing = fetch.into.missing
        self._receiver.fetch_content(
            fetch.id,
            chunks=missing.chunks,
            first_chunk=missing.first_chunk,
            kv_address=source.kv_address,
            incarnation=source.incarnation,
            block_ids=fetch.into.table,
            owner=fetch,
        )


class PrefixFetches:
    """Owns the imports of the engine, and their fetches from the provider. Both roles share it.

    Attributes:
        behind: fetches from one more source, the shared store. None: there is none.
    """

    def __init__(
        self,
        engine: Engine,
        provider: Provider,
        incarnation: int,
        counts: RequestCounts,
        links: PrefixLinks,
        trace: TraceWriter,
    ) -> None:
        self.behind: tuple[PrefixFetches, ContentSource] | None = None
        self._engine = engine
        self.provider = provider
        self._incarnation = incarnation
        self._counts = counts
        self._open: dict[bytes, PrefixFetch] = {}  # by key, those that prompts may wait for
        self._links = links
        self._trace = trace

    def get(
        self,
        attempt: Attempt,
        request: EngineRequest,
        source: ContentSource | None,
        then: Callable[[int], None],
    ) -> bool:
        """As `start`. What is still missing then is fetched from the source `behind`."""
        if self.behind is None:
            return source is not None and self.start(attempt, request, source, then)
        fetches, last = self.behind

        def fetched(tokens: int) -> None:
            if not fetches.start(attempt, request, last, lambda more: then(tokens + more)):
                then(tokens)

        if source is not None and self.start(attempt, request, source, fetched):
            return True
        return fetches.start(attempt, request, last, then)

    def start(
        self,
        attempt: Attempt,
        request: EngineRequest,
        source: ContentSource,
        then: Callable[[int], None],
        fetched: bytes = b"",
    ) -> bool:
        """Fetches what is missing of a prompt. Calls `then` when this has ended, in any way, with the number
        of tokens that came for it.

        False: there is nothing to wait for, and `then` will not be called. `fetched`: a chunk that was
        fetched just now. If it is still missing, it is not asked for again."""
        exchange = self.provider.exchange
        if exchange is None or source.incarnation == self._incarnation:
            return False
        missing = self.provider.missing(exchange, request)
        if missing is None or missing.chunks[0] == fetched:
            return False
        key, tokens = missing.chunks[0], len(missing.chunks) * CHUNK_TOKENS
        stop = missing.first_chunk * CHUNK_TOKENS + tokens
        rest = len(request.prompt_ids) + len(request.output_ids) - stop
        seconds = self._engine.prompt_seconds(stop - missing.computed_from, rest, missing.computed_from)
        same, now = self._open.get(key), time.monotonic()
        link = same.link if same is not None else self._links.to(source)
        if not link.pays(same.tokens if same is not None else tokens, seconds, now):
            return False
        if same is not None:
            same.waiting[Waiting(attempt, same, request, source, then)] = None
            return True
        fetch_id = os.urandom(16)
        into = exchange.start_import(missing)
        if into is None:
            return False
        until = now + self.provider.limit(link.expected(tokens), seconds)
        fetch = PrefixFetch(self, fetch_id, into, key, tokens, source.tier, link, now, until)
        fetch.waiting[Waiting(attempt, fetch, request, None, then)] = None
        self._open[key] = fetch
        self.provider.ask(fetch, source)
        return True

    def ended(self, fetch: PrefixFetch, event: Injected | FetchFailed | Closed) -> None:
        self.close(fetch)
        fetched = 0
        if isinstance(event, Injected):
            stats = event.stats
            fetched = stats.tokens
            self._counts.prefix_fetched_tokens[fetch.tier] += fetched
            self._counts.prefix_fetched_bytes += stats.bytes
            fetch.link.measured(
                stats.tokens,
                stats.first_frame_at - stats.asked_at,
                stats.injected_at - stats.first_frame_at,
                time.monotonic(),
                stats.asked_at - stats.fetch_at,
            )
            if self._trace.enabled:
                self._trace.instant(
                    "prefix fetched",
                    requests=[each.request.id.hex() for each in fetch.waiting],
                    tokens=fetched,
                    first_frame=stats.first_frame_at * 1e6,
                    last_frame=stats.last_frame_at * 1e6,
                )
        elif isinstance(event, FetchFailed) and event.reason not in ("gone", "busy"):
            fetch.link.paused_until = time.monotonic() + PAUSE
        fetch.into.end(fetched and fetch.into.missing.first_chunk * CHUNK_TOKENS + fetched)
        for each in fetch.take_waiting():
            if each.source is None:
                each.then(fetched)
            elif not fetched or not self.start(each.attempt, each.request, each.source, each.then, fetch.key):
                each.then(0)

    def expire(self) -> None:
        """Computes the prompts that wait for a fetch which takes too long."""
        now = time.monotonic()
        for fetch in list(self._open.values()):
            ends = max(now, self.provider.ends(fetch.id))
            if ends >= fetch.until:
                if self.provider.began(fetch.id):
                    fetch.link.measured(fetch.tokens, 0.0, ends - fetch.started, now)
                else:
                    fetch.link.paused_until = now + PAUSE
                fetch.give_up()
                for each in fetch.take_waiting():
                    each.then(0)

    def close(self, fetch: PrefixFetch) -> None:
        """No further prompt may wait for it."""
        if self._open.get(fetch.key) is fetch:
            del self._open[fetch.key]
