"""The sending side in its transfer process: between the engine's pump, the held prefills and the sessions."""

import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, ClassVar

from baton.kv_transfer.arena import Arena
from baton.kv_transfer.channel import Channel
from baton.kv_transfer.config import TransferConfig
from baton.kv_transfer.layout import Slice
from baton.kv_transfer.memory_reader import MemoryReader
from baton.kv_transfer.peer_memory import TCP_ONLY
from baton.kv_transfer.process.frames import OutgoingFrame
from baton.kv_transfer.process.lane import Lane
from baton.kv_transfer.process.movers import FarLane
from baton.kv_transfer.process.stats import TransferCounters, printable
from baton.kv_transfer.process.tcp_session import Session
from baton.kv_transfer.protocol import local_messages as local
from baton.kv_transfer.protocol import messages as wire
from baton.kv_transfer.protocol.credits import window
from baton.kv_transfer.protocol.frame import HEADER_BYTES, Header
from baton.kv_transfer.protocol.held import Effect, HeldKV, HeldPrefills, StartTransfer
from baton.kv_transfer.protocol.shared import Expired, Send
from baton.kv_transfer.trace import NO_TRACE, TraceWriter

log = logging.getLogger("baton.kv")

_MOST_UNREAD = 4 << 20  # bytes of messages that a session may send while the channel is full
_NAME, _TRANSPORT = 64, 128  # bytes that statistics have of a peer's name, and of what it says: one packet


class PrefillSide:
    """Implements SessionHandler."""

    def __init__(
        self, config: TransferConfig, arena: Arena, channel: Channel, counters: TransferCounters,
        reader: MemoryReader | None = None, trace: TraceWriter = NO_TRACE,
    ) -> None:  # fmt: skip
        self.table = HeldPrefills(config.deadlines, config.max_waiting, config.max_pins)
        self.slots_out = 0  # handed over by the engine and not given back yet
        self._config = config
        self._arena = arena
        self._channel = channel
        self._counters = counters
        self._sessions: dict[int, SendingSession] = {}  # by number
        self._reader = reader
        # Peers read the arena with it: the engine fills slots as for TCP.
        self._of_arena = reader if reader and not reader.for_sender else None
        self._trace = trace
        self._export: wire.Export | None = None
        self._why_tcp = f"{TCP_ONLY} at the sender"  # without an export
        if reader and reader.for_sender:
            self._why_tcp = "the sender's engine has not opened the memory yet"
            channel.post(local.RingOut(reader.for_sender))
        elif reader:
            self._set_export(reader.export, "")
        self._transports: dict[int, str] = {}  # session with a FETCH → how the peer gets KV, and why over TCP
        # By number over all ranks: slots with a slice, the session that reads it, and since when.
        self._exported: dict[int, tuple[int, local.SliceOut, float]] = {}
        self._unread: Counter[int] = Counter()  # bytes of messages since the channel is full, by session

    @property
    def transfers_open(self) -> int:
        return len(self.table.open)

    @property
    def quiet(self) -> bool:
        """No prefill is held, no FETCH waits, and the engine has every slot."""
        return not self.table.held and not self.table.waiting and self.slots_out == 0

    @property
    def busy(self) -> bool:
        return not self.quiet or bool(self._sessions)

    # ------------------------------------------------------------ from the engine

    def engine(self, message: local.FromSender) -> None:
        now = time.monotonic()
        match message:
            case local.SlicesOut(slices):
                self._send(slices, now)
            case local.Exported(export, why):
                self._set_export(export, why)
                for number in list(self._transports):
                    del self._transports[number]
                    self._offer_memory(self._sessions[number])
            case local.Offer(prefill_id):
                self._apply(self.table.offer(prefill_id, now))
            case local.Finished(prefill_id):
                self._apply(self.table.finish(prefill_id, now))
            case local.Pinned(pin_id, chunks):
                self._apply(self.table.pinned(pin_id, chunks, now))
            case local.CommitOut(transfer_id, first_token, frames, size):
                self._apply(self.table.commit(transfer_id, wire.Commit(first_token, frames, size), now))
            case local.RefuseFetch(transfer_id):
                self._counters.refuse(
                    "fetch_range", "a FETCH asks for what is not there, or no frame can carry"
                )
                self._apply(self.table.refuse(transfer_id, now))
            case local.CloseOut(prefill_id, reason):
                self._apply(self.table.close(prefill_id, reason, now))
            case local.Recalled(number, total, sent):
                if number in self._sessions:
                    self._sessions[number].send(wire.CreditReturned(total, sent))

    def _set_export(self, export: wire.Export | None, why: str) -> None:
        """`why` there is none."""
        if self._reader and export:  # the engine, if any of its devices has the slots, has opened it
            export, why = self._reader.export, self._reader.why_not_exported
            if why:
                export = None
                log.warning("KV goes over TCP: %s", why)
        self._export, self._why_tcp = export, why

    def _send(self, slices: Sequence[local.SliceOut], now: float) -> None:
        """A slice goes as a frame, unless the peer reads slots: then SLICES names it. A slice of a transfer
        that has ended goes back."""
        marked: dict[bytes, list[tuple[local.SliceOut, int]]] = {}  # by transfer; with their generations
        for s in slices:
            self.slots_out += 1
            transfer_id = s.header.transfer_id
            held = self.table.open.get(transfer_id)
            if held is None:
                self._give_back(s.slot, unsent=True)
                continue
            self._note_last(s.header.piece, held, now)
            payload = self._arena.slot(s.slot)[: s.header.length]
            if self._of_arena and self._reaches(held.session):
                # The peer reads it while the next checksum is computed.
                self._announce(transfer_id, [(s, self._of_arena.checksum(payload))], now)
            elif s.generation:
                marked.setdefault(transfer_id, []).append((s, s.generation))
            else:
                self._sessions[held.session].send_frame(OutgoingFrame(s.header, payload, s.slot))
        for transfer_id, numbered in marked.items():
            self._announce(transfer_id, numbered, now)

    def _reaches(self, session: int) -> bool:
        """Whether the peer reads slots."""
        return not self._transports.get(session, "tcp").startswith("tcp")

    def _note_last(self, piece: Slice, held: HeldKV, now: float) -> None:
        last_layer = self._config.layout.num_layers - 1
        if piece.layer == last_layer and piece.token_start + piece.token_count == held.stop:
            self.table.all_sent(held, now)

    def _announce(self, transfer_id: bytes, slices: Sequence[tuple[local.SliceOut, int]], now: float) -> None:
        """Names slices that the peer reads, each with its generation."""
        session = self._sessions[self.table.open[transfer_id].session]
        announced: list[wire.SliceAt] = []
        for s, generation in slices:
            number = s.rank * self._config.num_slots + s.slot
            self._exported[number] = session.number, s, now
            announced.append((number, generation, s.header.seq, s.header.length, s.header.piece))
        self.table.begin_send(transfer_id, now, len(announced))
        session.send(wire.Slices(tuple(announced)), transfer_id)

    # ------------------------------------------------------------ from sessions

    def session_up(self, session: "SendingSession") -> None:
        self._sessions[session.number] = session

    def _offer_memory(self, session: "SendingSession") -> None:
        """At the first FETCH. When lane 0 is up here, the peer may still wait for its other lanes."""
        if session.number in self._transports:
            return
        if self._export is None:
            why = self._why_tcp
        else:
            why = "the test copy is under way"
            session.send(self._export)
        self._transports[session.number] = f"tcp: {why}"

    def session_down(self, session: "SendingSession", reason: str, detail: str) -> None:
        del self._sessions[session.number]
        self._transports.pop(session.number, None)
        self._apply(self.table.session_down(session.number, time.monotonic()))
        # The peer may still read them. It will find another generation.
        for slot in [slot for slot, (number, *_) in self._exported.items() if number == session.number]:
            self._taken(slot)
        self._channel.post(local.SessionGone(session.number))

    def control(self, session: "SendingSession", header: Header, message: wire.Control) -> None:
        self._bound_unread(session, header)
        now = time.monotonic()
        if isinstance(message, wire.Fetch | wire.FetchContent):
            self._offer_memory(session)
        match message:
            case wire.FetchContent():
                self._apply(self.table.fetch_content(header.transfer_id, session.number, message, now))
            case wire.Fetch():
                self._apply(self.table.fetch(header.transfer_id, session.number, message, now))
            case wire.Reach() | wire.Taken():
                self._from_reader(session, message, now)
            case wire.Credit(total, recall):
                self._channel.post(local.Granted(session.number, total, recall))
            case wire.Ack() | wire.Abort():
                held = self.table.open.get(header.transfer_id)
                if held is not None and held.session != session.number:
                    raise wire.ProtocolError(
                        "foreign", f"{type(message).__name__} for another session's transfer"
                    )
                if isinstance(message, wire.Ack):
                    self._apply(self.table.ack(header.transfer_id, now))
                else:
                    self._apply(self.table.abort(header.transfer_id, message.reason, now))

    def _from_reader(self, session: "SendingSession", message: wire.Reach | wire.Taken, now: float) -> None:
        match message:
            case wire.Reach(reached, why):
                if self._export is None or session.number not in self._transports:
                    raise wire.ProtocolError("order", "REACH without EXPORT")
                self._transports[session.number] = self._export.kind if reached else f"tcp: {why}"
                if self._of_arena is None:
                    self._channel.post(local.Reached(session.number, reached))
            case wire.Taken(slots):
                for slot in slots:
                    if self._exported.get(slot, (None,))[0] != session.number:
                        raise wire.ProtocolError("foreign", f"slot {slot} was not to be read")
                    header, since = self._taken(slot)
                    session.moved(now)
                    self._counters.frames_sent += 1
                    self._counters.bytes_sent += header.length
                    session.bytes_sent += header.length
                    self.table.sent(header.transfer_id, now)
                    self._trace.frame("send", header, since, now)

    def _bound_unread(self, session: "SendingSession", header: Header) -> None:
        """Ends the session if too many of its messages wait here because the engine reads none."""
        if not self._channel.full:
            self._unread.clear()
            return
        self._unread[session.number] += HEADER_BYTES + header.length
        if self._unread[session.number] > _MOST_UNREAD:
            raise wire.ProtocolError(
                "flood", f"{_MOST_UNREAD >> 20} MiB of messages while the engine reads none"
            )

    def session_over(self, session: "SendingSession") -> None:
        pass  # `frame_dropped` gave back each slot that the lanes held

    def frame_begins(self, frame: OutgoingFrame) -> bool:
        if self.table.begin_send(frame.header.transfer_id, time.monotonic()):
            return True
        self._give_back(frame.slot, unsent=True)
        return False

    def frame_sent(self, frame: OutgoingFrame) -> None:
        self._counters.frames_sent += 1
        self._counters.bytes_sent += len(frame.payload)
        self.table.sent(frame.header.transfer_id, time.monotonic())
        self._give_back(frame.slot, unsent=False)

    def frame_dropped(self, frame: OutgoingFrame) -> None:
        self._give_back(frame.slot, unsent=True)

    def _taken(self, number: int) -> tuple[Header, float]:
        _, taken, since = self._exported.pop(number)
        self._give_back(taken.slot, unsent=False, soon=True)  # TAKEN named all slots of a copy
        return taken.header, since

    def _give_back(self, slot: int, *, unsent: bool, soon: bool = False) -> None:
        """`soon`: do not wait for other slots."""
        self.slots_out -= 1
        tell = self._channel.post if soon else self._channel.hold
        tell(local.SlotFree(slot, unsent))

    # ------------------------------------------------------------ time

    def tick(self, now: float) -> None:
        flow = {session.number: session.kv_moved for session in self._sessions.values()}
        self._apply(self.table.expire(now, flow))

    def transports(self) -> dict[str, str]:
        """Of each peer that fetches from here, by name."""
        return {
            _shown(session.peer.name, _NAME): _shown(self._transports.get(number, "tcp"), _TRANSPORT)
            for number, session in self._sessions.items()
            if session.peer is not None
        }

    def sent_to(self) -> dict[str, int]:
        """Bytes of KV frames to each peer with a session, by name."""
        sent: Counter[str] = Counter()
        for session in self._sessions.values():
            if session.peer is not None:
                sent[_shown(session.peer.name, _NAME)] += session.bytes_sent
        return dict(sent)

    def slots_free(self) -> int:
        return self._config.num_slots - self.slots_out

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case StartTransfer(prefill_id, transfer_id, number, fetch):
                    session = self._sessions[number]
                    exported = self._reaches(number)
                    slots = window(session.lane_count, self._config.num_slots, exported=exported)
                    self._channel.post(
                        local.StartOut(
                            prefill_id,
                            transfer_id,
                            number,
                            session.slot_bytes,
                            slots,
                            fetch.ranges,
                            fetch.next_positions,
                        )
                    )
                case local.ReleasedOut(_, reason):
                    self._counters.transfers[reason] += 1
                    self._channel.post(effect)
                case local.PinOut() | local.StopOut() | local.FetchWaits():
                    self._channel.post(effect)
                case Send(number, transfer_id, reply):
                    if isinstance(reply, wire.Aborted):
                        self._counters.transfers[reply.reason] += 1
                    if number in self._sessions:
                        self._sessions[number].send(reply, transfer_id)
                case Expired(name, detail):
                    self._counters.expire(name, detail)


class SendingSession(Session["PrefillSide"]):
    """KV frames go out."""

    side: ClassVar[wire.Side] = "sender"

    def __init__(self, *about: Any) -> None:
        super().__init__(*about)
        self._far: list[FarLane] = []  # the lanes that movers have
        self._waiting: deque[OutgoingFrame] = deque()  # for room in a mover
        self.bytes_sent = 0  # of KV frames

    @property
    def in_use(self) -> bool:
        return self.handler.table.uses(self.number)

    def _attach(self, lane: Lane | FarLane) -> None:
        if isinstance(lane, FarLane):
            self._far.append(lane)

    def send_frame(self, frame: OutgoingFrame) -> None:
        """By the lane with the fewest unsent bytes. If movers have lanes, by one of those."""
        if self._far:
            self._waiting.append(frame)
            self._feed()
        else:
            min(self.lanes.values(), key=lambda lane: lane.unsent).push_frame(frame)

    def _feed(self) -> None:
        """Give movers no more than they have room for: it shows late which lane is slow."""
        while self._waiting and (lane := min(self._far, key=lambda lane: lane.unsent)).has_room:
            lane.push_frame(self._waiting.popleft())

    def _over(self) -> None:
        while self._waiting:
            self.handler.frame_dropped(self._waiting.popleft())
        super()._over()

    def frame_begins(self, lane: Lane | FarLane, frame: OutgoingFrame) -> bool:
        return self.handler.frame_begins(frame)

    def frame_sent(self, lane: Lane | FarLane, frame: OutgoingFrame) -> None:
        self.bytes_sent += len(frame.payload)
        self.handler.frame_sent(frame)
        if self._waiting:
            self._feed()

    def frame_dropped(self, lane: Lane | FarLane, frame: OutgoingFrame) -> None:
        self.handler.frame_dropped(frame)


def _shown(text: str, most: int) -> str:
    """A text of a peer in so many bytes."""
    return printable(text).encode("ascii", "backslashreplace")[:most].decode()
