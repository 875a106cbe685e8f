"""Descriptors of KV and weights that outlive their engine (`kept_cache` and `shared_weights` in
`engine.execution`), as a worker holds them for each rank. Without torch, and without CUDA.

An engine makes the memory and exports its pages as files, on a GPU, too. A file keeps its page after the
process that made it has ended, however that ended. The files wait in a Unix socket: one message, which each
engine peeks at, so that the kernel gives each of them copies of the descriptors. The message stays there
while one process holds the socket, so no engine that dies can lose it. Only an engine that starts alone takes
a message out: that of the weights, and that of KV if it needs other pages. It makes others. KV and weights
have a socket each, since a message has too few descriptors for both.
"""

import fcntl
import os
import socket
from array import array
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from baton.system.device_memory import Exported
from baton.system.kept_pages import KeptMemory, KeptPages, Shelf, close

MOST_FILES = 253
"""Descriptors in one message (`SCM_MAX_FD` of Linux)."""
_MOST_BYTES = 1 << 16


class KeptFiles(NamedTuple):
    """Those of one rank. The worker owns them; processes that it starts inherit them."""

    table: int
    """A `memfd`, empty at first. It cannot shrink, so no process that has mapped it gets SIGBUS."""
    inlet: int
    """An engine that makes the pages of KV writes their files here."""
    outlet: int
    """From here each engine gets copies of the files."""
    weights_inlet: int
    """The same for weights."""
    weights_outlet: int

    @classmethod
    def create(cls) -> "KeptFiles":
        table = os.memfd_create("baton-kept-blocks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fcntl.fcntl(table, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        return cls(table, *_socket_pair(), *_socket_pair())

    @property
    def memory(self) -> KeptMemory:
        return KeptMemory(
            self.table, _shelf(self.inlet, self.outlet), _shelf(self.weights_inlet, self.weights_outlet)
        )

    def close(self) -> None:
        for fd in self:
            os.close(fd)


def _socket_pair() -> tuple[int, int]:
    inlet, outlet = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return inlet.detach(), outlet.detach()


def _shelf(inlet: int, outlet: int) -> Shelf:
    return Shelf(partial(_put, inlet), partial(_pages, outlet), partial(_clear, outlet))


def _put(inlet: int, kept: Sequence[KeptPages]) -> None:
    fds = [page.fd for each in kept for page in each.pages]
    with socket.fromfd(inlet, socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
        socket.send_fds(end, [msgspec.json.encode(kept)], fds)


def _clear(outlet: int) -> None:
    close(*_pages(outlet, 0))


def _pages(outlet: int, peek: int = socket.MSG_PEEK) -> Sequence[KeptPages]:
    with socket.fromfd(outlet, socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
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
        KeptPages(each.page_bytes, [Exported(next(copies), page.offset) for page in each.pages])
        for each in msgspec.json.decode(message, type=list[KeptPages])
    ]
