"""Measures the network between two nodes.

One node runs `baton doctor --listen PORT`, the other `baton doctor --peer HOST:PORT`. The peer opens
`--kv-lanes` TCP connections. On each, both ends prove with an HMAC of the other's nonce that they know the
cluster secret. Then the peer sends for `SECONDS`.

If both nodes have NIXL, the listener first reads memory of the peer with it.

The result of the lanes is the bandwidth of plain sockets. KV lanes add checksums and copies: see
docs/lab/kv-transfer.md.
"""

from __future__ import annotations

import hmac
import os
import socket
import time
from collections.abc import Callable, Iterator
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


def listen(options: DoctorOptions, secret: bytes) -> Iterator[Finding]:
    """Receives from one peer and yields the bandwidth."""
    assert options.listen is not None
    with socket.create_server((options.host, options.listen), backlog=options.kv_lanes) as server:
        lanes = [server.accept()[0] for _ in range(options.kv_lanes)]
    counts = [0] * len(lanes)

    def receive(number: int) -> None:
        lane, buffer = lanes[number], bytearray(PIECE)
        while got := lane.recv_into(buffer):
            counts[number] += got

    try:
        for lane in lanes:
            _prove(lane, secret, b"listener", b"peer")
        yield from nixl.measure(lanes[0], partial(_exactly, lanes[0]), secret, reads=True)
        began = time.perf_counter()
        _in_threads(receive, len(lanes))
        took = time.perf_counter() - began
    except (Stranger, OSError) as error:
        yield bad("lanes", str(error), "Give both nodes the same secret and --kv-lanes.")
        return
    finally:
        for lane in lanes:
            lane.close()
    yield _judged(sum(counts), took, len(lanes))


def send(options: DoctorOptions, secret: bytes) -> Iterator[Finding]:
    """Sends to a listening doctor and yields the bandwidth."""
    assert options.peer is not None
    host, _, port = options.peer.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"--peer {options.peer}: must be HOST:PORT")
    lanes: list[socket.socket] = []
    counts = [0] * options.kv_lanes
    try:
        for _ in range(options.kv_lanes):
            lanes.append(socket.create_connection((host, int(port)), timeout=TIMEOUT_S))
        for lane in lanes:
            _prove(lane, secret, b"peer", b"listener")
        yield from nixl.measure(lanes[0], partial(_exactly, lanes[0]), secret, reads=False)
        began = time.perf_counter()

        def push(number: int) -> None:
            piece = os.urandom(PIECE)
            while time.perf_counter() < began + SECONDS:
                lanes[number].sendall(piece)
                counts[number] += PIECE
            lanes[number].shutdown(socket.SHUT_WR)

        _in_threads(push, len(lanes))
        took = time.perf_counter() - began
    except Stranger as error:
        yield bad("lanes", str(error), "Give both nodes the same secret.")
        return
    except OSError as error:
        yield bad(
            "lanes", f"{options.peer}: {error}",
            "Start `baton doctor --listen` there with the same --kv-lanes; look at firewalls between.",
        )  # fmt: skip
        return
    finally:
        for lane in lanes:
            lane.close()
    yield _judged(sum(counts), took, len(lanes))


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


def _judged(size: int, seconds: float, lanes: int) -> Finding:
    gbit = size * 8 / seconds / 1e9
    found = f"{gbit:.1f} Gbit/s ({size / seconds / 1e9:.2f} GB/s) over {lanes} lanes"
    if gbit < MIN_GBIT:
        return warning(
            "lanes", found, "Try more --kv-lanes; look at the cards' speed, MTU and net.core.*mem_max."
        )
    return good("lanes", found)


def _in_threads(work: Callable[[int], None], count: int) -> None:
    """Runs `work` in one thread per lane. When all have ended, raises the exception of the first failure."""
    with ThreadPoolExecutor(count) as threads:
        list(threads.map(work, range(count)))
