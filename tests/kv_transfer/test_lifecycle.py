"""Both lifecycles and the network between them: every order of events.

The network may delay anything, lets frames overtake each other and COMMIT, keeps control messages of one
direction in order, and may lose a session at any time. A world here is the state machines of both sides, as
the transfer processes have them, and nothing else.
"""

import copyreg
import io
import pickle
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any, TypeVar

import pytest

from baton.kv_transfer.config import TransferDeadlines
from baton.kv_transfer.layout import KVLayout, Piece
from baton.kv_transfer.protocol.acks import Acks
from baton.kv_transfer.protocol.fetches import (
    Acknowledge,
    EndSession,
    Fetches,
    FrameRefused,
    Refuse,
    Transfer,
)
from baton.kv_transfer.protocol.held import HeldPrefills, StartTransfer
from baton.kv_transfer.protocol.incoming import TransferState
from baton.kv_transfer.protocol.local_messages import Complete, FailedIn, FetchIn, ReleasedOut
from baton.kv_transfer.protocol.messages import Aborted, Ack, Commit, Fetch, FirstToken
from baton.kv_transfer.protocol.shared import Send
from baton.kv_transfer.slices import Slice
from tests.layouts import kv_layout

DEADLINES = TransferDeadlines()
LAYOUT = kv_layout(2, 1, 8, "float32")
P = b"p" * 16
PEER = 1
RANGES = ((0, 4),)


class World:
    """One prefill id, up to two transfers of it, two frames each; decode works one transfer at a time."""

    start, stop = 0, 4  # positions of each frame, of a layer each

    def __init__(self) -> None:
        self.held = HeldPrefills(DEADLINES, 4)
        self.fetches = Fetches(DEADLINES, LAYOUT, 4096)
        self.session = 1
        self.up = True
        self.offered = self.finished = self.closed = False
        self.started: bytes | None = None  # what the pump serves
        self.queued: list[tuple[bytes, int]] = []  # frames handed to lanes, not begun
        self.flying: list[tuple[int, bytes, int]] = []  # (session, transfer, seq)
        self.to_decode: list[tuple[int, bytes, Any]] = []
        self.to_prefill: list[tuple[int, bytes, Any]] = []
        self.used = 0  # transfer ids
        self.complete: list[bytes] = []
        self.injected: list[bytes] = []
        self.acks = Acks(DEADLINES)
        self.released: list[str] = []
        self.left: dict[bytes, int] = {}  # frames that really left, by transfer
        self.now = 0.0
        self.kv_moved = 0.0
        self.fetches.session_up(PEER, self.session, LAYOUT.dtypes, self.now)

    @property
    def frame_bytes(self) -> int:
        return (self.stop - self.start) * LAYOUT.arrays[0].bytes

    @property
    def live(self) -> list[Transfer]:
        return [t for t in self.fetches.open.values() if t.incoming.live]

    # ------------------------------------------------------------ what may happen next

    def moves(self) -> list[tuple[Any, ...]]:
        out: list[tuple[Any, ...]] = []
        if not self.offered:
            out.append(("offer",))
        elif not self.finished and not self.closed:
            out.append(("finish",))
        if self.offered and not self.closed and not self.released:
            out.append(("close",))
        if self.used < 2 and not self.live:
            out.append(("fetch",))
        # The frames of a transfer are alike, so its first one stands for all.
        queued = [transfer_id for transfer_id, _ in self.queued]
        out += [("begin", queued.index(transfer_id)) for transfer_id in dict.fromkeys(queued)]
        out += [("frame", i) for i in range(len(self.flying))]
        if self.to_decode:
            out.append(("to_decode",))
        if self.to_prefill:
            out.append(("to_prefill",))
        for transfer_id, t in self.fetches.open.items():
            if t.incoming.live:
                out.append(("abort", transfer_id))
            if t.incoming.state is TransferState.COMPLETE:
                out.append(("inject", transfer_id))
        if not self.up:
            out.append(("session_up",))
        elif self.session == 1 and (self.fetches.open or self.flying or self.to_prefill):
            out.append(("lose_session",))
        return out

    def do(self, move: tuple[Any, ...]) -> None:
        self.now += 0.001
        getattr(self, "do_" + move[0])(*move[1:])
        self.check()

    # ------------------------------------------------------------ prefill

    def apply(self, effects: list[Any]) -> None:
        for e in effects:
            if isinstance(e, StartTransfer):
                assert not self.released, "a released prefill is served"
                self.started = e.transfer_id
                self.queued += [(e.transfer_id, 0), (e.transfer_id, 1)]
                if self.finished:
                    self.commit()
            elif isinstance(e, ReleasedOut):
                self.released.append(e.reason)
            elif isinstance(e, Send):
                if isinstance(e.message, Aborted):
                    assert e.message.frames == self.left.get(e.transfer_id, 0), (
                        "ABORTED miscounts what was sent"
                    )
                if e.session == self.session and self.up:
                    self.to_decode.append((e.session, e.transfer_id, e.message))

    def commit(self) -> None:
        if self.started is not None and self.started in self.held.open:
            commit = Commit(FirstToken(1), 2, 2 * self.frame_bytes)
            self.apply(self.held.commit(self.started, commit, self.now))

    def do_offer(self) -> None:
        self.offered = True
        self.apply(self.held.offer(P, self.now))

    def do_finish(self) -> None:
        self.finished = True
        self.apply(self.held.finish(P, self.now))
        self.commit()

    def do_close(self) -> None:
        self.closed = True
        self.apply(self.held.close(P, "cancelled", self.now))

    def do_begin(self, i: int) -> None:
        transfer_id, seq = self.queued.pop(i)
        if self.held.begin_send(transfer_id, self.now):
            self.kv_moved = self.now
            self.left[transfer_id] = self.left.get(transfer_id, 0) + 1
            self.flying.append((self.held.open[transfer_id].session, transfer_id, seq))

    def do_to_prefill(self) -> None:
        session, transfer_id, message = self.to_prefill.pop(0)
        if isinstance(message, Fetch):
            self.apply(self.held.fetch(transfer_id, session, message, self.now))
        elif isinstance(message, Ack):
            effects = self.held.ack(transfer_id, self.now)
            assert not effects or transfer_id == self.started, "an ACK of another transfer than the current"
            self.apply(effects)
        else:
            self.apply(self.held.abort(transfer_id, message.reason, self.now))

    # ------------------------------------------------------------ decode

    def apply_decode(self, effects: list[Any]) -> None:
        for e in effects:
            match e:
                case Send(session, transfer_id, message):
                    assert self.up
                    assert session == self.session, "said in a session that has ended"
                    self.to_prefill.append((session, transfer_id, message))
                case FailedIn(transfer_id, reason, retry):
                    assert transfer_id not in self.complete, "failed after it was complete"
                    assert retry or reason != "lost"
                    assert not retry or reason in ("lost", "deadline")
                case Complete(transfer_id):
                    assert transfer_id not in self.complete, "complete twice"
                    self.complete.append(transfer_id)
                case Acknowledge(_, transfer_id):
                    self.acks.injected(transfer_id, self.now)
                    self.acknowledge()
                case EndSession(session):
                    assert self.up
                    assert session == self.session
                    self.do_lose_session()
                case Refuse(kind, why):  # this prefill keeps to the protocol
                    assert kind == "transfer_id", why
                    assert self.now >= DEADLINES.tombstone, why

    def acknowledge(self) -> None:
        if self.up:
            for transfer_id in self.acks.say(self.now):
                self.to_prefill.append((self.session, transfer_id, Ack()))

    def do_fetch(self) -> None:
        self.used += 1
        transfer_id = bytes([self.used]) * 16
        self.apply_decode(self.fetches.fetch(FetchIn(transfer_id, P, "", PEER, 0, RANGES), self.now))

    def do_frame(self, i: int) -> None:
        session, transfer_id, seq = self.flying.pop(i)
        self.kv_moved = self.now
        piece = Piece(seq, 0, 1, self.start, self.stop - self.start)
        h = Slice(piece, transfer_id, seq, self.frame_bytes)
        try:
            transfer = self.fetches.begin(session, h, self.now)
            if self.fetches.verified(transfer, h, self.now):
                self.apply_decode([transfer.complete()])
        except FrameRefused as refused:
            self.apply_decode(refused.effects)

    def do_to_decode(self) -> None:
        session, transfer_id, message = self.to_decode.pop(0)
        if isinstance(message, Commit):
            effects = self.fetches.commit(session, transfer_id, message, self.now)
        else:
            effects = self.fetches.aborted(session, transfer_id, message, self.kv_moved, self.now)
        self.apply_decode(effects)

    def do_abort(self, transfer_id: bytes) -> None:
        effects = self.fetches.cancel(transfer_id, self.now)
        assert effects is not None
        self.apply_decode(effects)

    def do_inject(self, transfer_id: bytes) -> None:
        incoming = self.fetches.open[transfer_id].incoming
        assert (incoming.frames, incoming.bytes) == (2, 2 * self.frame_bytes)
        self.injected.append(transfer_id)
        self.apply_decode(self.fetches.injected(transfer_id, self.now))

    def expire(self) -> None:
        """What the passing of time ends, on both sides."""
        self.apply(self.held.expire(self.now, {self.session: self.kv_moved}))
        self.apply_decode(self.fetches.expire(self.now, {self.session: self.kv_moved}))
        self.acks.expire(self.now)

    # ------------------------------------------------------------ the network

    def do_lose_session(self) -> None:
        """Both ends learn of it; whatever was on its way is gone."""
        self.session += 1
        self.up = False
        self.flying.clear()
        self.to_decode.clear()
        self.to_prefill.clear()
        self.apply(self.held.session_down(self.session - 1, self.now))
        self.acks.lost(self.now)
        self.apply_decode(self.fetches.session_down(PEER, "lost", self.now))

    def do_session_up(self) -> None:
        """ACKs that may be lost are said again, those that came, too; then what was asked for meanwhile."""
        self.up = True
        self.acknowledge()
        self.apply_decode(self.fetches.session_up(PEER, self.session, LAYOUT.dtypes, self.now))

    # ------------------------------------------------------------ what must hold

    def check(self) -> None:
        assert len(self.released) <= 1, "released twice"
        assert len(set(self.injected)) == len(self.injected)
        assert set(self.injected) <= set(self.complete)
        assert len(self.live) <= 1
        if self.released == ["acked"]:
            assert self.injected, "released, but no worker has the KV"
        if self.closed or self.released:
            assert P not in self.held.held
        for transfer_id, held in self.held.open.items():
            assert held.transfer_id == transfer_id
            assert held.sent == self.left.get(transfer_id, 0)

    def settled(self) -> None:
        """With nothing on its way, the last transfer was acknowledged if it was injected."""
        if self.up and not (self.to_prefill or self.to_decode or self.flying or self.closed):
            last = bytes([self.used]) * 16
            assert last not in self.injected or self.released == ["acked"]

    def key(self) -> tuple[Any, ...]:
        held = self.held.held.get(P)
        return (
            self.session, self.up, self.offered, self.finished, self.closed, self.started, tuple(self.queued),
            tuple(sorted(self.flying)), tuple((s, t, repr(m)) for s, t, m in self.to_decode),
            tuple((s, t, repr(m)) for s, t, m in self.to_prefill), self.used, tuple(self.injected),
            tuple(self.released), tuple(sorted(self.left.items())),
            held and (held.state, held.transfer_id, held.session, held.sent, held.finished),
            tuple((t, w.transfer_id, w.session) for t, w in self.held.waiting.items()),
            tuple((t.id, t.incoming.state, t.incoming.frames, t.incoming.committed, t.source.session)
                  for t in self.fetches.open.values()),
            tuple(self.acks.waiting),
        )  # fmt: skip


T = TypeVar("T")
W = TypeVar("W", bound=World)


def _layout() -> KVLayout:
    return LAYOUT


class _Pickler(pickle.Pickler):
    """What never changes is no part of a copy."""

    dispatch_table = copyreg.dispatch_table | {KVLayout: lambda _: (_layout, ())}


def copies(of: T, count: int) -> Iterator[T]:
    """As many equal ones. The last one is the original, which may then change."""
    file = io.BytesIO()
    _Pickler(file).dump(of)  # faster than deepcopy
    dumped = file.getvalue()
    for _ in range(count - 1):
        yield pickle.loads(dumped)  # noqa: S301
    if count:
        yield of


def reachable(first: W) -> Iterator[W]:
    """Each state that events lead to from the first one, breadth first. The caller does not change it."""
    seen, frontier = {first.key()}, deque([first])
    while frontier:
        world = frontier.popleft()
        yield world
        moves = world.moves()
        for move, after in zip(moves, copies(world, len(moves)), strict=True):
            after.do(move)
            if (key := after.key()) not in seen:
                seen.add(key)
                frontier.append(after)


@pytest.mark.all
def test_every_order_of_events() -> None:
    ends: Counter[str] = Counter()
    for world in reachable(World()):
        world.settled()
        ends[(world.released or ["-"])[0]] += 1
    assert ends["acked"] > 0
    assert ends.total() > 8_000, "the exploration became trivial"
