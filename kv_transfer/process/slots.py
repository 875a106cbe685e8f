"""Free slots of the receiving arena: most wait here, some where every process that receives can take one.

A KV frame needs a slot the moment its header is read, in whichever process reads it. So the slots that credit
was given for lie in a pipe, which all of them read; the transfer process alone writes it, before the credit
goes out.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import struct

from kv_transfer.protocol.frame import FrameError

_SLOT = struct.Struct("<I")
_F_SETPIPE_SZ, _F_GETPIPE_SZ = 1031, 1032  # linux/fcntl.h; the fcntl module has them on some systems only


class Slots:
    """`take` is for every process that inherited it, the rest for the transfer process, which keeps count."""

    def __init__(self, count: int) -> None:
        # A heap, lowest first: few slots are used again and again, and neighbours are copied together.
        self._heap = list(range(count))
        self._laid_out = 0  # in the pipe, or taken from it and not told of yet
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        needed = 2 * count * _SLOT.size  # twice: a page that is read in part has only its rest for more
        if needed > fcntl.fcntl(self._write_fd, _F_GETPIPE_SZ):
            fcntl.fcntl(self._write_fd, _F_SETPIPE_SZ, needed)

    @property
    def free(self) -> int:
        """As far as the transfer process knows."""
        return len(self._heap) + self._laid_out

    def lay_out(self, count: int) -> None:
        """Have at least so many where they can be taken, or all that are free."""
        slots: list[int] = []
        while self._laid_out + len(slots) < count and self._heap:
            slots.append(heapq.heappop(self._heap))
        if slots:
            written = os.write(self._write_fd, b"".join(map(_SLOT.pack, slots)))
            assert written == len(slots) * _SLOT.size, "the pipe has room for all slots"
            self._laid_out += len(slots)

    def take(self) -> int | None:
        """A slot for a frame that begins; None: its sender had no credit. `taken` is to hear of it."""
        with contextlib.suppress(BlockingIOError):
            return _SLOT.unpack(os.read(self._read_fd, _SLOT.size))[0]
        return None

    def taken(self) -> None:
        """Somebody has one of those that were laid out."""
        self._laid_out -= 1
        assert self._laid_out >= 0, "a slot came from nowhere"

    def give_back(self, slot: int) -> None:
        heapq.heappush(self._heap, slot)


def take_slot(slots: Slots) -> int:
    """For a KV frame that begins, in any process. FrameError: no slot is laid out, so it has no credit."""
    slot = slots.take()
    if slot is None:
        raise FrameError("credit", "a frame came for which no slot is laid out")
    return slot
