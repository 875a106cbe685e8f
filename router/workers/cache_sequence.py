"""Follows one worker's numbered reports of its prefix cache: which may be taken in, and when one is
missing."""

from enum import Enum, auto

from rpc import worker_pb2 as pb


class Verdict(Enum):
    APPLY = auto()
    IGNORE = auto()  # until the snapshot comes
    RESYNC = auto()  # one is missing: ask for a snapshot, ignore the rest


class CacheSequence:
    """Of one stream, which begins with a snapshot where the worker has a prefix cache."""

    def __init__(self) -> None:
        self._last: int | None = None  # None: what is known cannot be continued

    def follow(self, events: pb.CacheEvents) -> Verdict:
        if not events.reset:
            if self._last is None:
                return Verdict.IGNORE
            if events.sequence not in (self._last, self._last + 1):  # the same: parts of a snapshot
                self._last = None
                return Verdict.RESYNC
        self._last = events.sequence
        return Verdict.APPLY
