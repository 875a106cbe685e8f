"""Movers as the transfer process holds them: one in its own thread, and forks, which it starts and ends."""

import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import setproctitle

from baton.kv_transfer.arena import Arena, channel_pair
from baton.kv_transfer.channel import Channel
from baton.kv_transfer.config import TransferConfig
from baton.kv_transfer.process import lane_messages as messages
from baton.kv_transfer.process import mover
from baton.kv_transfer.process.connection import Connection
from baton.kv_transfer.process.frames import SlotPipe
from baton.kv_transfer.process.lane import Lane, LaneOwner
from baton.kv_transfer.process.loop import Loop
from baton.kv_transfer.protocol.credits import credit
from baton.kv_transfer.trace import TraceWriter
from baton.kv_transfer.wait import wait
from baton.processes.children import become

log = logging.getLogger("baton.kv")

_STOPS_WITHIN = 3.0  # seconds that a mover takes at most to end


class MoverDied(Exception):
    """A mover has ended, or hangs. Its slots are lost, so the transfer process ends, too."""


class MoverHandle:
    """A mover, and its lanes by the numbers that it knows."""

    def __init__(self, tell: Callable[[messages.ToMover], object]) -> None:
        self.lanes: dict[int, Lane] = {}
        self._tell = tell
        self._adopted = 0

    def adopt(
        self, connection: Connection, owner: LaneOwner, max_payload: int, *, summed: bool, sends: bool,
        ahead: bool,
    ) -> Lane:  # fmt: skip
        """Hands over an authenticated connection. No KV frame may be under way."""
        self._adopted += 1
        lane = self.lanes[self._adopted] = Lane(self._tell, self._adopted, owner)
        sock, read, unwritten, keys = connection.leave()
        adopt = messages.Adopt(self._adopted, max_payload, summed, read, unwritten, keys, sends, ahead)
        self._adopt(adopt, sock)
        return lane

    def _adopt(self, message: messages.Adopt, sock: socket.socket) -> None:
        raise NotImplementedError

    def _report(self, report: messages.Report) -> None:
        lane = self.lanes[report.lane]
        if isinstance(report, messages.LaneClosed):
            del self.lanes[report.lane]
        lane.report(report)


class LocalMover(MoverHandle):
    """In the thread of the transfer process. It has lane 0 of each session, and without forks all lanes."""

    def __init__(self, loop: Loop, sending: Arena, slots: SlotPipe, trace: TraceWriter) -> None:
        self._mover = mover.Mover(loop, self._report, sending, slots, trace)
        self.tick = self._mover.tick
        super().__init__(self._mover.tell)

    def _adopt(self, message: messages.Adopt, sock: socket.socket) -> None:
        self._mover.adopt(message, sock)


class ForkedMoverHandle(MoverHandle):
    """In a fork. Its reports come late, but in order."""

    def __init__(self, channel: socket.socket, side: socket.socket, pid: int) -> None:
        self.channel = Channel(
            channel, messages.Report, gone=lambda why: MoverDied(f"mover {pid} is gone: {why}")
        )
        super().__init__(self.channel.post)
        self._side = side
        self._pid = pid

    def _adopt(self, message: messages.Adopt, sock: socket.socket) -> None:
        socket.send_fds(self._side, [b"l"], [sock.fileno()])
        sock.close()
        self.channel.post(message)

    def serve(self, _: int = 0) -> None:
        """Handles all reports that came: after an old one alone, its lane would seem silent.

        Raises MoverDied when the mover has ended."""
        while reports := self.channel.receive():
            for report in reports:
                self._report(report)

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
) -> list[ForkedMoverHandle]:
    """Forks `config.movers` movers, which close the sockets in `inherited`.

    Call it before this process has threads."""
    handles: list[ForkedMoverHandle] = []
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
        handles.append(ForkedMoverHandle(ours, near, pid))
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
    mover.ForkedMover(channel, side, sending, slots, trace).run()
    trace.close()
