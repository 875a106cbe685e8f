"""What a lane reports to, and the frames that it is given to send."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from kv_transfer.protocol.frame import Header


@dataclass(slots=True, eq=False)
class OutgoingFrame:
    """A KV frame on its way. Its slot is in use until the owner is told `frame_sent` or `frame_dropped`."""

    header: Header
    payload: memoryview
    slot: int
    started: float = 0.0


L = TypeVar("L", contravariant=True)


class LaneOwner(Protocol[L]):
    """What a lane (of type L) reports to. No method blocks."""

    def control(self, lane: L, header: Header, payload: memoryview) -> None: ...

    def lane_closed(self, lane: L, kind: str, why: str) -> None:
        """Last call. `kind` is a FrameError's kind, or "socket", "eof", or what `close_soon` was given."""
        ...


class LaneReceiver(Protocol[L]):
    """Takes the KV frames that come on a lane. No method blocks."""

    def kv_begins(self, lane: L, header: Header) -> tuple[memoryview, Any]:
        """Where to put the payload, and a ticket. FrameError: the frame may not come, and the lane closes."""
        ...

    def kv_ends(self, lane: L, header: Header, ticket: Any, whole: bool | None) -> None:
        """Returns the ticket. `whole`: whether the checksum matched; None: the lane closed in mid-frame."""
        ...


class LaneSender(Protocol[L]):
    """Follows the KV frames that leave by a lane. No method blocks."""

    def frame_begins(self, lane: L, frame: OutgoingFrame) -> bool:
        """The frame is next on the wire. False: its transfer has ended, and its slot was given back."""
        ...

    def frame_sent(self, lane: L, frame: OutgoingFrame) -> None: ...

    def frame_dropped(self, lane: L, frame: OutgoingFrame) -> None: ...
