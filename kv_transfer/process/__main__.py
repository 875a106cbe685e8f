"""The transfer process: sockets, checksums, credits and deadlines of one worker. No torch, no CUDA.

It imports its modules, and waits. On stdin come `spawn.TransferStart` as one line of JSON, and the cluster
secret in hexadecimal.

It is one thread, whose loop serves the engine's two channels, the service socket, the listener, the clock
and, where there are no movers, all lanes.
"""

import contextlib
import importlib
import logging
import logging.config
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import setproctitle

from baton.kv_transfer import spawn
from baton.kv_transfer.arena import ArenaEnd
from baton.kv_transfer.channel import Channel, ChannelClosed
from baton.kv_transfer.config import TransferConfig
from baton.kv_transfer.heartbeat import Heartbeat
from baton.kv_transfer.memory_reader import MemoryReader, reader_of
from baton.kv_transfer.peer_memory import Unreachable, host
from baton.kv_transfer.process import movers
from baton.kv_transfer.process.decode_side import DecodeSide, ReceivingSession
from baton.kv_transfer.process.frames import SlotPipe
from baton.kv_transfer.process.loop import Loop
from baton.kv_transfer.process.prefill_side import PrefillSide, SendingSession
from baton.kv_transfer.process.stats import TransferCounters
from baton.kv_transfer.process.tcp import MakeSession, TcpConnector, use_cubic
from baton.kv_transfer.protocol.local_messages import FromReceiver, FromSender
from baton.kv_transfer.protocol.messages import Side
from baton.kv_transfer.trace import TraceWriter
from baton.kv_transfer.wait import spins
from baton.processes.children import die_with_parent
from baton.processes.limits import raise_descriptor_limit
from baton.system.addresses import listening_socket

log = logging.getLogger("baton.kv")

_TICK = 0.25  # seconds between looks at the clock while anything is open
_IDLE_TICK = 1.0
_LOOK = 0.00005  # between looks at reads of a `MemoryReader`


class TransferProcess:
    def __init__(
        self,
        config: TransferConfig,
        secret: bytes,
        sending: ArenaEnd,
        receiving: ArenaEnd,
        heartbeat: Heartbeat,
        service: socket.socket,
    ) -> None:
        self._config = config
        self._heartbeat = heartbeat
        self._service = service
        if config.encrypt:  # now, and not in each mover when its first lane comes
            importlib.import_module("baton.kv_transfer.protocol.encryption")
        slots = SlotPipe(receiving.arena)
        inherited = [sending.channel, receiving.channel, service]
        self._forked = movers.fork(config, sending.arena, slots, inherited)
        self._loop = Loop(self._flush)
        kind, reader = reader_of(config.reader), None
        if kind is not None:
            reader = kind(config, secret, sending.arena, receiving.arena, self._loop.interrupt)
        self._counters = TransferCounters()
        self._trace = TraceWriter(config.trace_path, f"{config.name} transfer")
        self._local = movers.LocalMover(self._loop, sending.arena, slots, self._trace)
        self._to_sender = Channel(sending.channel, FromSender, self._blocked)
        self._to_receiver = Channel(receiving.channel, FromReceiver, self._blocked)
        make_sessions: dict[Side, MakeSession] = {}
        self._connector = TcpConnector(
            config, _memory(config, reader), secret, make_sessions, self._counters, self._trace,
            self._tick_age, self._loop, self._local, self._forked,
        )  # fmt: skip
        self._prefill = PrefillSide(
            config, sending.arena, self._to_sender, self._counters, reader, self._trace
        )
        self._decode = DecodeSide(
            config, slots, self._to_receiver, self._counters, self._connector.connect, reader, self._trace
        )
        make_sessions["sender"] = partial(SendingSession, self._prefill)
        make_sessions["receiver"] = partial(ReceivingSession, self._decode)
        self._listeners = listen_at(config.hosts, config.port)
        self._ticks = (0, time.monotonic())  # the engine's counter, and when it was seen to change
        self._next_tick = 0.0
        self._next_stats = 0.0
        self._stopping = False

    def run(self, parent_pid: int) -> int:
        """Serves until SIGTERM, or until the service closes its socket. Returns the exit code."""
        signal.signal(signal.SIGTERM, self._stop)
        self._watch_channels()
        self._loop.watch(self._service.fileno(), select.EPOLLIN, self._from_service)
        self._watch_listeners()
        for mover in self._forked:
            self._watch_mover(mover)
        self._tell(spawn.Ready(self._listeners[0].getsockname()[1]))
        try:
            while not self._stopping:
                busy = self._prefill.busy or self._decode.busy
                self._loop.turn(_TICK if busy else _IDLE_TICK)
                if (now := time.monotonic()) >= self._next_tick:
                    self._tick(now)
                    self._stopping |= os.getppid() != parent_pid
            self._connector.stop()
            self._loop.turn(0)
            self._flush()
            for mover in self._forked:
                mover.stop()
        except ChannelClosed as e:
            log.error("the engine process is gone: %s", e)
            return spawn.EXIT_ENGINE_GONE
        except movers.MoverDied as e:
            log.critical("%s", e)
            return 1
        finally:
            self._trace.close()
        return 0

    def _from_engine(self, channel: Channel, handle: Callable[[Any], None], _: int) -> None:
        channel.flush()
        for message in channel.receive():
            handle(message)
        self._watch_channels()

    def _watch_mover(self, mover: movers.ForkedMoverHandle) -> None:
        room = select.EPOLLOUT if mover.channel.full else 0
        self._loop.watch(mover.channel.fileno(), select.EPOLLIN | room, mover.serve)

    def _flush(self) -> float | None:
        """Called before each wait of the loop, as `Loop` says."""
        for mover in self._forked:
            if mover.channel.pending:
                mover.channel.flush()
                self._watch_mover(mover)
        look = self._decode.exports.take_reads()
        if look == 0.0:
            time.sleep(_LOOK)
        now = time.monotonic()
        if spins(self._prefill.table.commit_due, now) or spins(self._decode.fetches.commit_due, now):
            look = 0.0
        waits = [look, *(_flush_due(channel) for channel in (self._to_sender, self._to_receiver))]
        return min((wait for wait in waits if wait is not None), default=None)

    def _watch_channels(self) -> None:
        """Watches both channels for messages, and for room if messages wait for it."""
        for channel, side in ((self._to_sender, self._prefill), (self._to_receiver, self._decode)):
            room = select.EPOLLOUT if channel.full else 0
            call = partial(self._from_engine, channel, side.engine)
            self._loop.watch(channel.fileno(), select.EPOLLIN | room, call)

    def _watch_listeners(self) -> None:
        for listener in self._listeners:
            self._loop.watch(listener.fileno(), select.EPOLLIN, partial(self._accept, listener))

    def _accept(self, listener: socket.socket, _: int) -> None:
        if not self._connector.accept(listener):
            self._loop.forget(listener.fileno())  # until the next tick: it stays readable

    def _tick(self, now: float) -> None:
        if self._heartbeat.ticks != self._ticks[0]:
            self._ticks = (self._heartbeat.ticks, now)
        self._next_tick = now + _TICK
        self._local.tick(now)
        self._connector.tick(now)
        self._prefill.tick(now)
        self._decode.tick(now)
        for mover in self._forked:
            mover.check(now)
        self._watch_listeners()
        if now >= self._next_stats:
            self._next_stats = now + 1.0
            self._tell(self._stats())
            self._trace.flush()

    def _tick_age(self, now: float) -> float:
        return now - self._ticks[1] if self._ticks[0] else 0.0

    def _from_service(self, _: int) -> None:
        try:
            packet = self._service.recv(4096)
        except BlockingIOError:
            return
        except ConnectionError:
            packet = b""
        if not packet:
            self._stopping = True
            return
        spawn.decode_to_transfer(packet)  # no other question
        self._tell(self._stats())

    @property
    def _transfers_open(self) -> int:
        return self._prefill.transfers_open + self._decode.transfers_open

    def _stats(self) -> spawn.TransferStats:
        return spawn.TransferStats(
            transfers_open=self._transfers_open,
            prefills_held=len(self._prefill.table.held),
            fetches_waiting=len(self._prefill.table.waiting),
            sessions=len(self._connector.sessions.by_id),
            lanes=self._connector.lane_count,
            slots=self._config.num_slots,
            sender_slots_free=self._prefill.slots_free(),
            receiver_slots_free=self._decode.slots_free(),
            **self._counters.totals(),
            transports=self._prefill.transports(),
            sent_to=self._prefill.sent_to(),
            links=self._decode.links(time.monotonic()),
        )

    def _tell(self, message: spawn.FromTransfer) -> None:
        try:
            self._service.send(spawn.encode(message))
        except BlockingIOError:
            pass  # the service does not read: the next statistics say it all
        except OSError:
            self._stopping = True

    def _blocked(self) -> None:
        self._loop.wake(self._watch_channels)

    def _stop(self, *_: object) -> None:
        self._stopping = True
        self._loop.interrupt()


def _memory(config: TransferConfig, reader: MemoryReader | None) -> str:
    """As in `Identity`."""
    if reader is not None:
        return reader.export.kind
    with contextlib.suppress(Unreachable):
        return f"host {host()}" if config.exports else ""
    return ""


def _flush_due(channel: Channel) -> float | None:
    """Sends what is due. Returns the seconds until more is due, or None."""
    if not channel.pending or channel.full:
        return None
    wait = channel.due - time.monotonic()
    if wait > 0:
        return wait
    channel.send()
    return None


def listen_at(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """On one port of all hosts."""
    listeners = list[socket.socket]()
    for address in hosts:
        listeners.append(listener := listening_socket(address, port, backlog=128))
        listener.setblocking(False)
        use_cubic(listener)
        port = listener.getsockname()[1]
    return listeners


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    if not (line := sys.stdin.readline()):
        return 0  # the worker has ended, or does not need it
    start = msgspec.json.decode(line, type=spawn.TransferStart)
    secret, config = bytes.fromhex(sys.stdin.readline()), start.config
    die_with_parent(start.parent_pid)
    raise_descriptor_limit()
    setproctitle.setproctitle(f"{config.title}: {config.name} transfer")
    if config.logging is not None:
        logging.config.dictConfig(config.logging)
    service = socket.socket(fileno=start.service_fd)
    service.setblocking(False)
    sizes = config.num_slots, config.slot_bytes
    sending, receiving = (ArenaEnd.inherited(fds, *sizes) for fds in (start.sending_fds, start.receiving_fds))
    heartbeat = Heartbeat(start.heartbeat_fd)
    return TransferProcess(config, secret, sending, receiving, heartbeat, service).run(start.parent_pid)


if __name__ == "__main__":
    sys.exit(main())
