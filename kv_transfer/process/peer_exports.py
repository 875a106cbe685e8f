"""Memory that peers export, by session: for `DecodeSide`. The engine reads it, or NIXL does.

NIXL may read into slots with marks, which the engine verifies (`nixl_slots`). It opens them once, as `RING`.

EXPORT ─▶ the memory is opened ─▶ REACH(true) ─▶ SLICES ─▶ the session ends ─▶ it is closed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.kv_transfer.channel import Channel
from baton.kv_transfer.config import MAX_SLOT_BYTES, PAGE
from baton.kv_transfer.local_messages import ExportGone, ExportIn
from baton.kv_transfer.peer_memory import count_slots
from baton.kv_transfer.process.connector import ProtocolError, Session
from baton.kv_transfer.process.nixl_memory import NixlMemory
from baton.kv_transfer.protocol.messages import Export, Reach, SliceAt

RING = 2**63 - 1
"""Stands for a session that does not end."""


@dataclass(slots=True, eq=False)
class _Memory:
    session: Session
    export: Export
    slots: int  # of all ranks
    reached: bool = False  # slices there are read


class PeerExports:
    def __init__(self, channel: Channel, nixl: NixlMemory | None) -> None:
        """`channel`: to the engine."""
        self._channel = channel
        self._nixl = nixl
        self._memories: dict[int, _Memory] = {}  # by session
        self._ring_opened: bool | None = None  # None: the engine has not answered
        self._why_no_ring = ""
        self._wait_for_ring: list[int] = []  # sessions of which NIXL has read the token
        if nixl and nixl.for_receiver:
            channel.post(ExportIn(RING, nixl.for_receiver))

    def open(self, session: Session, export: Export) -> None:
        """`opened` follows. Raises ProtocolError."""
        number = session.number
        if number in self._memories:
            raise ProtocolError("order", "a second EXPORT")
        if export.slot_bytes % PAGE or not PAGE <= export.slot_bytes <= MAX_SLOT_BYTES:
            raise ProtocolError("length", f"EXPORT of slots of {export.slot_bytes} bytes")
        self._memories[number] = _Memory(session, export, count_slots(export))
        nixl = self._reader(export)
        assert session.peer is not None
        if nixl is None:
            self._channel.post(ExportIn(number, export, session.peer.kv_dtype))
            return
        if why := nixl.open(number, session.peer.incarnation, export):
            self.opened(number, False, why)

    def token_read(self, number: int, why: str) -> None:
        """By NIXL, or why not."""
        assert self._nixl is not None
        if why or not self._nixl.for_receiver:
            self.opened(number, not why, why)
        elif self._ring_opened is None:
            self._wait_for_ring.append(number)
        else:
            self.opened(number, self._ring_opened, self._why_no_ring)

    def opened(self, number: int, reached: bool, why: str) -> None:
        if number == RING:
            self._ring_opened, self._why_no_ring = reached, why
            waiting, self._wait_for_ring = self._wait_for_ring, []
            for session in waiting:
                self.opened(session, reached, why)
        if memory := self._memories.get(number):
            memory.reached = memory.reached or reached
            memory.session.send(Reach(reached, why[:512]))

    def reader(self, session: Session, slices: Sequence[SliceAt]) -> NixlMemory | None:
        """What reads the slices; None: the engine. Raises ProtocolError if one of them cannot be there."""
        memory = self._memories.get(session.number)
        if memory is None or not memory.reached:
            raise ProtocolError("order", "SLICE without REACH")
        export, nixl = memory.export, self._reader(memory.export)
        most = export.slot_bytes
        if nixl:
            most = min(nixl.slot_bytes, most)
        for m in slices:
            if m.slot >= memory.slots or m.length > most:
                raise ProtocolError("length", f"SLICE of {m.length} bytes in slot {m.slot}")
        return nixl

    def _reader(self, export: Export) -> NixlMemory | None:
        return self._nixl if self._nixl and export.kind == self._nixl.export.kind else None

    def transport(self, number: int) -> str:
        """How most KV of a session comes."""
        memory = self._memories.get(number)
        return memory.export.kind if memory and memory.reached else "tcp"

    def close(self, number: int) -> None:
        """The session has ended."""
        if memory := self._memories.pop(number, None):
            if nixl := self._reader(memory.export):
                nixl.close(number)
            else:
                self._channel.post(ExportGone(number))
