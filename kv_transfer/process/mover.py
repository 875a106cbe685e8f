"""Movers: what serves lanes and decides nothing, in the transfer process or in forks of it.

A mover accepts each frame for which it finds a slot, since there are never more of these slots than credits.
All other checks are made by the transfer process when it reads the report. The engine sees the slot only
after that. Lane 0, which carries control messages, never leaves the transfer process.
"""

import select
import socket
import time
from collections.abc import Callable
from functools import partial

from baton.kv_transfer.arena import Arena
from baton.kv_transfer.channel import Channel, ChannelClosed
from baton.kv_transfer.process.connection import Connection, FrameOwner
from baton.kv_transfer.process.frames import SlotPipe
from baton.kv_transfer.process.loop import Loop
from baton.kv_transfer.protocol.frame import FrameError, FrameType, Header, LaneKeys
from baton.kv_transfer.protocol.local_messages import Local
from baton.kv_transfer.slices import Slice
from baton.kv_transfer.trace import TraceWriter

_TICK = 0.25  # seconds between `Heard` reports of a lane
_MOST_PENDING = 4096  # reports that may wait until the transfer process reads them

# ---------------------------------------------------------------- transfer process → mover


class Adopt(Local):
    """Serve this lane, which is authenticated. Its state is that of `Connection.leave`. Its descriptor comes
    with it, to a fork on the side channel."""

    lane: int
    max_payload: int
    read: bytes
    unwritten: bytes
    keys: LaneKeys | None
    sends: bool  # KV frames leave by this lane; else they come


class Say(Local):
    """Send a control message. To a fork: a PING."""

    lane: int
    kind: FrameType
    transfer_id: bytes
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
    """When bytes last came on the lane, and when bytes of KV last moved (time.monotonic())."""

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


class Mover(FrameOwner):
    """Serves the connections of lanes, in one thread: that of the transfer process, or of a fork."""

    def __init__(
        self, loop: Loop, post: Callable[[FromMover], object], sending: Arena, slots: SlotPipe,
        trace: TraceWriter, *, ahead: int = 0,
    ) -> None:  # fmt: skip
        """`post`: to the transfer process. `slots`: for frames that come. `ahead` as in `Connection`."""
        self._loop = loop
        self._post = post
        self._sending = sending
        self._slots = slots
        self._trace = trace
        self._ahead = ahead
        self._connections: dict[int, Connection] = {}
        self._numbers: dict[Connection, int] = {}
        self._ticked = time.monotonic()

    def tell(self, message: ToMover) -> None:
        match message:  # a message for a lane that has closed is dropped: its LaneClosed is under way
            case Say(number, kind, transfer_id, payload) if number in self._connections:
                self._connections[number].push(kind, transfer_id, payload)
            case Move(number, s) if number in self._connections:
                self._connections[number].push_slice(s)
            case Close(number, kind, why) if number in self._connections:
                self._connections[number].close_soon(kind, why)

    def adopt(self, m: Adopt, sock: socket.socket) -> None:
        connection = Connection(
            sock, self._loop, self, self._trace, read=m.read, unwritten=m.unwritten, keys=m.keys,
            ahead=self._ahead,
        )  # fmt: skip
        connection.max_payload = m.max_payload
        connection.slots, connection.sending = (None, self._sending) if m.sends else (self._slots, None)
        self._connections[m.lane] = connection
        self._numbers[connection] = m.lane
        self._loop.wake(partial(connection.serve, select.EPOLLIN))

    def tick(self, now: float) -> None:
        """Several times a second."""
        for number, connection in self._connections.items():
            connection.tick(now)
            if max(connection.heard, connection.kv_moved) >= self._ticked:
                self._post(Heard(number, connection.heard, connection.kv_moved))
        self._ticked = now

    # ------------------------------------------------------------ FrameOwner

    def kv_begins(self, connection: Connection, s: Slice) -> None:
        self._post(Begins(self._numbers[connection], s))

    def kv_ends(
        self, connection: Connection, s: Slice, intact: bool | None, began: float, ended: float
    ) -> None:
        self._post(Ends(self._numbers[connection], intact, began, ended))

    def left(self, connection: Connection, s: Slice, *, sent: bool) -> None:
        self._post(Gone(self._numbers[connection], s.slot, sent))

    def control(self, connection: Connection, header: Header, payload: memoryview) -> None:
        self._post(Said(self._numbers[connection], header, bytes(payload)))

    def closed(self, connection: Connection, kind: str, why: str) -> None:
        number = self._numbers.pop(connection)
        del self._connections[number]
        self._post(LaneClosed(number, kind, why[:512]))


class ForkedMover(Mover):
    """Runs in a fork of the transfer process, at the other end of a channel."""

    def __init__(
        self, channel: socket.socket, side: socket.socket, sending: Arena, slots: SlotPipe, trace: TraceWriter
    ) -> None:
        """`side`: brings the descriptors of lanes."""
        self._channel = Channel(channel, ToMover, self._watch)
        self._side = side
        super().__init__(Loop(self._flush), self._channel.post, sending, slots, trace)

    def run(self) -> None:
        """Serves until the transfer process closes the channel."""
        self._watch()
        while True:
            try:
                self._loop.turn(_TICK if self._connections else None)
                if (now := time.monotonic()) >= self._ticked + _TICK:
                    self.tick(now)
                    self._trace.flush()
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
            if isinstance(message, Adopt):
                self._take(message)
            else:
                self.tell(message)
        self._watch()

    def _take(self, m: Adopt) -> None:
        _, fds, _, _ = socket.recv_fds(self._side, 1, 1)
        if fds:
            self.adopt(m, socket.socket(fileno=fds[0]))
        else:  # the kernel has closed it
            self._post(LaneClosed(m.lane, "socket", "too many open files"))

    def control(self, connection: Connection, header: Header, payload: memoryview) -> None:
        if len(self._channel.pending) >= _MOST_PENDING:
            raise FrameError("flood", "control messages come faster than they are read")
        super().control(connection, header, payload)
