"""The circuit breaker of a worker: it opens after three failures in 30 s, for 10 s, then allows one probe."""

from hypothesis import given
from hypothesis import strategies as st

from baton.router.workers.breaker import FAILURES, OPEN_S, TOGETHER_S, WINDOW_S, CircuitBreaker


def tripped(at: float = 4.0) -> CircuitBreaker:
    breaker = CircuitBreaker()
    assert [breaker.attempt_failed(at - 4), breaker.attempt_failed(at - 2), breaker.attempt_failed(at)] == [
        False,
        False,
        True,
    ]
    return breaker


def test_three_failures_open_it_and_a_good_probe_closes_it() -> None:
    breaker = tripped(at=4.0)
    assert breaker.open_for(4.0)
    assert breaker.open_for(13.9)
    assert breaker.open_for(13.0) == 1.0
    assert not breaker.open_for(14.0)
    assert breaker.attempt_sent(14.5)
    assert breaker.open_for(15.0), "one probe at a time"
    assert breaker.attempt_succeeded()
    assert not breaker.open_for(15.0)
    assert not breaker.attempt_sent(15.0)
    assert not breaker.attempt_failed(16.0), "old failures are forgotten"


def test_a_success_while_it_is_open_does_not_close_it() -> None:
    breaker = tripped(at=4.0)
    assert not breaker.attempt_succeeded()
    assert breaker.open_for(5.0)


def test_a_failed_probe_opens_it_again() -> None:
    breaker = tripped(at=4.0)
    assert breaker.attempt_sent(14.0)
    assert breaker.attempt_failed(14.2)
    assert breaker.open_for(24.1)
    assert not breaker.open_for(24.2)


def test_a_probe_without_a_result_is_followed_by_another() -> None:
    breaker = tripped(at=4.0)
    assert breaker.attempt_sent(14.0)
    assert breaker.open_for(23.9)
    assert not breaker.open_for(24.0)


def test_failures_within_a_second_count_as_one() -> None:
    breaker = CircuitBreaker()
    assert not any(breaker.attempt_failed(i * TOGETHER_S / 100) for i in range(60))
    assert not breaker.open_for(1.0)


def test_failures_far_apart_are_forgotten() -> None:
    breaker = CircuitBreaker()
    assert not any(breaker.attempt_failed(i * WINDOW_S / (FAILURES - 1)) for i in range(1, 50))


@given(st.lists(st.tuples(st.integers(0, 20), st.sampled_from(["failed", "given", "worked"])), max_size=60))
def test_it_is_never_open_for_longer_than_ten_seconds(events: list[tuple[int, str]]) -> None:
    """After any sequence of events the worker gets an attempt within OPEN_S."""
    breaker, now = CircuitBreaker(), 0.0
    for wait, event in events:
        now += wait
        if event == "failed":
            breaker.attempt_failed(now)
        elif event == "given":
            if not breaker.open_for(now):
                breaker.attempt_sent(now)
        else:
            breaker.attempt_succeeded()
        assert 0.0 <= breaker.open_for(now) <= OPEN_S
        assert not breaker.open_for(now + OPEN_S)
