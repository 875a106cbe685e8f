from baton.cluster.supervision.backoff import RestartPolicy


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
