"""The receiving side in its transfer process: between the engine, `Fetches`, credits and sessions.

`ReceiverSlots` has the free slots. A slot that a lane receives into belongs to that lane, as a ticket. A slot
named in `Arrived` belongs to the engine until `SlotsFree`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.kv_transfer.channel import Channel
from baton.kv_transfer.config import TransferConfig
from baton.kv_transfer.local_messages import (
    Arrived,
    ArrivedAt,
    CancelIn,
    Complete,
    FailedIn,
    FetchIn,
    FromReceiver,
    InjectedIn,
    Opened,
    PulledIn,
    SlotsFree,
)
from baton.kv_transfer.process.connector import Connect, ProtocolError, Session
from baton.kv_transfer.process.nixl_memory import NixlMemory, SliceToRead
from baton.kv_transfer.process.peer_exports import RING, PeerExports
from baton.kv_transfer.process.peers import Peers
from baton.kv_transfer.process.slots import SlotPipe
from baton.kv_transfer.process.stats import TransferCounters
from baton.kv_transfer.protocol.credits import CreditExceeded, ReceiverSlots
from baton.kv_transfer.protocol.effects import Expired, Send
from baton.kv_transfer.protocol.fetches import (
    Acknowledge,
    Completed,
    Effect,
    EndSession,
    Fail,
    Fetches,
    FrameRefused,
    Late,
    Refuse,
    Transfer,
)
from baton.kv_transfer.protocol.frame import FrameError, FrameType, Header, kind_of
from baton.kv_transfer.protocol.messages import (
    Aborted,
    Commit,
    Control,
    CreditReturned,
    Export,
    Have,
    Reach,
    SliceAt,
    Slices,
    Taken,
)
from baton.kv_transfer.receiver_pacing import credit


@dataclass(slots=True, eq=False)
class _Ticket:
    """A slot while a lane receives into it."""

    slot: int
    transfer: Transfer | None  # None: the frame is read away


@dataclass(slots=True, eq=False)
class _Pull:
    """A slice that is read in memory that the peer exports: by the engine, or with NIXL."""

    session: int
    m: SliceAt  # its slot in that memory, and more
    header: Header
    ticket: _Ticket
    here: bool  # it is read into the arena slot that was set aside
    taken: bool = False  # the peer knows that it is read


class DecodeSide:
    """Implements connector.FrameReceiver."""

    def __init__(
        self,
        config: TransferConfig,
        pipe: SlotPipe,
        channel: Channel,
        counters: TransferCounters,
        connect: Connect,
        nixl: NixlMemory | None = None,
    ) -> None:
        """`connect` makes sessions for this side."""
        self.draining = False
        self._slots = ReceiverSlots(config.num_slots)
        self._fetches = Fetches(config.deadlines, config.layout, config.slot_bytes)
        self._pipe = pipe
        self._channel = channel
        self._counters = counters
        self._peers = Peers(config, connect)
        self._nixl = nixl
        self._exports = PeerExports(channel, nixl)
        self._pulls: dict[int, _Pull] = {}  # by the slot of ours that is set aside

    @property
    def commit_due(self) -> float:
        return self._fetches.commit_due

    @property
    def transfers_open(self) -> int:
        return len(self._fetches.open)

    @property
    def quiet(self) -> bool:
        """No transfer is open."""
        return not self._fetches.open

    @property
    def busy(self) -> bool:
        return bool(self._peers)

    def slots_free(self) -> int:
        """Free, or granted as credit and not used yet."""
        return self._slots.not_in_use

    # ------------------------------------------------------------ from the engine

    def engine(self, message: FromReceiver) -> None:
        now = time.monotonic()
        match message:
            case SlotsFree() | PulledIn() | Opened():
                self._from_copies(message)
            case FetchIn(transfer_id) if self.draining:
                self._channel.post(FailedIn(transfer_id, "draining", retry=False))
            case FetchIn(transfer_id, prefill_id, address, incarnation, attempt, ranges, first, heads):
                held = (first, first + heads)
                states_of, chunks = message.states_of, message.chunks
                effects = self._fetches.fetch(
                    transfer_id, incarnation, prefill_id, attempt, ranges, held, now, states_of, chunks
                )
                self._apply(effects)
                self._peers.want(incarnation, address, now)
            case InjectedIn(transfer_id):
                self._counters.transfers["injected"] += 1
                self._apply(self._fetches.injected(transfer_id, now))
            case CancelIn(transfer_id):
                effects = self._fetches.cancel(transfer_id, now)
                if effects is not None:
                    self._counters.transfers["cancelled"] += 1
                    self._apply(effects)
        self.settle()

    # ------------------------------------------------------------ connector.FrameReceiver

    def session_up(self, session: Session) -> None:
        self._slots.open(session.number)
        now = time.monotonic()
        peer = self._peers.session_up(session, now)
        assert session.peer is not None
        self._apply(self._fetches.session_up(peer.key, session.number, session.peer.kv_dtype, now))
        self.settle()

    def session_down(self, session: Session, reason: str, detail: str) -> None:
        now = time.monotonic()
        if session.number in self._slots.accounts:  # it was up
            self._slots.end(session.number)
        peer = self._peers.session_down(session, reason, now)
        self._apply(self._fetches.session_down(peer.key, reason, now))
        self._exports.close(session.number)
        self.settle()

    def session_over(self, session: Session) -> None:
        if session.number in self._slots.accounts:  # it was up
            self._slots.close(session.number)
            self.settle()

    def control(self, session: Session, header: Header, message: Control) -> None:
        number, transfer_id, now = session.number, header.transfer_id, time.monotonic()
        match message:
            case CreditReturned(total, sent):
                try:
                    self._slots.returned(number, total, sent)
                except ValueError as e:
                    raise ProtocolError("credit", str(e)) from None
            case Commit():
                self._apply(self._fetches.commit(number, transfer_id, header.sender_rank, message, now))
            case Have():
                self._apply(self._fetches.have(number, transfer_id, message, now))
            case Export():
                self._exports.open(session, message)
            case SliceAt():  # or StateSliceAt, from a sender before version 5
                self._slices_at(session, transfer_id, (message,))
                return  # credit is granted when slots have been read, and not for each slice
            case Slices(slices):
                self._slices_at(session, transfer_id, slices)
            case Aborted():
                self._apply(self._fetches.aborted(number, transfer_id, message, session.kv_moved, now))
        self.settle()

    def kv_begins(self, session: Session, header: Header, slot: int) -> Any:
        transfer = None
        try:
            self._slots.arrive(session.number)
            transfer = self._fetches.begin(session.number, header, time.monotonic())
        except CreditExceeded as e:
            if session.number in self._peers.by_session:
                self._counters.refuse("credit", str(e))
                session.end("lost", str(e))
        except FrameRefused as e:
            if session.number in self._peers.by_session:
                self._apply(e.effects)
                if any(isinstance(effect, Fail) for effect in e.effects):
                    self.settle()  # else the credit of a late frame is granted again with the next event
        return _Ticket(slot, transfer)

    def kv_ends(self, header: Header, ticket: _Ticket, whole: bool | None) -> None:
        transfer = ticket.transfer
        if transfer is None:
            self._free(ticket.slot)  # granted again with the next event, not for each such frame
            return
        complete = self._counted(header, transfer, whole) if transfer.incoming.live else None
        if complete is None:
            self._free(ticket.slot)
            self.settle()
            return
        self._channel.hold(
            Arrived(
                transfer.id, ticket.slot, header.seq, header.layer, header.state, header.head_start,
                header.head_count, header.token_start, header.token_count, header.length,
                transfer.incoming.layout.dtype,
            )
        )  # fmt: skip
        if complete:
            self._complete(transfer)

    def _counted(self, header: Header, transfer: Transfer, whole: bool | None) -> bool | None:
        """Counts a frame that is over. Returns whether it completed its transfer; None: the frame is
        dropped."""
        if whole is None:
            return None
        self._verified(header, transfer, right=whole)
        return self._handed_over(header, transfer) if whole else None

    def _verified(self, header: Header, transfer: Transfer, *, right: bool) -> None:
        if right:
            self._counters.frames_received += 1
            self._counters.bytes_received += header.length
        else:
            self._counters.checksum("payload", f"layer {header.layer}, frame {header.seq}")
            self._apply(self._fetches.damaged(transfer, time.monotonic()))

    def _handed_over(self, header: Header, transfer: Transfer) -> bool | None:
        """Hands a frame over to the engine. Returns as `_counted` does."""
        try:
            return self._fetches.verified(transfer, header, time.monotonic())
        except FrameRefused as e:
            self._apply(e.effects)
            return None

    # ------------------------------------------------------------ exported memory

    def take_reads(self) -> float | None:
        """Takes reads of NIXL that are over. Returns within how many seconds to look again; None: no need."""
        if self._nixl is None or not self._nixl.busy:
            return None
        for number, why in self._nixl.opened():
            self._exports.token_read(number, why)
        self._take_finished(self._nixl)
        return self._nixl.look_within()

    def _take_finished(self, nixl: NixlMemory) -> None:
        finished = nixl.finished()
        if nixl.for_receiver:
            finished = self._handed_to_engine(finished)
        if finished:
            self._pulled(finished)

    def _handed_to_engine(self, read: Mapping[int, bool]) -> dict[int, bool]:
        """Of slots with marks that NIXL has read: the engine verifies them. Returns those that it does not
        need to see: they could not be read, or their transfer has ended."""
        over: dict[int, bool] = {}
        taken: dict[int, list[int]] = {}
        for slot, whole in read.items():
            pull = self._pulls[slot]
            transfer = self._fetches.open.get(pull.ticket.transfer.id) if pull.ticket.transfer else None
            if not (whole and transfer):
                over[slot] = False
                continue
            taken.setdefault(pull.session, []).append(pull.m.slot)
            pull.taken = True
            self._arrived_at(transfer, slot, RING, slot, pull.header, pull.m)
        self._take_there(taken)
        return over

    def _slices_at(self, session: Session, transfer_id: bytes, slices: Sequence[SliceAt]) -> None:
        """Instead of frames. Each uses a credit and a slot, too, though the engine writes nothing into it."""
        nixl = self._exports.reader(session, slices)
        session.moved(time.monotonic())
        to_read: list[SliceToRead] = []
        for m in slices:
            if session.number not in self._peers.by_session:
                break  # a slice before this one ended it
            slot = self._slice_at(session, transfer_id, m, nixl)
            if slot is not None:
                to_read.append(SliceToRead(m.slot, slot, m.length, m.generation))
        if nixl and session.number in self._peers.by_session:
            nixl.read(session.number, to_read)
        else:
            self._pulled({x.slot: False for x in to_read})

    def _slice_at(
        self, session: Session, transfer_id: bytes, m: SliceAt, nixl: NixlMemory | None
    ) -> int | None:
        """Returns the slot that NIXL is to read into, if any."""
        kind, state_type = kind_of(m.state)
        header = Header(
            FrameType.KV, transfer_id, m.layer, kind, m.head_start, m.head_count, m.token_start,
            m.token_count, m.seq, m.length, 0, 0, state_type,
        )  # fmt: skip
        try:
            slot = self._pipe.take()
        except FrameError as e:
            raise ProtocolError("credit", str(e)) from None
        ticket = self.kv_begins(session, header, slot)
        here = nixl is not None and nixl.for_receiver is None
        self._pulls[slot] = _Pull(session.number, m, header, ticket, here)
        if ticket.transfer is None:
            self._pulled({slot: False})
        elif nixl is None:
            self._arrived_at(ticket.transfer, slot, session.number, m.slot, header, m)
        else:
            return slot
        return None

    def _arrived_at(
        self, transfer: Transfer, slot: int, session: int, there: int, header: Header, m: SliceAt
    ) -> None:
        """The engine verifies the slice. This side counts it as verified at once, so no further message must
        follow the last slice. If a slice is wrong, the engine does not inject its transfer."""
        self._channel.post(
            ArrivedAt(
                transfer.id, slot, m.seq, m.layer, m.state, m.head_start, m.head_count, m.token_start,
                m.token_count, m.length, session, there, m.generation, transfer.incoming.layout.dtype,
            )
        )  # fmt: skip
        if self._handed_over(header, transfer):
            self._complete(transfer)

    def _from_copies(self, message: SlotsFree | PulledIn | Opened) -> None:
        match message:
            case SlotsFree(slots):
                for slot in slots:
                    if slot not in self._pulls:
                        self._free(slot)
                self._pulled({slot: False for slot in slots if slot in self._pulls})
            case PulledIn(slots, whole):
                self._pulled(dict(zip(slots, whole, strict=True)))
            case Opened(number, reached, why):
                self._exports.opened(number, reached, why)

    def _pulled(self, slots: Mapping[int, bool]) -> None:
        """These slots are read or dropped. The value says whether the slice was right."""
        pulls = {slot: self._pulls.pop(slot) for slot in slots}
        taken: dict[int, list[int]] = {}
        for pull in pulls.values():
            if not pull.taken:
                taken.setdefault(pull.session, []).append(pull.m.slot)
        self._take_there(taken)
        for slot, pull in pulls.items():
            ticket, right = pull.ticket, slots[slot]
            transfer = self._fetches.open.get(ticket.transfer.id) if ticket.transfer else None
            if (
                transfer and not right and pull.session in self._peers.by_session
            ):  # the next transfer is over TCP
                self._session(pull.session).send(Reach(False, "a slice could not be read, or was wrong"))
            if pull.here:
                self.kv_ends(pull.header, ticket, right)
                continue
            self._free(slot)
            if transfer:
                self._verified(pull.header, transfer, right=right)

    def _take_there(self, slots: Mapping[int, Sequence[int]]) -> None:
        """The peer of each session may use these slots again."""
        for number, there in slots.items():
            if number in self._peers.by_session:
                self._session(number).moved(time.monotonic())
                self._session(number).send(Taken(tuple(there)))

    # ------------------------------------------------------------ credits and time

    def settle(self) -> None:
        """Grant and recall credits. Needed whenever a slot, a transfer or a session came or went."""
        for number, peer in self._peers.by_session.items():
            if peer.up and peer.session is not None:
                missing = self._fetches.missing_frames(peer.key)
                lanes = peer.session.lane_count
                transport = self._exports.transport(number)
                self._slots.want(number, 0 if missing is None else credit(missing, lanes, transport))
        grants = self._slots.settle()
        # Also without a grant: a frame beyond its credit took a slot that was laid out for another session.
        if slots := self._slots.lay_out():
            self._pipe.lay_out(slots)
        for number, message in grants:
            self._session(number).send(message)

    def tick(self, now: float) -> None:
        flow = {n: p.session.kv_moved for n, p in self._peers.by_session.items() if p.session is not None}
        self._apply(self._fetches.expire(now, flow))
        self._peers.tick(now, self._fetches.has_transfers)
        self._slots.ask_again()
        self.settle()

    # ------------------------------------------------------------ inside

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(number, transfer_id, message):
                    self._session(number).send(message, transfer_id)
                case Fail(transfer_id, reason, retry):
                    self._counters.transfers[reason] += 1
                    self._channel.post(FailedIn(transfer_id, reason, retry))
                case Completed(transfer):
                    self._complete(transfer)
                case Acknowledge(peer, transfer_id):
                    self._peers.acknowledge(peer, transfer_id, time.monotonic())
                case EndSession(number):
                    self._session(number).end("lost", "frames do not come")
                case Refuse(kind, why):
                    self._counters.refuse(kind, why)
                case Late():
                    self._counters.late_frames += 1
                case Expired(name, detail):
                    self._counters.expire(name, detail)

    def _session(self, number: int) -> Session:
        session = self._peers.by_session[number].session
        assert session is not None
        return session

    def _complete(self, transfer: Transfer) -> None:
        """Tells the engine at once: a request waits for this."""
        incoming = transfer.incoming
        self._channel.send(
            Complete(
                transfer.id, incoming.first_token, incoming.frames, incoming.bytes, transfer.asked_at,
                transfer.first_frame_at, transfer.last_frame_at, transfer.commit_at,
            )
        )  # fmt: skip

    def _free(self, slot: int) -> None:
        self._slots.release(slot)
