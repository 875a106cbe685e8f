"""What a lane moves, and what it reports to: frames to send, and slots for frames that come."""

import fcntl
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from baton.kv_transfer.arena import Arena
from baton.kv_transfer.protocol.frame import FrameError, Header

_SLOT = struct.Struct("<I")
_F_SETPIPE_SZ, _F_GETPIPE_SZ = 1031, 1032  # linux/fcntl.h; the fcntl module has them on some systems only


@dataclass(slots=True, eq=False)
class OutgoingFrame:
    """A KV frame to send. Its slot is in use until `frame_sent` or `frame_dropped` is called."""

    header: Header
    payload: memoryview
    slot: int
    started: float = 0.0


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

    def kv_begins(self, lane: L, header: Header, slot: int) -> None:
        """A frame begins, in a slot that the lane took. `kv_ends` follows."""
        raise NotImplementedError

    def kv_ends(self, lane: L, header: Header, slot: int, intact: bool | None) -> None:
        """The frame is over. `intact`: whether its checksum matched; None: the lane closed before."""
        raise NotImplementedError

    # ------------------------------------------------------------ KV frames that leave

    def frame_begins(self, lane: L, frame: OutgoingFrame) -> bool:
        """Called before the frame is written. Returns False if its transfer has ended: the lane skips it.

        The owner has then given back its slot."""
        raise NotImplementedError

    def frame_sent(self, lane: L, frame: OutgoingFrame) -> None:
        raise NotImplementedError

    def frame_dropped(self, lane: L, frame: OutgoingFrame) -> None:
        """The lane closed before all of the frame was sent."""
        raise NotImplementedError
