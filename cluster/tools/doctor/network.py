"""Measures the network between two nodes.

One node runs `baton doctor --listen PORT`, the other `baton doctor --peer HOST:PORT`. The peer opens
`--kv-lanes` TCP connections. On each, both ends prove with an HMAC of the other's nonce that they know the
cluster secret. Then the peer sends for `SECONDS`.

If both nodes have NIXL, the listener first reads memory of the peer with it.

The result of the lanes is the bandwidth of plain sockets. KV lanes add checksums and copies: see
docs/lab/kv-transfer.md.
"""

import hmac
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from baton.cluster.options.clients import DoctorOptions
from baton.cluster.tools.doctor import nixl
from baton.cluster.tools.doctor.finding import Finding, bad, good, warning

NONCE = MAC = 32  # bytes
PIECE = 1 << 20  # bytes of one write
SECONDS = 3.0  # for which the peer sends
MIN_GBIT = 8.0  # Gbit/s, below which the finding is a warning
TIMEOUT_S = 10.0


class Stranger(Exception):
    """The other end did not prove that it knows the cluster secret."""


def measure(options: DoctorOptions, secret: bytes) -> Iterator[Finding]:
    """Receives from one peer with `--listen`, and sends to a listening doctor with `--peer`."""
    lanes: list[socket.socket] = []
    listens = options.listen is not None
    labels = (b"listener", b"peer") if listens else (b"peer", b"listener")
    try:
        for lane in _accepted(options) if listens else _connected(options):
            lanes.append(lane)
        for lane in lanes:
            _prove(lane, secret, *labels)
        yield from nixl.measure(lanes[0], partial(_exactly, lanes[0]), secret, reads=listens)
        began = time.perf_counter()
        with ThreadPoolExecutor(len(lanes)) as threads:
            size = sum(threads.map(_receive if listens else _push, lanes))
        took = time.perf_counter() - began
    except (Stranger, OSError) as error:
        remedy = "Give both nodes the same secret and --kv-lanes, and --listen a free port."
        if isinstance(error, OSError) and not listens:
            remedy = "Start `baton doctor --listen` there with the same --kv-lanes; look at firewalls."
        yield bad("lanes", f"{options.peer}: {error}" if options.peer else str(error), remedy)
        return
    finally:
        for lane in lanes:
            lane.close()
    gbit = size * 8 / took / 1e9
    found = f"{gbit:.1f} Gbit/s ({size / took / 1e9:.2f} GB/s) over {len(lanes)} lanes"
    if gbit < MIN_GBIT:
        remedy = "Try more --kv-lanes; look at the cards' speed, MTU and net.core.*mem_max."
        yield warning("lanes", found, remedy)
    else:
        yield good("lanes", found)


def _accepted(options: DoctorOptions) -> Iterator[socket.socket]:
    assert options.listen is not None
    with socket.create_server((options.host, options.listen), backlog=options.kv_lanes) as server:
        for _ in range(options.kv_lanes):
            yield server.accept()[0]


def _connected(options: DoctorOptions) -> Iterator[socket.socket]:
    assert options.peer is not None
    host, _, port = options.peer.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"--peer {options.peer}: must be HOST:PORT")
    for _ in range(options.kv_lanes):
        yield socket.create_connection((host, int(port)), timeout=TIMEOUT_S)


def _receive(lane: socket.socket) -> int:
    """Returns the bytes that came until the peer ended the lane."""
    buffer, size = bytearray(PIECE), 0
    while got := lane.recv_into(buffer):
        size += got
    return size


def _push(lane: socket.socket) -> int:
    """Sends for `SECONDS`. Returns the bytes."""
    piece, size = os.urandom(PIECE), 0
    until = time.perf_counter() + SECONDS
    while time.perf_counter() < until:
        lane.sendall(piece)
        size += PIECE
    lane.shutdown(socket.SHUT_WR)
    return size


def _prove(lane: socket.socket, secret: bytes, me: bytes, other: bytes) -> None:
    """Proves the secret to the other end and verifies its proof. Raises Stranger.

    Each end signs its own label (`me`), so that a proof cannot be reflected to its sender.
    """
    lane.settimeout(TIMEOUT_S)
    mine = os.urandom(NONCE)
    lane.sendall(mine)
    theirs = _exactly(lane, NONCE)
    lane.sendall(hmac.digest(secret, b"baton doctor " + me + theirs, "sha256"))
    if not hmac.compare_digest(
        _exactly(lane, MAC), hmac.digest(secret, b"baton doctor " + other + mine, "sha256")
    ):
        raise Stranger("the other node does not know this cluster's secret")


def _exactly(lane: socket.socket, size: int) -> bytes:
    got = lane.recv(size, socket.MSG_WAITALL)
    if len(got) != size:
        raise Stranger("the other node closed the connection: it has another secret or is no `baton doctor`")
    return got
