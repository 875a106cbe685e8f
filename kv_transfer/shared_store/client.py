"""The client of a store in a process of its own, and `ClientProcess`, the store process's end of it.

    store process: `ClientProcess` ── method, keys, places ─▶ client process: a `StoreBackend`
                                   ◀─ results, or an error ─

Each connection carries one call at a time. The memory of objects is shared. Any peer of the store may
change it at any time.
"""

import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any

import msgspec
import setproctitle

from baton.kv_transfer.arena import memory_file
from baton.kv_transfer.shared_store import (
    EXIT_UNUSABLE,
    READERS,
    StoreBackend,
    StoreGone,
    load_backend,
    parse,
)
from baton.processes.children import die_with_parent
from baton.processes.spawn import spawn

CLIENT_MODULE = "baton.kv_transfer.shared_store.client"
RETRY = 2.0
"""Seconds between two attempts to connect."""
_encode, _decode = msgspec.msgpack.encode, msgspec.msgpack.decode


class ClientStart(msgspec.Struct, frozen=True):
    """The line on stdin of the client process, as JSON."""

    url: str
    title: str
    parent_pid: int
    fds: Sequence[int]  # memory, and connections


class ClientProcess:
    """Starts a client process, and calls the methods of its `StoreBackend`. It ends with the thread that
    started it.

    Attributes:
        memory: what the client reads and writes. `places` are (offset, size) in it.
    """

    memory: memoryview

    def __init__(self, url: str, title: str) -> None:
        self._fd, pairs = memory_file(), [Pipe() for _ in range(1 + READERS)]
        fds = self._fd, *(theirs.fileno() for _, theirs in pairs)
        start = ClientStart(url, title, os.getpid(), fds)
        self._popen = spawn("-m", CLIENT_MODULE, given=msgspec.json.encode(start), pass_fds=fds)
        for _, theirs in pairs:
            theirs.close()
        self._connections = [ours for ours, _ in pairs]

    def open(self, size: int) -> None:
        """The client connects, with so many bytes of memory. Until then it only loads its library."""
        os.ftruncate(self._fd, size)
        self.memory = memoryview(mmap.mmap(self._fd, size))
        with suppress(OSError):  # it has ended: `reason` says so
            self._connections[0].send_bytes(_encode(size))

    def reason(self) -> str:
        """Waits until the client is connected, or could not connect and tries again. Returns why it is not
        connected; "" if it is. Raises `StoreGone` if it has ended, and `ImportError` if it cannot run."""
        try:
            return self._receive(self._connections[0])
        except StoreGone:
            if self._popen.wait() == EXIT_UNUSABLE:
                raise ImportError("its library cannot be loaded") from None
            raise

    def call(self, connection: int, method: str, keys: Any, places: Sequence[tuple[int, int]] = ()) -> Any:
        """Raises `StoreGone`."""
        with suppress(OSError):  # it has ended: the next line says so
            self._connections[connection].send_bytes(_encode((method, keys, places)))
        return self._receive(self._connections[connection])

    def close(self) -> None:
        self._popen.kill()
        self._popen.wait()
        os.close(self._fd)
        for connection in self._connections:
            connection.close()

    def _receive(self, connection: Connection) -> Any:
        try:
            result, error = _decode(connection.recv_bytes())
        except (EOFError, OSError):
            raise StoreGone("its client has ended") from None
        if error:
            raise StoreGone(error)
        return result


def main() -> None:
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=ClientStart)
    die_with_parent(start.parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    setproctitle.setproctitle(start.title)
    memory_fd, *fds = start.fds
    connections = [Connection(fd) for fd in fds]
    try:
        made = load_backend(start.url)
    except ImportError as error:
        print(f"{start.url}: {error} (Debian: apt install libibverbs1)", file=sys.stderr, flush=True)
        os._exit(EXIT_UNUSABLE)
    memory = memoryview(mmap.mmap(memory_fd, _decode(connections[0].recv_bytes())))
    while True:
        try:
            backend = made(*parse(start.url), memory)
            break
        except StoreGone as error:
            connections[0].send_bytes(_encode((str(error), "")))
            time.sleep(RETRY)
    connections[0].send_bytes(_encode(("", "")))
    for connection in connections:
        threading.Thread(target=_serve, args=(connection, backend, memory)).start()


def _serve(connection: Connection, backend: StoreBackend, memory: memoryview) -> None:
    while True:
        method, keys, places = _decode(connection.recv_bytes())
        arguments = [keys, *([[memory[at : at + size] for at, size in places]] if places else [])]
        try:
            result, error = getattr(backend, method)(*arguments), ""
        except StoreGone as gone:
            result, error = None, str(gone)
        connection.send_bytes(_encode((result, error)))


if __name__ == "__main__":
    main()
