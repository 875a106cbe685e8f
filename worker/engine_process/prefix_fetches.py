"""Fetches the beginnings of prompts from other workers and from the shared store, instead of computing them.

Life of a fetch:

1. A router names a worker that has more of a prompt cached, and the shared store may have more of any prompt.
   If fetching takes longer than computing, the prompt is computed.
2. The engine reserves blocks for what is missing here, if there is room. Otherwise the prompt is computed.
3. The source is asked for these chunks. Another worker pins those that it has, and sends them.
4. When all of them are verified, they enter the prefix cache. What is still missing then is fetched from the
   next source. After the last one the prompt goes to the engine.

If the fetch fails, or takes longer than it should, the prompt is computed. Prompts that begin with the same
missing chunk wait for one fetch. They hold nothing while they wait. Then each of them fetches what is still
missing, by the same rule.
"""

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from baton.engine import EngineRequest
from baton.engine.core.link import Link
from baton.kv_names import CHUNK_TOKENS
from baton.kv_transfer import Closed, FetchFailed, Injected, TraceWriter, TransferDeadlines
from baton.kv_transfer.protocol.messages import MAX_CHUNKS, Reason
from baton.rpc import worker_pb2 as pb
from baton.worker.engine_process.attempt import Attempt, Lease
from baton.worker.engine_process.engine_protocol import Engine, ReceivingEnd
from baton.worker.stats import RequestCounts

LONGEST = 5.0
"""Seconds that a fetch may take if the speed of prefills is not known."""
SLACK = 1.0
"""Seconds that a fetch may take beyond twice the time to compute its tokens."""
PAUSE = 10.0
"""Seconds without fetches from a worker that did not answer, or with which a transfer failed. Otherwise each
prompt would wait for it again."""
IDLE_CLOSE = TransferDeadlines().idle_close
"""Seconds without a fetch after which a session ends."""
MOST_LINKS = 1000
"""Links with measured fetches. One more replaces the oldest."""
RECENT = 60.0
"""Seconds for which a measured fetch is reported to routers. After that they count the link as unknown, and
try it again."""


class Place(NamedTuple):
    """What holds KV: a tier of another worker, or a store."""

    source: pb.ContentSource
    link: Link
    """What fetches from there took."""


@dataclass(slots=True, eq=False)
class Waiting(Lease[Attempt]):
    """A prompt waits for a fetch. `place`: where it may fetch from after that. None: the fetch is its own."""

    fetch: "PrefixFetch"
    request: EngineRequest
    place: Place | None
    then: Callable[[int], None]

    def revoke(self, reason: Reason) -> None:
        """The request has ended. `then` is not called."""
        del self.fetch.waiting[self]
        self.end()
        if not self.fetch.waiting:
            self.fetch.give_up()


@dataclass(slots=True, eq=False)
class PrefixFetch:
    """A fetch from a source, until nothing writes into its blocks."""

    fetches: "PrefixFetches"
    id: bytes
    source: "PrefixSource"
    place: Place
    into: Any  # an `Import`
    key: bytes  # the name of the first missing chunk
    tokens: int  # that are asked for
    started: float  # time.monotonic(), and the next
    until: float
    waiting: dict[Waiting, None] = field(default_factory=dict)  # in order of arrival

    def give_up(self) -> None:
        """No prompt waits any more. The blocks come back when the source has reported Closed."""
        self.fetches.close(self)
        self.source.cancel(self.id)

    def handle(self, event: Injected | FetchFailed | Closed) -> None:
        """Handles the end of the fetch."""
        self.fetches.ended(self, event)

    def take_waiting(self) -> Iterable[Waiting]:
        """Ends the leases of the prompts that wait. They wait no more."""
        waiting, self.waiting = self.waiting, {}
        for each in waiting:
            each.end()
        return waiting


class PrefixSource(Protocol):
    """Where prefixes come from: other workers, or the shared store."""

    brings_all: bool
    """Whether it brings all positions of arrays with windows, and full chunks of a block that is not full. If
    not, of such arrays it brings those that the token behind the prefix reads."""

    def find(self, hint: pb.ContentSource | None) -> Place | None:
        """Where to fetch from. `hint`: the worker that the router named. None: there is none."""

    def limit(self, expected: float, computing: float) -> float:
        """Seconds in which a fetch must end, from the seconds that it should take and those to compute its
        tokens. 0: not known."""

    def ask(self, fetch: PrefixFetch) -> None:
        """Starts a fetch, which is the owner of its events."""

    def ends(self, fetch_id: bytes) -> float | None:
        """When a fetch will have ended, at the speed that it has. 0: not known. None: nothing has come."""

    def cancel(self, fetch_id: bytes, /) -> None:
        """Nothing waits for a fetch any more. The source reports Closed, unless it has ended."""


class PrefixLinks:
    """The links of one worker to the tiers of other workers."""

    def __init__(self) -> None:
        self._links: dict[tuple[str, int, pb.Tier], Link] = {}  # by address, incarnation and tier

    def to(self, source: pb.ContentSource) -> Link:
        key = source.kv_address, source.incarnation, source.tier
        if key not in self._links and len(self._links) >= MOST_LINKS:
            del self._links[next(iter(self._links))]
        return self._links.setdefault(key, Link(IDLE_CLOSE))

    def recent(self, now: float) -> list[pb.PrefixLink]:
        """What routers should know."""
        return [
            pb.PrefixLink(
                incarnation=incarnation,
                tier=tier,
                wait=link.waited.value,
                tokens_per_s=link.tokens_per_s.value,
            )
            for (_, incarnation, tier), link in self._links.items()
            if now < link.measured_at + RECENT and link.tokens_per_s.value
        ]


class Workers:
    """The prefix caches of other workers, as a `PrefixSource`."""

    brings_all = False

    def __init__(self, receiver: ReceivingEnd, incarnation: int, links: PrefixLinks) -> None:
        """`incarnation`: of this worker."""
        self.cancel = receiver.cancel
        self._receiver = receiver
        self._incarnation = incarnation
        self._links = links

    def find(self, hint: pb.ContentSource | None) -> Place | None:
        if hint is None or hint.incarnation == self._incarnation:
            return None
        return Place(hint, self._links.to(hint))

    def limit(self, expected: float, computing: float) -> float:
        return SLACK + 2 * computing if computing else LONGEST

    def ends(self, fetch_id: bytes) -> float | None:
        return 0.0 if self._receiver.began(fetch_id) else None

    def ask(self, fetch: PrefixFetch) -> None:
        missing, source = fetch.into.missing, fetch.place.source
        self._receiver.fetch_content(
            fetch.id,
            chunks=missing.chunks,
            first_chunk=missing.first_chunk,
            kv_address=source.kv_address,
            incarnation=source.incarnation,
            block_ids=fetch.into.table,
            state_slot=fetch.into.state_slot or 0,
            owner=fetch,
        )


class PrefixFetches:
    """Owns the fetches into the prefix cache of the engine. Both roles share it.

    Attributes:
        sources: where prefixes come from. The first one is asked first.
    """

    def __init__(self, engine: Engine, counts: RequestCounts, trace: TraceWriter) -> None:
        self.sources: list[PrefixSource] = []
        self._engine = engine
        self._counts = counts
        self._open: dict[tuple[PrefixSource, bytes], PrefixFetch] = {}  # those that prompts may wait for
        self._trace = trace

    def get(
        self,
        attempt: Attempt,
        request: EngineRequest,
        hint: pb.ContentSource | None,
        then: Callable[[int], None],
        *,
        first: int = 0,
        came: int = 0,
    ) -> bool:
        """Fetches what is missing of a prompt, from one source after the other. Calls `then` when this has
        ended, in any way, with the number of tokens that came for it.

        False: there is nothing to wait for, and `then` will not be called. `hint` as in `PrefixSource`.
        `first`: number of the first source; `came`: tokens that came from those before it."""
        for number, source in enumerate(self.sources[first:], first):

            def fetched(tokens: int, following: int = number + 1) -> None:
                if not self.get(attempt, request, hint, then, first=following, came=came + tokens):
                    then(came + tokens)

            place = source.find(hint)
            if place is not None and self._start(attempt, request, source, place, fetched):
                return True
        return False

    def _start(
        self,
        attempt: Attempt,
        request: EngineRequest,
        source: PrefixSource,
        place: Place,
        then: Callable[[int], None],
        fetched: bytes = b"",
    ) -> bool:
        """As `get`, from one place. `fetched`: a chunk that was fetched just now. If it is still missing, it
        is not asked for again."""
        if (exchange := self._engine.prefix_exchange) is None:
            return False
        missing = exchange.missing(request, MAX_CHUNKS, remnant=source.brings_all)
        if missing is None or missing.chunks[0] == fetched:
            return False
        key, tokens = missing.chunks[0], len(missing.chunks) * CHUNK_TOKENS
        stop = missing.first_chunk * CHUNK_TOKENS + tokens
        behind = len(request.prompt_ids) + len(request.output_ids) - stop
        seconds = self._engine.prompt_seconds(stop - missing.computed_from, behind, missing.computed_from)
        same, now = self._open.get((source, key)), time.monotonic()
        link = same.place.link if same is not None else place.link
        if not link.pays(same.tokens if same is not None else tokens, seconds, now):
            return False
        if same is not None:
            same.waiting[Waiting(attempt, same, request, place, then)] = None
            return True
        into = exchange.start_import(missing)
        if into is None:
            return False
        until = now + source.limit(link.expected(tokens), seconds)
        fetch = PrefixFetch(self, os.urandom(16), source, place, into, key, tokens, now, until)
        fetch.waiting[Waiting(attempt, fetch, request, None, then)] = None
        self._open[source, key] = fetch
        source.ask(fetch)
        return True

    def ended(self, fetch: PrefixFetch, event: Injected | FetchFailed | Closed) -> None:
        self.close(fetch)
        fetched = 0
        if isinstance(event, Injected):
            stats = event.stats
            fetched = stats.tokens
            self._counts.fetched_by_tier[fetch.place.source.tier] += fetched
            self._counts.prefix_fetched_bytes += stats.bytes
            fetch.place.link.measured(
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
            fetch.place.link.paused_until = time.monotonic() + PAUSE
        stop = fetched and fetch.into.missing.first_chunk * CHUNK_TOKENS + fetched
        fetch.into.end(stop, all_positions=fetch.source.brings_all)
        for each in fetch.take_waiting():
            if each.place is None:
                each.then(fetched)
            elif not fetched or not self._start(
                each.attempt, each.request, fetch.source, each.place, each.then, fetch.key
            ):
                each.then(0)

    def expire(self) -> None:
        """Computes the prompts that wait for a fetch which takes too long."""
        now = time.monotonic()
        for fetch in list(self._open.values()):
            ends = fetch.source.ends(fetch.id)
            if (over := max(now, ends or 0.0)) >= fetch.until:
                if ends is None:
                    fetch.place.link.paused_until = now + PAUSE
                else:
                    fetch.place.link.measured(fetch.tokens, 0.0, over - fetch.started, now)
                fetch.give_up()
                for each in fetch.take_waiting():
                    each.then(0)

    def close(self, fetch: PrefixFetch) -> None:
        """No further prompt may wait for it."""
        if self._open.get(at := (fetch.source, fetch.key)) is fetch:
            del self._open[at]
