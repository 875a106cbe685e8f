"""The host tier's copies when an engine has several ranks.

    rank 0: `RankedStore` ── CopyBlocks(blocks, places) ─▶ other ranks: `serve_store`
                          ◀─ BlocksCopied(intact) ────────  each between its KV cache and its own memory

Each rank keeps its heads of a block. A block is intact if it is intact on all ranks.
"""

import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import closing, suppress

from baton.kv_transfer.channel import Channel, ChannelClosed
from baton.kv_transfer.protocol.local_messages import BlocksCopied, CopyBlocks
from baton.kv_transfer.stores import BlockStore, Pair
from baton.kv_transfer.wait import EVENT_POLL, wait


class RankedStore(BlockStore):
    """The store of rank 0. Owns the channels to the other ranks."""

    def __init__(self, rank0: BlockStore, ranks: Sequence[socket.socket], silence: float) -> None:
        """`silence`: seconds without a copy, while some are due, after which another rank counts as hung."""
        self.batch = rank0.batch
        self.num_places, self.ready = rank0.num_places, rank0.ready
        self._silence = silence
        self._most = rank0.room // rank0.batch
        self._rank0 = rank0
        self._channels = [Channel(sock, BlocksCopied) for sock in ranks]
        # Of each rank: copies that are over and not reported.
        self._intact: list[deque[bool]] = [deque() for _ in range(1 + len(ranks))]
        self._batches: deque[int] = deque()  # blocks of each batch that is not over on all ranks
        self._heard = [0.0] * len(ranks)  # when a rank last copied, or had nothing to do

    def expect(self, places: int) -> None:
        self._rank0.expect(places)
        self.num_places, self.ready = self._rank0.num_places, self._rank0.ready

    @property
    def room(self) -> int:
        return max(0, self._most - len(self._batches)) * self.batch

    def copy(self, pairs: Sequence[Pair], *, is_load: bool) -> None:
        self._rank0.copy(pairs, is_load=is_load)
        if not self._batches:
            self._heard = [time.monotonic()] * len(self._channels)
        for first in range(0, len(pairs), self.batch):
            some = pairs[first : first + self.batch]
            self._batches.append(len(some))
            for channel in self._channels:
                channel.send(CopyBlocks(is_load, some))

    def ended(self) -> list[bool]:
        """Raises `ChannelClosed` if a rank is gone, and `RuntimeError` if one hangs."""
        now, due = time.monotonic(), sum(self._batches)
        self._intact[0] += self._rank0.ended()
        for i, (channel, intact) in enumerate(zip(self._channels, self._intact[1:], strict=True)):
            channel.flush()
            while messages := channel.receive():
                self._heard[i] = now
                for message in messages:
                    intact += message.intact
            if len(intact) >= due:
                self._heard[i] = now
            elif now - self._heard[i] > self._silence:
                raise RuntimeError(f"rank {i + 1} has not copied blocks for {self._silence:g} s")
        found: list[bool] = []
        while self._batches and all(len(intact) >= self._batches[0] for intact in self._intact):
            for _ in range(self._batches.popleft()):
                of_ranks = [intact.popleft() for intact in self._intact]
                found.append(all(of_ranks))
        return found

    def close(self) -> None:
        for channel in self._channels:
            channel.sock.close()
        self._rank0.close()


def serve_store(store: BlockStore, sock: socket.socket) -> None:
    """A rank from 1 on: makes the copies that rank 0 orders, in a thread of its own.

    The thread ends when rank 0 closes its channel, and closes the store. If it dies, it closes its channel,
    which rank 0 sees."""
    args = store, Channel(sock, CopyBlocks)
    threading.Thread(target=_serve, args=args, name="host tier", daemon=True).start()


def _serve(store: BlockStore, channel: Channel) -> None:
    under_way = 0
    with channel.sock, closing(store), suppress(ChannelClosed):
        while True:
            wait([channel.fileno()], EVENT_POLL if under_way else None)
            for order in channel.receive():
                store.copy(order.pairs, is_load=order.is_load)
                under_way += len(order.pairs)
            if intact := store.ended():
                under_way -= len(intact)
                channel.send(BlocksCopied(intact))
