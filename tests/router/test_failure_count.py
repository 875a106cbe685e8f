"""When a request is given up, and when it runs in steps of its own."""

from baton.router.generation.failures import MAX_FAILURES, MAX_LOSSES, FailureCount


def test_three_failures_in_a_row_exhaust_it_and_a_token_resets_the_count() -> None:
    failures = FailureCount()
    for _ in range(5):
        for i in range(MAX_FAILURES - 1):
            failures.failed(f"w{i}", crashed=False)
        assert not failures.exhausted
        assert failures.avoid == {f"w{i}" for i in range(MAX_FAILURES - 1)}
        failures.token()
        assert (failures.total, failures.avoid) == (0, set())
    for _ in range(MAX_FAILURES):
        failures.failed("w", crashed=False)
    assert failures.exhausted


def test_only_twelve_lost_workers_exhaust_it() -> None:
    failures = FailureCount()
    for _ in range(MAX_LOSSES - 1):
        failures.lost("w")
    assert not failures.exhausted
    failures.lost("w")
    assert (failures.exhausted, failures.total) == (True, MAX_LOSSES)


def test_after_two_crashed_steps_the_request_always_runs_alone() -> None:
    failures = FailureCount()
    failures.failed("w", crashed=True)
    failures.failed("w", crashed=False)
    assert not failures.alone
    failures.token()
    failures.failed("w", crashed=True)
    assert failures.alone
    failures.token()
    assert failures.alone
