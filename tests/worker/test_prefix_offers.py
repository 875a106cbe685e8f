"""How many prefixes a worker that leaves offers, and for how long."""

from types import SimpleNamespace

import pytest

from baton.engine import CachedPrefix
from baton.prefill_worker import offers
from baton.prefill_worker.offers import ANSWER, BYTES, DECLINED, OPEN, SECONDS, PrefixOffers


def prefix(number: int, chunks: int = 2) -> CachedPrefix:
    names = [bytes([number, chunk]) for chunk in range(chunks)]
    return CachedPrefix(range(chunks * 64), names, b"", b"")


class World:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(offers, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.sent: dict[int, CachedPrefix] = {}
        self.offers = PrefixOffers(self.sent.__setitem__, token_bytes=BYTES // 1000)
        self.offers.start(prefix(number) for number in range(100))

    def pump(self, seconds: float = 0.0) -> list[bytes]:
        self.now += seconds
        return self.offers.pump()

    def ask(self, number: int) -> bytes:
        pin_id = b"pin %d" % number
        self.offers.asked(pin_id, self.sent[number].chunks[1:])
        return pin_id


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_the_next_prefix_is_offered_when_one_is_sent(world: World) -> None:
    world.pump()
    assert len(world.sent) == OPEN
    pin_id = world.ask(1)
    world.pump(2 * ANSWER)
    assert len(world.sent) == OPEN, "a transfer is under way"
    world.offers.unpinned(pin_id)
    world.pump()
    assert len(world.sent) == OPEN + 1


def test_transfers_end_at_the_limit_of_time(world: World) -> None:
    world.pump()
    pins = [world.ask(number) for number in (1, 2)]
    assert world.pump(SECONDS - 0.01) == []
    assert world.offers.open
    assert world.pump(0.01) == pins
    assert not world.offers.open


def test_offers_end_at_the_limit_of_bytes(world: World) -> None:
    world.pump()
    asked = 0
    while world.offers.open:
        asked += 1
        world.offers.unpinned(world.ask(asked))
        world.pump()
    assert 64 * asked <= 1000, "each is one chunk long"
    assert 64 * (asked + 2) > 1000


def test_offers_end_if_no_peer_asks(world: World) -> None:
    world.pump()
    world.pump(ANSWER - 0.01)
    assert world.offers.open
    world.pump(0.01)
    assert not world.offers.open


def test_offers_end_if_routers_decline_all_of_them(world: World) -> None:
    while world.offers.open:
        world.pump()
        for number in list(world.sent):
            world.offers.declined(number)
    assert len(world.sent) == DECLINED


def test_a_worker_with_an_empty_cache_makes_no_offers(world: World) -> None:
    world.offers.start(iter([]))
    world.pump()
    assert not world.offers.open
