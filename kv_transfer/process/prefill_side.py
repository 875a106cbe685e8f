"""The sending side in its transfer process: between the engine's pump, the held prefills and the sessions."""

import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

from baton.kv_transfer.arena import Arena
from baton.kv_transfer.channel import Channel
from baton.kv_transfer.config import TransferConfig
from baton.kv_transfer.memory_reader import MemoryReader
from baton.kv_transfer.process.card_rate import CardRate
from baton.kv_transfer.process.connection import Connection
from baton.kv_transfer.process.lane import Lane
from baton.kv_transfer.process.peer_reads import PeerReads
from baton.kv_transfer.process.stats import TransferCounters, printable
from baton.kv_transfer.process.tcp_session import Session
from baton.kv_transfer.protocol import local_messages as local
from baton.kv_transfer.protocol import messages as wire
from baton.kv_transfer.protocol.frame import HEADER_BYTES, Header
from baton.kv_transfer.protocol.held import Effect, HeldKV, HeldPrefills, StartTransfer
from baton.kv_transfer.protocol.shared import Expired, Send
from baton.kv_transfer.slices import Slice
from baton.kv_transfer.trace import NO_TRACE, TraceWriter

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
        self._channel = channel
        self._counters = counters
        self._sessions: dict[int, SendingSession] = {}  # by number
        self._reads = PeerReads(
            arena, channel, reader, trace, self._begin, partial(self.sent, soon=True), self.dropped
        )
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
                self._move(slices, now)
            case local.Exported(export, why):
                self._reads.export(export, why, [*self._sessions.values()])
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

    def _move(self, slices: Sequence[Slice], now: float) -> None:
        """By lanes, or read by the peer. A slice of a transfer that has ended goes back."""
        batches: dict[tuple[int, bool], list[Slice]] = {}
        for s in slices:
            self.slots_out += 1
            held = self.table.open.get(s.transfer_id)
            if held is None:
                self.dropped(s)
                continue
            self._note_last(s, held, now)
            is_read = self._reads.reads(self._sessions[held.session], s)
            batches.setdefault((held.session, is_read), []).append(s)
        for (number, is_read), batch in batches.items():
            session = self._sessions[number]
            if is_read:
                self._reads.move(session, batch)
            else:
                session.move(batch)

    def _note_last(self, s: Slice, held: HeldKV, now: float) -> None:
        piece, last_layer = s.piece, self._config.layout.num_layers - 1
        if piece.layer == last_layer and piece.token_start + piece.token_count == held.stop:
            self.table.all_sent(held, now)

    # ------------------------------------------------------------ from sessions

    def session_up(self, session: "SendingSession") -> None:
        self._sessions[session.number] = session

    def session_down(self, session: "SendingSession", reason: str, detail: str) -> None:
        del self._sessions[session.number]
        self._apply(self.table.session_down(session.number, time.monotonic()))
        self._reads.close(session)
        self._channel.post(local.SessionGone(session.number))

    def control(self, session: "SendingSession", header: Header, message: wire.Control) -> None:
        self._bound_unread(session, header)
        now = time.monotonic()
        if isinstance(message, wire.Fetch | wire.FetchContent):
            self._reads.offer(session)
        match message:
            case wire.FetchContent():
                self._apply(self.table.fetch_content(header.transfer_id, session.number, message, now))
            case wire.Fetch():
                self._apply(self.table.fetch(header.transfer_id, session.number, message, now))
            case wire.Reach():
                self._reads.reach(session, message)
            case wire.Taken():
                self._reads.taken(session, message)
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
        pass  # `dropped` gave back each slot that the lanes held

    def begins(self, s: Slice) -> bool:
        """Whether the slice may leave by a lane. If not, its slot is given back."""
        if self._begin(s.transfer_id, 1):
            return True
        self.dropped(s)
        return False

    def _begin(self, transfer_id: bytes, count: int) -> bool:
        return self.table.begin_send(transfer_id, time.monotonic(), count)

    def sent(self, session: "SendingSession", s: Slice, *, soon: bool = False) -> None:
        """`soon`: its slot does not wait for others: TAKEN named all slots of a copy."""
        self._counters.frames_sent += 1
        self._counters.bytes_sent += s.size
        session.bytes_sent += s.size
        self.table.sent(s.transfer_id, time.monotonic())
        self.slots_out -= 1
        (self._channel.post if soon else self._channel.hold)(local.SlotFree(s.slot, unsent=False))

    def dropped(self, s: Slice) -> None:
        self.slots_out -= 1
        self._channel.hold(local.SlotFree(s.slot, unsent=True))

    # ------------------------------------------------------------ time

    def tick(self, now: float) -> None:
        for session in self._sessions.values():
            session.feed()  # a lane for which slices wait may have stalled
        flow = {session.number: session.kv_moved for session in self._sessions.values()}
        self._apply(self.table.expire(now, flow))

    def transports(self) -> dict[str, str]:
        """Of each peer that fetches from here, by name."""
        return {
            _shown(session.peer.name, _NAME): _shown(self._reads.transport(session), _TRANSPORT)
            for session in self._sessions.values()
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
                    self._channel.post(
                        local.StartOut(
                            prefill_id,
                            transfer_id,
                            number,
                            session.slot_bytes,
                            session.lane_count,
                            session.dtypes,
                            fetch.ranges,
                            fetch.next_positions,
                        )
                    )
                case local.ReleasedOut(_, reason):
                    self._counters.transfers[reason] += 1
                    self._channel.post(effect)
                case local.ContentWanted() | local.StopOut() | local.FetchWaits():
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
        self._waiting: deque[Slice] = deque()  # for room in a lane
        self._cards: dict[object, CardRate] = {}  # by the addresses of both
        self.bytes_sent = 0  # of slices

    @property
    def in_use(self) -> bool:
        return self.handler.table.uses(self.number)

    def add(self, number: int, connection: Connection, peer: wire.Identity) -> None:
        cards = None
        with suppress(OSError):  # closed by the peer
            cards = connection.sock.getsockname()[0], connection.sock.getpeername()[0]
        super().add(number, connection, peer)
        self.lanes[number].card = self._cards.setdefault(cards, CardRate())

    def move(self, slices: Sequence[Slice]) -> None:
        """Sends slices of the arena, each by the lane that brings it first. Each ends with `sent` or
        `dropped` of `PrefillSide`."""
        self._waiting.extend(slices)
        self.feed()

    def feed(self) -> None:
        """Gives lanes no more than they have room for: a mover shows late that its lane is slow."""
        while self._waiting and (lane := self._next_lane()) is not None:
            if self.handler.begins(s := self._waiting.popleft()):
                lane.push_slice(s)

    def _next_lane(self) -> Lane | None:
        """The lane with room that brings the next slice first. None: the lanes without room bring all that
        waits before it would, since it has a slower card.

        A card that was not measured lately counts as the fastest one, and one that stalls as slow. With one
        card all lanes are alike, and looking at the fewest unsent bytes takes less time."""
        if len(self._cards) < 2:
            lane = min(self.kv_lanes, key=lambda lane: lane.unsent)
            return lane if lane.has_room else None
        now = time.monotonic()
        known = {lane.card: lane.card.rate(now) for lane in self.kv_lanes}
        most = max(known.values()) or 1.0
        rates = {lane: min(known[lane.card] or most, lane.most(now)) for lane in self.kv_lanes}
        behind = {lane: lane.backlog(rate, now) for lane, rate in rates.items()}
        size, full = self._waiting[0].size, [lane for lane in rates if not lane.has_room]
        seconds = {lane: (behind[lane] + size) / rates[lane] for lane in rates if lane.has_room}
        if not seconds:
            return None
        lane = min(seconds, key=seconds.__getitem__)
        rest = sum(behind[other] for other in full) + sum(s.size for s in self._waiting)
        return lane if not full or seconds[lane] * sum(rates[other] for other in full) <= rest else None

    def _over(self) -> None:
        while self._waiting:
            self.handler.dropped(self._waiting.popleft())
        super()._over()

    def left(self, s: Slice, *, sent: bool) -> None:
        if sent:
            self.handler.sent(self, s)
            self.feed()
        else:
            self.handler.dropped(s)


def _shown(text: str, most: int) -> str:
    """A text of a peer in so many bytes."""
    return printable(text).encode("ascii", "backslashreplace")[:most].decode()
