"""What the state machines of both sides share: effects, and the memory of ids that ended."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

from baton.kv_transfer.protocol.messages import Control

MAX_TOMBSTONES = 65_536


@dataclass(frozen=True, slots=True)
class Send:
    """To the peer, by this session."""

    session: int
    transfer_id: bytes
    message: Control


@dataclass(frozen=True, slots=True)
class Expired:
    """To the log and the metrics: this deadline has passed."""

    deadline: str  # its name in TransferDeadlines
    detail: str


T = TypeVar("T")


class Tombstones(Generic[T]):
    """Ids that ended a while ago, so that what comes late for them is not taken for new.

    Id → an epitaph (why it ended), for `seconds` or until 65,536 later ones came."""

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

    def expire(self, now: float) -> None:
        while self._entries and next(iter(self._entries.values()))[0] <= now:
            self._entries.popitem(last=False)
