"""The sending side in its transfer process: between the engine's pump, the held prefills and the sessions."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence

from baton.kv_transfer.arena import Arena
from baton.kv_transfer.channel import Channel
from baton.kv_transfer.config import TransferConfig
from baton.kv_transfer.layout import EXPORT_VERSION, SLICES_VERSION
from baton.kv_transfer.local_messages import (
    CloseOut,
    CommitOut,
    Exported,
    FetchWaits,
    Finished,
    FromSender,
    Granted,
    Offer,
    Pinned,
    PinOut,
    Reached,
    Recalled,
    RefuseFetch,
    ReleasedOut,
    RingOut,
    SessionGone,
    SliceOut,
    SlicesOut,
    SlotFree,
    StartOut,
    StopOut,
)
from baton.kv_transfer.peer_memory import TCP_ONLY
from baton.kv_transfer.process import nixl_memory
from baton.kv_transfer.process.connector import ProtocolError, SessionToDecode
from baton.kv_transfer.process.lane_owner import OutgoingFrame
from baton.kv_transfer.process.nixl_memory import NixlMemory
from baton.kv_transfer.process.stats import TransferCounters, printable
from baton.kv_transfer.protocol.effects import Expired, Send
from baton.kv_transfer.protocol.frame import HEADER_BYTES, FrameType, Header, kind_of
from baton.kv_transfer.protocol.held import (
    Effect,
    Held,
    HeldPrefills,
    Pin,
    Release,
    StartTransfer,
    StopTransfer,
    Waiting,
)
from baton.kv_transfer.protocol.messages import (
    Abort,
    Aborted,
    Ack,
    AnySliceAt,
    Commit,
    Control,
    Credit,
    CreditReturned,
    Export,
    Fetch,
    FetchContent,
    Reach,
    SliceAt,
    Slices,
    StateSliceAt,
    Taken,
)
from baton.kv_transfer.sender_pacing import window

log = logging.getLogger("baton.kv")

_MOST_UNREAD = 4 << 20  # bytes of messages that a session may send while the channel is full
_NAME, _TRANSPORT = 64, 128  # bytes that statistics have of a peer's name, and of what it says: one packet


class PrefillSide:
    """Implements connector.FrameSender."""

    def __init__(
        self, config: TransferConfig, arena: Arena, channel: Channel, counters: TransferCounters,
        nixl: NixlMemory | None = None,
    ) -> None:  # fmt: skip
        self.table = HeldPrefills(config.deadlines, config.max_waiting)
        self._draining = False
        self.slots_out = 0  # handed over by the engine and not given back yet
        self._config = config
        self._arena = arena
        self._channel = channel
        self._counters = counters
        self._sessions: dict[int, SessionToDecode] = {}  # by number
        self._nixl = nixl
        self._export: Export | None = None
        self._why_tcp = f"{TCP_ONLY} at the sender"  # without an export
        if nixl and nixl.for_sender:
            self._why_tcp = "the sender's engine has not opened the memory yet"
            channel.post(RingOut(nixl.for_sender))
        elif nixl:
            self._set_export(nixl.export, "")
        self._transports: dict[int, str] = {}  # session with a FETCH → how the peer gets KV, and why over TCP
        # By number over all ranks: slots with a slice, and the session that reads it.
        self._exported: dict[int, tuple[int, SliceOut]] = {}
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
        return bool(self.table.held or self.table.waiting or self._sessions)

    def drain(self) -> None:
        """Refuses each FETCH that waits or comes from now on, unless its prefill is held."""
        self._draining = True
        self._apply(self.table.refuse_waiting("busy"))

    # ------------------------------------------------------------ from the engine

    def engine(self, message: FromSender) -> None:
        now = time.monotonic()
        match message:
            case SlicesOut(slices):
                self._send(slices, now)
            case Exported():
                self._exported_now(message)
            case Offer(prefill_id):
                self._apply(self.table.offer(prefill_id, now))
            case Finished(prefill_id):
                self._apply(self.table.finish(prefill_id, now))
            case Pinned(pin_id, chunks):
                self._apply(self.table.pinned(pin_id, chunks, now))
            case CommitOut(transfer_id, first_token, frames, size):
                self._apply(self.table.commit(transfer_id, Commit(first_token, frames, size), now))
            case RefuseFetch(transfer_id):
                self._counters.refuse(
                    "fetch_range", "a FETCH asks for what is not there, or no frame can carry"
                )
                self._apply(self.table.refuse(transfer_id, now))
            case CloseOut(prefill_id, reason):
                self._apply(self.table.close(prefill_id, reason, now))
            case Recalled(number, total, sent):
                if number in self._sessions:
                    self._sessions[number].send(CreditReturned(total, sent))

    def _set_export(self, export: Export | None, why: str) -> None:
        """`why` there is none."""
        if self._nixl and export:  # the engine, if any of its devices has the slots, has opened it
            export, why = self._nixl.export, self._nixl.why_not_exported
            if why:
                export = None
                log.warning("KV goes over TCP: %s", why)
        self._export, self._why_tcp = export, why

    def _exported_now(self, m: Exported) -> None:
        self._set_export(m.export, m.why)
        for number in list(self._transports):
            del self._transports[number]
            self._offer_memory(self._sessions[number])

    def _send(self, slices: Sequence[SliceOut], now: float) -> None:
        exported: dict[bytes, list[AnySliceAt]] = {}  # by transfer
        last_layer = self._config.layout.num_layers - 1
        for s in slices:
            self.slots_out += 1
            held = self.table.open.get(s.transfer_id)
            if held is None:
                self._give_back(s.slot, unsent=True)
                continue
            if s.layer == last_layer and s.token_start + s.token_count == held.stop:
                self.table.whole(held, now)
            generation, hashed = s.generation, self._transports.get(held.session) == nixl_memory.KIND
            if hashed:
                generation = nixl_memory.checksum(self._arena.slot(s.slot)[: s.length])
            if not generation:
                self._send_frame(s, held)
                continue
            there = s.rank * self._config.num_slots + s.slot
            self._exported[there] = held.session, s
            exported.setdefault(s.transfer_id, []).append(
                AnySliceAt(
                    there, generation, s.seq, s.layer, s.head_start, s.head_count, s.token_start,
                    s.token_count, s.length, s.state,
                )
            )  # fmt: skip
            if hashed:  # the peer reads it while the next checksum is computed
                self._announce_all(exported, now)
        self._announce_all(exported, now)

    def _announce_all(self, exported: dict[bytes, list[AnySliceAt]], now: float) -> None:
        while exported:
            transfer_id, found = exported.popitem()
            self.table.begin_send(transfer_id, now, len(found))
            self._announce(self._sessions[self.table.open[transfer_id].session], transfer_id, found)

    def _send_frame(self, s: SliceOut, held: Held) -> None:
        kind, state_type = kind_of(s.state)
        header = Header(
            FrameType.KV, s.transfer_id, s.layer, kind, s.head_start, s.head_count, s.token_start,
            s.token_count, s.seq, s.length, receiver_rank=held.receiver_rank, state_type=state_type,
        )  # fmt: skip
        frame = OutgoingFrame(header, self._arena.slot(s.slot)[: s.length], s.slot)
        self._sessions[held.session].send_frame(frame)

    def _announce(self, session: SessionToDecode, transfer_id: bytes, slices: Sequence[AnySliceAt]) -> None:
        """Slices that the peer reads."""
        assert session.peer is not None
        if session.peer.versions[1] >= SLICES_VERSION:
            session.send(Slices(tuple(slices)), transfer_id)
            return
        for s in slices:
            where = (
                s.slot, s.generation, s.seq, s.layer, s.head_start, s.head_count, s.token_start,
                s.token_count, s.length,
            )  # fmt: skip
            message = SliceAt(*where) if s.state is None else StateSliceAt(*where, s.state)
            session.send(message, transfer_id)

    # ------------------------------------------------------------ connector.FrameSender

    def session_up(self, session: SessionToDecode) -> None:
        self._sessions[session.number] = session

    def _offer_memory(self, session: SessionToDecode) -> None:
        """At the first FETCH. When lane 0 is up here, the peer may still wait for its other lanes."""
        if session.number in self._transports:
            return
        assert session.peer is not None
        if self._export is None:
            why = self._why_tcp
        elif session.peer.versions[1] < EXPORT_VERSION:
            why = f"the receiver speaks wire version {session.peer.versions[1]}"
        else:
            why = "the test copy is under way"
            session.send(self._export)
        self._transports[session.number] = f"tcp: {why}"

    def session_down(self, session: SessionToDecode, reason: str, detail: str) -> None:
        del self._sessions[session.number]
        self._transports.pop(session.number, None)
        self._apply(self.table.session_down(session.number, time.monotonic()))
        # The peer may still read them. It will find another generation.
        for slot in [slot for slot, (number, _) in self._exported.items() if number == session.number]:
            self._taken(slot)
        self._channel.post(SessionGone(session.number))

    def control(self, session: SessionToDecode, header: Header, message: Control) -> None:
        self._bound_unread(session, header)
        now = time.monotonic()
        if isinstance(message, Fetch | FetchContent):
            self._offer_memory(session)
        match message:
            case FetchContent() if self._draining:
                self._counters.transfers["busy"] += 1
                session.send(Aborted("busy", 0), header.transfer_id)
            case FetchContent():
                self._apply(self.table.fetch_content(header.transfer_id, session.number, message, now))
            case Fetch():
                if self._draining and message.prefill_id not in self.table.held:
                    self._counters.transfers["busy"] += 1
                    session.send(Aborted("busy", 0), header.transfer_id)
                else:
                    self._apply(self.table.fetch(header.transfer_id, session.number, message, now))
            case Reach() | Taken():
                self._from_reader(session, message, now)
            case Credit(total, recall):
                self._channel.post(Granted(session.number, total, recall))
            case Ack() | Abort():
                held = self.table.open.get(header.transfer_id)
                if held is not None and held.session != session.number:
                    raise ProtocolError("foreign", f"{type(message).__name__} for another session's transfer")
                if isinstance(message, Ack):
                    self._apply(self.table.ack(header.transfer_id, now))
                else:
                    self._apply(self.table.abort(header.transfer_id, message.reason, now))

    def _from_reader(self, session: SessionToDecode, message: Reach | Taken, now: float) -> None:
        match message:
            case Reach(reached, why):
                assert session.peer is not None
                is_old = session.peer.versions[1] < EXPORT_VERSION
                if self._export is None or is_old or session.number not in self._transports:
                    raise ProtocolError("order", "REACH without EXPORT")
                self._transports[session.number] = self._export.kind if reached else f"tcp: {why}"
                if self._export.kind != nixl_memory.KIND:  # the engine fills slots as for TCP
                    self._channel.post(Reached(session.number, reached))
            case Taken(slots):
                for slot in slots:
                    if self._exported.get(slot, (None,))[0] != session.number:
                        raise ProtocolError("foreign", f"slot {slot} was not to be read")
                    sent = self._taken(slot)
                    session.moved(now)
                    self._counters.frames_sent += 1
                    self._counters.bytes_sent += sent.length
                    self.table.sent(sent.transfer_id, now)

    def _bound_unread(self, session: SessionToDecode, header: Header) -> None:
        """Ends the session if too many of its messages wait here because the engine reads none."""
        if not self._channel.full:
            self._unread.clear()
            return
        self._unread[session.number] += HEADER_BYTES + header.length
        if self._unread[session.number] > _MOST_UNREAD:
            raise ProtocolError("flood", f"{_MOST_UNREAD >> 20} MiB of messages while the engine reads none")

    def session_over(self, session: SessionToDecode) -> None:
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

    def _taken(self, there: int) -> SliceOut:
        _, taken = self._exported.pop(there)
        self._give_back(taken.slot, unsent=False, soon=True)  # TAKEN named all slots of a copy
        return taken

    def _give_back(self, slot: int, *, unsent: bool, soon: bool = False) -> None:
        """`soon`: do not wait for other slots."""
        self.slots_out -= 1
        tell = self._channel.post if soon else self._channel.hold
        tell(SlotFree(slot, unsent))

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

    def slots_free(self) -> int:
        return self._config.num_slots - self.slots_out

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case StartTransfer(prefill_id, transfer_id, number, fetch):
                    session = self._sessions[number]
                    transport = self._transports.get(number, "tcp")
                    slots = window(session.lane_count, self._config.num_slots, transport)
                    self._channel.post(
                        StartOut(
                            prefill_id, transfer_id, number, session.slot_bytes, slots,
                            fetch.ranges, fetch.head_start, fetch.head_count,
                        )
                    )  # fmt: skip
                case Pin(pin_id, chunks, first_chunk):
                    self._channel.post(PinOut(pin_id, chunks, first_chunk))
                case StopTransfer(prefill_id, transfer_id):
                    self._channel.post(StopOut(prefill_id, transfer_id))
                case Release(prefill_id, reason):
                    self._counters.transfers[reason] += 1
                    self._channel.post(ReleasedOut(prefill_id, reason))
                case Waiting(prefill_id, gone):
                    self._channel.post(FetchWaits(prefill_id, gone))
                case Send(number, transfer_id, reply):
                    if isinstance(reply, Aborted):
                        self._counters.transfers[reply.reason] += 1
                    if number in self._sessions:
                        self._sessions[number].send(reply, transfer_id)
                case Expired(name, detail):
                    self._counters.expire(name, detail)


def _shown(text: str, most: int) -> str:
    """A text of a peer in so many bytes."""
    return printable(text).encode("ascii", "backslashreplace")[:most].decode()
