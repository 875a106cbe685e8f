"""Frames and slices that come: their slots, credits and transfers, up to the engine.

`ReceiverSlots` has the free slots. A slot that a lane receives into belongs to that lane, and is in
`_receiving`. A slot named in `Arrived` belongs to the engine until `SlotsFree`.
"""

import time

from baton.kv_transfer.channel import Channel
from baton.kv_transfer.config import TransferConfig
from baton.kv_transfer.process.frames import SlotPipe
from baton.kv_transfer.process.peers import Peers
from baton.kv_transfer.process.stats import TransferCounters
from baton.kv_transfer.process.tcp_session import Session
from baton.kv_transfer.protocol.credits import CreditExceeded, ReceiverSlots, credit
from baton.kv_transfer.protocol.fetches import (
    Acknowledge,
    Effect,
    EndSession,
    Fetches,
    FrameRefused,
    Late,
    Refuse,
    Transfer,
)
from baton.kv_transfer.protocol.frame import Header
from baton.kv_transfer.protocol.local_messages import Arrived, Complete, FailedIn
from baton.kv_transfer.protocol.shared import Expired, Send


class Arrivals:
    def __init__(
        self,
        config: TransferConfig,
        pipe: SlotPipe,
        channel: Channel,
        counters: TransferCounters,
        peers: Peers,
    ) -> None:
        self.slots = ReceiverSlots(config.num_slots)
        self.fetches = Fetches(config.deadlines, config.layout, config.slot_bytes)
        self.pipe = pipe
        # By slot. None: the frame is read away.
        self._receiving: dict[int, Transfer | None] = {}
        self._channel = channel
        self._counters = counters
        self._peers = peers

    def kv_begins(self, session: Session, header: Header, slot: int) -> None:
        """A frame comes into this slot, or a slice for which the slot was taken. `kv_ends` follows."""
        transfer = None
        try:
            self.slots.arrive(session.number)
            transfer = self.fetches.begin(session.number, header, time.monotonic())
        except CreditExceeded as e:
            if session.number in self._peers.by_session:
                self._counters.refuse("credit", str(e))
                session.end("lost", str(e))
        except FrameRefused as e:
            if session.number in self._peers.by_session:
                self.apply(e.effects)
                if any(isinstance(effect, FailedIn) for effect in e.effects):
                    self.settle()  # else the credit of a late frame is granted again with the next event
        self._receiving[slot] = transfer

    def open_transfer(self, slot: int) -> Transfer | None:
        """Of the frame or slice in this slot. None: it is read away, or its transfer has ended."""
        transfer = self._receiving[slot]
        return transfer and self.fetches.open.get(transfer.id)

    def kv_ends(self, header: Header, slot: int, intact: bool | None) -> None:
        """`intact`: whether the checksum matched; None: the lane closed before."""
        if self._receiving[slot] is None:
            self._end(slot)  # granted again with the next event, not for each such frame
            return
        transfer = self.open_transfer(slot)
        if transfer is not None and transfer.incoming.live and intact is not None:
            self._verified(header, transfer, right=intact)
            if intact and self.hand_over(transfer, Arrived(header, slot, transfer.incoming.layout.dtype)):
                del self._receiving[slot]
                return
        self._end(slot)
        self.settle()

    def hand_over(self, transfer: Transfer, arrived: Arrived) -> bool:
        """Counts a frame or slice, and names it to the engine. Returns False if its transfer refuses it.

        The engine verifies a slice in memory that a peer exports. It counts as verified at once, so no
        further message must follow the last slice. If a slice is wrong, the engine does not inject its
        transfer."""
        try:
            complete = self.fetches.verified(transfer, arrived.header, time.monotonic())
        except FrameRefused as e:
            self.apply(e.effects)
            return False
        (self._channel.hold if arrived.session is None else self._channel.post)(arrived)
        if complete:
            self._channel.send(transfer.complete())
        return True

    def read(self, header: Header, slot: int, *, right: bool) -> None:
        """A slice that was handed over in exported memory is read, or dropped."""
        if (transfer := self.open_transfer(slot)) is not None:
            self._verified(header, transfer, right=right)
        self._end(slot)

    def _end(self, slot: int) -> None:
        del self._receiving[slot]
        self.slots.release(slot)

    def _verified(self, header: Header, transfer: Transfer, *, right: bool) -> None:
        if right:
            self._counters.frames_received += 1
            self._counters.bytes_received += header.length
        else:
            self._counters.checksum("payload", f"layer {header.piece.layer}, frame {header.seq}")
            self.apply(self.fetches.damaged(transfer, time.monotonic()))

    # ------------------------------------------------------------ credits and effects

    def settle(self) -> None:
        """Grant and recall credits. Needed whenever a slot, a transfer or a session came or went."""
        for number, peer in self._peers.by_session.items():
            if peer.up and peer.session is not None:
                missing = self.fetches.missing_frames(peer.key)
                lanes, exported = peer.session.lane_count, peer.session.transport != "tcp"
                self.slots.want(number, 0 if missing is None else credit(missing, lanes, exported=exported))
        grants = self.slots.settle()
        # Also without a grant: a frame beyond its credit took a slot that was laid out for another session.
        if slots := self.slots.lay_out():
            self.pipe.lay_out(slots)
        for number, message in grants:
            self._session(number).send(message)

    def apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(number, transfer_id, message):
                    self._session(number).send(message, transfer_id)
                case FailedIn(_, reason):
                    self._counters.transfers[reason] += 1
                    self._channel.post(effect)
                case Complete():  # at once: a request waits for this
                    self._channel.send(effect)
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
