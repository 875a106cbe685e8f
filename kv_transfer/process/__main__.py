"""The transfer process: sockets, checksums, credits and deadlines of one worker. No torch, no CUDA.

    python -m kv_transfer.process --channel-fd N --arena-fd N --service-fd N --parent-pid N

On stdin come the TransferConfig as one line of JSON, and the cluster secret in hexadecimal.

The main thread's loop serves the engine channel, the service socket, the listener and the clock. With one I/O
thread it serves the lanes, too; with more, each of these has a loop of its own for its share of the lanes.
One lock guards all state. It is held for microseconds at a time, and never during a system call that moves
KV.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import logging.config
import os
import select
import signal
import socket
import sys
import threading
import time

import msgspec
import setproctitle

from kv_transfer import spawn
from kv_transfer.arena import Arena
from kv_transfer.channel import Channel, ChannelClosed, FromReceiver, FromSender
from kv_transfer.config import TransferConfig
from kv_transfer.process.decode_side import DecodeSide
from kv_transfer.process.loop import Loop
from kv_transfer.process.prefill_side import PrefillSide
from kv_transfer.process.stats import Counters
from kv_transfer.process.tcp import TcpConnector, use_cubic
from kv_transfer.trace import TraceWriter

log = logging.getLogger("baton.kv")

_TICK = 0.25  # seconds between looks at the clock while anything is open
_IDLE_TICK = 1.0
_PR_SET_PDEATHSIG = 1


class TransferProcess:
    def __init__(
        self,
        config: TransferConfig,
        secret: bytes,
        channel: socket.socket,
        arena: Arena,
        service: socket.socket,
    ) -> None:
        self._config = config
        self._arena = arena
        self._service = service
        self._lock = threading.RLock()
        self._counters = Counters()
        self._trace = TraceWriter(config.trace_path, f"{config.name} transfer")
        self._loop = Loop(self._flush)
        self._others = [Loop(self._flush) for _ in range(config.io_threads if config.io_threads > 1 else 0)]
        prefill = config.role == "prefill"
        self._channel = Channel(channel, FromSender if prefill else FromReceiver, self._blocked)
        side_type = PrefillSide if prefill else DecodeSide
        self._side = side_type(config, arena, self._channel, self._counters)
        self._connector = TcpConnector(
            config, secret, self._lock, self._side, self._counters, self._trace, self._tick_age,
            self._others or [self._loop],
        )  # fmt: skip
        if isinstance(self._side, DecodeSide):
            self._side.connector = self._connector
        self._listener = _listen(config.host, config.port) if prefill else None
        self._ticks = (0, time.monotonic())  # the engine's counter, and when it was seen to change
        self._next_tick = 0.0
        self._next_stats = 0.0
        self._drain_until: float | None = None
        self._stopping = False

    def run(self, parent_pid: int) -> int:
        """Until SIGTERM, or until an end of a socket closes. The exit code: 0 unless the engine is gone."""
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
        self._watch_channel()
        self._loop.watch(self._service.fileno(), select.EPOLLIN, self._from_service)
        port = 0
        if self._listener is not None:
            self._loop.watch(self._listener.fileno(), select.EPOLLIN, self._accept)
            port = self._listener.getsockname()[1]
        threads = [threading.Thread(target=loop.run, name="lanes", daemon=True) for loop in self._others]
        for thread in threads:
            thread.start()
        self._tell(spawn.Ready(port))
        try:
            while not self._stopping and os.getppid() == parent_pid:
                self._loop.turn(_TICK if self._side.busy or self._drain_until else _IDLE_TICK)
                self._tick(time.monotonic())
            with self._lock:
                self._connector.stop()
            for loop, thread in zip(self._others, threads, strict=True):
                loop.stop()
                thread.join()
            self._loop.turn(0)
            self._flush()
        except ChannelClosed as e:
            log.error("the engine process is gone: %s", e)
            return 1
        finally:
            self._trace.close()
        return 0

    def _from_engine(self, _: int) -> None:
        with self._lock:
            self._channel.flush()
            for message in self._channel.receive():
                self._side.engine(message)
        self._watch_channel()

    def _flush(self) -> float | None:
        """In every turn of every loop."""
        channel = self._channel
        if not channel.pending or channel.full:
            return None
        wait = channel.due - time.monotonic()
        if wait > 0:
            return wait
        with self._lock:
            channel.send()
        return None

    def _watch_channel(self) -> None:
        """For messages, and for room if something waits to go into it."""
        room = select.EPOLLOUT if self._channel.full else 0
        self._loop.watch(self._channel.fileno(), select.EPOLLIN | room, self._from_engine)

    def _accept(self, _: int) -> None:
        assert self._listener is not None
        with self._lock:
            self._connector.accept(self._listener)

    def _tick(self, now: float) -> None:
        if self._arena.ticks != self._ticks[0]:
            self._ticks = (self._arena.ticks, now)
        if now < min(self._next_tick, self._next_stats) and self._drain_until is None:
            return
        with self._lock:
            if now >= self._next_tick:
                self._next_tick = now + _TICK
                self._connector.tick(now)
                self._side.tick(now)
            if now >= self._next_stats:
                self._next_stats = now + 1.0
                self._tell(self._stats())
                self._trace.flush()
            if self._drain_until is not None and (self._side.quiet or now >= self._drain_until):
                self._drain_until = None
                self._tell(spawn.Drained(self._side.transfers_open))
                for session in list(self._connector.sessions.values()):
                    session.end("drained", "the worker drains")

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
        match spawn.decode_to_transfer(packet):
            case spawn.StatsRequest():
                with self._lock:
                    self._tell(self._stats())
            case spawn.Drain(timeout):
                self._side.draining = True
                self._drain_until = time.monotonic() + timeout

    def _stats(self) -> spawn.TransferStats:
        side, counters = self._side, self._counters
        prefill = side if isinstance(side, PrefillSide) else None
        return spawn.TransferStats(
            transfers_open=side.transfers_open,
            prefills_held=len(prefill.table.held) if prefill else 0,
            fetches_waiting=len(prefill.table.waiting) if prefill else 0,
            sessions=len(self._connector.sessions),
            lanes=self._connector.lane_count,
            slots_total=self._config.num_slots,
            slots_free=side.slots_free(),
            kv_bytes=counters.kv_bytes,
            kv_frames=counters.kv_frames,
            late_frames=counters.late_frames,
            transfers=dict(counters.transfers),
            checksum_failures=dict(counters.checksum_failures),
            refused=dict(counters.refused),
            deadlines=dict(counters.deadlines),
        )

    def _tell(self, message: spawn.FromTransfer) -> None:
        try:
            self._service.send(spawn.encode(message))
        except BlockingIOError:
            pass  # the service does not read: the next statistics say it all
        except OSError:
            self._stopping = True

    def _blocked(self) -> None:
        self._loop.wake(self._watch_channel)

    def _stop(self, *_: object) -> None:
        self._stopping = True
        self._loop.stop()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=128)
    listener.setblocking(False)
    use_cubic(listener)
    return listener


def _die_with_parent(parent_pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        os._exit(1)  # it died before we asked to be told


def _thread_died(args: threading.ExceptHookArgs) -> None:
    """A thread that died leaves lanes unserved: end the process, so that the worker starts anew."""
    if isinstance(args.exc_value, ChannelClosed):
        log.error("the engine process is gone: %s", args.exc_value)
    else:
        log.critical("I/O thread died", exc_info=args.exc_value)
    logging.shutdown()
    os._exit(1)


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("--channel-fd", "--arena-fd", "--service-fd", "--parent-pid"):
        parser.add_argument(name, type=int, required=True)
    args = parser.parse_args()
    _die_with_parent(args.parent_pid)
    config = msgspec.json.decode(sys.stdin.readline(), type=TransferConfig)
    secret = bytes.fromhex(sys.stdin.readline())
    setproctitle.setproctitle(f"baton: {config.name} transfer")
    if config.logging is not None:
        logging.config.dictConfig(config.logging)
    threading.excepthook = _thread_died
    service = socket.socket(fileno=args.service_fd)
    service.setblocking(False)
    arena = Arena.attach(args.arena_fd, config.num_slots, config.slot_bytes)
    channel = socket.socket(fileno=args.channel_fd)
    return TransferProcess(config, secret, channel, arena, service).run(args.parent_pid)


if __name__ == "__main__":
    sys.exit(main())
