"""What a lane reports to, and the frames that it is given to send."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from baton.kv_transfer.protocol.frame import Header


@dataclass(slots=True, eq=False)
class OutgoingFrame:
    """A KV frame to send. Its slot is in use until `frame_sent` or `frame_dropped` is called."""

    header: Header
    payload: memoryview
    slot: int
    started: float = 0.0


L = TypeVar("L", contravariant=True)


class LaneOwner(Protocol[L]):
    """What a lane (of type L) reports to. No method blocks."""

    def control(self, lane: L, header: Header, payload: memoryview) -> None: ...

    def lane_closed(self, lane: L, kind: str, why: str) -> None:
        """The last call of a lane. `kind`: that of a FrameError or of `close_soon`, or "socket", or "eof"."""
        ...


class LaneReceiver(Protocol[L]):
    """Takes the KV frames that come on a lane. No method blocks."""

    def kv_begins(self, lane: L, header: Header) -> tuple[memoryview, Any]:
        """A frame begins. Returns memory for its payload, and a ticket, which `kv_ends` gets.

        Raises FrameError if the peer may not send the frame. The lane then closes."""
        ...

    def kv_ends(self, lane: L, header: Header, ticket: Any, whole: bool | None) -> None:
        """The frame is over. `whole`: whether its checksum matched; None: the lane closed before."""
        ...


class LaneSender(Protocol[L]):
    """Follows the KV frames that leave by a lane. No method blocks."""

    def frame_begins(self, lane: L, frame: OutgoingFrame) -> bool:
        """Called before the frame is written. Returns False if its transfer has ended: the lane skips it.

        The sender has then given back its slot."""
        ...

    def frame_sent(self, lane: L, frame: OutgoingFrame) -> None: ...

    def frame_dropped(self, lane: L, frame: OutgoingFrame) -> None: ...
