"""Messages to routers about the prefix cache: numbered changes and snapshots.

A router gets a snapshot when it attaches, and when it missed a change and asks for one.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import TypeVar

from content import Tier
from rpc import worker_pb2 as pb

T = TypeVar("T")

MAX_CHUNKS = 4096
"""The most chunks in one message."""


class CacheFeed:
    """The cached chunks of one incarnation, and the sequence number of the last change."""

    def __init__(self) -> None:
        self._tier_of: dict[int, Tier] = {}
        self._sequence = 0

    def changed(self, cached: Sequence[Sequence[int]], evicted: Sequence[int]) -> list[pb.WorkerMessage]:
        """Applies a change. `cached`: for each tier, chunks that are there now. Returns the messages for all
        routers."""
        messages = []
        entered = ((chunk, tier) for tier, chunks in zip(Tier, cached, strict=True) for chunk in chunks)
        for batch in _batches(chain(((chunk, None) for chunk in evicted), entered)):
            self._sequence += 1
            events = pb.CacheEvents(sequence=self._sequence)
            for chunk, tier in batch:
                if tier is None:
                    events.evicted.append(chunk)
                    self._tier_of.pop(chunk, None)
                else:
                    self._put(events, chunk, tier)
            messages.append(pb.WorkerMessage(cache=events))
        return messages

    def snapshot(self) -> list[pb.WorkerMessage]:
        """Returns the snapshot for one router. It includes every change up to now."""
        before, self._tier_of = self._tier_of, {}
        messages = []
        for number, batch in enumerate(list(_batches(iter(before.items()))) or [[]]):
            events = pb.CacheEvents(sequence=self._sequence, reset=number == 0)
            for chunk, tier in batch:
                self._put(events, chunk, tier)
            messages.append(pb.WorkerMessage(cache=events))
        return messages

    def _put(self, events: pb.CacheEvents, chunk: int, tier: Tier) -> None:
        before = self._tier_of.get(chunk)
        self._tier_of[chunk] = tier
        if before is None:
            events.added.append(chunk)
        if tier is not (before or Tier.DEVICE):
            {Tier.DEVICE: events.device, Tier.HOST: events.host, Tier.DISK: events.disk}[tier].append(chunk)


def _batches(items: Iterator[T]) -> Iterator[list[T]]:
    while batch := list(islice(items, MAX_CHUNKS)):
        yield batch
