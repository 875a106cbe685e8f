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
from baton.kv_transfer.process.connection import Connection
from baton.kv_transfer.process.frames import SlotPipe
from baton.kv_transfer.process.lane_messages import (
    Adopt,
    Close,
    Heard,
    LaneClosed,
    Move,
    Report,
    Said,
    Say,
    ToMover,
)  # fmt: skip
from baton.kv_transfer.process.loop import Loop
from baton.kv_transfer.protocol.frame import FrameError
from baton.kv_transfer.trace import TraceWriter

_TICK = 0.25  # seconds between `Heard` reports of a lane
_MOST_PENDING = 4096  # reports that may wait until the transfer process reads them


class Mover:
    """Serves the connections of lanes, in one thread: that of the transfer process, or of a fork."""

    def __init__(
        self, loop: Loop, post: Callable[[Report], object], sending: Arena, slots: SlotPipe,
        trace: TraceWriter,
    ) -> None:  # fmt: skip
        """`post`: to the transfer process. `slots`: for frames that come."""
        self._loop = loop
        self._post = post
        self._sending = sending
        self._slots = slots
        self._trace = trace
        self._connections: dict[int, Connection] = {}
        self._ticked = time.monotonic()

    def tell(self, message: ToMover) -> None:
        connection = self._connections.get(message.lane)
        if connection is None or connection.closed:  # its LaneClosed is under way
            return
        match message:
            case Say(_, kind, transfer_id, payload):
                connection.push(kind, transfer_id, payload)
            case Move(_, s):
                connection.push_slice(s)
            case Close(_, kind, why):
                connection.close_soon(kind, why)

    def adopt(self, m: Adopt, sock: socket.socket) -> None:
        connection = Connection(
            sock, self._loop, self._post, self._trace, m.lane, read=m.read, unwritten=m.unwritten,
            keys=m.keys, ahead=m.ahead,
        )  # fmt: skip
        connection.max_payload, connection.summed = m.max_payload, m.summed
        connection.slots, connection.sending = (None, self._sending) if m.sends else (self._slots, None)
        self._connections[m.lane] = connection
        self._loop.wake(partial(connection.serve, select.EPOLLIN))

    def tick(self, now: float) -> None:
        """Several times a second."""
        self._connections = {n: each for n, each in self._connections.items() if not each.closed}
        for number, connection in self._connections.items():
            connection.tick(now)
            if max(connection.heard, connection.kv_moved) >= self._ticked:
                self._post(Heard(number, connection.heard, connection.kv_moved))
        self._ticked = now


class ForkedMover(Mover):
    """Runs in a fork of the transfer process, at the other end of a channel."""

    def __init__(
        self, channel: socket.socket, side: socket.socket, sending: Arena, slots: SlotPipe, trace: TraceWriter
    ) -> None:
        """`side`: brings the descriptors of lanes."""
        self._channel = Channel(channel, ToMover, self._watch)
        self._side = side
        super().__init__(Loop(self._flush), self._report, sending, slots, trace)

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

    def _report(self, report: Report) -> None:
        if isinstance(report, Said) and len(self._channel.pending) >= _MOST_PENDING:
            raise FrameError("flood", "control messages come faster than they are read")
        self._channel.post(report)
