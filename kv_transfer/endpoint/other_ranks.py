"""The copies of an engine's ranks from 1 on, as rank 0 orders them.

    rank 0: `Line.order`   ── ToRank(line, order) ────▶ other ranks: `rank_copier`
            `Line.receive` ◀─ FromRank(line, report) ──

A rank has one channel. A *line* is the copies between the KV cache and one memory: slots to send, slots to
receive, units of the shared store, places of a tier. Copies of one line end in their order. Lines do not wait
for each other.
"""

import socket
import threading
import time
from collections import defaultdict
from collections.abc import Sequence

from baton.kv_transfer.channel import Channel
from baton.kv_transfer.protocol import local_messages as local

SENDING, RECEIVING, STORE, TIERS = range(4)
"""Numbers of lines. A tier has `TIERS` + its own number."""
SILENCE = 10.0
"""Seconds without a copy, while some are due, after which a rank counts as hung."""
Answer = local.Exported | local.Opened


class OtherRanks:
    """Owns the channels to the other ranks. Any thread may call it."""

    def __init__(self, socks: Sequence[socket.socket] = ()) -> None:
        self._channels = [Channel(sock, local.FromRank) for sock in socks]
        self._lock = threading.Lock()
        # By line: reports, with the index of the rank, that the thread of the line has not taken.
        self._reports: defaultdict[int, list[tuple[int, local.Copied | Answer]]] = defaultdict(list)

    def __len__(self) -> int:
        return len(self._channels)

    def send(self, rank: int, *messages: local.ToRank) -> None:
        """Raises `ChannelClosed` if the rank is gone."""
        with self._lock:
            self._channels[rank].send(*messages)

    def receive(self, line: int) -> Sequence[tuple[int, local.Copied | Answer]]:
        """The reports of one line since the last call. Raises `ChannelClosed` if a rank is gone."""
        with self._lock:
            for rank, channel in enumerate(self._channels):
                channel.flush()
                while messages := channel.receive():
                    for message in messages:
                        self._reports[message.line].append((rank, message.report))
            return self._reports.pop(line, ())

    def close(self) -> None:
        """Ends the threads of the other ranks."""
        for channel in self._channels:
            channel.sock.close()


NO_RANKS = OtherRanks()


class Line:
    """A line to all other ranks. One thread uses it.

    Attributes:
        ordered: of each rank: copies since the start.
        found: of each rank, by the number of the copy from 1 on: as in `Copied`. Callers remove it.
    """

    def __init__(self, ranks: OtherRanks, number: int, silence: float = SILENCE) -> None:
        self.ordered = [0] * len(ranks)
        self.found: list[dict[int, int | None]] = [{} for _ in self.ordered]
        self.silence = silence
        self._ranks = ranks
        self._number = number
        self._copied = [0] * len(ranks)
        self._heard = [0.0] * len(ranks)  # when a rank last copied, or had nothing to do

    def order(self, rank: int, copies: Sequence[local.Copy | local.CopyCell]) -> None:
        if self._copied[rank] == self.ordered[rank]:
            self._heard[rank] = time.monotonic()
        self.ordered[rank] += len(copies)
        self._ranks.send(rank, *(local.ToRank(self._number, copy) for copy in copies))

    def tell(self, message: local.ExportIn | local.ExportGone) -> None:
        for rank in range(len(self.ordered)):
            self._ranks.send(rank, local.ToRank(self._number, message))

    def receive(self) -> list[tuple[int, Answer]]:
        """Counts the copies that are over. Returns the answers about memory, with the index of the rank."""
        answers: list[tuple[int, Answer]] = []
        for rank, report in self._ranks.receive(self._number):
            self._heard[rank] = time.monotonic()
            if isinstance(report, local.Copied):
                first = self._copied[rank] + 1
                self.found[rank].update({first + place: each for place, each in report.found.items()})
                self._copied[rank] += report.count
            else:
                answers.append((rank, report))
        return answers

    def over(self, ordered: Sequence[int]) -> bool:
        """Whether these many copies of each rank are over. Raises `RuntimeError` if a rank hangs."""
        now = time.monotonic()
        for rank, heard in enumerate(self._heard):
            if self._copied[rank] < self.ordered[rank] and now - heard > self.silence:
                raise RuntimeError(f"rank {rank + 1} has not copied for {self.silence:g} s")
        return all(copied >= count for copied, count in zip(self._copied, ordered, strict=True))
