"""The start of a transfer process, and the messages between it and its service."""

import os
import socket
import subprocess
from collections.abc import Sequence

import msgspec

from baton.kv_transfer.arena import ArenaEnd
from baton.kv_transfer.config import TransferConfig
from baton.kv_transfer.heartbeat import Heartbeat
from baton.processes.spawn import spawn, tell

MAX_MESSAGE = 1 << 16  # bytes
EXIT_ENGINE_GONE = 3  # of a transfer process: its engine process ended before it


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Transfer process → service, once: lanes are accepted, and can be opened."""

    port: int


class TransferStats(msgspec.Struct, frozen=True, tag=True):
    """Transfer process → service, every second and on StatsRequest. Counts are since the start."""

    transfers_open: int
    prefills_held: int  # offered and not released
    fetches_waiting: int  # for an id not seen yet
    sessions: int
    lanes: int
    slots: int  # of each arena
    sender_slots_free: int  # not on their way
    receiver_slots_free: int  # free or granted as credit
    bytes_sent: int  # payload of KV frames
    bytes_received: int  # verified
    frames_sent: int
    frames_received: int
    late_frames: int  # of transfers that had ended, read away
    transfers: dict[str, int]  # ended, by reason ("injected" or "acked" is the good one)
    checksum_failures: dict[str, int]  # by kind: header, payload, control, tag
    refused: dict[str, int]  # peers and frames refused, by reason
    deadlines: dict[str, int]  # expired, by name in TransferDeadlines
    transports: dict[str, str]  # peers that fetch from here, by name: kind of memory, or "tcp: " and why
    sent_to: dict[str, int]  # bytes of KV frames to them, by name, since their sessions began
    # From peers, by incarnation: bytes/s, bytes that are under way, and the share of the time that is used.
    links: dict[int, tuple[float, int, float]]


class StatsRequest(msgspec.Struct, frozen=True, tag=True):
    """Service → transfer process."""


FromTransfer = Ready | TransferStats
encode = msgspec.msgpack.Encoder().encode
decode_from_transfer = msgspec.msgpack.Decoder(FromTransfer).decode
decode_to_transfer = msgspec.msgpack.Decoder(StatsRequest).decode


class TransferStart(msgspec.Struct, frozen=True):
    """The first line on stdin of `python -m baton.kv_transfer.process`, as JSON. All descriptors are
    inherited."""

    config: TransferConfig
    sending_fds: Sequence[int]  # as `ArenaEnd.fds` of the process's ends
    receiving_fds: Sequence[int]
    heartbeat_fd: int
    service_fd: int
    parent_pid: int


class WaitingTransfer:
    """A transfer process that imports its modules, and then waits for `start`. It ends with this process,
    when `service` is closed here, or on SIGTERM.

    The channels and `service` are the transfer process's ends. They are closed here, so that the other ends
    show when it dies.
    """

    def __init__(
        self, *, sending: ArenaEnd, receiving: ArenaEnd, heartbeat: Heartbeat, service: socket.socket
    ) -> None:
        self._fds = sending.fds, receiving.fds, heartbeat.fd, service.fileno()
        inherited = *sending.fds, *receiving.fds, heartbeat.fd, service.fileno()
        self.process = spawn("-m", "baton.kv_transfer.process", pass_fds=inherited)
        for end in (sending, receiving):
            end.channel.close()
        service.close()

    def start(self, config: TransferConfig, secret: bytes) -> None:
        """It listens and serves. Its service then gets `Ready`."""
        start = TransferStart(config, *self._fds, os.getpid())
        # What a process is started with stays readable in /proc/PID/environ: the secret comes by a pipe.
        tell(self.process, msgspec.json.encode(start) + b"\n" + secret.hex().encode() + b"\n")

    def close(self) -> None:
        """It has ended, or ends: without `start` nothing else will come."""
        assert self.process.stdin is not None
        self.process.stdin.close()


def spawn_transfer(
    config: TransferConfig,
    *,
    sending: ArenaEnd,
    receiving: ArenaEnd,
    heartbeat: Heartbeat,
    service: socket.socket,
    secret: bytes,
) -> subprocess.Popen[bytes]:
    """Starts a transfer process, as `WaitingTransfer`."""
    waiting = WaitingTransfer(sending=sending, receiving=receiving, heartbeat=heartbeat, service=service)
    waiting.start(config, secret)
    return waiting.process
