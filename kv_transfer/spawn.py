"""Starting a transfer process: what it inherits, and what it and its parent tell each other."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import msgspec

from kv_transfer.arena import Arena
from kv_transfer.config import TransferConfig
from kv_transfer.heartbeat import Heartbeat

SECRET_VARIABLE = "BATON_CLUSTER_SECRET"
EXIT_ENGINE_GONE = 3  # of a transfer process: its engine process ended before it


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Transfer process → service, once: lanes are accepted (prefill) or can be opened (decode)."""

    port: int  # 0 on decode, which listens nowhere


class TransferStats(msgspec.Struct, frozen=True, tag=True):
    """Transfer process → service, every second and on StatsRequest. Counts are since the start."""

    transfers_open: int
    prefills_held: int  # prefill: offered and not released
    fetches_waiting: int  # prefill: for an id not seen yet
    sessions: int
    lanes: int
    slots_total: int
    slots_free: int  # decode: free or granted as credit; prefill: not on their way
    kv_bytes: int  # payload of KV frames sent (prefill) or verified (decode)
    kv_frames: int
    late_frames: int  # decode: of transfers that had ended, read away
    transfers: dict[str, int]  # ended, by reason ("injected" or "acked" is the good one)
    checksum_failures: dict[str, int]  # by kind: header, payload, control
    refused: dict[str, int]  # peers and frames refused, by reason
    deadlines: dict[str, int]  # expired, by name in TransferDeadlines


class StatsRequest(msgspec.Struct, frozen=True, tag=True):
    """Service → transfer process."""


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Service → transfer process: take no new transfer, let the open ones end, then close the lanes."""

    timeout: float


class Drained(msgspec.Struct, frozen=True, tag=True):
    """Transfer process → service: answers Drain; `open` transfers were cut off."""

    open: int


FromTransfer = Ready | TransferStats | Drained
ToTransfer = StatsRequest | Drain
encode = msgspec.msgpack.Encoder().encode
decode_from_transfer = msgspec.msgpack.Decoder(FromTransfer).decode
decode_to_transfer = msgspec.msgpack.Decoder(ToTransfer).decode


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """For engine ↔ transfer and service ↔ transfer: keeps message boundaries, shows a dead other end."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def spawn_transfer(
    config: TransferConfig,
    *,
    channel: socket.socket,
    arena: Arena,
    heartbeat: Heartbeat,
    service: socket.socket,
    secret: bytes,
) -> subprocess.Popen[bytes]:
    """Start `python -m kv_transfer.process`. Call it from a thread that lives as long as this process.

    `channel` and `service` are the transfer process's ends: close them here afterwards, so that their end is
    seen when it dies. It ends when this process does, when `service` is closed here, or on SIGTERM.
    """
    fds = {
        "--channel-fd": channel.fileno(), "--arena-fd": arena.fd, "--heartbeat-fd": heartbeat.fd,
        "--service-fd": service.fileno(),
    }  # fmt: skip
    fds_and_parent = {**fds, "--parent-pid": os.getpid()}
    arguments = [x for name, value in fds_and_parent.items() for x in (name, str(value))]
    child = subprocess.Popen(
        [sys.executable, "-m", "kv_transfer.process", *arguments],
        stdin=subprocess.PIPE,
        pass_fds=tuple(fds.values()),
        # What a process is started with stays readable in /proc/PID/environ: the secret goes through the
        # pipe.
        env={name: value for name, value in os.environ.items() if name != SECRET_VARIABLE},
    )
    assert child.stdin is not None
    child.stdin.write(msgspec.json.encode(config) + b"\n" + secret.hex().encode())
    child.stdin.close()
    return child
