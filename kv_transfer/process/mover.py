"""A mover: a process forked from the transfer process. It serves lanes and decides nothing.

The mover accepts each frame for which it finds a slot, since there are never more of these slots than
credits. All other checks are made by the transfer process when it reads the report. The engine sees the slot
only after that. Lane 0, which carries control messages, never goes to a mover.
"""

import select
import socket
import time

from baton.kv_transfer.arena import Arena
from baton.kv_transfer.channel import Channel, ChannelClosed
from baton.kv_transfer.process.frames import LaneOwner, SlotPipe
from baton.kv_transfer.process.lane import Lane
from baton.kv_transfer.process.loop import Loop
from baton.kv_transfer.protocol.frame import NO_TRANSFER, FrameError, FrameType, Header, LaneKeys
from baton.kv_transfer.protocol.local_messages import Local
from baton.kv_transfer.slices import Slice
from baton.kv_transfer.trace import TraceWriter

_TICK = 0.25  # seconds between `Heard` reports of a lane
_MOST_PENDING = 4096  # reports that may wait until the transfer process reads them

# ---------------------------------------------------------------- transfer process → mover


class Adopt(Local):
    """The next descriptor on the side channel is lane `lane`, authenticated; its state as of `Lane.leave`."""

    lane: int
    max_payload: int
    read: bytes
    unwritten: bytes
    keys: LaneKeys | None
    sends: bool  # KV frames leave by this lane; else they come


class Say(Local):
    """Send a PING."""

    lane: int
    payload: bytes


class Move(Local):
    """Send this slice. Answered by Gone, or by the lane's `LaneClosed`."""

    lane: int
    slice: Slice


class Close(Local):
    lane: int
    kind: str
    why: str


# ---------------------------------------------------------------- mover → transfer process


class Begins(Local):
    """A slice begins to come, in a slot that was taken for it. Ends follows."""

    lane: int
    slice: Slice


class Ends(Local):
    """All of the slice came. `intact`: whether its checksum matched; None: the lane closed before."""

    lane: int
    intact: bool | None
    began: float
    ended: float


class Gone(Local):
    """The mover needs the slot no more. `sent`: its slice was sent. Otherwise the lane closed before."""

    lane: int
    slot: int
    sent: bool


class Said(Local):
    """A control message came."""

    lane: int
    header: Header
    payload: bytes


class Heard(Local):
    """When bytes last came on the lane, and when bytes of KV last moved (time.monotonic()); see `Lane`."""

    lane: int
    at: float
    kv_moved: float


class LaneClosed(Local):
    """The last report of a lane."""

    lane: int
    kind: str
    why: str


ToMover = Adopt | Say | Move | Close
FromMover = Begins | Ends | Gone | Said | Heard | LaneClosed


class Mover(LaneOwner[Lane]):
    """Serves its lanes in the forked process."""

    def __init__(
        self, channel: socket.socket, side: socket.socket, sending: Arena, slots: SlotPipe, trace: TraceWriter
    ) -> None:
        """`side`: brings the descriptors of lanes. `slots`: for frames that come."""
        self._channel = Channel(channel, ToMover, self._watch)
        self._side = side
        self._sending = sending
        self._slots = slots
        self._trace = trace
        self._loop = Loop(self._flush)
        self._lanes: dict[int, Lane] = {}
        self._ids: dict[Lane, int] = {}

    def run(self) -> None:
        """Serves until the transfer process closes the channel."""
        self._watch()
        ticked = time.monotonic()
        while True:
            try:
                self._loop.turn(_TICK if self._lanes else None)
                if (now := time.monotonic()) >= ticked + _TICK:
                    self._tick(ticked, now)
                    ticked = now
            except ChannelClosed:
                return

    def _watch(self) -> None:
        room = select.EPOLLOUT if self._channel.full else 0
        self._loop.watch(self._channel.fileno(), select.EPOLLIN | room, self._told)

    def _flush(self) -> None:
        if self._channel.pending and not self._channel.full:
            self._channel.flush()

    def _told(self, _: int) -> None:
        self._channel.flush()
        for message in self._channel.receive():
            match message:  # a message for a lane that has closed is dropped: its LaneClosed is under way
                case Adopt():
                    self._adopt(message)
                case Say(number, payload) if number in self._lanes:
                    self._lanes[number].push(FrameType.PING, NO_TRANSFER, payload)
                case Move(number, s) if number in self._lanes:
                    self._lanes[number].push_slice(s)
                case Close(number, kind, why) if number in self._lanes:
                    self._lanes[number].close_soon(kind, why)
        self._watch()

    def _adopt(self, m: Adopt) -> None:
        _, fds, _, _ = socket.recv_fds(self._side, 1, 1)
        if not fds:  # the kernel has closed it
            self._channel.post(LaneClosed(m.lane, "socket", "too many open files"))
            return
        lane = Lane(
            socket.socket(fileno=fds[0]), self._loop, self, self._trace, read=m.read, unwritten=m.unwritten,
            keys=m.keys,
        )  # fmt: skip
        lane.max_payload = m.max_payload
        lane.slots, lane.sending = (None, self._sending) if m.sends else (self._slots, None)
        self._lanes[m.lane] = lane
        self._ids[lane] = m.lane
        lane.serve(select.EPOLLIN)

    def _tick(self, last: float, now: float) -> None:
        for number, lane in self._lanes.items():
            lane.tick(now)
            if max(lane.heard, lane.kv_moved) >= last:
                self._channel.post(Heard(number, lane.heard, lane.kv_moved))
        self._trace.flush()

    # ------------------------------------------------------------ LaneOwner

    def kv_begins(self, lane: Lane, s: Slice) -> None:
        self._channel.post(Begins(self._ids[lane], s))

    def kv_ends(self, lane: Lane, s: Slice, intact: bool | None, began: float, ended: float) -> None:
        self._channel.post(Ends(self._ids[lane], intact, began, ended))

    def begins(self, s: Slice) -> bool:
        return True

    def left(self, lane: Lane, s: Slice, *, sent: bool) -> None:
        self._channel.post(Gone(self._ids[lane], s.slot, sent))

    def control(self, lane: Lane, header: Header, payload: memoryview) -> None:
        if len(self._channel.pending) >= _MOST_PENDING:
            raise FrameError("flood", "control messages come faster than they are read")
        self._channel.post(Said(self._ids[lane], header, bytes(payload)))

    def lane_closed(self, lane: Lane, kind: str, why: str) -> None:
        number = self._ids.pop(lane)
        del self._lanes[number]
        self._channel.post(LaneClosed(number, kind, why[:512]))
