"""The seam between the lifecycle of transfers and the connector that carries them.

`prefill_side` implements `FrameSender`, and `decode_side` implements `FrameReceiver`. Both know sessions
only as `Session`, which `tcp_session` implements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from baton.kv_transfer.process.lane_owner import OutgoingFrame
from baton.kv_transfer.protocol.frame import Header
from baton.kv_transfer.protocol.messages import Control, Identity


class Session(Protocol):
    """A connection of two workers. It ends once, and its credits and open transfers end with it."""

    number: int  # unique in this process
    slot_bytes: int  # largest payload that both sides take
    lane_count: int
    peer: Identity | None  # known from `session_up` on

    @property
    def kv_moved(self) -> float:
        """When bytes of KV frames last came, or when the peer last took some (time.monotonic()). 0: never."""
        ...

    def moved(self, now: float) -> None:
        """The peer read a slice, or a slice that it exported was read."""
        ...

    def send(self, message: Control, transfer_id: bytes = ...) -> None:
        """Queues a control message. Control messages stay in order, but may overtake frames."""
        ...

    def end(self, reason: str, detail: str) -> None: ...


class SessionToDecode(Session, Protocol):
    """A session that carries KV frames to the peer."""

    def send_frame(self, frame: OutgoingFrame) -> None: ...


S = TypeVar("S", bound=Session, contravariant=True)


class SessionHandler(Protocol[S]):
    """Gets the events of the sessions of one side."""

    def session_up(self, session: S) -> None: ...

    def session_down(self, session: S, reason: str, detail: str) -> None:
        """The session ended, or (decode) never came up. Frames of it may begin until `session_over`."""
        ...

    def session_over(self, session: S) -> None:
        """All lanes are closed, and no frame is under way. Comes after `session_down`."""
        ...

    def control(self, session: S, header: Header, message: Control) -> None: ...


class FrameReceiver(SessionHandler[Session], Protocol):
    """The side that receives KV frames: decode."""

    def kv_begins(self, session: Session, header: Header, slot: int) -> Any:
        """A lane receives a frame into this slot. Returns a ticket, which `kv_ends` gets."""
        ...

    def kv_ends(self, header: Header, ticket: Any, whole: bool | None) -> None:
        """The frame is over. `whole`: whether its checksum matched; None: the lane closed before."""
        ...


class FrameSender(SessionHandler[SessionToDecode], Protocol):
    """The side that sends KV frames: prefill."""

    def frame_begins(self, frame: OutgoingFrame) -> bool:
        """Called before the frame is written. Returns False if its transfer has ended: the lane skips it.

        This side has then given back its slot."""
        ...

    def frame_sent(self, frame: OutgoingFrame) -> None: ...

    def frame_dropped(self, frame: OutgoingFrame) -> None:
        """The lane closed before all of the frame was sent."""
        ...


# (address, incarnation, number of lanes): starts a session with that prefill worker. `session_up` or
# `session_down` follows. OSError: the session cannot start.
Connect = Callable[[tuple[str, int], int, int], Session]


class ProtocolError(Exception):
    """A `SessionHandler` raises it in `control`: the peer broke the protocol, so its session ends.

    `kind` names the counter.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
