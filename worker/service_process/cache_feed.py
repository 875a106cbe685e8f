"""Messages to routers about the prefix cache: changes and snapshots.

A router gets a snapshot when it attaches, and after it has missed changes. A snapshot may have
millions of chunks. So its parts are made one by one, and changes may be sent between them.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any, TypeVar

from baton.kv_names import MOST_STORED, Tier
from baton.rpc import worker_pb2 as pb

T = TypeVar("T")

MAX_CHUNKS = 4096
"""The most chunks in one message."""


class CacheFeed:
    """The cached chunks of one incarnation."""

    def __init__(self) -> None:
        self._tier_of: dict[int, Tier] = {}
        self._stored: dict[int, None] = {}  # that the shared store has, as far as this worker knows

    def changed(
        self, tiers: Mapping[int, Tier | None], stored: Mapping[int, bool] = MappingProxyType({})
    ) -> list[bytes]:
        """Applies a `CacheChanged`. Returns the messages for all routers."""
        messages = []
        for batch in _batches(iter(tiers.items())):
            messages.append(self._message(batch, self._tier_of))
        for some in _batches(iter(stored.items())):
            now = [chunk for chunk, is_there in some if is_there]
            gone = [chunk for chunk, is_there in some if not is_there]
            self._stored.update(dict.fromkeys(now))
            for chunk in [*gone, *islice(self._stored, max(0, len(self._stored) - MOST_STORED))]:
                self._stored.pop(chunk, None)
            messages.append(self._events(stored=now, not_stored=gone))
        return messages

    def cleared(self) -> list[bytes]:
        """No tier has anything any more. Returns the messages for all routers."""
        return self.changed(dict.fromkeys(self._tier_of))

    def snapshot(self) -> Iterator[bytes]:
        """Yields the parts of a snapshot for one router. Each has the tiers of its chunks when it is made.

        Before the next part is made, the router must be sent every change up to then.
        """
        tier_of = self._tier_of
        for number, batch in enumerate(list(_batches(iter(tier_of))) or [[]]):
            now = [(chunk, tier_of[chunk]) for chunk in batch if chunk in tier_of]
            yield self._message(now, {}, reset=number == 0)
        for some in list(_batches(iter(self._stored))):
            yield self._events(stored=some)

    def _message(
        self, batch: Sequence[tuple[int, Tier | None]], tier_of: dict[int, Tier], *, reset: bool = False
    ) -> bytes:
        """Applies a part of a change to `tier_of`. `batch`: chunks and their tiers now; None: in no tier."""
        evicted: list[int] = []
        added: list[int] = []
        moved: list[list[int]] = [[] for _ in Tier]
        device = Tier.DEVICE
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
        return self._events(
            reset=reset,
            evicted=evicted,
            added=added,
            device=moved[Tier.DEVICE],
            host=moved[Tier.HOST],
            disk=moved[Tier.DISK],
        )

    def _events(self, **fields: Any) -> bytes:
        return pb.WorkerMessage(cache=pb.CacheEvents(**fields)).SerializeToString()


def _batches(items: Iterator[T]) -> Iterator[list[T]]:
    while batch := list(islice(items, MAX_CHUNKS)):
        yield batch
