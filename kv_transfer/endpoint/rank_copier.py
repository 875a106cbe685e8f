"""Copies of a rank from 1 on, between its KV cache and slots, or places of tiers. Rank 0 says which
(`other_ranks`)."""

import os
import socket
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import lru_cache

from msgspec.structs import replace

from baton.kv_transfer.arena import Arena
from baton.kv_transfer.channel import Channel, ChannelClosed
from baton.kv_transfer.device.host_pool import open_pool
from baton.kv_transfer.device.pool import Event, Outcome, Remainder, Sums
from baton.kv_transfer.endpoint.copies import exported as export_of
from baton.kv_transfer.endpoint.other_ranks import RECEIVING, SENDING, STORE, TIERS
from baton.kv_transfer.peer_memory import PeerMemory, Unreachable
from baton.kv_transfer.protocol.local_messages import (
    Copied,
    Copy,
    CopyCell,
    ExportGone,
    ExportIn,
    FromRank,
    Opened,
    ToRank,
)
from baton.kv_transfer.slices import Slice
from baton.kv_transfer.staging import scattered_at_once
from baton.kv_transfer.stores import CellStore
from baton.kv_transfer.transport import PagedKV
from baton.kv_transfer.wait import EVENT_POLL, wait

LOOK = 0.0005
"""As `pump.LOOK`. Rank 0 learns of these gathers when it looks itself."""
TABLES = 1024
"""Tables that a rank keeps for each arena. Slices of one range of positions have the same one in every layer,
and making it takes a GPU's host 60 to 100 µs."""


class RankCopier:
    """A rank from 1 on: does the copies that rank 0 orders, in one thread.

    The thread ends when rank 0 closes its channel, and frees what it copies to. If it dies, it closes its
    channel, which rank 0 sees."""

    def __init__(
        self, kv: PagedKV, rank0: socket.socket, sending: Arena, receiving: Arena, *, exports: bool = False,
        adopts: bool = False, store: Arena | None = None, tiers: Mapping[int, CellStore] | None = None,
    ) -> None:  # fmt: skip
        """`rank0`: the channel to it. `exports` and `adopts` as in `Transport`. `store`: the units of the
        shared store. `tiers`: by their numbers on all ranks."""
        self._exports = exports and not adopts
        self._layers_ready = 0
        # By the count of layers that are ready with it. Older ones have passed: few steps are under way.
        self._events: dict[int, Event] = {}
        self._keep = 16 * kv.layout.num_layers
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._orders_wait = False  # for layers
        self._launched = True  # a step, up to its last layer
        self._last_layer = kv.layout.num_layers - 1
        self._channel = Channel(rank0, ToRank)
        self._gathers = _Slices(kv, self, sending)
        self._lines: dict[int, _Slices | _Cells] = {
            SENDING: self._gathers,
            RECEIVING: _Slices(kv, self, receiving),
            **({} if store is None else {STORE: _Slices(kv, self, store)}),
            **{TIERS + number: _Cells(tier) for number, tier in (tiers or {}).items()},
        }
        threading.Thread(target=self._serve, name="rank copies", daemon=True).start()

    def layer_done(self, layer: int) -> None:
        """A layer of a step that hands over KV is written when the current stream gets here."""
        count = self._layers_ready + 1
        self._events[count] = self._gathers.pool.record()
        self._events.pop(count - self._keep, None)
        self._layers_ready = count
        self._launched = layer == self._last_layer
        if self._orders_wait or self._launched:
            os.eventfd_write(self._wake, 1)

    def is_written(self, order: Copy) -> bool:
        return order.layers_ready <= self._layers_ready

    def event_of(self, order: Copy) -> Event:
        """After which its layer is written. None: it is."""
        return self._events.get(order.layers_ready)

    def _serve(self) -> None:
        channel, lines = self._channel, self._lines
        watched = [channel.fileno(), self._wake]
        with channel.sock, ExitStack() as closes:
            for line in lines.values():
                closes.enter_context(closing(line))
            self._gathers.pool.enter_thread()  # the others are of the same device
            if self._exports:
                channel.send(FromRank(SENDING, export_of(self._gathers.pool)))
            while True:
                if self._wake in wait(watched, self._look(), [channel.fileno()] if channel.full else []):
                    os.eventfd_read(self._wake)
                try:
                    channel.flush()  # reports that had no room, since rank 0 read none for a while
                    for message in channel.receive():
                        if answer := lines[message.line].handle(message.order):
                            channel.send(FromRank(message.line, answer))
                    for number, line in lines.items():
                        for report in line.turn() if line.busy else ():
                            channel.send(FromRank(number, report))
                except ChannelClosed:
                    break

    def _look(self) -> float | None:
        """Seconds until the next look at the device. None: it need not be looked at."""
        self._orders_wait = bool(self._gathers.orders)
        if self._gathers.is_ready:  # the layer was done before `_orders_wait` was set
            return 0.0
        if any(line.busy for line in self._lines.values() if line is not self._gathers):
            return EVENT_POLL
        if not self._gathers.under_way:
            return None
        return EVENT_POLL if self._launched else LOOK


class _Slices:
    """Copies between the cache and slots of an arena, or of memory of peers."""

    def __init__(self, kv: PagedKV, copier: RankCopier, arena: Arena) -> None:
        self.pool = open_pool(kv, arena)
        self.orders: deque[Copy] = deque()
        self._copier = copier
        self._scatter_most = scattered_at_once(arena.slot_bytes)
        self._table = lru_cache(TABLES)(self.pool.table)
        self._memories: dict[int, PeerMemory] = {}  # of peers, by number
        self.under_way: deque[tuple[Event, Outcome | Sums]] = deque()

    @property
    def busy(self) -> bool:
        return bool(self.orders or self.under_way)

    @property
    def is_ready(self) -> bool:
        """Whether the next copy may start: a rank may be behind rank 0."""
        return bool(self.orders) and self._copier.is_written(self.orders[0])

    def handle(self, order: Copy | ExportIn | ExportGone) -> Opened | None:
        match order:
            case Copy():
                self.orders.append(order)
            case ExportIn(number, export, dtypes):
                try:
                    if number:
                        self._memories[number] = self.pool.open(export, dtypes)
                    else:
                        self.pool.adopt(export)
                except Unreachable as e:
                    return Opened(number, False, str(e))
                return Opened(number, True, "")
            case ExportGone(number):  # no copy is under way
                if memory := self._memories.pop(number, None):
                    memory.close()
        return None

    def turn(self) -> Iterator[Copied]:
        """Starts what may start. Reports what is over."""
        while batch := self._next():
            self.under_way.append(self._start(batch))
        while self.under_way and ((event := self.under_way[0][0]) is None or self.pool.passed(event)):
            yield _copied(self.under_way.popleft()[1]())

    def _next(self) -> list[Copy]:
        """Takes the next orders, as far as their layers are written and their slots are in one memory."""
        batch: list[Copy] = []
        while self.is_ready and (not batch or _kind(self.orders[0]) == _kind(batch[0])):
            batch.append(self.orders.popleft())
            if len(batch) == (self._scatter_most if batch[0].into_pool else self.pool.gather_most):
                break
        return batch

    def _start(self, batch: Sequence[Copy]) -> tuple[Event, Outcome | Sums]:
        slices = [self._with_table(order.slice) for order in batch]
        into_pool, memory = _kind(batch[0])
        if not into_pool:
            events = map(self._copier.event_of, batch)
            return self.pool.gather(slices, [event for event in events if event is not None])
        try:
            return self.pool.scatter(slices, self._memories[memory] if memory else None)
        except Unreachable:
            return None, lambda: [None] * len(batch)

    def _with_table(self, s: Slice) -> Slice:
        block_ids, state_slot = s.table
        num_tokens = s.piece.token_start + s.piece.token_count
        return replace(s, table=self._table(tuple(block_ids), num_tokens, state_slot))

    def close(self) -> None:
        self.pool.close()
        for memory in self._memories.values():
            memory.close()


class _Cells:
    """Copies between the cache and the places of a tier."""

    def __init__(self, store: CellStore) -> None:
        self._store = store
        self._orders: deque[CopyCell] = deque()
        self._under_way = 0
        store.expect(0)

    @property
    def busy(self) -> bool:
        return bool(self._orders or self._under_way)

    def handle(self, order: CopyCell) -> None:
        self._store.expect(order.place + 1)
        self._orders.append(order)

    def turn(self) -> Iterator[Copied]:
        while batch := self._next():
            pairs = [(order.cell, order.place) for order in batch]
            cells = [order.window_cell for order in batch]
            self._store.copy(pairs, is_load=batch[0].into_pool, window_cells=cells)
            self._under_way += len(batch)
        if intact := self._store.ended():
            self._under_way -= len(intact)
            yield _copied([0 if right else None for right in intact])

    def _next(self) -> list[CopyCell]:
        """Takes the next orders, as far as there is room for them and their places have memory."""
        batch: list[CopyCell] = []
        store, most = self._store, min(self._store.room, self._store.batch)
        while self._orders and len(batch) < most:
            order, ready = self._orders[0], store.ready
            has_memory = order.place < ready or ready >= store.num_places
            if not has_memory or (batch and order.into_pool != batch[0].into_pool):
                break
            batch.append(self._orders.popleft())
        return batch

    def close(self) -> None:
        self._store.close()


def _kind(order: Copy) -> tuple[bool, int]:
    return order.into_pool, order.slice.memory


def _copied(found: Sequence[Remainder]) -> Copied:
    return Copied(len(found), {place: each for place, each in enumerate(found) if each != 0})
