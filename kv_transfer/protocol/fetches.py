"""Transfers as decode sees them, from FETCH to ACK or failure. Pure: events in, effects out.

`Incoming` says what a transfer still misses. `Fetches` owns all open transfers of a worker, their deadlines
and the decision whether a failed transfer is worth a new FETCH. A transfer is open from `fetch` until the
engine has injected or cancelled it, or until it failed. Ids of transfers that ended leave a tombstone.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.kv_names import CHUNK_TOKENS
from baton.kv_transfer.config import TransferDeadlines
from baton.kv_transfer.layout import Dtypes, KVLayout
from baton.kv_transfer.protocol.incoming import Fault, Incoming
from baton.kv_transfer.protocol.local_messages import Arrival, Complete, FailedIn, FetchIn
from baton.kv_transfer.protocol.messages import Abort, Aborted, Commit, Fetch, FetchContent, Have, Reason
from baton.kv_transfer.protocol.shared import Expired, Send, Tombstones
from baton.kv_transfer.slices import Slice

PeerKey = int  # the incarnation of a prefill worker, which may have several addresses

# A session that did not come up for one of these reasons may come up at the next attempt.
MENDABLE = frozenset({"lost", "dead", "unreachable", "idle", "busy", "by_peer", "hello"})


@dataclass(slots=True, eq=False)
class _Source:
    """A prefill worker that transfers come from."""

    peer: PeerKey
    layout: KVLayout  # of the KV that it sends, once a session was up
    session: int | None = None  # the one that is up
    up_at: float = 0.0  # since when
    moved: float = 0.0  # when a frame of any of its transfers last came
    transfers: "dict[bytes, Transfer]" = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Transfer:
    request: FetchIn
    source: _Source
    incoming: Incoming
    opened: float
    moved: float
    narrowed: bool = False  # its HAVE came
    first_frame_at: float = 0.0
    last_frame_at: float = 0.0
    commit_at: float = 0.0

    @property
    def id(self) -> bytes:
        return self.request.transfer_id

    @property
    def asked_at(self) -> float:
        """When its FETCH left: at once, or when a session was up."""
        return max(self.opened, self.source.up_at)

    def complete(self) -> Complete:
        """To the engine: every frame of the transfer came, verified."""
        incoming, commit_at = self.incoming, self.commit_at
        came = Arrival(
            incoming.bytes, incoming.tokens, incoming.frames, self.asked_at,
            self.first_frame_at or commit_at, self.last_frame_at or commit_at, commit_at,
        )  # fmt: skip
        return Complete(self.id, incoming.first_token, came)


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """To the peer: ACK, over the session that is up or over the next one."""

    peer: PeerKey
    transfer_id: bytes


@dataclass(frozen=True, slots=True)
class EndSession:
    """The frames that both sides count as under way are lost. Only a new session has their credits."""

    session: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """To the log and the metrics: a frame or message was refused."""

    kind: str
    why: str


@dataclass(frozen=True, slots=True)
class Late:
    """To the metrics: a frame or message came for a transfer that is COMPLETE or has ended."""


Effect = Send | FailedIn | Complete | Acknowledge | EndSession | Refuse | Late | Expired


class FrameRefused(Exception):
    """The frame is no part of a live transfer. `effects` follow from it."""

    def __init__(self, effects: list[Effect]) -> None:
        super().__init__(effects)
        self.effects = effects


class Fetches:
    """All open transfers of one decode worker."""

    def __init__(self, deadlines: TransferDeadlines, layout: KVLayout, slot_bytes: int) -> None:
        self.open: dict[bytes, Transfer] = {}  # by transfer id, until ACK or failure
        self._sources: dict[PeerKey, _Source] = {}  # those with a transfer or a session
        self._tombstones: Tombstones[str] = Tombstones(deadlines.tombstone)
        self._deadlines = deadlines
        self._layout = layout
        self._slot_bytes = slot_bytes
        self._newest_complete: Transfer | None = None  # the newest of which all frames came before COMMIT

    @property
    def commit_due(self) -> float:
        """Since when a transfer misses only its COMMIT. Infinite: none does. Of several the newest counts."""
        newest = self._newest_complete
        return newest.last_frame_at if newest is not None and newest.incoming.live else math.inf

    def has_transfers(self, peer: PeerKey) -> bool:
        source = self._sources.get(peer)
        return source is not None and bool(source.transfers)

    def missing_frames(self, peer: PeerKey) -> int | None:
        """The fewest frames that the peer's live transfers still need; None: it has no live transfer."""
        missing = None
        source = self._sources.get(peer)
        for transfer in source.transfers.values() if source is not None else ():
            if transfer.incoming.live:
                missing = (missing or 0) + transfer.incoming.missing_frames
        return missing

    def missing_bytes(self, peer: PeerKey) -> int:
        """That the peer's live transfers still need."""
        source = self._sources.get(peer)
        return sum(t.incoming.missing_bytes for t in source.transfers.values()) if source is not None else 0

    # ------------------------------------------------------------ from the engine

    def fetch(self, request: FetchIn, now: float) -> list[Effect]:
        source = self._source(request.incarnation)
        incoming = Incoming(
            source.layout,
            request.ranges,
            slot_bytes=self._slot_bytes,
            states_at=request.states_at,
            narrows=bool(request.chunks),
            next_positions=request.next_positions,
        )
        transfer = Transfer(request, source, incoming, now, now)
        self.open[transfer.id] = source.transfers[transfer.id] = transfer
        return self._ask(source, transfer)

    def injected(self, transfer_id: bytes, now: float) -> list[Effect]:
        """The last write into the pool is over."""
        transfer = self.open.get(transfer_id)
        assert transfer is not None, "the engine injected a transfer that is not open"
        transfer.incoming.injected()
        self._close(transfer, "injected", now)
        return [Acknowledge(transfer.source.peer, transfer_id)]

    def cancel(self, transfer_id: bytes, now: float) -> list[Effect] | None:
        """None: the transfer has failed, and the engine will read that next."""
        transfer = self.open.get(transfer_id)
        if transfer is None:
            return None
        self._close(transfer, "cancelled", now)
        return self._abort(transfer, "cancelled")

    # ------------------------------------------------------------ from sessions

    def session_up(self, peer: PeerKey, session: int, dtypes: Dtypes, now: float) -> list[Effect]:
        """`dtypes`: in which slices travel."""
        source = self._source(peer)
        source.session, source.up_at = session, now
        source.layout = self._layout.sent_as(dtypes)
        live = [transfer for transfer in source.transfers.values() if transfer.incoming.live]
        for transfer in live:
            transfer.incoming.sent_as(source.layout)
        return [effect for transfer in live for effect in self._ask(source, transfer)]

    def session_down(self, peer: PeerKey, reason: str, now: float) -> list[Effect]:
        """The peer's session ended, or never came up. The engine still injects what is COMPLETE."""
        source = self._sources.get(peer)
        if source is None:
            return []
        was_up, source.session = source.session is not None, None
        effects: list[Effect] = []
        if was_up or reason not in MENDABLE:
            for transfer in [t for t in source.transfers.values() if t.incoming.live]:
                effects += self._fail(transfer, "lost" if was_up else reason, now, retry=was_up)
        self._drop_unused(source)
        return effects

    def commit(self, session: int, transfer_id: bytes, commit: Commit, now: float) -> list[Effect]:
        transfer = self._live(session, transfer_id)
        if transfer is None:
            return [self._stale(session, transfer_id, "COMMIT")]
        if transfer.request.chunks and not transfer.narrowed:
            return self._broken(transfer, "have", "COMMIT before HAVE", now)
        transfer.commit_at = transfer.moved = now
        try:
            complete = transfer.incoming.commit(commit)
        except Fault as e:
            return self._broken(transfer, e.kind, str(e), now)
        return [transfer.complete()] if complete else []

    def have(self, session: int, transfer_id: bytes, message: Have, now: float) -> list[Effect]:
        transfer = self._live(session, transfer_id)
        if transfer is None:
            return [self._stale(session, transfer_id, "HAVE")]
        asked = len(transfer.request.chunks)
        if transfer.narrowed or not 1 <= message.chunks <= asked:
            text = f"HAVE {message.chunks} of {asked} chunks"
            return self._broken(transfer, "have", text, now)
        transfer.narrowed, transfer.moved = True, now
        try:
            transfer.incoming.narrow(transfer.incoming.ranges[0][0] + message.chunks * CHUNK_TOKENS)
        except Fault as e:
            return self._broken(transfer, e.kind, str(e), now)
        return []

    def aborted(
        self, session: int, transfer_id: bytes, message: Aborted, kv_moved: float, now: float
    ) -> list[Effect]:
        """`kv_moved`: when a byte of any frame last came over the session."""
        transfer = self._live(session, transfer_id)
        if transfer is None:  # it crossed our ABORT, or prefill ended it after everything came
            return [self._stale(session, transfer_id, "ABORTED")]
        if message.reason == "deadline" and self._dry(transfer, kv_moved, now):
            return [EndSession(session)]
        # A deadline with no frame sent: the prefill never showed up, and will not for a second FETCH.
        retry = message.reason == "integrity" or (message.reason == "deadline" and message.frames > 0)
        return self._fail(transfer, message.reason, now, retry=retry)

    # ------------------------------------------------------------ frames

    def begin(self, session: int, s: Slice, now: float) -> Transfer:
        """A slice begins to come. Returns the transfer that it is part of; raises FrameRefused."""
        transfer = self._live(session, s.transfer_id)
        if transfer is None:
            raise FrameRefused([self._stale(session, s.transfer_id, "KV")])
        try:
            transfer.incoming.begin(s)
        except Fault as e:
            raise FrameRefused(self._broken(transfer, e.kind, str(e), now)) from None
        if transfer.first_frame_at == 0:
            transfer.first_frame_at = now
        return transfer

    def verified(self, transfer: Transfer, s: Slice, now: float) -> bool:
        """A slice of this live transfer is whole, or the engine will say if it is not. True: the transfer is
        complete. Raises FrameRefused."""
        transfer.moved = transfer.last_frame_at = transfer.source.moved = now
        incoming = transfer.incoming
        try:
            complete = incoming.verified(s)
        except Fault as e:
            raise FrameRefused(self._broken(transfer, e.kind, str(e), now)) from None
        if not (complete or incoming.missing_frames):
            self._newest_complete = transfer
        return complete

    def damaged(self, transfer: Transfer, now: float) -> list[Effect]:
        """The checksum of a frame of this open transfer does not match."""
        return self._broken(transfer, "payload", "payload checksum does not match", now)

    # ------------------------------------------------------------ time

    def expire(self, now: float, flow: Mapping[int, float]) -> list[Effect]:
        """`flow`: for each session that is up, when a byte of any frame last came over it."""
        limits = self._deadlines
        effects: list[Effect] = []
        dry: set[int] = set()
        for transfer in list(self.open.values()):
            incoming, session = transfer.incoming, transfer.source.session
            if not incoming.live or session in dry:
                continue
            if session is None:
                if now >= transfer.opened + limits.unreachable:
                    effects.append(Expired("unreachable", f"incarnation {transfer.source.peer:x}"))
                    effects += self._fail(transfer, "unreachable", now, retry=False)
                continue
            if not incoming.committed:
                continue  # the router bounds how long a prefill computes
            if now >= max(transfer.moved, flow[session]) + limits.progress:
                effects.append(Expired("progress", f"{incoming.frames} frames came"))
                if self._dry(transfer, flow[session], now):
                    dry.add(session)
                    effects.append(EndSession(session))
                else:
                    effects += self._abort(transfer, "deadline")
                    effects += self._fail(transfer, "deadline", now, retry=True)
        self._tombstones.expire(now)
        return effects

    def _dry(self, transfer: Transfer, kv_moved: float, now: float) -> bool:
        """The transfer is committed, no byte of a frame comes, and no other transfer's frame came since this
        transfer last moved.

        Then the frames that both sides count as under way are lost, and their credits with them. Half of the
        deadline is enough, since prefill's may end a little before ours."""
        if now < kv_moved + self._deadlines.progress / 2:
            return False
        return transfer.incoming.committed and transfer.source.moved <= transfer.moved

    # ------------------------------------------------------------ transitions

    def _source(self, peer: PeerKey) -> _Source:
        source = self._sources.get(peer)
        if source is None:
            source = self._sources[peer] = _Source(peer, self._layout)
        return source

    def _drop_unused(self, source: _Source) -> None:
        if not source.transfers and source.session is None:
            self._sources.pop(source.peer, None)

    def _live(self, session: int, transfer_id: bytes) -> Transfer | None:
        transfer = self.open.get(transfer_id)
        if transfer is None or transfer.source.session != session or not transfer.incoming.live:
            return None
        return transfer

    def _ask(self, source: _Source, transfer: Transfer) -> list[Effect]:
        if source.session is None:
            return []
        m = transfer.request
        if m.chunks:
            fetch = FetchContent(m.chunks, m.ranges[0][0] // CHUNK_TOKENS)
        else:
            fetch = Fetch(m.prefill_id, m.attempt, m.ranges, m.next_positions)
        return [Send(source.session, transfer.id, fetch)]

    def _abort(self, transfer: Transfer, reason: Reason) -> list[Effect]:
        session = transfer.source.session
        return [] if session is None else [Send(session, transfer.id, Abort(reason))]

    def _broken(self, transfer: Transfer, kind: str, why: str, now: float) -> list[Effect]:
        abort = self._abort(transfer, "integrity")
        return [Refuse(kind, why), *abort, *self._fail(transfer, "integrity", now, retry=True)]

    def _fail(self, transfer: Transfer, reason: str, now: float, *, retry: bool) -> list[Effect]:
        self._close(transfer, reason, now)
        return [FailedIn(transfer.id, reason, retry)]

    def _close(self, transfer: Transfer, reason: str, now: float) -> None:
        """Frames that still come for the transfer are read away."""
        transfer.incoming.end()
        del self.open[transfer.id]
        del transfer.source.transfers[transfer.id]
        self._drop_unused(transfer.source)
        self._tombstones.bury(transfer.id, reason, now)

    def _stale(self, session: int, transfer_id: bytes, what: str) -> Effect:
        transfer = self.open.get(transfer_id)
        complete = transfer is not None and transfer.source.session == session
        if complete or self._tombstones.get(transfer_id) is not None:
            return Late()
        return Refuse("transfer_id", f"{what} of a transfer that never was")
