"""The receiving side in its transfer process: between the engine, its transfers, and its sessions."""

import time
from functools import partial
from typing import Any, ClassVar

from baton.kv_transfer.channel import Channel
from baton.kv_transfer.config import TransferConfig
from baton.kv_transfer.memory_reader import MemoryReader
from baton.kv_transfer.process.arrivals import Arrivals
from baton.kv_transfer.process.frames import SlotPipe
from baton.kv_transfer.process.peer_exports import PeerExports
from baton.kv_transfer.process.peers import Connect, Peers
from baton.kv_transfer.process.stats import TransferCounters
from baton.kv_transfer.process.tcp_session import Session
from baton.kv_transfer.protocol import local_messages as local
from baton.kv_transfer.protocol import messages as wire
from baton.kv_transfer.protocol.frame import Header
from baton.kv_transfer.trace import NO_TRACE, TraceWriter


class DecodeSide:
    """Implements SessionHandler."""

    def __init__(
        self,
        config: TransferConfig,
        pipe: SlotPipe,
        channel: Channel,
        counters: TransferCounters,
        connect: Connect,
        reader: MemoryReader | None,
        trace: TraceWriter = NO_TRACE,
    ) -> None:
        """`connect` makes sessions for this side."""
        self._channel = channel
        self._counters = counters
        self._peers = Peers(config, connect)
        self.arrivals = Arrivals(config, pipe, channel, counters, self._peers)
        self.exports = PeerExports(self.arrivals, channel, reader, trace)
        self._slots, self.fetches = self.arrivals.slots, self.arrivals.fetches

    @property
    def transfers_open(self) -> int:
        return len(self.fetches.open)

    @property
    def busy(self) -> bool:
        return bool(self._peers)

    def slots_free(self) -> int:
        """Free, or granted as credit and not used yet."""
        return self._slots.not_in_use

    def links(self, now: float) -> dict[int, tuple[float, int, float]]:
        """Of each link that was measured lately, by the incarnation of the peer: bytes/s, bytes that are
        asked for and have not come, and the share of its time in which frames came."""
        recent = self.arrivals.link_rates.recent(now).items()
        return {peer: (rate, self.fetches.missing_bytes(peer), used) for peer, (rate, used) in recent}

    # ------------------------------------------------------------ from the engine

    def engine(self, message: local.FromReceiver) -> None:
        now = time.monotonic()
        match message:
            case local.Emptied(slots, damaged):
                self.exports.emptied(slots, damaged)
            case local.Opened(number, reached, why):
                self.exports.opened(number, reached, why)
            case local.FetchIn(_, _, address, incarnation):
                self.arrivals.apply(self.fetches.fetch(message, now))
                self._peers.want(incarnation, address, now)
            case local.InjectedIn(transfer_id):
                self._counters.transfers["injected"] += 1
                self.arrivals.apply(self.fetches.injected(transfer_id, now))
            case local.CancelIn(transfer_id):
                effects = self.fetches.cancel(transfer_id, now)
                if effects is not None:
                    self._counters.transfers["cancelled"] += 1
                    self.arrivals.apply(effects)
        self.arrivals.settle()

    # ------------------------------------------------------------ from sessions

    def session_up(self, session: Session) -> None:
        self._slots.open(session.number)
        now = time.monotonic()
        peer = self._peers.session_up(session, now)
        self.arrivals.apply(self.fetches.session_up(peer.key, session.number, session.dtypes, now))
        self.arrivals.settle()

    def session_down(self, session: Session, reason: str, detail: str) -> None:
        now = time.monotonic()
        if session.number in self._slots.accounts:  # it was up
            self._slots.end(session.number)
        peer = self._peers.session_down(session, reason, now)
        self.arrivals.apply(self.fetches.session_down(peer.key, reason, now))
        self.exports.close(session.number)
        self.arrivals.settle()

    def session_over(self, session: Session) -> None:
        if session.number in self._slots.accounts:  # it was up
            self._slots.close(session.number)
            self.arrivals.settle()

    def control(self, session: Session, header: Header, message: wire.Control) -> None:
        number, transfer_id, now = session.number, header.transfer_id, time.monotonic()
        match message:
            case wire.CreditReturned(total, sent):
                try:
                    self._slots.returned(number, total, sent)
                except ValueError as e:
                    raise wire.ProtocolError("credit", str(e)) from None
            case wire.Commit():
                self.arrivals.apply(self.fetches.commit(number, transfer_id, message, now))
            case wire.Have():
                self.arrivals.apply(self.fetches.have(number, transfer_id, message, now))
            case wire.Export():
                self.exports.open(session, message)
            case wire.Slices(slices):
                self.exports.slices(session, transfer_id, slices)
                return  # credit is granted when slots have been read, and not for each message
            case wire.Aborted():
                self.arrivals.apply(self.fetches.aborted(number, transfer_id, message, session.kv_moved, now))
        self.arrivals.settle()

    # ------------------------------------------------------------ time

    def tick(self, now: float) -> None:
        flow = {n: p.session.kv_moved for n, p in self._peers.by_session.items() if p.session is not None}
        self.arrivals.apply(self.fetches.expire(now, flow))
        self._peers.tick(now, self.fetches.has_transfers)
        self._slots.ask_again()
        self.arrivals.settle()


class ReceivingSession(Session["DecodeSide"]):
    """KV frames come in."""

    side: ClassVar[wire.Side] = "receiver"

    def __init__(self, handler: DecodeSide, *about: Any) -> None:
        super().__init__(handler, *about)
        self.begins = partial(handler.arrivals.begins, self)
        self.came = partial(handler.arrivals.lane_brought, self)
