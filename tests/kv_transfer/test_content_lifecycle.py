"""A prefix that travels by content: every order of events, as in test_lifecycle.py. The holder has one of the
two chunks that are asked for, or none."""

from collections import Counter
from typing import Any

import pytest

from baton.kv_transfer.protocol.held import MOST_PINS, StartTransfer
from baton.kv_transfer.protocol.incoming import TransferState
from baton.kv_transfer.protocol.local_messages import ContentWanted, FetchIn, ReleasedOut
from baton.kv_transfer.protocol.messages import Ack, Commit, FetchContent, FirstToken, Have
from baton.kv_transfer.protocol.shared import Send

from .test_lifecycle import DEADLINES, PEER, World, copies, reachable

CHUNKS = (b"1" * 16, b"2" * 16)


class ContentWorld(World):
    """Up to two transfers. Their pins belong to the engine of the holder."""

    start, stop = 192, 256

    def __init__(self) -> None:
        super().__init__()
        self.wanted: list[bytes] = []  # the engine is asked
        self.pins: set[bytes] = set()
        self.unpinned: list[bytes] = []

    def moves(self) -> list[tuple[Any, ...]]:
        known = {"fetch", "begin", "frame", "to_decode", "to_prefill", "abort", "inject", "session_up"}
        out = [move for move in super().moves() if move[0] in known or move[0] == "lose_session"]
        for pin_id in self.wanted:
            out += [("pin", pin_id), ("refuse", pin_id)]
        return out

    # ------------------------------------------------------------ holder

    def do_pin(self, pin_id: bytes) -> None:
        self.wanted.remove(pin_id)
        self.pins.add(pin_id)
        self.apply(self.held.pinned(pin_id, 1, self.now))

    def do_refuse(self, pin_id: bytes) -> None:
        self.wanted.remove(pin_id)
        self.apply(self.held.close(pin_id, "gone", self.now))

    def apply(self, effects: list[Any]) -> None:
        for e in effects:
            match e:
                case ContentWanted(pin_id, chunks, first_chunk):
                    assert (chunks, first_chunk) == (CHUNKS, 3)
                    self.wanted.append(pin_id)
                case StartTransfer(_, transfer_id, _, fetch):
                    assert fetch.ranges == ((192, 256),)
                    self.queued += [(transfer_id, 0), (transfer_id, 1)]
                    commit = Commit(FirstToken(0), 2, 2 * self.frame_bytes)
                    super().apply(self.held.commit(transfer_id, commit, self.now))
                case ReleasedOut(pin_id):
                    self.pins.remove(pin_id)
                    self.unpinned.append(pin_id)
                case Send():
                    super().apply([e])

    def do_to_prefill(self) -> None:
        session, transfer_id, message = self.to_prefill.pop(0)
        match message:
            case FetchContent():
                effects = self.held.fetch_content(transfer_id, session, message, self.now)
            case Ack():
                effects = self.held.ack(transfer_id, self.now)
            case _:
                effects = self.held.abort(transfer_id, message.reason, self.now)
        self.apply(effects)

    # ------------------------------------------------------------ asker

    def do_fetch(self) -> None:
        self.used += 1
        transfer_id, ranges = bytes([self.used]) * 16, ((192, 320),)
        request = FetchIn(transfer_id, b"", "", PEER, 0, ranges, states_at=(256, 320), chunks=CHUNKS)
        self.apply_decode(self.fetches.fetch(request, self.now))

    def do_to_decode(self) -> None:
        if isinstance(self.to_decode[0][2], Have):
            session, transfer_id, message = self.to_decode.pop(0)
            self.apply_decode(self.fetches.have(session, transfer_id, message, self.now))
        else:
            super().do_to_decode()

    # ------------------------------------------------------------ what must hold

    def check(self) -> None:
        assert len(set(self.unpinned)) == len(self.unpinned), "released twice"
        assert not self.pins & {*self.unpinned}
        assert {*self.held.held} == self.pins, "a pin without a deadline"
        assert len(self.pins) + len(self.wanted) <= MOST_PINS
        for transfer_id in self.injected:
            assert transfer_id in self.complete
        for transfer in self.fetches.open.values():
            if transfer.incoming.state is TransferState.COMPLETE:
                assert transfer.incoming.bytes == 2 * self.frame_bytes

    def settled(self) -> None:
        """The engine answers, and time passes: every pin ends."""
        for pin_id in list(self.wanted):
            self.do_pin(pin_id)
        self.now += DEADLINES.pin
        self.apply(self.held.expire(self.now, {self.session: self.now}))
        assert not self.pins
        assert not self.held.held
        assert not self.held.open

    def key(self) -> tuple[Any, ...]:
        return (
            *super().key(), tuple(self.wanted), tuple(sorted(self.pins)), tuple(self.unpinned),
            tuple((t.id, t.narrowed) for t in self.fetches.open.values()),
        )  # fmt: skip


@pytest.mark.all
def test_every_order_of_events() -> None:
    ends: Counter[str] = Counter()
    for world in reachable(ContentWorld()):
        ends["injected"] += bool(world.injected)
        ends["unpinned"] += bool(world.unpinned)
        if world.wanted or len(world.pins) > 1:
            later, _ = copies(world, 2)
            later.settled()
    assert min(ends["injected"], ends["unpinned"]) > 500, "the exploration became trivial"
