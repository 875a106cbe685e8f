"""Slices that come: their slots, credits and transfers, up to the engine.

`ReceiverSlots` has the free slots. A slot in `_slices` belongs to the lane or reader that fills it, and from
`Arrived` on to the engine.
"""

import time

from baton.kv_transfer.channel import Channel
from baton.kv_transfer.config import TransferConfig
from baton.kv_transfer.process.frames import SlotPipe
from baton.kv_transfer.process.link_rates import LinkRates
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
from baton.kv_transfer.protocol.local_messages import Arrived, Complete, FailedIn
from baton.kv_transfer.protocol.shared import Expired, Send
from baton.kv_transfer.slices import ARENA, Slice


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
        self.link_rates = LinkRates()
        self.pipe = pipe
        # By slot. Without a transfer the slice is read away.
        self._slices: dict[int, tuple[Slice, Transfer | None]] = {}
        self._channel = channel
        self._counters = counters
        self._peers = peers

    def begins(self, session: Session, s: Slice) -> None:
        """A slice begins to come into its slot, or its slot was taken for it. `came` follows, or `hand_over`,
        or `emptied`."""
        transfer = None
        try:
            self.slots.arrive(session.number)
            transfer = self.fetches.begin(session.number, s, time.monotonic())
        except CreditExceeded as e:
            if session.number in self._peers.by_session:
                self._counters.refuse("credit", str(e))
                session.end("lost", str(e))
        except FrameRefused as e:
            if session.number in self._peers.by_session:
                self.apply(e.effects)
                if any(isinstance(effect, FailedIn) for effect in e.effects):
                    self.settle()  # else the credit of a late frame is granted again with the next event
        self._slices[s.slot] = s, transfer

    def transfer_of(self, slot: int) -> Transfer | None:
        """Of the slice in this slot. None: the slice is read away, or its transfer has ended."""
        transfer = self._slices[slot][1]
        return transfer and self.fetches.open.get(transfer.id)

    def lane_brought(
        self, session: Session, s: Slice, intact: bool | None, began: float, ended: float
    ) -> None:
        """A slice of a lane is in its slot, as in `came`, after so long (time.monotonic())."""
        if intact and session.peer is not None:
            transfer, due = self._slices[s.slot][1], began
            if transfer is not None and transfer.commit_at:  # since then the peer has had it to send
                due = min(began, transfer.commit_at)
            self.link_rates.came(session.peer.incarnation, s.size, began, ended, due)
        self.came(s, intact)

    def came(self, s: Slice, intact: bool | None) -> None:
        """A slice is in its slot. `intact`: whether its checksum matched; None: its lane closed before."""
        if self._slices[s.slot][1] is None:
            self.emptied(s.slot, None)  # granted again with the next event, not for each such frame
            return
        transfer = self.transfer_of(s.slot)
        if transfer is not None and transfer.incoming.live and intact is not None:
            if s.verified:
                self._judge(s, transfer, right=intact)
            if intact and self.hand_over(transfer, s):
                return
        self.emptied(s.slot, None)
        self.settle()

    def hand_over(self, transfer: Transfer, s: Slice) -> bool:
        """Counts a slice, and gives it to the engine until `emptied`. Returns False if its transfer refuses
        it.

        The engine verifies a slice of a summed lane, and one in memory that a peer exports. It counts as
        verified at once, so no further message must follow the last slice. If a slice is wrong, the engine
        does not inject its transfer."""
        try:
            complete = self.fetches.verified(transfer, s, time.monotonic())
        except FrameRefused as e:
            self.apply(e.effects)
            return False
        s.dtype = transfer.incoming.layout.arrays[s.piece.array].dtype
        (self._channel.hold if s.memory == ARENA else self._channel.post)(Arrived(s))
        if complete:
            self._channel.send(transfer.complete())
        return True

    def emptied(self, slot: int, right: bool | None) -> None:
        """Nothing uses the slot any more. `right`: as the engine found the slice, if it was not verified;
        None: no process has looked."""
        if right is not None and not self._slices[slot][0].verified and (transfer := self.transfer_of(slot)):
            self._judge(self._slices[slot][0], transfer, right=right)
        del self._slices[slot]
        self.slots.release(slot)

    def _judge(self, s: Slice, transfer: Transfer, *, right: bool) -> None:
        if right:
            self._counters.frames_received += 1
            self._counters.bytes_received += s.size
        else:
            self._counters.checksum("payload", f"layer {s.piece.layer}, frame {s.seq}")
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
