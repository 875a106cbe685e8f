"""What a lane reports to, and where it finds slots for slices that come."""

import fcntl
import os
import struct
from collections.abc import Sequence
from typing import Generic, TypeVar

from baton.kv_transfer.arena import Arena
from baton.kv_transfer.protocol.frame import FrameError, Header
from baton.kv_transfer.slices import Slice

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


L = TypeVar("L", contravariant=True)


class LaneOwner(Generic[L]):
    """What a lane (of type L) reports to. No method blocks.

    `Handshake` owns lanes that carry no KV yet, a `Session` those of the transfer process, and a `Mover` its
    own."""

    def control(self, lane: L, header: Header, payload: memoryview) -> None:
        raise NotImplementedError

    def lane_closed(self, lane: L, kind: str, why: str) -> None:
        """The last call of a lane. `kind`: that of a FrameError or of `close_soon`, or "socket", or "eof"."""
        raise NotImplementedError

    # ------------------------------------------------------------ KV frames that come

    def kv_begins(self, lane: L, s: Slice) -> None:
        """A frame begins, in a slot that the lane took. `kv_ends` follows."""
        raise NotImplementedError

    def kv_ends(self, lane: L, s: Slice, intact: bool | None, began: float, ended: float) -> None:
        """The frame is over. `intact`: whether its checksum matched; None: the lane closed before. `began`,
        `ended`: when the lane saw its header and its end (time.monotonic())."""
        raise NotImplementedError

    # ------------------------------------------------------------ KV frames that leave

    def begins(self, s: Slice) -> bool:
        """Called before the slice is written. Returns False if its transfer has ended: the lane skips it.

        The owner has then given back its slot."""
        raise NotImplementedError

    def left(self, lane: L, s: Slice, *, sent: bool) -> None:
        """The lane needs the slot no more. `sent`: all of it was sent. Otherwise the lane closed before."""
        raise NotImplementedError
