"""Descriptors of KV that outlives its engine (`engine.execution.kept_cache`), as a worker holds them for each
rank. Without torch, and without CUDA.

An engine makes the memory and exports its pages as files, on a GPU, too. A file keeps its page after the
process that made it has ended, however that ended. The files wait in a Unix socket: one message, which each
engine peeks at, so that the kernel gives each of them copies of the descriptors. The message stays there
while one process holds the socket. No engine takes it out, so none that dies can lose it.
"""

import os
import socket
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from baton.machine.device_memory import Exported
from baton.machine.kept_pages import KeptMemory, KeptPages

MOST_FILES = 253
"""Descriptors in one message (`SCM_MAX_FD` of Linux)."""
_MOST_BYTES = 1 << 16


class KeptFiles(NamedTuple):
    """Those of one rank. The worker owns them; processes that it starts inherit them."""

    table: int
    """An empty `memfd` that can be sealed."""
    weights: int
    """The same for weights on a CPU."""
    inlet: int
    """The engine that makes the pages writes their files here, once."""
    outlet: int
    """From here each engine gets copies of the files."""

    @classmethod
    def create(cls) -> "KeptFiles":
        inlet, outlet = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        table = os.memfd_create("baton-kept-blocks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        return cls(table, _weights_file(), inlet.detach(), outlet.detach())

    def with_new_weights(self) -> "KeptFiles":
        """The same files, but for that of weights. Closes the old one."""
        os.close(self.weights)
        return self._replace(weights=_weights_file())

    @property
    def memory(self) -> KeptMemory:
        return KeptMemory(self.table, self.weights, self.put, self.pages)

    def put(self, kept: Sequence[KeptPages]) -> None:
        """As in `KeptMemory`, and the next."""
        fds = [page.fd for each in kept for page in each.pages]
        with socket.fromfd(self.inlet, socket.AF_UNIX, socket.SOCK_SEQPACKET) as inlet:
            socket.send_fds(inlet, [msgspec.json.encode(kept)], fds)

    def pages(self) -> Sequence[KeptPages]:
        with socket.fromfd(self.outlet, socket.AF_UNIX, socket.SOCK_SEQPACKET) as outlet:
            fds = array("i")
            room = socket.CMSG_LEN(MOST_FILES * fds.itemsize)
            flags = socket.MSG_PEEK | socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
            try:
                message, found, _, _ = outlet.recvmsg(_MOST_BYTES, room, flags)
            except BlockingIOError:
                return []
        for *_, data in found:
            fds.frombytes(data)
        copies = iter(fds)
        return [
            KeptPages(each.page_bytes, [Exported(next(copies), page.offset) for page in each.pages])
            for each in msgspec.json.decode(message, type=list[KeptPages])
        ]

    def close(self) -> None:
        for fd in self:
            os.close(fd)


def _weights_file() -> int:
    return os.memfd_create("baton-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
