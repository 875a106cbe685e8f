"""Detects missing reports in one worker's numbered sequence of prefix cache reports."""

from enum import Enum, auto

from baton.rpc import worker_pb2 as pb


class CacheAction(Enum):
    """What to do with a report."""

    APPLY = auto()
    IGNORE = auto()  # a report is missing; the snapshot has not come yet
    RESYNC = auto()  # a report is missing: ask for a snapshot and ignore this report


class CacheSequence:
    """Of one stream. A worker with a prefix cache sends a snapshot first."""

    def __init__(self) -> None:
        self._last: int | None = None  # None: only a snapshot can continue

    def follow(self, events: pb.CacheEvents) -> CacheAction:
        if not events.reset:
            if self._last is None:
                return CacheAction.IGNORE
            if events.sequence not in (self._last, self._last + 1):  # parts of a snapshot share a number
                self._last = None
                return CacheAction.RESYNC
        self._last = events.sequence
        return CacheAction.APPLY
