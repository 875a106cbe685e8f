"""Three failures in half a minute, ten seconds out, one probe."""

from hypothesis import given
from hypothesis import strategies as st

from router.workers.breaker import FAILURES, OUT_S, TOGETHER_S, WINDOW_S, Breaker


def tripped(at: float = 4.0) -> Breaker:
    breaker = Breaker()
    assert [breaker.failed(at - 4), breaker.failed(at - 2), breaker.failed(at)] == [False, False, True]
    return breaker


def test_out_after_three_failures_and_back_after_a_good_probe() -> None:
    breaker = tripped(at=4.0)
    assert not breaker.admits(4.0)
    assert not breaker.admits(13.9)
    assert breaker.out_for(13.0) == 1.0
    assert breaker.admits(14.0)
    assert breaker.given(14.5)
    assert not breaker.admits(15.0), "one probe at a time"
    assert breaker.worked()
    assert breaker.admits(15.0)
    assert not breaker.given(15.0)
    assert not breaker.failed(16.0), "it starts from nothing"


def test_what_it_serves_while_it_is_out_says_nothing() -> None:
    breaker = tripped(at=4.0)
    assert not breaker.worked()
    assert not breaker.admits(5.0)


def test_a_probe_that_fails_puts_it_out_again() -> None:
    breaker = tripped(at=4.0)
    assert breaker.given(14.0)
    assert breaker.failed(14.2)
    assert not breaker.admits(24.1)
    assert breaker.admits(24.2)


def test_a_probe_that_tells_nothing_is_followed_by_another() -> None:
    breaker = tripped(at=4.0)
    assert breaker.given(14.0)
    assert not breaker.admits(23.9)
    assert breaker.admits(24.0)


def test_what_fails_together_failed_once() -> None:
    breaker = Breaker()
    assert not any(breaker.failed(i * TOGETHER_S / 100) for i in range(60))
    assert breaker.admits(1.0)


def test_failures_far_apart_are_forgotten() -> None:
    breaker = Breaker()
    assert not any(breaker.failed(i * WINDOW_S / (FAILURES - 1)) for i in range(1, 50))


@given(st.lists(st.tuples(st.integers(0, 20), st.sampled_from(["failed", "given", "worked"])), max_size=60))
def test_it_is_never_out_for_longer_than_a_probe_takes(events: list[tuple[int, str]]) -> None:
    """Whatever happens, a worker that is there is tried again within OUT_S."""
    breaker, now = Breaker(), 0.0
    for wait, event in events:
        now += wait
        if event == "failed":
            breaker.failed(now)
        elif event == "given":
            if breaker.admits(now):
                breaker.given(now)
        else:
            breaker.worked()
        assert 0.0 <= breaker.out_for(now) <= OUT_S
        assert breaker.admits(now) == (breaker.out_for(now) == 0.0)
        assert breaker.admits(now + OUT_S)
