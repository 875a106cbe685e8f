"""Effects that the state machines of both sides have."""

from __future__ import annotations

from dataclasses import dataclass

from baton.kv_transfer.protocol.messages import Control


@dataclass(frozen=True, slots=True)
class Send:
    """To the peer, by this session."""

    session: int
    transfer_id: bytes
    message: Control


@dataclass(frozen=True, slots=True)
class Expired:
    """To the log and the metrics: this deadline has passed."""

    deadline: str  # its name in TransferDeadlines
    detail: str
