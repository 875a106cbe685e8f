"""A way to move slices without lanes: peers read the slots where they lie. For `PrefillSide`.

EXPORT ─▶ REACH(true) ─▶ SLICES names slots ─▶ TAKEN: the peer has read them

Peers read memory of the engine, or slots of a `MemoryReader`: slots of its own, or the arena.
"""

import time
from collections.abc import Callable, Sequence

from baton.kv_transfer.arena import Arena
from baton.kv_transfer.channel import Channel
from baton.kv_transfer.memory_reader import MemoryReader
from baton.kv_transfer.process.stats import log
from baton.kv_transfer.process.tcp_session import Session
from baton.kv_transfer.protocol.local_messages import Reached, RingOut
from baton.kv_transfer.protocol.messages import Export, ProtocolError, Reach, SliceAt, Slices, Taken
from baton.kv_transfer.slices import ARENA, EXPORTED, Slice
from baton.kv_transfer.trace import TraceWriter


class PeerReads:
    def __init__(
        self, arena: Arena, channel: Channel, reader: MemoryReader | None, trace: TraceWriter,
        began: Callable[[bytes, int], object], taken: Callable[[Session, Slice], None],
        dropped: Callable[[Slice], None],
    ) -> None:  # fmt: skip
        """`channel`: to the engine. `began`: so many slices of a transfer begin to leave. `taken`: the peer
        has read a slice. `dropped`: it will not read it."""
        self._arena = arena
        self._channel = channel
        self._reader = reader
        # Peers read the arena with it: the engine fills slots as for lanes.
        self._of_arena = reader if reader and not reader.for_sender else None
        self._trace = trace
        self._began, self._taken, self._dropped = began, taken, dropped
        self._export: Export | None = None
        self._why_not = "the sender's engine has not opened the memory yet"  # without an export
        if reader and reader.for_sender:
            channel.post(RingOut(reader.for_sender))
        elif reader:
            self._set_export(reader.export, "")
        self._transports: dict[int, str] = {}  # session with a FETCH → how the peer gets KV, and why over TCP
        # By slot, over all ranks: the session that reads it, and since when.
        self._slices: dict[int, tuple[Session, Slice, float]] = {}

    def transport(self, session: Session) -> str:
        return self._transports.get(session.number, "tcp")

    def reads(self, session: Session, s: Slice | None = None) -> bool:
        """Whether the peer reads the next slices, or this one."""
        if s is not None and (s.memory != ARENA or self._of_arena is None):
            return s.memory != ARENA
        return not self.transport(session).startswith("tcp")

    # ------------------------------------------------------------ memory

    def export(self, export: Export | None, why: str, sessions: Sequence[Session]) -> None:
        """Of the engine, or why there is none. Peers of `sessions` that know of another one get it."""
        self._set_export(export, why)
        for session in sessions:
            if self._transports.pop(session.number, None):
                self.offer(session)

    def _set_export(self, export: Export | None, why: str) -> None:
        if self._reader and export:  # the engine, if any of its devices has the slots, has opened it
            export, why = self._reader.export, self._reader.why_not_exported
            if why:
                export = None
                log.warning("KV goes over TCP: %s", why)
        self._export, self._why_not = export, why

    def offer(self, session: Session) -> None:
        """At the first FETCH. When lane 0 is up here, the peer may still wait for its other lanes."""
        if session.number in self._transports:
            return
        why = session.why_lanes or self._why_not
        if self._export is not None and not session.why_lanes:
            why = "the test copy is under way"
            session.send(self._export)
        self._transports[session.number] = f"tcp: {why}"

    def reach(self, session: Session, message: Reach) -> None:
        """Raises ProtocolError."""
        if self._export is None or session.why_lanes or session.number not in self._transports:
            raise ProtocolError("order", "REACH without EXPORT")
        reached = message.reached
        self._transports[session.number] = self._export.kind if reached else f"tcp: {message.why}"
        if self._of_arena is None:
            self._channel.post(Reached(session.number, reached))

    # ------------------------------------------------------------ slices

    def move(self, session: Session, slices: Sequence[Slice]) -> None:
        """Names slices to the peer. Each ends with `taken` or `dropped`."""
        if self._of_arena is None:
            by_transfer: dict[bytes, list[Slice]] = {}
            for s in slices:
                by_transfer.setdefault(s.transfer_id, []).append(s)
            for of_transfer in by_transfer.values():
                self._name(session, of_transfer)
            return
        for s in slices:  # the peer reads it while the next checksum is computed
            s.memory, s.sum = EXPORTED, self._of_arena.checksum(self._arena.slot(s.slot)[: s.size])
            self._name(session, [s])

    def _name(self, session: Session, slices: Sequence[Slice]) -> None:
        """Of one transfer."""
        now, named = time.monotonic(), list[SliceAt]()
        for s in slices:
            self._slices[s.slot] = session, s, now
            named.append((s.slot, s.sum, s.seq, s.size, s.piece))
        self._began(slices[0].transfer_id, len(named))
        session.send(Slices(tuple(named)), slices[0].transfer_id)

    def taken(self, session: Session, message: Taken) -> None:
        """Raises ProtocolError."""
        now = time.monotonic()
        for slot in message.slots:
            if self._slices.get(slot, (None,))[0] is not session:
                raise ProtocolError("foreign", f"slot {slot} was not to be read")
            _, s, since = self._slices.pop(slot)
            session.moved(now)
            self._taken(session, s)
            self._trace.moved("send", s, since, now)

    def close(self, session: Session) -> None:
        """The session has ended. The peer may still read slots. It will find another generation."""
        self._transports.pop(session.number, None)
        for slot in [slot for slot, (reader, *_) in self._slices.items() if reader is session]:
            self._dropped(self._slices.pop(slot)[1])
