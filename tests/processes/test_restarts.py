"""When a process that ends is started again."""

import pytest

from baton.processes.restarts import TRANSITIONS, Phase, RestartPolicy


@pytest.mark.parametrize("phase", ["starting", "ready", "waiting", "stopped"])
def test_from_each_phase_a_process_can_be_stopped_and_nothing_leaves_that(phase: Phase) -> None:
    assert TRANSITIONS[phase, "stop"] == "stopped"
    events = {event for begin, event in TRANSITIONS if begin == phase}
    assert phase != "stopped" or events == {"stop"}


def test_a_process_that_ends_waits_before_it_starts() -> None:
    reached = {("starting", ()): "starting"}
    for _ in range(4):
        reached |= {
            (begin, (*events, event)): after
            for (begin, events), at in reached.items()
            for (phase, event), after in TRANSITIONS.items()
            if phase == at
        }
    assert {phase for phase, _ in TRANSITIONS} == set(reached.values()), "each phase can be reached"
    for (_, events), after in reached.items():
        if events[-1:] == ("ended",):
            assert after == "waiting", events


def test_waits_double_up_to_a_bound() -> None:
    policy = RestartPolicy(first_delay=0.1, max_delay=1.0)
    assert [policy.crashed(t, ran_for=0.0) for t in range(6)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_a_healthy_run_starts_over() -> None:
    policy = RestartPolicy(first_delay=0.1, healthy_after=30.0)
    for t in range(4):
        policy.crashed(t, ran_for=1.0)
    assert policy.crashed(100.0, ran_for=90.0) == 0.1
    assert policy.crashed(101.0, ran_for=1.0) == 0.2


def test_a_crash_loop_is_many_crashes_in_the_window() -> None:
    policy = RestartPolicy(loop_crashes=3, loop_window=60.0)
    for t in (0.0, 10.0):
        policy.crashed(t, ran_for=1.0)
        assert not policy.crash_loop(t)
    policy.crashed(20.0, ran_for=1.0)
    assert policy.crash_loop(20.0)
    assert not policy.crash_loop(65.0), "the first crash has left the window"


def test_the_wait_stays_finite_after_thousands_of_crashes() -> None:
    policy = RestartPolicy(max_delay=30.0)
    assert {policy.crashed(float(t), ran_for=0.0) for t in range(5000)} <= {0.1 * 2**n for n in range(10)} | {
        30.0
    }
