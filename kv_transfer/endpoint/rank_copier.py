"""Copies of the ranks from 1 on, between their KV caches and arena slots. `ranked_pool` says which."""

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import lru_cache
from typing import Any

from msgspec.structs import replace

from baton.kv_transfer.arena import ArenaEnd
from baton.kv_transfer.channel import Channel, ChannelClosed
from baton.kv_transfer.device.host_pool import open_pool
from baton.kv_transfer.device.pool import Event, Outcome, Pool
from baton.kv_transfer.endpoint.pulls import exported as export_of
from baton.kv_transfer.peer_memory import PeerMemory, Unreachable
from baton.kv_transfer.protocol.local_messages import Copied, Copy, ExportGone, ExportIn, Opened, Staged
from baton.kv_transfer.staging import scattered_at_once
from baton.kv_transfer.transport import PagedKV
from baton.kv_transfer.wait import EVENT_POLL, wait

LOOK = 0.0005
"""As `pump.LOOK`. Rank 0 learns of these gathers when it looks itself."""
TABLES = 1024
"""Tables that a rank keeps for each direction. Slices of one range of positions have the same one in every
layer, and making it takes a GPU's host 60 to 100 µs."""


class RankCopier:
    """A rank from 1 on: does the copies that rank 0 orders, in a thread for each direction.

    The threads end when rank 0 closes its channels, and close their pools. If one dies, it closes its
    channel, which rank 0 sees."""

    def __init__(
        self, kv: PagedKV, sending: ArenaEnd, receiving: ArenaEnd, *, exports: bool = False,
        adopts: bool = False,
    ) -> None:  # fmt: skip
        """`exports` and `adopts` as in `Transport`."""
        self._exports = exports and not adopts
        self._layers_ready = 0
        # By the count of layers that are ready with it. Older ones have passed: few steps are under way.
        self._events: dict[int, Event] = {}
        self._keep = 16 * kv.layout.num_layers
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._orders_wait = False  # in the thread that gathers, for layers
        self._launched = True  # a step, up to its last layer
        self._last_layer = kv.layout.num_layers - 1
        self._gathers = open_pool(kv, sending.arena, exported=exports)
        scatters = open_pool(kv, receiving.arena, exported=exports)
        self._memories: dict[int, PeerMemory] = {}  # of peers, by number; for the thread that scatters
        for end, pool, is_gather, most in (
            (sending, self._gathers, True, self._gathers.gather_most),
            (receiving, scatters, False, scattered_at_once(receiving.arena.slot_bytes)),
        ):
            args = (Channel(end.channel, Copy | ExportIn | ExportGone), pool, is_gather, most)
            threading.Thread(target=self._serve, args=args, name="kv copies", daemon=True).start()

    def layer_done(self, layer: int) -> None:
        """A layer of a step that hands over KV is written when the current stream gets here."""
        count = self._layers_ready + 1
        self._events[count] = self._gathers.record()
        self._events.pop(count - self._keep, None)
        self._layers_ready = count
        self._launched = layer == self._last_layer
        if self._orders_wait or self._launched:
            os.eventfd_write(self._wake, 1)

    def _serve(self, channel: Channel, pool: Pool, is_gather: bool, most: int) -> None:
        """`most`: slices that are gathered or scattered together."""
        orders: deque[Copy] = deque()
        under_way: deque[tuple[Event, Outcome]] = deque()
        watched = [channel.fileno(), self._wake] if is_gather else [channel.fileno()]
        with channel.sock, closing(pool):
            pool.enter_thread()
            table = lru_cache(TABLES)(pool.table)
            if is_gather and self._exports:
                channel.send(export_of(pool))
            while True:
                look = EVENT_POLL if under_way else None
                if is_gather:
                    if under_way:
                        look = EVENT_POLL if self._launched else LOOK
                    self._orders_wait = bool(orders)
                    if self._is_ready(orders):  # the layer was done before `_orders_wait` was set
                        look = 0
                if self._wake in wait(watched, look, [channel.fileno()] if channel.full else []):
                    os.eventfd_read(self._wake)
                try:
                    channel.flush()  # reports that had no room, since rank 0 read none for a while
                    orders += self._orders(channel, pool, is_gather=is_gather)
                    while batch := self._ready(orders, most):
                        staged = [_staged(table, order.item) for order in batch]
                        under_way.append(self._start(pool, batch, staged, is_gather=is_gather))
                    _report(channel, pool, under_way)
                except ChannelClosed:
                    break
        if not is_gather:
            for memory in self._memories.values():
                memory.close()

    def _start(
        self, pool: Pool, batch: Sequence[Copy], staged: Sequence[Staged], *, is_gather: bool
    ) -> tuple[Event, Outcome]:
        if (memory := batch[0].session) is not None:
            try:
                return pool.pull(self._memories[memory], staged)
            except Unreachable:
                return None, lambda: [None] * len(batch)
        if is_gather:
            events = [self._events.get(order.layers_ready) for order in batch]
            done = pool.gather(staged, [event for event in events if event is not None])
        else:
            done = pool.scatter(staged)[1]
        return done, lambda: [0] * len(batch)

    def _orders(self, channel: Channel, pool: Pool, *, is_gather: bool) -> Sequence[Copy]:
        """Those that came, without orders to open and close memory: these it carries out."""
        orders: list[Copy] = []
        for message in channel.receive():
            match message:
                case Copy():
                    orders.append(message)
                case ExportIn(number, export, dtype):
                    try:
                        if is_gather:
                            pool.adopt(export)
                        else:
                            self._memories[number] = pool.open(export, dtype)
                        channel.send(Opened(number, True, ""))
                    except Unreachable as e:
                        channel.send(Opened(number, False, str(e)))
                case ExportGone(number):  # no copy is under way
                    if memory := self._memories.pop(number, None):
                        memory.close()
        return orders

    def _ready(self, orders: deque[Copy], most: int) -> list[Copy]:
        """Takes the next orders, as far as their layers are written and their slots are in one memory."""
        batch: list[Copy] = []
        while len(batch) < most and self._is_ready(orders):
            if batch and batch[0].session != orders[0].session:
                break
            batch.append(orders.popleft())
        return batch

    def _is_ready(self, orders: deque[Copy]) -> bool:
        return bool(orders) and orders[0].layers_ready <= self._layers_ready


def _report(channel: Channel, pool: Pool, under_way: deque[tuple[Event, Outcome]]) -> None:
    """Tells rank 0 which copies are over."""
    while under_way and ((event := under_way[0][0]) is None or pool.passed(event)):
        rests = under_way.popleft()[1]()
        channel.send(Copied(len(rests), {place: rest for place, rest in enumerate(rests) if rest != 0}))


def _staged(table_of: Callable[[tuple[int, ...], int, int], Any], item: Staged) -> Staged:
    block_ids, state_slot = item.table
    num_tokens = item.piece.token_start + item.piece.token_count
    return replace(item, table=table_of(tuple(block_ids), num_tokens, state_slot))
