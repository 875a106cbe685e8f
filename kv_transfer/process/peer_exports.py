"""Memory that peers export, by session, and the slices that are read there: for `DecodeSide`.

The engine reads the memory, or a `MemoryReader` does. This may read into slots with marks, which the engine
verifies. The engine opens them once, as `RING`.

EXPORT ─▶ the memory is opened ─▶ REACH(true) ─▶ SLICES ─▶ the session ends ─▶ it is closed

A slice uses a credit and a slot, as a frame does. It is read, and then the peer gets TAKEN. What differs is
the moment when `Arrivals` hands the slice over to the engine:

- the engine reads the memory: at once, and the slot stays empty
- a reader reads into arena slots, and verifies: when the slice is verified, as a frame
- a reader reads into slots with marks: when it is read, and the engine verifies it there
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from baton.kv_transfer.channel import Channel
from baton.kv_transfer.config import MAX_SLOT_BYTES, PAGE
from baton.kv_transfer.memory_reader import MemoryReader
from baton.kv_transfer.peer_memory import count_slots
from baton.kv_transfer.process.arrivals import Arrivals
from baton.kv_transfer.process.tcp_session import Session
from baton.kv_transfer.protocol.frame import FrameError
from baton.kv_transfer.protocol.local_messages import ExportGone, ExportIn
from baton.kv_transfer.protocol.messages import Export, ProtocolError, Reach, SliceAt, Taken
from baton.kv_transfer.slices import ARENA, Slice
from baton.kv_transfer.trace import TraceWriter

RING = 2**63 - 1
"""Stands for a session that does not end."""


@dataclass(slots=True, eq=False)
class _Memory:
    session: Session
    export: Export
    slots: int  # of all ranks
    reached: bool = False  # slices there are read


@dataclass(slots=True, eq=False)
class _Read:
    """A slice that is read."""

    slice: Slice
    session: int
    peer_slot: int  # its slot in the memory of the peer
    began: float
    taken: bool = False  # the peer knows that it is read


class PeerExports:
    def __init__(
        self, arrivals: Arrivals, channel: Channel, reader: MemoryReader | None, trace: TraceWriter
    ) -> None:
        """`channel`: to the engine, which reads memory if there is no `reader`."""
        self._trace = trace
        self._arrivals = arrivals
        self._channel = channel
        self._reader = reader
        self._memories: dict[int, _Memory] = {}  # by session
        self._reads: dict[int, _Read] = {}  # by the slot of ours that is set aside
        self._ring_opened: bool | None = None  # None: the engine has not answered
        self._why_no_ring = ""
        self._wait_for_ring: list[int] = []  # sessions of which the reader has read the token
        if reader and reader.for_receiver:
            channel.post(ExportIn(RING, reader.for_receiver))

    # ------------------------------------------------------------ memory

    def open(self, session: Session, export: Export) -> None:
        """`opened` follows. Raises ProtocolError."""
        number = session.number
        if session.why_lanes or number in self._memories:
            raise ProtocolError("order", "a second EXPORT, or one in a session of lanes")
        if export.slot_bytes % PAGE or not PAGE <= export.slot_bytes <= MAX_SLOT_BYTES:
            raise ProtocolError("length", f"EXPORT of slots of {export.slot_bytes} bytes")
        self._memories[number] = _Memory(session, export, count_slots(export))
        assert session.peer is not None
        if self._reader is None:
            self._channel.post(ExportIn(number, export, session.dtypes))
        elif why := self._reader.open(number, session.peer.incarnation, export):
            self.opened(number, False, why)

    def _token_read(self, number: int, why: str) -> None:
        """By the reader, or why not."""
        assert self._reader is not None
        if why or not self._reader.for_receiver:
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
            if memory.reached:
                memory.session.transport = memory.export.kind
            memory.session.send(Reach(reached, why[:512]))

    def close(self, number: int) -> None:
        """The session has ended."""
        if self._memories.pop(number, None):
            if self._reader:
                self._reader.close(number)
            else:
                self._channel.post(ExportGone(number))

    # ------------------------------------------------------------ slices

    def slices(self, session: Session, transfer_id: bytes, named: Sequence[SliceAt]) -> None:
        """SLICES came, instead of frames. Raises ProtocolError."""
        self._check(session, named)
        number, reader, now = session.number, self._reader, time.monotonic()
        session.moved(now)
        to_read: list[Slice] = []
        for there, checksum, seq, size, piece in named:
            if number not in self._memories:
                break  # a slice before this one ended the session
            s = Slice(piece, transfer_id, seq, size, memory=number, there=there, sum=checksum, verified=False)
            try:
                s.slot = self._arrivals.pipe.take()
            except FrameError as e:
                self._drop(to_read)  # nothing else would give them back
                raise ProtocolError("credit", str(e)) from None
            self._arrivals.begins(session, s)
            self._reads[s.slot] = _Read(s, number, there, now)
            if reader is None:
                self._hand_over(s)
            elif self._arrivals.transfer_of(s.slot):
                to_read.append(s)
            else:
                self._drop([s])
        if reader and number in self._memories:
            reader.read(number, to_read)
        else:
            self._drop(to_read)

    def _check(self, session: Session, named: Sequence[SliceAt]) -> None:
        """Raises ProtocolError if one of the slices cannot be there."""
        memory = self._memories.get(session.number)
        if memory is None or not memory.reached:
            raise ProtocolError("order", "SLICES without REACH")
        most = memory.export.slot_bytes
        if self._reader:
            most = min(self._reader.slot_bytes, most)
        for slot, _, _, size, _ in named:
            if slot >= memory.slots or size > most:
                raise ProtocolError("length", f"a slice of {size} bytes in slot {slot}")

    def _hand_over(self, s: Slice) -> None:
        """The engine reads the slice in memory that it has opened."""
        transfer = self._arrivals.transfer_of(s.slot)
        if transfer is None or not self._arrivals.hand_over(transfer, s):
            self._drop([s])

    def take_reads(self) -> float | None:
        """Takes reads that are over. Returns within how many seconds to look again; None: no need."""
        if self._reader is None or not self._reader.busy:
            return None
        for number, why in self._reader.opened():
            self._token_read(number, why)
        over = self._reader.finished()
        self._give_back([self._reads[slot] for slot in over])  # the peer may use the slots again
        for slot, right in over.items():
            s = self._reads[slot].slice
            if self._reader.for_receiver is None:
                self._over(slot, right)
                s.memory, s.verified = ARENA, True
                self._arrivals.came(s, right)
            elif right:
                s.memory, s.there = RING, slot
                self._hand_over(s)
            else:
                self.emptied([slot], [slot])
        return self._reader.look_within()

    def emptied(self, slots: Sequence[int], damaged: Collection[int]) -> None:
        """The engine has read these slots, and found those of `damaged` wrong. Or it dropped them."""
        self._give_back([self._reads[slot] for slot in slots if slot in self._reads])
        for slot in slots:
            right = slot not in damaged
            if slot in self._reads:
                self._over(slot, right)
            self._arrivals.emptied(slot, right)

    def _drop(self, slices: Sequence[Slice]) -> None:
        """Nothing reads them."""
        self._give_back([self._reads[s.slot] for s in slices])
        for s in slices:
            self._over(s.slot, True)
            self._arrivals.emptied(s.slot, None)

    def _over(self, slot: int, right: bool) -> None:
        read = self._reads.pop(slot)
        self._trace.moved("recv", read.slice, read.began, time.monotonic())
        memory = self._memories.get(read.session)
        if memory and not right and self._arrivals.transfer_of(slot):  # the next transfer is over TCP
            memory.session.send(Reach(False, "a slice could not be read, or was wrong"))

    def _give_back(self, reads: Sequence[_Read]) -> None:
        """The peers may use these slots again."""
        taken: dict[int, list[int]] = {}
        for read in reads:
            if not read.taken:
                read.taken = True
                taken.setdefault(read.session, []).append(read.peer_slot)
        for number, there in taken.items():
            if memory := self._memories.get(number):
                memory.session.moved(time.monotonic())
                memory.session.send(Taken(tuple(there)))
