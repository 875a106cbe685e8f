"""The engine's end of the shared store: fetches what prompts lack, and writes what the prefix cache has.

    fetch:  exists? ──▶ get into units ──▶ verified? ──▶ scatter into reserved blocks ──▶ Injected
    offer:  exists? ──▶ pin, gather into a unit, unpin ──▶ put

A fetch has the events of `Receiver.fetch_content`: Injected has what came, from the first chunk on. Offers
may take half of the units, so no fetch waits for a write. A unit, and nothing else, belongs to the store
process from an order to its answer. So blocks are given back at once when a fetch is given up, and an answer
that never comes holds no block. A new store process does no order of the one before: these have failed.
"""

from __future__ import annotations

import os
import socket
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.content import CHUNK_TOKENS
from baton.kv_transfer.arena import Arena
from baton.kv_transfer.channel import Channel
from baton.kv_transfer.device.host_pool import open_pool
from baton.kv_transfer.device.pool import Event
from baton.kv_transfer.layout import Slice
from baton.kv_transfer.protocol.local_messages import Staged, StoreAnswer, StoreOpened, StoreOrder
from baton.kv_transfer.protocol.messages import FirstToken
from baton.kv_transfer.shared_store import Units
from baton.kv_transfer.transport import Closed, FetchFailed, Injected, InjectStats, PagedKV

FETCHES = 64
"""Under way at most."""
OFFERS = 1 << 14
"""Chunks that wait to be written. One more replaces the oldest."""
KNOWN = 1 << 16
"""Chunks of which this worker remembers that the store has them."""
SHARE = 0.02
"""Of the time in which requests run, how long the engine's thread may gather chunks to write."""
PAUSE = 10.0
"""Seconds without writes after one has failed: the store is full, for example."""

Answer = Callable[[list[bool]], None]


@dataclass(slots=True, eq=False)
class _Fetch:
    id: bytes
    chunks: Sequence[bytes]
    first_chunk: int
    table: Sequence[int]
    asked_at: float = field(default_factory=time.monotonic)
    found_at: float = 0.0
    stop: int | None = None  # so many chunks are there, from the first on. None: not known yet
    asked: int = 0  # chunks that were ordered
    answered: int = 0
    ended: bool = False


class SharedStore:
    """Owns the units that the store process does not have. The engine's thread calls it. No call blocks.

    Attributes:
        written, refused: chunks that the store took, or did not.
        missed: chunks that it had, and whose objects were wrong or gone when they were read.
    """

    def __init__(
        self,
        kv: PagedKV,
        arena_fd: int,
        channel: socket.socket,
        *,
        pin: Callable[[bytes, Sequence[bytes], int], tuple[int, Sequence[int]]],
        unpin: Callable[[bytes], None],
        known: Callable[[bytes, bool], None],
    ) -> None:
        """`pin` and `unpin`: those of `PrefixExchange`. `known` is called when this worker learns that the
        store has a chunk, and when it forgets that."""
        self._layout = kv.layout
        self._cut = units = Units.of(kv.layout)
        self._arena = Arena.create(units.count * units.slots, units.slot_bytes, arena_fd)
        self._pool = open_pool(kv, self._arena)
        self._channel = Channel(channel, StoreAnswer | StoreOpened)
        self._pin, self._unpin, self._on_known = pin, unpin, known
        self._session = 0  # 0: the store is not open
        self._tickets = 0
        self._orders: dict[int, tuple[Sequence[int], Answer]] = {}
        self._free = list(range(units.count))
        self._writing = 0  # units that offers have
        self._fetches: dict[bytes, _Fetch] = {}
        self._events: list[Injected | FetchFailed | Closed] = []
        # Copies that the device makes: when the event has passed, the function is called.
        self._copies: deque[tuple[Event, Callable[[], None]]] = deque()
        self._offers: OrderedDict[bytes, int] = OrderedDict()  # name → position in its prompt, in chunks
        self._lacking: deque[tuple[bytes, int]] = deque()  # offers that the store does not have
        self._asks = False  # what it has of some offers
        self._next_write = self._paused_until = 0.0  # time.monotonic()
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self.written = self.refused = self.missed = 0

    def fileno(self) -> int:
        return self._channel.fileno()

    # Fetches, as a `Receiver`

    def fetch_content(
        self,
        fetch_id: bytes,
        *,
        chunks: Sequence[bytes],
        first_chunk: int,
        kv_address: str,
        incarnation: int,
        block_ids: Sequence[int],
    ) -> None:
        """As `Receiver.fetch_content`; the address means nothing."""
        if not self._session or self._channel.full or len(self._fetches) >= FETCHES:
            self._events.append(FetchFailed(fetch_id, "busy"))
            return
        table = self._pool.table(block_ids, (first_chunk + len(chunks)) * CHUNK_TOKENS)
        fetch = self._fetches[fetch_id] = _Fetch(fetch_id, chunks, first_chunk, table)

        def answered(there: list[bool]) -> None:
            fetch.found_at = time.monotonic()
            fetch.stop = [*there, False].index(False)
            for name in chunks[: fetch.stop]:
                self._knows(name)
            for name in chunks[fetch.stop : fetch.stop + 1]:
                self._forget(name)

        self._order(answered, chunks, is_urgent=True)

    def cancel(self, fetch_id: bytes) -> None:
        """`poll` then reports Closed, unless the fetch has ended."""
        if (fetch := self._fetches.get(fetch_id)) is not None:
            fetch.stop, fetch.ended = 0, True

    def began(self, fetch_id: bytes) -> bool:
        """Whether the store has answered."""
        fetch = self._fetches.get(fetch_id)
        return fetch is not None and bool(fetch.found_at)

    def poll(self) -> list[Injected | FetchFailed | Closed]:
        events, self._events = self._events, []
        return events

    # Offers

    def offer(self, name: bytes, chunk: int) -> None:
        """The prefix cache has this chunk, at this position in its prompt."""
        if name in self._known or name in self._offers:
            return
        if len(self._offers) >= OFFERS:
            self._offers.popitem(last=False)
        self._offers[name] = chunk

    # Both

    @property
    def copies(self) -> bool:
        """Whether `move` must be called soon, also if nothing comes from the store process."""
        return bool(self._fetches or self._copies or self._lacking)

    @property
    def writes(self) -> bool:
        """Whether offers wait or are under way that the store will take."""
        wait = self._offers or self._lacking or self._writing or self._asks
        return bool(wait and self._session) and time.monotonic() >= self._paused_until

    @property
    def is_open(self) -> bool:
        return bool(self._session)

    @property
    def idle(self) -> bool:
        """Whether no block is in use, and nothing is to be written."""
        return not self._copies and not self._fetches and not self.writes

    def move(self, *, busy: bool) -> None:
        """Takes answers, and starts what is due. `busy`: requests run, so writes may take little time."""
        while messages := self._channel.receive():
            for message in messages:
                match message:
                    case StoreOpened(session):
                        self._reset(session)
                    case StoreAnswer(ticket, done):
                        self._answered(ticket, done)
        self._channel.flush()
        while self._copies and self._pool.passed(self._copies[0][0]):
            self._copies.popleft()[1]()
        now = time.monotonic()
        for fetch in list(self._fetches.values()):
            if fetch.stop is not None:
                self._go_on(fetch, fetch.stop, now)
        if self._session and not self._channel.full:
            self._ask()
            if self._lacking and now >= max(self._next_write, self._paused_until):
                self._write(now, busy=busy)

    def close(self) -> None:
        self._channel.sock.close()
        self._pool.close()

    def _order(
        self, then: Answer, names: Sequence[bytes], units: Sequence[int] = (), *, is_urgent: bool = False
    ) -> None:
        self._tickets += 1
        self._orders[self._tickets] = units, then
        is_put = not is_urgent
        self._channel.send(
            StoreOrder(self._session, self._tickets, is_urgent, is_put, tuple(names), tuple(units))
        )

    def _answered(self, ticket: int, done: list[bool]) -> None:
        if (order := self._orders.pop(ticket, None)) is not None:  # else of the process before
            order[1](done)

    def _reset(self, session: int) -> None:
        """There is another store process: what the one before had to do has failed."""
        self._session = session
        orders, self._orders = self._orders, {}
        for units, then in orders.values():
            then([False] * len(units))

    # Fetches

    def _go_on(self, fetch: _Fetch, stop: int, now: float) -> None:
        while fetch.asked < stop and self._free and not self._channel.full:
            count = min(stop - fetch.asked, len(self._free), max(1, self._cut.count // 4))
            self._get(fetch, range(fetch.asked, fetch.asked + count))
            fetch.asked += count
        scattering = fetch.answered < fetch.asked
        if fetch.ended:
            if not self._copies:
                self._end(fetch, Closed(fetch.id))
        elif not scattering and fetch.asked >= stop:
            self._end(fetch, self._injected(fetch, stop, now) if stop else FetchFailed(fetch.id, "gone"))

    def _end(self, fetch: _Fetch, event: Injected | FetchFailed | Closed) -> None:
        fetch.stop, fetch.ended = 0, True
        del self._fetches[fetch.id]
        self._events.append(event)

    def _injected(self, fetch: _Fetch, chunks: int, now: float) -> Injected:
        size = chunks * CHUNK_TOKENS * self._layout.bytes_per_token
        stats = InjectStats(
            bytes=size,
            tokens=chunks * CHUNK_TOKENS,
            frames=chunks,
            fetch_at=fetch.asked_at,
            asked_at=fetch.asked_at,
            first_frame_at=fetch.found_at,
            last_frame_at=now,
            scatter_at=fetch.found_at,
            commit_at=now,
            injected_at=now,
        )
        return Injected(fetch.id, FirstToken(0), stats)

    def _get(self, fetch: _Fetch, chunks: range) -> None:
        units = [self._free.pop() for _ in chunks]

        def answered(whole: list[bool]) -> None:
            for chunk, unit, right in zip(chunks, units, whole, strict=True):
                assert fetch.stop is not None, "chunks are ordered when it is known"
                if not right:
                    self.missed += 1
                    self._forget(fetch.chunks[chunk])
                    fetch.stop = min(fetch.stop, chunk)
                if chunk >= fetch.stop:
                    fetch.answered += 1
                    self._free.append(unit)
                    continue

                def scattered(unit: int = unit) -> None:
                    fetch.answered += 1
                    self._free.append(unit)

                staged = self._staged(unit, fetch.first_chunk + chunk, fetch.table)
                self._copies.append((self._pool.scatter(staged)[1], scattered))

        self._order(answered, [fetch.chunks[chunk] for chunk in chunks], units, is_urgent=True)

    def _staged(self, unit: int, chunk: int, table: Sequence[int]) -> list[Staged]:
        layout, first = self._layout, unit * self._cut.slots
        return [
            Staged(Slice(layer, 0, layout.num_kv_heads, chunk * CHUNK_TOKENS, CHUNK_TOKENS), slot, table)
            for slot, layer in enumerate(layout.kv_layers, first)
        ]

    # Offers

    def _ask(self) -> None:
        """Asks which of the next offers the store lacks."""
        if self._asks or self._lacking or not self._offers:
            return
        some = [self._offers.popitem(last=False) for _ in range(min(len(self._offers), self._cut.count))]

        def answered(there: list[bool]) -> None:
            self._asks = False
            if not there:  # the process has ended
                self._offers.update(some)
            for (name, chunk), known in zip(some, there, strict=False):
                if known:
                    self._knows(name)
                else:
                    self._lacking.append((name, chunk))

        self._asks = True
        self._order(answered, [name for name, _ in some])

    def _write(self, now: float, *, busy: bool) -> None:
        """Writes one chunk, if there is a unit for it."""
        if self._writing >= self._cut.count // 2 or not self._free:
            return
        name, chunk = self._lacking.popleft()
        pin_id = os.urandom(16)
        count, block_ids = self._pin(pin_id, [name], chunk)
        if not count:  # evicted meanwhile, or the pool is full
            return
        unit = self._free.pop()
        self._writing += 1
        table = self._pool.table(block_ids, (chunk + 1) * CHUNK_TOKENS)
        event = self._pool.gather(self._staged(unit, chunk, table))

        def gathered() -> None:
            self._unpin(pin_id)
            self._order(written, [name], [unit])

        def written(done: list[bool]) -> None:
            self._free.append(unit)
            self._writing -= 1
            if all(done):
                self.written += 1
                self._knows(name)
            else:
                self.refused += 1
                self._paused_until = time.monotonic() + PAUSE

        self._copies.append((event, gathered))
        if busy:
            self._next_write = now + (time.monotonic() - now) / SHARE

    # What the store has

    def _knows(self, name: bytes) -> None:
        if name not in self._known:
            self._on_known(name, True)
        self._known[name] = None
        self._known.move_to_end(name)
        if len(self._known) > KNOWN:
            self._forget(next(iter(self._known)))

    def _forget(self, name: bytes) -> None:
        if name in self._known:
            del self._known[name]
            self._on_known(name, False)
