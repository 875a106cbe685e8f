"""The copies of the tiers when an engine has several ranks.

    rank 0: `RankedStore` ── CopyCells(store, cells, places) ─▶ other ranks: `serve_stores`
                          ◀─ CellsCopied(store, intact) ──────  each between its cache and its own memory

Each rank keeps its heads of a cell. A cell is intact if it is intact on all ranks. A rank has one channel and
one thread for all stores.
"""

import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress

from baton.kv_transfer.channel import Channel, ChannelClosed
from baton.kv_transfer.protocol.local_messages import CellsCopied, CopyCells
from baton.kv_transfer.stores import CellStore, Pair
from baton.kv_transfer.wait import EVENT_POLL, wait


class OtherRank:
    """Another rank, as the stores of rank 0 see it. They share its channel.

    Attributes:
        intact: of each store, by number: copies that are over and not reported.
        heard: of each store: when the rank last copied, or had nothing to do.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.channel = Channel(sock, CellsCopied)
        self.intact: dict[int, deque[bool]] = defaultdict(deque)
        self.heard: dict[int, float] = {}

    def receive(self, now: float) -> None:
        """Raises `ChannelClosed` if the rank is gone."""
        self.channel.flush()
        while messages := self.channel.receive():
            for message in messages:
                self.intact[message.store] += message.intact
                self.heard[message.store] = now


class RankedStore(CellStore):
    """A store of rank 0, and those of the other ranks with its number."""

    def __init__(self, number: int, rank0: CellStore, others: Sequence[OtherRank], silence: float) -> None:
        """`silence`: seconds without a copy, while some are due, after which another rank counts as hung."""
        self.batch = rank0.batch
        self.num_places, self.ready = rank0.num_places, rank0.ready
        self._number = number
        self._silence = silence
        self._most = rank0.room // rank0.batch
        self._rank0 = rank0
        self._intact = deque[bool]()  # copies here that are over and not reported
        self._others = others
        self._batches: deque[int] = deque()  # cells of each batch that is not over on all ranks

    def expect(self, places: int) -> None:
        self._rank0.expect(places)
        self.num_places, self.ready = self._rank0.num_places, self._rank0.ready

    @property
    def room(self) -> int:
        return max(0, self._most - len(self._batches)) * self.batch

    def copy(self, pairs: Sequence[Pair], *, is_load: bool) -> None:
        self._rank0.copy(pairs, is_load=is_load)
        if not self._batches:
            for rank in self._others:
                rank.heard[self._number] = time.monotonic()
        for first in range(0, len(pairs), self.batch):
            some = pairs[first : first + self.batch]
            self._batches.append(len(some))
            for rank in self._others:
                rank.channel.send(CopyCells(self._number, is_load, some))

    def ended(self) -> list[bool]:
        """Raises `ChannelClosed` if a rank is gone, and `RuntimeError` if one hangs."""
        now, due = time.monotonic(), sum(self._batches)
        self._intact += self._rank0.ended()
        for i, rank in enumerate(self._others, 1):
            rank.receive(now)
            if len(rank.intact[self._number]) >= due:
                rank.heard[self._number] = now
            elif now - rank.heard[self._number] > self._silence:
                raise RuntimeError(f"rank {i} has not copied to a tier for {self._silence:g} s")
        copied, found = [self._intact, *(rank.intact[self._number] for rank in self._others)], list[bool]()
        while self._batches and all(len(intact) >= self._batches[0] for intact in copied):
            for _ in range(self._batches.popleft()):
                of_ranks = [intact.popleft() for intact in copied]
                found.append(all(of_ranks))
        return found

    def close(self) -> None:
        """Ends the stores of the other ranks, also those with other numbers."""
        for rank in self._others:
            rank.channel.sock.close()
        self._rank0.close()


def serve_stores(stores: Mapping[int, CellStore], sock: socket.socket) -> None:
    """A rank from 1 on: makes the copies that rank 0 orders, in a thread of its own. `stores`: by number.

    The thread ends when rank 0 closes its channel, and closes the stores. If it dies, it closes its channel,
    which rank 0 sees."""
    args = stores, Channel(sock, CopyCells)
    threading.Thread(target=_serve, args=args, name="tiers", daemon=True).start()


def _serve(stores: Mapping[int, CellStore], channel: Channel) -> None:
    under_way = 0
    with channel.sock, ExitStack() as closes, suppress(ChannelClosed):
        for store in stores.values():
            closes.enter_context(closing(store))
        while True:
            wait([channel.fileno()], EVENT_POLL if under_way else None)
            for order in channel.receive():
                stores[order.store].copy(order.pairs, is_load=order.is_load)
                under_way += len(order.pairs)
            for number, store in stores.items():
                if intact := store.ended():
                    under_way -= len(intact)
                    channel.send(CellsCopied(number, intact))
