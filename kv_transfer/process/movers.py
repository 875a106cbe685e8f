"""Movers as the transfer process sees them: their start and end, and a stand-in for each of their lanes."""

import contextlib
import logging
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

import setproctitle

from baton.kv_transfer.arena import Arena, channel_pair
from baton.kv_transfer.channel import Channel
from baton.kv_transfer.config import TransferConfig
from baton.kv_transfer.process import mover
from baton.kv_transfer.process.frames import LaneOwner, SlotPipe
from baton.kv_transfer.process.lane import Lane
from baton.kv_transfer.protocol.credits import credit
from baton.kv_transfer.protocol.frame import FrameType
from baton.kv_transfer.slices import Slice
from baton.kv_transfer.trace import TraceWriter
from baton.kv_transfer.wait import wait
from baton.processes.children import become

log = logging.getLogger("baton.kv")

SLICES_AHEAD = 2  # that a lane in a mover has: one that is written, and the next
_STOPS_WITHIN = 3.0  # seconds that a mover takes at most to close a lane, or to end


class FarLane:
    """Stands for a lane in a mover. It has the methods of `Lane` that sessions use.

    Reports of the mover come late, but in order."""

    is_far: ClassVar = True

    def __init__(self, handle: "MoverHandle", number: int, owner: "LaneOwner[FarLane]") -> None:
        self.heard = time.monotonic()
        self.kv_moved = 0.0  # as its mover last reported it
        self.closed_by = math.inf  # time.monotonic(): if the lane is open then, its mover hangs
        self.unsent = 0
        self._handle = handle
        self._number = number
        self._owner = owner
        self._leaving: dict[int, Slice] = {}  # by slot
        self._coming: Slice | None = None

    @property
    def has_room(self) -> bool:
        return len(self._leaving) < SLICES_AHEAD

    def push(self, kind: FrameType, transfer_id: bytes, payload: bytes) -> None:
        assert kind is FrameType.PING, "other control messages go down lane 0"
        self._handle.channel.post(mover.Say(self._number, payload))

    def push_slice(self, s: Slice) -> None:
        if self._owner.begins(s):
            self.unsent += s.wire
            self._leaving[s.slot] = s
            self._handle.channel.post(mover.Move(self._number, s))

    def tick(self, now: float) -> None:
        """Its mover does it."""

    def close_soon(self, kind: str, why: str) -> None:
        if self.closed_by == math.inf:
            self.closed_by = time.monotonic() + _STOPS_WITHIN
            self._handle.channel.post(mover.Close(self._number, kind, why[:512]))

    def report(self, message: mover.FromMover) -> None:
        if isinstance(message, mover.Begins | mover.Ends | mover.Said):
            self.heard = time.monotonic()
            if not isinstance(message, mover.Said):
                self.kv_moved = self.heard
        match message:
            case mover.Begins(_, s):
                self._coming = s
                self._owner.kv_begins(self, s)
            case mover.Ends(_, intact, began, ended):
                assert self._coming is not None
                s, self._coming = self._coming, None
                self._owner.kv_ends(self, s, intact, began, ended)
            case mover.Gone(_, slot, sent):
                s = self._leaving.pop(slot)
                self.unsent -= s.wire
                self._owner.left(self, s, sent=sent)
            case mover.Said(_, header, payload):
                self._owner.control(self, header, memoryview(payload))
            case mover.Heard(_, at, kv_moved):
                self.heard, self.kv_moved = at, kv_moved
            case mover.LaneClosed(_, kind, why):
                assert self._coming is None
                for s in self._leaving.values():  # the lane closed before the mover was told of them
                    self._owner.left(self, s, sent=False)
                self._owner.lane_closed(self, kind, why)


class MoverDied(Exception):
    """A mover has ended, or hangs. Its slots are lost, so the transfer process ends, too."""


class MoverHandle:
    """One mover, as the transfer process holds it."""

    def __init__(self, channel: socket.socket, side: socket.socket, pid: int) -> None:
        self.channel = Channel(
            channel, mover.FromMover, gone=lambda why: MoverDied(f"mover {pid} is gone: {why}")
        )
        self.lanes: dict[int, FarLane] = {}
        self._side = side
        self._pid = pid
        self._made = 0

    def adopt(self, lane: Lane, owner: LaneOwner[FarLane], *, sends: bool) -> FarLane:
        """Hands over a lane to the mover. No KV frame may be under way on it."""
        self._made += 1
        sock, read, unwritten, keys = lane.leave()
        socket.send_fds(self._side, [b"l"], [sock.fileno()])
        sock.close()
        self.channel.post(mover.Adopt(self._made, lane.max_payload, read, unwritten, keys, sends))
        self.lanes[self._made] = FarLane(self, self._made, owner)
        return self.lanes[self._made]

    def serve(self, _: int = 0) -> None:
        """Handles all reports that came: after an old one alone, its lane would seem silent.

        Raises MoverDied when the mover has ended."""
        while reports := self.channel.receive():
            for report in reports:
                far = self.lanes[report.lane]
                if isinstance(report, mover.LaneClosed):
                    del self.lanes[report.lane]
                far.report(report)

    def check(self, now: float) -> None:
        """Raises MoverDied if a lane has not closed in time: the mover hangs, and keeps its slots."""
        if any(now >= lane.closed_by for lane in self.lanes.values()):
            raise MoverDied(f"mover {self._pid} hangs: it closes no lane")

    def stop(self) -> None:
        """Ends the mover. It handles the messages that it was sent, and closes its lanes.

        A mover that hangs is killed."""
        self.channel.sock.close()
        self._side.close()
        # If our parent ignores SIGCHLD, so do we, and the kernel has reaped the mover already.
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            ended = os.pidfd_open(self._pid)
            if not wait([ended], _STOPS_WITHIN):
                log.error("mover %d hangs: killed", self._pid)
                os.kill(self._pid, signal.SIGKILL)
            os.close(ended)
            os.waitpid(self._pid, 0)


def fork(
    config: TransferConfig, sending: Arena, slots: SlotPipe, inherited: Sequence[socket.socket]
) -> list[MoverHandle]:
    """Forks `config.movers` movers, which close the sockets in `inherited`.

    Call it before this process has threads."""
    handles: list[MoverHandle] = []
    for number in range(config.movers):
        (ours, theirs), (near, far) = channel_pair(), channel_pair()
        parent_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            not_mine = [*inherited, ours, near, *(x for h in handles for x in (h.channel.sock, h._side))]
            moves = partial(_mover, config, sending, slots, theirs, far, number)
            become(parent_pid, partial(_child, not_mine, moves))
        theirs.close()
        far.close()
        handles.append(MoverHandle(ours, near, pid))
    return handles


def _child(not_mine: Sequence[socket.socket], moves: Callable[[], None]) -> int:
    for number in (signal.SIGTERM, signal.SIGINT):  # may reach the whole group: the parent decides
        signal.signal(number, signal.SIG_IGN)
    for sock in not_mine:  # otherwise their other ends would not notice the death of the parent
        sock.close()
    try:
        moves()
    except Exception:
        log.critical("a mover died", exc_info=True)
        logging.shutdown()
        return 1
    return 0


def _mover(
    config: TransferConfig, sending: Arena, slots: SlotPipe, channel: socket.socket, side: socket.socket,
    number: int,
) -> None:  # fmt: skip
    name = f"{config.name} transfer, lanes {number}"
    setproctitle.setproctitle(f"{config.title}: {name}")
    path = None
    if config.trace_path is not None:
        path = Path(config.trace_path).with_suffix(f".lanes{number}.trace")
    trace = TraceWriter(path, name)
    used = credit(config.num_slots, config.lanes, exported=False)
    sending.populate(used)
    slots.arena.populate(used)
    mover.Mover(channel, side, sending, slots, trace).run()
    trace.close()
