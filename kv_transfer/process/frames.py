"""Where connections find slots for slices that come."""

import fcntl
import os
import struct
from collections.abc import Sequence

from baton.kv_transfer.arena import Arena
from baton.kv_transfer.protocol.frame import FrameError

_SLOT = struct.Struct("<I")
_F_SETPIPE_SZ, _F_GETPIPE_SZ = 1031, 1032  # linux/fcntl.h; the fcntl module has them on some systems only


class SlotPipe:
    """The receiver's free slots that are laid out, where every process that serves lanes can take one.

    The transfer process writes the pipe before the credit goes out. `ReceiverSlots` keeps the ledger."""

    def __init__(self, arena: Arena) -> None:
        """Has room for all slots of the arena."""
        self.arena = arena
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # Twice the bytes: a page that is read in part has only its rest for more.
        needed = 2 * arena.num_slots * _SLOT.size
        if needed > fcntl.fcntl(self._write_fd, _F_GETPIPE_SZ):
            fcntl.fcntl(self._write_fd, _F_SETPIPE_SZ, needed)

    def lay_out(self, slots: Sequence[int]) -> None:
        written = os.write(self._write_fd, b"".join(map(_SLOT.pack, slots)))
        assert written == len(slots) * _SLOT.size, "the pipe has room for all slots"

    def take(self) -> int:
        """For a KV frame that begins. FrameError: no slot is laid out, so the frame has no credit."""
        try:
            return _SLOT.unpack(os.read(self._read_fd, _SLOT.size))[0]
        except BlockingIOError:
            raise FrameError("credit", "a frame came for which no slot is laid out") from None
