"""Pages of `DeviceMemory` that outlive the process that made them: KV, states and weights of an engine, for
those that follow it (`kept_cache` and `shared_weights` in `engine.execution`). Without torch and CUDA.

An engine makes the memory and exports its pages as files, on a GPU, too. A file keeps its page after the
process that made it has ended, however that ended. The files wait on a shelf, which is a Unix socket: one
message, which each engine peeks at, so that the kernel gives each of them copies of the descriptors. The
message stays there while one process holds the socket, so no engine that dies can lose it. Only an engine
that starts alone takes a message out: that of the weights, and that of KV if it needs other pages. It makes
others. KV and weights have a shelf each, since a message has too few descriptors for both.
"""

import fcntl
import json
import os
import socket
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from baton.system.device_memory import DeviceMemory, Exported, Page

MOST_PAGES = 64
"""Of a dtype of the cache, and of the weights: each is a file. An engine that stands by has one page of each
dtype of the cache more."""
MOST_FILES = 253
"""Descriptors in one message (`SCM_MAX_FD` of Linux)."""
_MOST_BYTES = 1 << 16


class CannotShareError(ValueError):
    """Of an engine that would stand by: it needs other pages than the engine that serves has. It can start
    alone."""


class KeptPages(NamedTuple):
    """Pages of one size, in the order of their addresses."""

    page_bytes: int
    pages: Sequence[Exported]


class Shelf(NamedTuple):
    """Where files of pages wait for engines: both ends of a socket."""

    inlet: int
    outlet: int

    @classmethod
    def create(cls) -> "Shelf":
        inlet, outlet = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(inlet.detach(), outlet.detach())

    def put(self, kept: Sequence[KeptPages]) -> None:
        """The engine that makes the pages calls it. Nothing is there before. The files stay the caller's."""
        fds = [page.fd for each in kept for page in each.pages]
        offsets = [(each.page_bytes, [page.offset for page in each.pages]) for each in kept]
        with socket.fromfd(self.inlet, socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
            socket.send_fds(end, [json.dumps(offsets).encode()], fds)

    def pages(self, peek: int = socket.MSG_PEEK) -> Sequence[KeptPages]:
        """Copies of what `put` was given. The caller owns the files. Empty: nothing yet."""
        with socket.fromfd(self.outlet, socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
            fds = array("i")
            room = socket.CMSG_LEN(MOST_FILES * fds.itemsize)
            flags = peek | socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
            try:
                message, found, _, _ = end.recvmsg(_MOST_BYTES, room, flags)
            except BlockingIOError:
                return []
        for *_, data in found:
            fds.frombytes(data)
        copies = iter(fds)
        return [
            KeptPages(page_bytes, [Exported(next(copies), offset) for offset in offsets])
            for page_bytes, offsets in json.loads(message)
        ]

    def clear(self) -> None:
        """Lets go of what `put` was given, which may be called again then."""
        close(*self.pages(0))


class KeptMemory(NamedTuple):
    """Of one rank, for engines that follow each other. The worker owns the descriptors; processes that it
    starts inherit them."""

    table: int
    """Memory of the host, empty at first. It cannot shrink, so no process that has mapped it gets SIGBUS."""
    cache: Shelf
    """Of KV and states."""
    weights: Shelf

    @classmethod
    def create(cls) -> "KeptMemory":
        table = os.memfd_create("baton-kept-blocks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fcntl.fcntl(table, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        return cls(table, Shelf.create(), Shelf.create())

    @property
    def fds(self) -> Sequence[int]:
        return self.table, *self.cache, *self.weights

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


def exported(memory: DeviceMemory, pages: Sequence[Page]) -> KeptPages:
    """The caller owns the files."""
    return KeptPages(memory.page_bytes, [memory.export(page) for page in pages])


def adopted(memory: DeviceMemory, kept: KeptPages) -> list[Page]:
    """The pages of another process. Closes its files. Raises `MemoryError`."""
    try:
        return [page for each in kept.pages for page in memory.adopt(each, 1)]
    finally:
        close(kept)


def close(*kept: KeptPages) -> None:
    """Closes the files."""
    for each in kept:
        for page in each.pages:
            os.close(page.fd)
