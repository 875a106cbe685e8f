"""What a link carries, from the frames that come."""

import random

import pytest

from baton.kv_transfer.process.link_rates import ENOUGH, FORGOTTEN, MOST, RECENT, SHARE_OF, LinkRates

MIB = 1 << 20


def came(links: LinkRates, peer: int, size: int, began: float, ended: float) -> None:
    links.came(peer, size, began, ended, began)


def rates(links: LinkRates, now: float) -> dict[int, float]:
    return {peer: rate for peer, (rate, _) in links.recent(now).items()}


def test_lanes_share_the_time_of_their_link_and_pauses_do_not_count() -> None:
    links = LinkRates()
    for start in (10.0, 20.0):  # the peer has nothing to send for 9.8 s
        for lane in range(4):
            came(links, 1, 10 * MIB, start, start + 0.05 * (lane + 1))
    assert rates(links, 21.0) == {1: pytest.approx(80 * MIB / 0.4)}
    came(links, 1, 10 * MIB, 20.15, 20.19)  # reported late: another lane was busy then
    assert rates(links, 21.0) == {1: pytest.approx(90 * MIB / 0.4)}


def test_few_bytes_say_nothing_and_old_ones_are_forgotten() -> None:
    links = LinkRates()
    came(links, 2, ENOUGH[0] - 1, 0.0, 0.1)
    assert rates(links, 0.1) == {}
    came(links, 2, 1, 0.1, 0.1)
    assert rates(links, 0.1) == {2: pytest.approx(ENOUGH[0] / 0.1)}
    assert rates(links, 0.1 + RECENT) == {}


def test_the_share_of_a_link_is_that_of_the_last_seconds() -> None:
    links = LinkRates()
    for second in range(100):
        came(links, 1, 30 * MIB, float(second), second + 0.4)
    assert links.recent(100.0)[1][1] == pytest.approx(0.4, rel=0.1)
    assert links.recent(100.0 + 3 * SHARE_OF)[1][1] < 0.05
    came(links, 1, 3000 * MIB, 200.0, 300.0)
    assert links.recent(300.0)[1][1] == pytest.approx(1.0, rel=0.01)


def test_the_share_of_a_full_link_is_never_more_than_all() -> None:
    links, numbers, now, shares = LinkRates(), random.Random(0), 0.0, []
    for _ in range(40):
        seconds = numbers.choice([numbers.random() * 0.01, numbers.random() * 5, numbers.random() * 60])
        came(links, 1, 1 << 24, now, now + seconds)
        now += seconds
        shares.append(links.recent(now)[1][1])
    assert 0.999 < max(shares) <= 1.0


def test_a_link_without_frames_for_long_is_measured_anew() -> None:
    links = LinkRates()
    came(links, 1, 30 * MIB, 0.0, 10.0)
    came(links, 1, 30 * MIB, 10.0 + FORGOTTEN + 1.0, 10.0 + FORGOTTEN + 1.5)
    assert rates(links, 10.0 + FORGOTTEN + 2.0) == {1: pytest.approx(60 * MIB)}


@pytest.mark.parametrize("queued", [False, True])
def test_frames_that_take_longer_than_a_window_and_end_together_count_evenly(queued: bool) -> None:
    """Four lanes share 3.2 MB/s: each frame takes 2.6 s. Of a link that was faster, frames follow. `queued`:
    the peer had all of them to send before."""
    links, now = LinkRates(), 100.0
    for _ in range(100):
        came(links, 1, 2 * MIB, now, now + 0.002)
        now += 0.002
    begun, ended = [now] * 4, now
    for number in range(48):
        lane = number % 4
        ended += 2.4 if lane == 0 else 0.07
        links.came(1, 2 * MIB, begun[lane], ended, now if queued else begun[lane])
        begun[lane] = ended
        if number >= 8:
            assert rates(links, ended) == {1: pytest.approx(8 * MIB / 2.61, rel=0.25)}


@pytest.mark.parametrize("slower", [10, 1000])
def test_a_link_that_became_slow_is_known_after_a_second_and_a_slow_one_as_well(slower: int) -> None:
    links, now = LinkRates(), 0.0
    for rate in (20_000 * MIB, 20_000 * MIB // slower):
        for _ in range(11):
            came(links, 1, rate // 10, now, now + 0.1)
            now += 0.1
        assert rates(links, now) == {1: pytest.approx(rate)}


def test_links_of_many_peers_take_bounded_memory() -> None:
    links = LinkRates()
    for peer in range(3 * MOST):
        came(links, peer, ENOUGH[0], float(peer), peer + 0.5)
    assert [*links.recent(3.0 * MOST)] == [*range(2 * MOST, 3 * MOST)]
