"""What lanes over one pair of cards carry, and which lane a slice takes by that."""

from typing import Any

import pytest

from baton.kv_transfer.config import TransferDeadlines
from baton.kv_transfer.process import lane as session_lane
from baton.kv_transfer.process import lane_messages, prefill_side
from baton.kv_transfer.process.card_rate import FORGOTTEN, CardRate
from baton.kv_transfer.process.prefill_side import PrefillSide, SendingSession
from baton.kv_transfer.process.tcp_session import Sessions
from baton.kv_transfer.protocol.held import HeldPrefills
from tests.stand_in import stand_in

from .test_connection import slice_of


def test_a_rate_follows_the_card_and_is_forgotten() -> None:
    card = CardRate()
    assert card.rate(0.0) == 0.0, "not known"
    for now in range(10):
        card.took(100, 1.0, now)
    assert card.rate(9.0) == pytest.approx(100)
    card.took(300, 0.1, 10.0)
    assert 100 < card.rate(10.0) < 3000
    card.took(30_000, 10.0, 20.0)
    assert card.rate(20.0) == pytest.approx(3000, rel=0.01)
    assert card.rate(20.0 + FORGOTTEN) == 0.0


class Link:
    """Two lanes of one session over two cards, on a clock of its own."""

    SIZE = 1000

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *rates: float) -> None:
        self.now, self.rates, self.arrived = 0.0, rates, [0 for _ in rates]
        for module in (session_lane, prefill_side):
            monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        sessions: dict[int, SendingSession] = {}
        self.side = stand_in(
            PrefillSide, _sessions=sessions, begins=lambda _: True, sent=lambda *_: None,
            table=HeldPrefills(TransferDeadlines(), 1), _apply=lambda _: None,
        )  # fmt: skip
        self.session = sessions[1] = SendingSession(self.side, stand_in(Sessions), 1, b"s" * 16, len(rates))
        self.queues: list[list[int]] = [[] for _ in rates]
        self.began = [0.0 for _ in rates]
        for number in range(len(rates)):
            lane = session_lane.Lane(self._told, number, self.session)
            self.session.lanes[number] = lane
            self.session.kv_lanes.append(lane)
            self.session._cards[number] = lane.card

    def _told(self, message: Any) -> None:
        queue = self.queues[message.lane]
        if not queue:
            self.began[message.lane] = self.now
        queue.append(message.slice.slot)

    def send(self, count: int) -> float:
        """Seconds until so many slices have arrived. A card sends one slice after another."""
        began = self.now
        self.session.move([slice_of(self.SIZE, slot=slot) for slot in range(count)])
        while any(self.queues):
            ends = {n: self.began[n] + self.SIZE / self.rates[n] for n, q in enumerate(self.queues) if q}
            number = min(ends, key=lambda n: ends[n])
            self.now = self.began[number] = ends[number]
            self.arrived[number] += 1
            slot, taken = self.queues[number].pop(0), self.arrived[number] * self.SIZE
            self.session.lanes[number].report(lane_messages.Gone(number, slot, True, taken, 0))
        return self.now - began


@pytest.mark.parametrize("rates", [(0.1e6, 0.3e6), (0.2e6, 0.2e6), (0.04e6, 1e6)])
def test_unequal_cards_carry_together_what_both_carry(
    rates: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last slice does not wait for the slower card, also where this one would have had room before."""
    link = Link(monkeypatch, *rates)
    link.send(200)
    for count in (32, 33, 5):
        need = count * link.SIZE / sum(rates)
        assert link.send(count) <= need + 1.01 * link.SIZE / max(rates), count


def test_a_card_that_was_slow_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(monkeypatch, 0.01e6, 1e6)
    link.send(200)
    before = link.arrived[0]
    link.send(50)
    assert link.arrived[0] == before, "it would bring a slice later than the other one all of them"
    link.rates = 1e6, 1e6
    link.now += FORGOTTEN
    link.send(200)
    assert link.arrived[0] > before + 90


def test_slices_do_not_wait_for_a_card_that_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(monkeypatch, 0.01e6, 1e6)
    link.send(200)
    link.session.move([slice_of(link.SIZE, slot=slot) for slot in range(10)])
    assert not link.queues[0], "the fast card would bring all of them before"
    link.now += 1.0
    PrefillSide.tick(link.side, link.now)
    assert len(link.queues[0]) == 2, "it brought nothing for 1 s, and the slow one needs 0.1 s for a slice"
