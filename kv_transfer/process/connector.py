"""The seam between the lifecycle of transfers and what carries them.

`prefill_side` and `decode_side` know only these interfaces; `tcp` implements the carrier's half.
"""

from __future__ import annotations

from typing import Any, Protocol

from kv_transfer.process.lane import OutgoingFrame
from kv_transfer.protocol.frame import Header
from kv_transfer.protocol.messages import Control, Identity


class Session(Protocol):
    """A pair of workers while connected. Ends once, and takes its credits and open transfers along."""

    number: int  # unique in this process
    slot_bytes: int  # largest payload that both sides take
    lane_count: int
    peer: Identity | None  # known from `session_up` on

    @property
    def kv_moved(self) -> float:
        """When bytes of KV frames last came, or left and were taken (time.monotonic()); 0: never."""
        ...

    def send(self, message: Control, transfer_id: bytes = ...) -> None:
        """Queue a control message. In order with the others, but may overtake frames."""
        ...

    def send_frame(self, frame: OutgoingFrame) -> None: ...

    def end(self, reason: str, detail: str) -> None: ...


class Handler(Protocol):
    """The lifecycle's half: PrefillSide or DecodeSide."""

    def session_up(self, session: Session) -> None: ...

    def session_down(self, session: Session, reason: str, detail: str) -> None:
        """It ended, or (decode) never came up. Frames may begin until `session_over`, for nobody."""
        ...

    def session_over(self, session: Session) -> None:
        """After `session_down`: its lanes are closed, all tickets returned, all frames dropped."""
        ...

    def control(self, session: Session, header: Header, message: Control) -> None: ...

    def kv_begins(self, session: Session, header: Header, slot: int) -> Any:
        """A payload is being received into this slot, one of `Slots.take`; returns a ticket for it."""
        ...

    def kv_ends(self, session: Session, header: Header, ticket: Any, whole: bool | None) -> None:
        """The ticket comes back. `whole`: the checksum matched, or not; None: cut off in mid-frame."""
        ...

    def frame_begins(self, session: Session, frame: OutgoingFrame) -> bool:
        """The frame is next on the wire. False: its transfer has ended, and its slot was given back."""
        ...

    def frame_sent(self, session: Session, frame: OutgoingFrame) -> None: ...

    def frame_dropped(self, session: Session, frame: OutgoingFrame) -> None:
        """Its lane closed before it was all sent."""
        ...


class Connector(Protocol):
    """The carrier's half, as the decode side uses it."""

    def connect(self, address: tuple[str, int], incarnation: int, lanes: int) -> Session:
        """Start a session with that incarnation; `session_up` or `session_down` follows. OSError: cannot."""
        ...


class ProtocolError(Exception):
    """Raised by a Handler in `control`: the peer broke the protocol, its session ends.

    `kind` names the counter.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
