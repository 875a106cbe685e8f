"""A lane as its session has it: a mover serves the connection, and reports."""

import math
import time
from collections.abc import Callable

from baton.kv_transfer.process import lane_messages as messages
from baton.kv_transfer.process.card_rate import CardRate
from baton.kv_transfer.protocol.frame import FrameType, Header
from baton.kv_transfer.slices import Slice

_SLICES_AHEAD = 2  # that a mover has of a lane: one that is written, and the next
_CLOSES_WITHIN = 3.0  # seconds that a mover takes at most to close it


class LaneOwner:
    """A session, as its lanes report to it. No method blocks.

    Attributes:
        begins, came: of a receiver, where its slices go with `Begins`, and with `Ends`.
    """

    begins: Callable[[Slice], object]
    came: Callable[[Slice, bool | None, float, float], object]

    def left(self, s: Slice, *, sent: bool) -> None:
        """A lane needs the slot no more. `sent`: all of it was sent. Otherwise the lane closed before."""
        raise NotImplementedError

    def control(self, lane: "Lane", header: Header, payload: memoryview) -> None:
        raise NotImplementedError

    def lane_closed(self, kind: str, why: str) -> None:
        """The last call of a lane, as `LaneClosed`."""
        raise NotImplementedError


class Lane:
    """
    Attributes:
        heard, kv_moved: when bytes last came, and when bytes of KV last moved, as of the last report.
        unsent: bytes of the slices that the mover has and has not sent.
        closed_by: time.monotonic(). If it is open then, its mover hangs.
        card: what each lane over the same cards carries.
    """

    def __init__(self, tell: Callable[[messages.ToMover], object], number: int, owner: LaneOwner) -> None:
        """`tell`: its mover, which knows it by `number`."""
        self.heard = time.monotonic()
        self.kv_moved = 0.0
        self.unsent = 0
        self.closed_by = math.inf
        self.card = CardRate()
        self._tell = tell
        self._number = number
        self._owner = owner
        self._leaving: dict[int, Slice] = {}  # by slot
        self._coming: Slice | None = None
        # As of the last slice that the mover sent.
        self._taken = self._waiting = 0
        self._looked = 0.0
        self._has_next = False  # another slice was with the mover
        self._since = 0.0  # when the mover last sent a slice, or got one while it had none

    @property
    def has_room(self) -> bool:
        """For another slice."""
        return len(self._leaving) < _SLICES_AHEAD

    def most(self, now: float) -> float:
        """Bytes/s that the peer can be taking: it has not taken all yet. A lane that stalls looks slower and
        slower."""
        if not self._leaving or now <= self._since:
            return math.inf
        return (self.unsent + self._waiting) / (now - self._since)

    def backlog(self, rate: float, now: float) -> float:
        """Bytes that the peer has yet to take, if it takes `rate` bytes/s."""
        return self.unsent + max(0.0, self._waiting - rate * (now - self._looked))

    def push(self, kind: FrameType, transfer_id: bytes, payload: bytes) -> None:
        """A control message: it overtakes KV frames that have not begun."""
        self._tell(messages.Say(self._number, kind, transfer_id, payload))

    def push_slice(self, s: Slice) -> None:
        """A slice of the arena. `LaneOwner.left` follows."""
        if not self._leaving:
            self._since = time.monotonic()
        self.unsent += s.size
        self._leaving[s.slot] = s
        self._tell(messages.Move(self._number, s))

    def close_soon(self, kind: str, why: str) -> None:
        """Closes it after one attempt to write the queued control messages."""
        if self.closed_by == math.inf:
            self.closed_by = time.monotonic() + _CLOSES_WITHIN
            self._tell(messages.Close(self._number, kind, why[:512]))

    def report(self, report: messages.Report) -> None:
        match report:
            case messages.Begins(_, s):
                self._coming = s
                self.heard = self.kv_moved = time.monotonic()
                self._owner.begins(s)
            case messages.Ends(_, intact, began, ended, checksum):
                assert self._coming is not None
                s, self._coming = self._coming, None
                s.sum, s.verified = checksum or 0, checksum is None
                self.heard = self.kv_moved = time.monotonic()
                self._owner.came(s, intact, began, ended)
            case messages.Gone(_, slot, sent, taken, waiting):
                s = self._leaving.pop(slot)
                self.unsent -= s.size
                self._since = time.monotonic()
                if sent:
                    self._measure(taken, waiting, self._since)
                self._owner.left(s, sent=sent)
            case messages.Said(_, header, payload):
                self.heard = time.monotonic()
                self._owner.control(self, header, memoryview(payload))
            case messages.Heard(_, at, kv_moved):
                self.heard, self.kv_moved = at, kv_moved
            case messages.LaneClosed(_, kind, why):
                assert self._coming is None
                for s in self._leaving.values():  # the lane closed before the mover was told of them
                    self._owner.left(s, sent=False)
                self._owner.lane_closed(kind, why)

    def _measure(self, taken: int, waiting: int, now: float) -> None:
        if self._has_next:
            self.card.took(taken - self._taken, now - self._looked, now)
        self._taken, self._waiting, self._looked = taken, waiting, now
        self._has_next = bool(self._leaving)
