"""When a request has failed too often, and when it has to run alone."""

from router.generation.strikes import MAX_FAILURES, MAX_LOSSES, Strikes


def test_three_failures_in_a_row_are_the_end_and_any_token_resets_the_count() -> None:
    strikes = Strikes()
    for _ in range(5):
        for i in range(MAX_FAILURES - 1):
            strikes.failed(f"w{i}", crashed=False)
        assert not strikes.out
        assert strikes.avoid == {f"w{i}" for i in range(MAX_FAILURES - 1)}
        strikes.token()
        assert (strikes.count, strikes.avoid) == (0, set())
    for _ in range(MAX_FAILURES):
        strikes.failed("w", crashed=False)
    assert strikes.out


def test_lost_workers_count_little() -> None:
    strikes = Strikes()
    for _ in range(MAX_LOSSES - 1):
        strikes.lost("w")
    assert not strikes.out
    strikes.lost("w")
    assert (strikes.out, strikes.count) == (True, MAX_LOSSES)


def test_who_was_in_two_crashed_steps_runs_alone_for_good() -> None:
    strikes = Strikes()
    strikes.failed("w", crashed=True)
    strikes.failed("w", crashed=False)
    assert not strikes.alone
    strikes.token()
    strikes.failed("w", crashed=True)
    assert strikes.alone
    strikes.token()
    assert strikes.alone
