"""Messages to routers about the prefix cache: numbered changes and snapshots.

A router gets a snapshot when it attaches, and when it missed a change and asks for one.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import TypeVar

from rpc import worker_pb2 as pb

T = TypeVar("T")

MAX_CHUNKS = 4096
"""The most chunks in one message."""


class CacheFeed:
    """The cached chunks of one incarnation, and the sequence number of the last change."""

    def __init__(self) -> None:
        self._chunks: set[int] = set()
        self._sequence = 0

    def changed(self, added: Sequence[int], evicted: Sequence[int]) -> list[pb.WorkerMessage]:
        """Applies a change. Returns the messages for all routers."""
        self._chunks.update(added)
        self._chunks.difference_update(evicted)
        messages = []
        changes = chain(((chunk, False) for chunk in evicted), ((chunk, True) for chunk in added))
        for batch in _batches(changes):
            self._sequence += 1
            events = pb.CacheEvents(
                sequence=self._sequence,
                added=[chunk for chunk, enters in batch if enters],
                evicted=[chunk for chunk, enters in batch if not enters],
            )
            messages.append(pb.WorkerMessage(cache=events))
        return messages

    def snapshot(self) -> list[pb.WorkerMessage]:
        """Returns the snapshot for one router. It includes every change up to now."""
        batches = list(_batches(iter(self._chunks))) or [[]]
        return [
            pb.WorkerMessage(cache=pb.CacheEvents(sequence=self._sequence, reset=i == 0, added=batch))
            for i, batch in enumerate(batches)
        ]


def _batches(items: Iterator[T]) -> Iterator[list[T]]:
    while batch := list(islice(items, MAX_CHUNKS)):
        yield batch
