"""The receiving side in its transfer process: between the engine's fetches, the credits and the sessions.

A slot that is free is in `Slots`; one being received into belongs to its lane (as ticket); from `Arrived` to
`SlotsFree` it belongs to the engine.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any

from kv_transfer.channel import (
    Arrived,
    CancelIn,
    Channel,
    Complete,
    FailedIn,
    FetchIn,
    FromReceiver,
    InjectedIn,
    SlotsFree,
)
from kv_transfer.config import MAX_LANES, TransferConfig
from kv_transfer.process.connector import Connector, ProtocolError, Session
from kv_transfer.process.slots import Slots
from kv_transfer.process.stats import Counters, printable
from kv_transfer.protocol.acks import Acks
from kv_transfer.protocol.credits import CreditExceeded, CreditPool
from kv_transfer.protocol.frame import Header
from kv_transfer.protocol.incoming import Fault, Incoming
from kv_transfer.protocol.messages import (
    Abort,
    Aborted,
    Ack,
    Commit,
    Control,
    CreditReturned,
    Fetch,
    Reason,
)
from kv_transfer.protocol.tombstones import Tombstones

log = logging.getLogger("baton.kv")

# Slots at most that wait for frames, per lane (of four at least): enough until the next grant is used. More
# would only be memory that has left every cache when it is written to.
_CREDIT_PER_LANE, _CREDIT_LANES = 4, 4
_BACKOFF = (0.05, 1.0)  # seconds before lanes reopen: first and longest
# A new session, or a new FETCH over it, can mend these; anything else that ends a session cannot.
_MENDABLE = {"lost", "dead", "unreachable", "idle", "busy", "by_peer", "hello"}
# We ended it, and nothing was amiss: what was said will arrive. Any other end may have lost it. So may the
# peer's: it closes in the same way when it drains and when it heard nothing from us for too long.
_CLEAN = {"idle", "drained", "stopped"}


@dataclass(slots=True, eq=False)
class _Transfer:
    id: bytes
    prefill_id: bytes
    peer: _Peer
    incoming: Incoming
    opened: float
    moved: float
    first_frame_at: float = 0.0
    last_frame_at: float = 0.0
    commit_at: float = 0.0


@dataclass(slots=True, eq=False)
class _Ticket:
    """A slot while a lane receives into it."""

    slot: int
    transfer: _Transfer | None  # None: nobody wants it


@dataclass(slots=True, eq=False)
class _Peer:
    """A prefill worker's incarnation, whether or not a session with it is up."""

    address: str
    incarnation: int
    acks: Acks
    session: Session | None = None  # up, or coming up
    up: bool = False
    transfers: dict[bytes, _Transfer] = field(default_factory=dict)
    retry_at: float = 0.0
    backoff: float = _BACKOFF[0]
    used: float = 0.0  # when it last had something to do
    moved: float = 0.0  # when a frame of any of its transfers last came


class DecodeSide:
    """Implements connector.FrameReceiver."""

    def __init__(self, config: TransferConfig, slots: Slots, channel: Channel, counters: Counters) -> None:
        self.transfers: dict[bytes, _Transfer] = {}  # until ACK or failure
        self.draining = False
        self.connector: Connector | None = None  # set by who makes both
        self.credits = CreditPool(config.num_slots)
        self._config = config
        self._slots = slots
        self._channel = channel
        self._counters = counters
        self._peers: dict[tuple[str, int], _Peer] = {}
        self._by_session: dict[int, _Peer] = {}
        self._tombstones: Tombstones[str] = Tombstones(config.deadlines.tombstone)

    @property
    def transfers_open(self) -> int:
        return len(self.transfers)

    @property
    def quiet(self) -> bool:
        """No transfer is open."""
        return not self.transfers

    @property
    def busy(self) -> bool:
        return bool(self._peers)

    def slots_free(self) -> int:
        """Free, or granted as credit and not used yet."""
        free = self.credits.free + self.credits.promised
        assert free == self._slots.free, "credits and slots disagree"
        return free

    # ------------------------------------------------------------ from the engine

    def engine(self, message: FromReceiver) -> None:
        now = time.monotonic()
        match message:
            case SlotsFree(slots):
                for slot in slots:
                    self._free(slot)
            case FetchIn():
                self._fetch(message, now)
            case InjectedIn(transfer_id):
                transfer = self.transfers.get(transfer_id)
                assert transfer is not None, "the engine injected what was not complete"
                transfer.incoming.injected()
                self._forget(transfer, "injected", now)
                transfer.peer.acks.injected(transfer_id, now)
                self._acknowledge(transfer.peer, now)
            case CancelIn(transfer_id):
                transfer = self.transfers.get(transfer_id)
                if transfer is not None:  # else its failure crossed the cancel
                    self._abort(transfer, "cancelled")
                    self._forget(transfer, "cancelled", now)
        self.settle()

    def _fetch(self, message: FetchIn, now: float) -> None:
        if self.draining:
            self._channel.post(FailedIn(message.transfer_id, "draining", retry=False))
            return
        key = (message.address, message.incarnation)
        peer = self._peers.get(key)
        if peer is None:
            peer = self._peers[key] = _Peer(*key, Acks(self._config.deadlines))
        incoming = Incoming(
            self._config.layout,
            message.ranges,
            (message.head_start, message.head_start + message.head_count),
            slot_bytes=self._config.slot_bytes,
        )
        transfer = _Transfer(message.transfer_id, message.prefill_id, peer, incoming, now, now)
        self.transfers[transfer.id] = peer.transfers[transfer.id] = transfer
        peer.used = now
        if peer.up:
            self._open(transfer)
        else:
            self._connect(peer, now)

    def _open(self, transfer: _Transfer) -> None:
        assert transfer.peer.session is not None
        incoming = transfer.incoming
        heads = incoming.heads
        fetch = Fetch(transfer.prefill_id, incoming.ranges, 0, heads[0], heads[1] - heads[0])
        transfer.peer.session.send(fetch, transfer.id)

    def _acknowledge(self, peer: _Peer, now: float) -> None:
        if peer.session is not None and peer.up:
            for transfer_id in peer.acks.say(now):
                peer.session.send(Ack(), transfer_id)

    def _connect(self, peer: _Peer, now: float) -> None:
        if peer.session is not None or now < peer.retry_at:
            return
        assert self.connector is not None
        wanted = self._config.lanes + bool(self._config.lane_processes)  # lane 0 carries no KV then
        lanes = max(1, min(wanted, MAX_LANES, self._config.max_lanes // len(self._peers)))
        try:
            host, port = peer.address.rsplit(":", 1)
            peer.session = self.connector.connect((host.strip("[]"), int(port)), peer.incarnation, lanes)
        except (OSError, ValueError) as e:
            log.warning("cannot connect to %s: %s", printable(peer.address), e)
            self._back_off(peer, now)
        else:
            self._by_session[peer.session.number] = peer

    # ------------------------------------------------------------ connector.FrameReceiver

    def session_up(self, session: Session) -> None:
        peer = self._by_session[session.number]
        peer.up = True
        peer.backoff = _BACKOFF[0]
        self.credits.open(session.number)
        self._acknowledge(peer, time.monotonic())
        for transfer in peer.transfers.values():
            if transfer.incoming.live:
                self._open(transfer)
        self.settle()

    def session_down(self, session: Session, reason: str, detail: str) -> None:
        now = time.monotonic()
        peer = self._by_session.pop(session.number)
        peer.session = None
        if peer.up:
            peer.up = False
            self.credits.end(session.number)
            if reason in _CLEAN:
                peer.acks.clear()
            else:
                peer.acks.lost(now)
            self._fail_live(peer, "lost", retry=True)
            peer.retry_at = now  # streams wait: the first attempt is due at once
        else:
            if reason not in _MENDABLE:
                peer.acks.clear()
                self._fail_live(peer, reason, retry=False)
            self._back_off(peer, now)
        self.settle()

    def session_over(self, session: Session) -> None:
        if session.number in self.credits.accounts:  # it was up
            self.credits.close(session.number)
            self.settle()

    def control(self, session: Session, header: Header, message: Control) -> None:
        if isinstance(message, CreditReturned):
            try:
                self.credits.returned(session.number, message.total, message.sent)
            except ValueError as e:
                raise ProtocolError("credit", str(e)) from None
        else:
            transfer = self._by_session[session.number].transfers.get(header.transfer_id)
            if transfer is None or not transfer.incoming.live:
                self._stale(header)  # crossed our ABORT, or the sender's own end after everything came
            elif isinstance(message, Commit):
                self._commit(transfer, header, message)
            elif isinstance(message, Aborted) and message.reason == "deadline" and self._dry(transfer):
                session.end("lost", "frames do not come")
            elif isinstance(message, Aborted):
                # "deadline" with nothing sent: the prefill never showed up, and will not for a second FETCH.
                retry = message.reason == "integrity" or (message.reason == "deadline" and message.frames > 0)
                self._fail(transfer, message.reason, retry=retry)
        self.settle()

    def _commit(self, transfer: _Transfer, header: Header, message: Commit) -> None:
        transfer.commit_at = transfer.moved = time.monotonic()
        try:
            complete = transfer.incoming.commit(header.sender_rank, message)
        except Fault as e:
            self._integrity(transfer, e.kind, str(e))
        else:
            if complete:
                self._complete(transfer)

    def kv_begins(self, session: Session, header: Header, slot: int) -> Any:
        self._slots.taken()
        transfer: _Transfer | None = None
        try:
            self.credits.arrive(session.number)
        except CreditExceeded as e:
            if session.number in self._by_session:
                self._counters.refuse("credit", str(e))
                session.end("lost", str(e))
        else:
            transfer = self._wanted(session, header)
        if transfer is not None and transfer.first_frame_at == 0:
            transfer.first_frame_at = time.monotonic()
        return _Ticket(slot, transfer)

    def _wanted(self, session: Session, header: Header) -> _Transfer | None:
        """The live transfer that this frame is a right part of."""
        peer = self._by_session.get(session.number)
        if peer is None:
            return None  # of a session that has ended
        transfer = peer.transfers.get(header.transfer_id)
        if transfer is None or not transfer.incoming.live:
            self._stale(header)
            return None
        try:
            transfer.incoming.begin(header)
        except Fault as e:
            self._integrity(transfer, e.kind, str(e))
            return None
        return transfer

    def kv_ends(self, header: Header, ticket: _Ticket, whole: bool | None) -> None:
        transfer = ticket.transfer
        if transfer is None:
            self._free(ticket.slot)  # granted again with the next event, not for each such frame
            return
        if not whole or not transfer.incoming.live:
            self._free(ticket.slot)
            if whole is False and transfer.incoming.live:
                self._counters.checksum("payload", f"layer {header.layer}, frame {header.seq}")
                self._integrity(transfer, "payload", "payload checksum does not match")
            self.settle()
            return
        transfer.moved = transfer.last_frame_at = transfer.peer.moved = time.monotonic()
        self._counters.kv_frames += 1
        self._counters.kv_bytes += header.length
        try:
            complete = transfer.incoming.verified(header)
        except Fault as e:
            self._free(ticket.slot)
            self._integrity(transfer, e.kind, str(e))
            return
        self._channel.hold(
            Arrived(
                transfer.id, ticket.slot, header.seq, header.layer, header.head_start, header.head_count,
                header.token_start, header.token_count, header.length,
            )
        )  # fmt: skip
        if complete:
            self._complete(transfer)

    # ------------------------------------------------------------ credits and time

    def settle(self) -> None:
        """Grant and recall credits. Needed whenever a slot, a transfer or a session came or went."""
        for number, peer in self._by_session.items():
            if peer.up and peer.session is not None:
                missing = sum(t.incoming.missing_frames for t in peer.transfers.values())
                # One more per lane: slices need not be as large as they could be.
                open_ = any(t.incoming.live for t in peer.transfers.values())
                lanes = peer.session.lane_count
                most = _CREDIT_PER_LANE * max(lanes, _CREDIT_LANES)
                self.credits.want(number, min(missing + lanes, most) if open_ else 0)
        grants = self.credits.settle()
        # Without a grant, too: a frame beyond its credit took one that was laid out for somebody else.
        self._slots.lay_out(self.credits.promised)
        for number, credit in grants:
            session = self._by_session[number].session
            assert session is not None
            session.send(credit)

    def tick(self, now: float) -> None:
        limits = self._config.deadlines
        for transfer in list(self.transfers.values()):
            incoming, peer = transfer.incoming, transfer.peer
            if not incoming.live:
                continue
            if not peer.up and now >= transfer.opened + limits.unreachable:
                self._counters.expire("unreachable", peer.address)
                self._fail(transfer, "unreachable", retry=False)
            elif peer.session is None or not incoming.committed:
                continue  # how long the prefill computes is the router's business
            elif now >= max(transfer.moved, peer.session.kv_moved) + limits.progress:
                self._counters.expire("progress", f"{incoming.frames} frames came")
                if self._dry(transfer):
                    peer.session.end("lost", "frames do not come")
                else:
                    self._abort(transfer, "deadline")
                    self._fail(transfer, "deadline", retry=True)
        for key, peer in list(self._peers.items()):
            if peer.transfers:
                peer.used = now
            peer.acks.expire(now)
            wanted = peer.transfers or peer.acks.waiting
            if peer.session is None and wanted:
                self._connect(peer, now)
            elif peer.session is None:
                del self._peers[key]
            elif not wanted and now >= peer.used + limits.idle_close:
                peer.session.end("idle", "no transfer for a while")
        self._tombstones.expire(now)
        self.credits.ask_again()
        self.settle()

    def _dry(self, transfer: _Transfer) -> bool:
        """COMMIT came, no byte of a frame comes over its session, and since this transfer last moved no frame
        of any other did.

        Then the frames that both sides count as on their way are lost, and with them their credits: only a
        new session has any. Half of the deadline, since prefill's may end a little before ours."""
        session, peer = transfer.peer.session, transfer.peer
        if session is None or time.monotonic() < session.kv_moved + self._config.deadlines.progress / 2:
            return False
        return transfer.incoming.committed and peer.moved <= transfer.moved

    # ------------------------------------------------------------ ends

    def _complete(self, transfer: _Transfer) -> None:
        incoming = transfer.incoming
        self._channel.post(
            Complete(
                transfer.id, incoming.first_token, incoming.frames, incoming.bytes,
                transfer.first_frame_at, transfer.last_frame_at, transfer.commit_at,
            )
        )  # fmt: skip

    def _integrity(self, transfer: _Transfer, kind: str, why: str) -> None:
        self._counters.refuse(kind, why)
        self._abort(transfer, "integrity")
        self._fail(transfer, "integrity", retry=True)
        self.settle()

    def _abort(self, transfer: _Transfer, reason: Reason) -> None:
        if transfer.peer.up and transfer.peer.session is not None:
            transfer.peer.session.send(Abort(reason), transfer.id)

    def _fail(self, transfer: _Transfer, reason: str, *, retry: bool) -> None:
        self._channel.post(FailedIn(transfer.id, reason, retry))
        self._forget(transfer, reason, time.monotonic())

    def _fail_live(self, peer: _Peer, reason: str, *, retry: bool) -> None:
        """All but those that are COMPLETE: the engine will say when they are injected, whatever became of
        the peer."""
        for transfer in [t for t in peer.transfers.values() if t.incoming.live]:
            self._fail(transfer, reason, retry=retry)

    def _forget(self, transfer: _Transfer, reason: str, now: float) -> None:
        """From here on frames of this transfer are for nobody."""
        transfer.incoming.end()
        del self.transfers[transfer.id]
        del transfer.peer.transfers[transfer.id]
        transfer.peer.used = now
        self._tombstones.bury(transfer.id, reason, now)
        self._counters.transfers[reason] += 1

    def _stale(self, header: Header) -> None:
        if self._tombstones.get(header.transfer_id) is None:
            self._counters.refuse("transfer_id", f"{header.type.name} of a transfer that never was")
        else:
            self._counters.late_frames += 1

    def _free(self, slot: int) -> None:
        self._slots.give_back(slot)
        self.credits.release()

    def _back_off(self, peer: _Peer, now: float) -> None:
        peer.retry_at = now + peer.backoff
        peer.backoff = min(2 * peer.backoff, _BACKOFF[1])
