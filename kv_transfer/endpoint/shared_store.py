"""The engine's end of the shared store: fetches what prompts lack, and writes what the prefix cache has.

    fetch:  exists? ──▶ get into units ──▶ verified? ──▶ scatter into reserved blocks ──▶ Injected
    offer:  exists? ──▶ pin, gather into a unit, unpin ──▶ put

A fetch has the events of `Receiver.fetch_content`: Injected has what came, from the first chunk on. Offers
may take half of the units, so no fetch waits for a write. A unit, and nothing else, belongs to the store
process from an order to its answer. So blocks are given back at once when a fetch is given up, and an answer
that never comes holds no block. A new store process does no order of the one before: these have failed.
"""

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from baton.kv_names import CHUNK_TOKENS
from baton.kv_transfer.endpoint.other_ranks import STORE, OtherRanks
from baton.kv_transfer.endpoint.ranked_pool import open_ranks
from baton.kv_transfer.endpoint.store_offers import Lent, StoreOffers
from baton.kv_transfer.endpoint.store_orders import StoreOrders
from baton.kv_transfer.protocol.local_messages import StoreLayout
from baton.kv_transfer.protocol.messages import FirstToken
from baton.kv_transfer.shared_store import READERS, Units
from baton.kv_transfer.shared_store.chunk_object import label, name_of, section_of
from baton.kv_transfer.transport import Closed, FetchFailed, Injected, InjectStats, PagedKV


@dataclass(slots=True, eq=False)
class _Fetch:
    id: bytes
    first_chunk: int
    table: Any
    owner: Any
    asked_at: float = field(default_factory=time.monotonic)
    found_at: float = 0.0
    objects: Sequence[bytes] = ()  # labels: chunks that follow each other, then the states after them
    chunks: int = 0  # of these
    stop: int | None = None  # so many objects will come. None: not known yet
    asked: int = 0  # objects that were ordered
    answered: int = 0
    copying: int = 0  # scatters that are not over
    answered_at: float = 0.0  # the last one
    ended: bool = False


class SharedStore:
    """The engine's thread calls it. No call blocks.

    Attributes:
        offers: what is written to the store.
        missed: objects that it had, and that were wrong or gone when they were read.
    """

    def __init__(
        self, kv: PagedKV, fds: Sequence[int], ranks: OtherRanks, identity: str, *,
        lend: Callable[[bytes, int, int], Lent | None], known: Callable[[bytes, bool], None],
        answered: Callable[[float], None], probed: Callable[[float, float], None],
    ) -> None:  # fmt: skip
        """`fds`: memory for the units, and the channel to the store process. `identity`: as in `ObjectSeal`.
        `lend`: keeps the chunk of this name in place, or the states after it, if the second argument is not
        0. The third is the position of the chunk in its prompt. None: they are gone. `known` is called when
        this worker learns that the store has a chunk or lacks it. `answered` gets the seconds after which the
        store said what it has of a fetch. `probed` gets the same of a probe, and the seconds that it needed
        to read an object."""
        self._layout = kv.layout
        self._block_size = kv.block_size
        self._units = units = Units(kv.layout, kv.ranks)
        self._batch = max(1, units.count // READERS)  # objects that are read by one call
        memory, channel = fds
        pool = open_ranks(kv, units.map(memory), ranks, STORE)
        describes = StoreLayout(identity, kv.layout, kv.ranks)
        self._orders = StoreOrders(socket.socket(fileno=channel), units, pool, describes)
        self._on_known, self._on_answer, self._on_probe = known, answered, probed
        self.offers = StoreOffers(self._orders, lend, lambda name: self._knows(name, True))
        self._fetches: dict[bytes, _Fetch] = {}
        self._events: list[Injected | FetchFailed | Closed] = []
        self.missed = 0
        self._given_up = 0  # fetches, before the store had said what it has
        self._probing = 0  # readers of a probe that is not measured yet

    @property
    def unanswered(self) -> int:
        """Fetches that were given up before the store had said what it has, and readers that measure it."""
        return self._given_up + self._probing

    def fileno(self) -> int:
        return self._orders.channel.fileno()

    # As a `Receiver`

    def fetch_content(
        self, fetch_id: bytes, *, salt: bytes, chunks: Sequence[bytes], first_chunk: int,
        block_ids: Sequence[int], state_slot: int | None, owner: Any = None,
    ) -> None:  # fmt: skip
        """As `Receiver.fetch_content`. `state_slot`: the states after the last chunk that comes, go there.
        None: the model has none. Chunks without states after them do not come if it has."""
        if not self._orders.ready:
            self._events.append(FetchFailed(fetch_id, "busy", owner))
            return
        tokens = (first_chunk + len(chunks)) * CHUNK_TOKENS
        table = self._orders.pool.table(block_ids, tokens, state_slot or 0)
        fetch = self._fetches[fetch_id] = _Fetch(fetch_id, first_chunk, table, owner)
        names, sections = [label(salt, name) for name in chunks], range(1, len(self._units.objects))
        ends = range(len(chunks), 0, -1) if sections else range(0)
        ends = [end for end in ends if not (first_chunk + end) * CHUNK_TOKENS % self._block_size]
        states = [label(salt, chunks[end - 1], sections[-1]) for end in ends]  # the last one that is written

        def answered(exists: list[bool]) -> None:
            fetch.found_at = time.monotonic()
            self._given_up -= fetch.ended
            if exists:  # the process goes on
                self._on_answer(fetch.found_at - fetch.asked_at)
            count = [*exists[: len(names)], False].index(False)
            for name, is_there in zip(names, exists, strict=False):
                self._on_known(name_of(name), is_there)
            if sections:
                with_states = zip(ends, exists[len(names) :], strict=False)
                count = next((end for end, is_there in with_states if is_there and end <= count), 0)
            of_states = (label(salt, name, i) for name in chunks[count - 1 : count] for i in sections)
            fetch.objects = [*names[:count], *of_states]
            fetch.chunks, fetch.stop = count, len(fetch.objects)

        self._orders.order(answered, [*names, *states], is_urgent=True)

    def probe(self) -> bool:
        """The store process shall measure how fast the store is. False: not now, the units are in use."""
        if not self._orders.ready or len(self._orders.free) < READERS * self._batch:
            return False

        def answered(units: Sequence[int], _: list[bool]) -> None:
            self._orders.free += units
            self._probing = max(0, self._probing - 1)

        for _ in range(READERS):
            units = [self._orders.free.pop() for _ in range(self._batch)]
            names = [label(b"", os.urandom(16)) for _ in units]
            self._orders.order(partial(answered, units), names, units, is_urgent=True, is_put=True)
        self._probing = READERS
        return True

    def _measured(self, waited: float, seconds: float) -> None:
        self._probing = 0  # the readers have only to remove what they have read
        self._on_probe(waited, seconds)

    def cancel(self, fetch_id: bytes) -> None:
        """`poll` then reports Closed, unless the fetch has ended."""
        if (fetch := self._fetches.get(fetch_id)) is not None and not fetch.ended:
            fetch.stop, fetch.ended = 0, True
            self._given_up += not fetch.found_at

    def ends(self, fetch_id: bytes) -> float | None:
        """The time.monotonic() at which all will have come, as fast as some have. 0: not known. None: the
        store has not answered. When the first answer comes, the other readers are about to have theirs."""
        fetch = self._fetches.get(fetch_id)
        if fetch is None or not fetch.found_at:
            return None
        if not fetch.answered or fetch.stop is None:
            return 0.0
        come = fetch.answered + (READERS - 1) * self._batch
        return fetch.found_at + (fetch.answered_at - fetch.found_at) * max(1.0, fetch.stop / come)

    def poll(self) -> list[Injected | FetchFailed | Closed]:
        events, self._events = self._events, []
        return events

    def offer(self, salt: bytes, name: bytes, chunk: int, *, states: bool = False) -> None:
        """The prefix cache has this chunk, at this position in its prompt, or the states after it."""
        for section in range(1, len(self._units.objects)) if states else (0,):
            self.offers.offer(label(salt, name, section), chunk)

    @property
    def session(self) -> int:
        """Of the store process that is connected. 0: there is none."""
        return self._orders.session

    @property
    def copies(self) -> bool:
        """Whether `move` must be called soon, also if nothing comes from the store process."""
        return bool(self._fetches) or self._orders.copying or self.offers.due

    @property
    def idle(self) -> bool:
        """Whether no block is in use, and nothing is to be written."""
        return not self._orders.copying and not self._fetches and not self.offers.writes

    def move(self, *, busy: bool) -> None:
        """Takes answers, and starts what is due. `busy`: requests run, so writes may take little time."""
        if self._orders.receive(self._measured):
            self.offers.resume()
        now = time.monotonic()
        for fetch in list(self._fetches.values()):
            if fetch.stop is not None:
                self._go_on(fetch, fetch.stop, now)
        if self._orders.ready:
            self.offers.turn(now, busy=busy)

    def close(self) -> None:
        self._orders.close()

    def _go_on(self, fetch: _Fetch, stop: int, now: float) -> None:
        while fetch.asked < stop and self._orders.free and not self._orders.channel.full:
            count = min(stop - fetch.asked, len(self._orders.free), self._batch)
            self._get(fetch, range(fetch.asked, fetch.asked + count))
            fetch.asked += count
        if fetch.copying if fetch.ended else fetch.answered < fetch.asked or fetch.asked < stop:
            return
        event: Injected | FetchFailed | Closed = FetchFailed(fetch.id, "gone", fetch.owner)
        if fetch.ended:
            event = Closed(fetch.id, fetch.owner)
        elif chunks := min(stop, fetch.chunks):
            tokens, asked, found = chunks * CHUNK_TOKENS, fetch.asked_at, fetch.found_at
            size = tokens * self._layout.bytes_per_token
            stats = InjectStats(size, tokens, chunks, asked, found, now, now, asked, found, now)
            event = Injected(fetch.id, FirstToken(0), stats, fetch.owner)
        fetch.stop, fetch.ended = 0, True
        del self._fetches[fetch.id]
        self._events.append(event)

    def _get(self, fetch: _Fetch, numbers: range) -> None:
        units = [self._orders.free.pop() for _ in numbers]

        def came(unit: int) -> None:
            fetch.answered, fetch.answered_at = fetch.answered + 1, time.monotonic()
            self._orders.free.append(unit)

        def copied(unit: int) -> None:
            fetch.copying -= 1
            came(unit)

        def answered(intact: list[bool]) -> None:
            for number, unit, right in zip(numbers, units, intact, strict=True):
                assert fetch.stop is not None, "objects are ordered when it is known"
                if not right:
                    self.missed += 1
                    self._knows(name := fetch.objects[number], False)
                    self.offers.offer(name, fetch.first_chunk + number)  # it may have been computed meanwhile
                    # Chunks are of no use without the states after the last one.
                    fetch.stop = 0 if len(fetch.objects) > fetch.chunks else min(fetch.stop, number)
                if number >= fetch.stop:
                    came(unit)
                    continue
                chunk, section = fetch.first_chunk + number, section_of(fetch.objects[number])
                scattered = self._orders.pool.scatter(self._orders.staged(unit, section, chunk, fetch.table))
                fetch.copying += 1
                self._orders.copy(scattered, partial(copied, unit))

        self._orders.order(answered, [fetch.objects[number] for number in numbers], units, is_urgent=True)

    def _knows(self, name: bytes, is_there: bool) -> None:
        if not section_of(name):
            self._on_known(name_of(name), is_there)
