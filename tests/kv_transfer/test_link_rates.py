"""What a link carries, from the frames that come."""

import pytest

from baton.kv_transfer.process.link_rates import ENOUGH, FORGETS, MOST, RECENT, LinkRates

MIB = 1 << 20


def test_lanes_share_the_time_of_their_link_and_pauses_do_not_count() -> None:
    links = LinkRates()
    for start in (10.0, 20.0):  # the peer has nothing to send for 9.6 s
        for lane in range(4):
            links.came(1, 10 * MIB, start, start + 0.1 * (lane + 1))
    assert links.recent(21.0) == {1: pytest.approx(80 * MIB / 0.8)}
    links.came(1, 10 * MIB, 20.35, 20.39)  # reported late: another lane was busy then
    assert links.recent(21.0) == {1: pytest.approx(90 * MIB / 0.8)}


def test_each_direction_and_peer_has_a_rate_of_its_own_and_old_ones_are_forgotten() -> None:
    links, now = LinkRates(), 0.0
    links.came(2, ENOUGH - 1, 0.0, 0.1)
    assert links.recent(0.1) == {}, "few bytes say nothing"
    links.came(2, 1, 0.1, 0.1)
    assert links.recent(0.1) == {2: pytest.approx(ENOUGH / 0.1)}
    assert links.recent(0.1 + RECENT) == {}
    for rate in (400 * MIB, 40 * MIB):
        for _ in range(100):
            links.came(1, rate // 10, now, now + 0.1)
            now += 0.1
    assert links.recent(now)[1] == pytest.approx(40 * MIB, rel=0.02), f"after {FORGETS} s a half counts"


def test_links_of_many_peers_take_bounded_memory() -> None:
    links = LinkRates()
    for peer in range(3 * MOST):
        links.came(peer, ENOUGH, float(peer), peer + 0.5)
    assert [*links.recent(3.0 * MOST)] == [*range(3 * MOST - int(RECENT), 3 * MOST)]
