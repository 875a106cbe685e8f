"""What a sender has to send, and whose slice is next: pure, and the pump's alone.

A *prefill* is known until it is released; a *transfer* of it is open while a peer fetches it, one at a time,
on a *session* with that peer, whose credits and window its slices need.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kv_transfer.layout import Range, Slice
from kv_transfer.protocol.credits import SenderCredits
from kv_transfer.protocol.messages import FirstToken


@dataclass(slots=True, eq=False)
class Session:
    number: int
    credits: SenderCredits = field(default_factory=SenderCredits)
    window: int = 1
    slots_out: int = 0

    @property
    def has_room(self) -> bool:
        return self.credits.available > 0 and self.slots_out < self.window


@dataclass(slots=True, eq=False)
class Prefill:
    id: bytes
    table: Any = None  # None until open()
    num_tokens: int = 0
    ready: list[tuple[int, int, int, Any]] = field(default_factory=list)  # (layer, start, stop, event)
    launched: bool = False  # nothing more becomes ready
    first_token: FirstToken | None = None
    transfer: Transfer | None = None
    gathers: int = 0  # enqueued, their events not passed
    ended: str | None = None


@dataclass(slots=True, eq=False)
class Transfer:
    id: bytes
    prefill: Prefill
    session: Session
    slot_bytes: int
    ranges: tuple[Range, ...]
    heads: Range
    pending: deque[tuple[Slice, Any]] = field(default_factory=deque)  # with the event that makes it ready
    frames: int = 0  # pending and handed over
    bytes: int = 0
    seq: int = 0


class Turns:
    """Round robin over the open transfers."""

    def __init__(self, num_layers: int) -> None:
        self._last_layer = num_layers - 1
        self._ring: deque[Transfer] = deque()  # next in turn first

    def add(self, transfer: Transfer) -> None:
        self._ring.append(transfer)

    def remove(self, transfer: Transfer) -> None:
        self._ring.remove(transfer)

    def next(self, passed: Callable[[Any], bool], *, ahead: bool) -> Transfer | None:
        """With credit, window, and a first slice that is ready; `ahead`: or is of the last layer. Who is
        skipped keeps its turn."""
        for transfer in self._with_room():
            piece, event = transfer.pending[0]
            if event is None or (ahead and piece.layer == self._last_layer) or passed(event):
                self._ring.remove(transfer)
                self._ring.append(transfer)
                return transfer
        return None

    @property
    def waiting(self) -> bool:
        """Once `next` found nothing: somebody's slice only waits to be ready."""
        return any(True for _ in self._with_room())

    @property
    def urgent(self) -> bool:
        """KV is still to leave of a prefill that will soon be over."""
        return any(t.prefill.launched and (t.pending or t.prefill.gathers) for t in self._ring)

    def _with_room(self) -> Iterator[Transfer]:
        return (t for t in self._ring if t.pending and t.session.has_room)
