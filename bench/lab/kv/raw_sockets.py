"""The baseline for moving KV: plain sockets between two processes, with a thread for each stream.

Each stream sends its part of a large buffer with `sendall`, in pieces of 1 MiB, and receives with `recv_into`
into another buffer, without checksums or frames. So it shows what Python's sockets reach on this machine.
"""

import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from baton.bench.lab.harness.hosts import Host
from baton.bench.lab.harness.processes import cpu_seconds

MIB = 1 << 20
_SIZE = 8  # bytes of an order: how much a stream must send


class RawPair:
    """`streams` connections to a child process that sends. Close it."""

    def __init__(self, streams: int, sender: Host | None = None, address: str = "127.0.0.1") -> None:
        """`sender`: the host of the child, which connects to `address`, where the caller is."""
        with socket.create_server((address, 0), backlog=streams) as listener:
            context = multiprocessing.get_context("spawn")
            self._child = context.Process(
                target=_sender, args=(listener.getsockname(), streams, sender), daemon=True
            )
            self._child.start()
            self._streams = [listener.accept()[0] for _ in range(streams)]
        self._buffer = memoryview(b"")
        assert self._child.pid is not None
        self._pid = self._child.pid

    def seconds(self, size: int) -> float:
        """Seconds for `size` bytes, from the order to the last byte in the buffer."""
        part = size // len(self._streams)
        if len(self._buffer) < part * len(self._streams):
            self._buffer = memoryview(bytearray(part * len(self._streams)))

        def receive(number: int) -> None:
            at, stop = number * part, (number + 1) * part
            while at < stop:
                count = self._streams[number].recv_into(self._buffer[at : min(at + MIB, stop)])
                assert count, "the raw sender died"
                at += count

        started = time.perf_counter()
        for stream in self._streams:
            stream.sendall(part.to_bytes(_SIZE, "little"))
        in_threads(receive, len(self._streams))
        return time.perf_counter() - started

    def cpu_seconds(self) -> float:
        return cpu_seconds(os.getpid()) + cpu_seconds(self._pid)

    def close(self) -> None:
        for stream in self._streams:
            stream.close()
        self._child.join()


def _sender(address: tuple[str, int], streams: int, host: Host | None) -> None:
    """The child: each thread sends what its orders say, until the connection ends."""
    if host is not None:
        host.enter()
    source = memoryview(bytearray(os.urandom(MIB)) * 64)

    def send(_: int) -> None:
        with socket.socket() as stream:
            stream.connect(address)
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while order := stream.recv(_SIZE, socket.MSG_WAITALL):
                unsent = int.from_bytes(order, "little")
                while unsent:
                    piece = min(unsent, MIB)
                    at = unsent % (len(source) - MIB)
                    stream.sendall(source[at : at + piece])
                    unsent -= piece

    in_threads(send, streams)


def in_threads(function: Callable[[int], None], count: int) -> None:
    with ThreadPoolExecutor(count) as threads:
        list(threads.map(function, range(count)))
