"""Ids that ended a while ago, so that what comes late for them is not taken for new. Bounded twice."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

MAX_TOMBSTONES = 65_536

T = TypeVar("T")


class Tombstones(Generic[T]):
    """Id → an epitaph (why it ended), for `seconds` or until 65,536 later ones came."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._entries: OrderedDict[bytes, tuple[float, T]] = OrderedDict()  # oldest first

    def bury(self, key: bytes, epitaph: T, now: float) -> None:
        self._entries.pop(key, None)
        if len(self._entries) >= MAX_TOMBSTONES:
            self._entries.popitem(last=False)
        self._entries[key] = (now + self._seconds, epitaph)

    def get(self, key: bytes) -> T | None:
        entry = self._entries.get(key)
        return None if entry is None else entry[1]

    def __len__(self) -> int:
        return len(self._entries)

    def expire(self, now: float) -> None:
        while self._entries and next(iter(self._entries.values()))[0] <= now:
            self._entries.popitem(last=False)
