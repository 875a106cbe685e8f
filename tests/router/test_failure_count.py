"""When a request has failed too often, and when it has to run alone."""

from router.generation.failure_count import MAX_FAILURES, MAX_LOSSES, FailureCount


def test_three_failures_in_a_row_are_the_end_and_any_token_resets_the_count() -> None:
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


def test_lost_workers_count_little() -> None:
    failures = FailureCount()
    for _ in range(MAX_LOSSES - 1):
        failures.lost("w")
    assert not failures.exhausted
    failures.lost("w")
    assert (failures.exhausted, failures.total) == (True, MAX_LOSSES)


def test_who_was_in_two_crashed_steps_runs_alone_for_good() -> None:
    failures = FailureCount()
    failures.failed("w", crashed=True)
    failures.failed("w", crashed=False)
    assert not failures.alone
    failures.token()
    failures.failed("w", crashed=True)
    assert failures.alone
    failures.token()
    assert failures.alone
