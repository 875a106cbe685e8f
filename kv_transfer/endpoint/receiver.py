"""The engine's half of the receiving side: fetches, from their FETCH to their end.

All of it runs in the thread of the engine. Blocks of a fetch are written (`injector`) until the event of its
last scatter has passed. The end of the fetch is reported only then.

Of a prompt that several workers compute, KV is used layer by layer, while the step of another worker computes
it (`fetch_ranges`, `wait_for_layer`). The engine thread waits inside its step then, and empties slots
meanwhile. A device that waited for a word of memory instead would hang with the first allocation behind it,
or when its queue of launches is full. The wait costs the launch of one attention, in a layer that takes a
hundred times as long.
"""

import math
import os
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec

from baton.kv_names import CHUNK_TOKENS
from baton.kv_transfer.arena import ArenaEnd
from baton.kv_transfer.channel import Channel
from baton.kv_transfer.endpoint.injector import Injector
from baton.kv_transfer.endpoint.live_fetch import LayerPace, LayersThere, LiveFetch
from baton.kv_transfer.endpoint.other_ranks import NO_RANKS, RECEIVING, OtherRanks
from baton.kv_transfer.layout import Range
from baton.kv_transfer.protocol import local_messages as local
from baton.kv_transfer.trace import TraceWriter
from baton.kv_transfer.transport import Began, Closed, FetchFailed, Injected, InjectStats, PagedKV
from baton.kv_transfer.wait import EVENT_POLL, wait

Event = Injected | FetchFailed | Closed | Began

_MAX_REFETCHES = 2
TICK = 0.1
"""Seconds between two signs of life of an engine that waits inside a step."""


class Receiver:
    """Fetches KV into reserved blocks.

    Slices come in arena slots, and are copied into the blocks. Or they wait in memory that the sender
    exports, and are copied from there."""

    def __init__(self, end: ArenaEnd, kv: PagedKV, trace: TraceWriter, ranks: OtherRanks = NO_RANKS) -> None:
        """`ranks`: as in `Transport`."""
        from baton.kv_transfer.endpoint.ranked_pool import open_ranks  # torch: in engine processes only

        self._pool = open_ranks(kv, end.arena, ranks, RECEIVING)
        self._layout = kv.layout
        self._trace = trace
        self._channel = Channel(end.channel, local.ToReceiver)
        self._fetches: dict[bytes, LiveFetch] = {}  # by decode id, until an outcome is certain
        self._injector = Injector(self._pool, kv.layout, trace, end.arena.slot_bytes)
        self._early: list[Event] = []  # of polls inside a step
        self._ending: list[LiveFetch] = []  # outcome certain, last scatter perhaps not over

    def fetch(
        self,
        decode_id: bytes,
        *,
        prefill_id: bytes,
        kv_address: str,
        incarnation: int,
        attempt: int,
        block_ids: Sequence[int],
        num_tokens: int,
        start: int = 0,
        state_slot: int = 0,
        owner: Any = None,
    ) -> None:
        """Fetches positions [start, num_tokens) into `block_ids`, which no enqueued step may touch. If the
        layout has states, those that cover [0, num_tokens) come, too, into `state_slot`. Of an array with a
        window, only the positions come that the token at `num_tokens` reads, here and in `fetch_content`.
        With `num_tokens` 0 nothing comes but the first token, and the ACK releases the prefill.

        It replaces a fetch of this decode id that is live, or whose end is not reported yet. `attempt`
        numbers the decode attempts of a request: a fetch of a newer attempt replaces those of older ones.
        The events of `poll` have the `owner`, here and below.
        """
        assert 0 <= start <= num_tokens
        self._take_back(decode_id)
        replaced = self._drop(decode_id) or self._unreported(decode_id)
        ranges = ((start, num_tokens),) if start < num_tokens else ()
        ends = (num_tokens,) if num_tokens else ()
        request = local.FetchIn(
            os.urandom(16), prefill_id, kv_address, incarnation, attempt, ranges, ends, next_positions=ends
        )
        fetch = self._open(decode_id, request, block_ids, num_tokens, state_slot, owner)
        if replaced is not None:  # scatters of the replaced fetch may still write to these blocks
            fetch.last_scatter = replaced.last_scatter

    def fetch_ranges(
        self,
        fetch_id: bytes,
        *,
        prefill_id: bytes,
        kv_address: str,
        incarnation: int,
        block_ids: Sequence[int],
        ranges: Sequence[Range],
        next_positions: Sequence[int] = (),
        states_at: Sequence[int] = (),
        state_slot: int = 0,
        owner: Any = None,
    ) -> None:
        """Fetches these positions (ascending, disjoint, perhaps none) of a prompt that a step of another
        worker computes, and the states after `states_at`, which are ends of ranges. Of an array with a
        window, only the positions come that the tokens at `next_positions` read, where ranges of this worker
        begin. `poll` reports the beginning of each range. Steps may touch the other positions of the blocks
        meanwhile. A fetch that fails is not tried again."""
        request = local.FetchIn(
            os.urandom(16), prefill_id, kv_address, incarnation, 0, tuple(ranges), tuple(states_at),
            next_positions=tuple(next_positions),
        )  # fmt: skip
        stop = ranges[-1][1] if ranges else 0
        fetch = self._open(fetch_id, request, block_ids, stop, state_slot, owner)
        fetch.layers = LayersThere(ranges, self._layout, states_at, next_positions)

    def wait_for_layer(
        self, fetch_ids: Collection[bytes], layer: int, stop: int, until: float, tick: Callable[[], None]
    ) -> bool:
        """Waits inside a step until the layer has all positions below `stop` that these fetches bring, and
        the next layer its states. False: one of them has ended, or the time `until` (time.monotonic()) has
        come. `tick` is called often."""
        while True:
            self._injector.look()
            injected = {event.decode_id for event in self._early if isinstance(event, Injected)}
            missing = [fetch_id for fetch_id in fetch_ids if fetch_id not in injected]
            if not all(fetch_id in self._fetches for fetch_id in missing):
                return False
            if all(self._has(self._fetches[fetch_id], layer, stop) for fetch_id in missing):
                return True
            left = until - time.monotonic()
            if left <= 0:
                return False
            tick()
            wait([self.fileno()], min(left, EVENT_POLL if self._polls else TICK))
            self._early = self.poll()

    def may_wait(self, fetch_ids: Collection[bytes], stop: int) -> bool:
        """Whether `wait_for_layer` may have to wait for positions below `stop`, of any layer."""
        self._injector.look()
        live = (self._fetches[fetch_id] for fetch_id in fetch_ids if fetch_id in self._fetches)
        return any(fetch.layers is not None and not fetch.layers.has_all(stop) for fetch in live)

    def _has(self, fetch: LiveFetch, layer: int, stop: int) -> bool:
        return fetch.layers is not None and fetch.layers.has(layer, stop)

    def fetch_content(
        self,
        fetch_id: bytes,
        *,
        chunks: Sequence[bytes],
        first_chunk: int,
        kv_address: str,
        incarnation: int,
        block_ids: Sequence[int],
        state_slot: int = 0,
        owner: Any = None,
    ) -> None:
        """Fetches chunks of 64 tokens from the prefix cache of a worker, as far as it has them. If the layout
        has states, those after the last chunk that comes go into `state_slot`.

        `chunks`: at most `MAX_CHUNKS` names (`kv_names`). `first_chunk`: the position of the first one in the
        prompt, in chunks. The events of `poll` have `fetch_id` as their `decode_id`. Injected has the bytes
        of the chunks that came, from the first on, and a first token without meaning. A fetch that fails is
        not tried again."""
        start, *ends = (chunk * CHUNK_TOKENS for chunk in range(first_chunk, first_chunk + len(chunks) + 1))
        request = local.FetchIn(
            os.urandom(16), b"", kv_address, incarnation, 0, ((start, ends[-1]),), tuple(ends), tuple(chunks)
        )
        self._open(fetch_id, request, block_ids, ends[-1], state_slot, owner)

    def _open(
        self,
        decode_id: bytes,
        request: local.FetchIn,
        block_ids: Sequence[int],
        num_tokens: int,
        state_slot: int,
        owner: Any,
    ) -> LiveFetch:
        started = time.monotonic()
        self._channel.send(request)  # first: while the table is made, the request is on its way
        table = self._pool.table(block_ids, num_tokens, state_slot)
        fetch = LiveFetch(decode_id, request, table, started, owner)
        self._fetches[decode_id] = self._injector.live[request.transfer_id] = fetch
        return fetch

    def cancel(self, decode_id: bytes) -> None:
        """Idempotent. poll() reports Closed for an id that was live, and nothing else for it afterwards."""
        for event in self._take_back(decode_id):
            self._early.append(Closed(decode_id, event.owner))
        fetch = self._drop(decode_id)
        if fetch is not None:
            fetch.outcome = Closed(decode_id, fetch.owner)
            self._ending.append(fetch)
            return
        for ending in self._ending:
            if ending.decode_id == decode_id and isinstance(ending.outcome, FetchFailed):
                ending.outcome = Closed(decode_id, ending.owner)

    def poll(self, spare: float = math.inf) -> list[Event]:
        """Writes what arrived into its blocks and returns what ended. Call it when readable, and in time, as
        `poll_within` says.

        `spare`: seconds until the next step must be launched. Infinite: no step is computed now.
        """
        injector, channel, live = self._injector, self._channel, self._injector.live
        channel.send(*injector.emptied())  # first: the sender waits for these, and the next copies take long
        while messages := channel.receive():
            for message in messages:
                match message:
                    case local.Arrived(s):
                        injector.arrived(s)
                    case local.Complete(transfer_id) if transfer_id in live:
                        live[transfer_id].complete = message
                    case local.FailedIn(transfer_id, reason, retry) if transfer_id in live:
                        self._failed(live[transfer_id], reason, retry)
                    case local.ExportIn() | local.ExportGone():
                        injector.take(math.inf)  # slices of the session that has ended may be there
                        injector.copies.handle(message)
        injector.take(spare)
        channel.send(*injector.emptied(), *injector.copies.opened())
        channel.flush()
        return self._ended()

    def began(self, decode_id: bytes) -> bool:
        """Whether KV of a live fetch has arrived, or will not come any more because nothing is missing."""
        fetch = self._fetches.get(decode_id)
        return fetch is not None and bool(fetch.frames or fetch.complete)

    @property
    def next_injection(self) -> float:
        """When the first of the fetches should have all of its KV (time.monotonic()), as far as its layers
        tell. Infinite: not known."""
        return min((fetch.pace.ends_at for fetch in self._fetches.values()), default=math.inf)

    def fileno(self) -> int:
        """Readable when poll() has something."""
        return self._channel.fileno()

    @property
    def poll_within(self) -> float | None:
        """Call poll() within these seconds even if fileno() is not readable. None: no limit."""
        return EVENT_POLL if self._polls or self._early else None

    @property
    def _polls(self) -> bool:
        """Whether something ends that `fileno` does not show."""
        waiting = self._injector or self._ending or self._channel.pending
        fetches = self._fetches.values()
        return bool(waiting or any(f.complete or (f.layers and f.layers.beginning) for f in fetches))

    @property
    def idle(self) -> bool:
        """No fetch is open, and no memory of the transport is in use on this side."""
        return not (self._fetches or self._ending or self._injector)

    def shutdown(self) -> None:
        """Closes the receiver. Nothing is written into blocks afterwards."""
        self._pool.close()
        self._injector.copies.close()
        self._channel.sock.close()

    # ------------------------------------------------------------ inside

    def _failed(self, fetch: LiveFetch, reason: str, retry: bool) -> None:
        del self._injector.live[fetch.request.transfer_id]
        once = fetch.request.chunks or fetch.layers
        if retry and not once and fetch.refetches < _MAX_REFETCHES:
            fetch.refetches += 1
            fetch.frames = fetch.bytes = fetch.unwritten = 0
            fetch.complete = None
            fetch.pace = LayerPace()
            fetch.scatter_at = 0.0
            fetch.request = msgspec.structs.replace(fetch.request, transfer_id=os.urandom(16))
            self._injector.live[fetch.request.transfer_id] = fetch
            self._channel.send(fetch.request)
        else:
            del self._fetches[fetch.decode_id]
            fetch.outcome = FetchFailed(fetch.decode_id, reason, fetch.owner)
            self._ending.append(fetch)

    def _drop(self, decode_id: bytes) -> LiveFetch | None:
        """Ends a live fetch. The slots of its late slices are only freed."""
        fetch = self._fetches.pop(decode_id, None)
        if fetch is not None:
            del self._injector.live[fetch.request.transfer_id]
            self._channel.send(local.CancelIn(fetch.request.transfer_id))
        return fetch

    def _take_back(self, decode_id: bytes) -> list[Event]:
        """Forgets what polls inside a step have found of a fetch. Returns its end, if it has ended: then its
        last scatter is over."""
        events = [event for event in self._early if event.decode_id == decode_id]
        self._early = [event for event in self._early if event.decode_id != decode_id]
        return [event for event in events if not isinstance(event, Began)]

    def _unreported(self, decode_id: bytes) -> LiveFetch | None:
        """Takes back the failure of a fetch, if its last scatter is not over."""
        for fetch in self._ending:
            if fetch.decode_id == decode_id and isinstance(fetch.outcome, FetchFailed):
                self._ending.remove(fetch)
                return fetch
        return None

    def _ended(self) -> list[Event]:
        out, self._early = self._early, []
        for fetch in list(self._fetches.values()):
            if fetch.layers is not None:
                began = fetch.layers.began()
                out += [Began(fetch.decode_id, stop, fetch.owner) for stop in began]
            if (complete := fetch.complete) is None:
                continue
            if fetch.frames < complete.came.frames:
                assert self._injector.arrivals, "complete without all frames"
            elif fetch.unwritten == 0 and self._over(fetch):
                out.append(self._injected(fetch))
        for fetch in [f for f in self._ending if self._over(f)]:
            assert fetch.outcome is not None
            self._ending.remove(fetch)
            out.append(fetch.outcome)
        return out

    def _injected(self, fetch: LiveFetch) -> Injected:
        done = fetch.complete
        assert done is not None
        assert (done.came.frames, done.came.bytes) == (fetch.frames, fetch.bytes), done
        del self._fetches[fetch.decode_id]
        del self._injector.live[fetch.request.transfer_id]
        self._channel.send(local.InjectedIn(fetch.request.transfer_id))
        now = time.monotonic()
        stats = InjectStats(
            **msgspec.structs.asdict(done.came),
            fetch_at=fetch.started,
            scatter_at=fetch.scatter_at or now,
            injected_at=now,
        )
        self._trace.instant("injected", bytes=stats.bytes)
        return Injected(fetch.decode_id, done.first_token, stats, fetch.owner)

    def _over(self, fetch: LiveFetch) -> bool:
        return fetch.last_scatter is None or self._pool.passed(fetch.last_scatter)
