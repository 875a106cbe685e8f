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
        entered = ((chunk, tier) for tier, chunks in zip(Tier, cached, strict=True) for chunk in chunks)
        messages = []
        for batch in _batches(chain(((chunk, None) for chunk in evicted), entered)):
            self._sequence += 1
            messages.append(self._message(batch))
        return messages

    def snapshot(self) -> list[pb.WorkerMessage]:
        """Returns the snapshot for one router. It includes every change up to now."""
        before, self._tier_of = self._tier_of, {}
        batches = list(_batches(iter(before.items()))) or [[]]
        return [self._message(batch, reset=number == 0) for number, batch in enumerate(batches)]

    def _message(self, batch: Sequence[tuple[int, Tier | None]], *, reset: bool = False) -> pb.WorkerMessage:
        """Applies a part of a change. `batch`: chunks and their tiers now; None: they are in no tier."""
        evicted: list[int] = []
        added: list[int] = []
        moved: list[list[int]] = [[] for _ in Tier]
        tier_of, device = self._tier_of, Tier.DEVICE
        for chunk, tier in batch:
            if tier is None:
                evicted.append(chunk)
                tier_of.pop(chunk, None)
                continue
            before = tier_of.get(chunk)
            tier_of[chunk] = tier
            if before is None:
                added.append(chunk)
                before = device
            if tier is not before:
                moved[tier].append(chunk)
        events = pb.CacheEvents(
            sequence=self._sequence,
            reset=reset,
            evicted=evicted,
            added=added,
            device=moved[Tier.DEVICE],
            host=moved[Tier.HOST],
            disk=moved[Tier.DISK],
        )
        return pb.WorkerMessage(cache=events)


def _batches(items: Iterator[T]) -> Iterator[list[T]]:
    while batch := list(islice(items, MAX_CHUNKS)):
        yield batch
