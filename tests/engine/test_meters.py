"""The averages that an engine reports of its steps."""

from engine.core.meters import LARGE, Meters


def test_short_prompts_do_not_lower_the_speed_of_long_ones() -> None:
    """A short prompt takes as long as reading the weights."""
    meters = Meters(8192, 0.2048)
    assert meters.prefill_tokens_per_s == 40_000
    for _ in range(50):
        meters.record(20, 0.005)
    assert meters.prefill_tokens_per_s == 40_000
    for _ in range(50):
        meters.record(LARGE, LARGE / 20_000)
    assert 19_000 < meters.prefill_tokens_per_s < 21_000


def test_without_long_prompts_the_longest_seen_count() -> None:
    meters = Meters()
    assert meters.prefill_tokens_per_s == 0
    meters.record(20, 0.005)
    assert meters.prefill_tokens_per_s == 4_000
    meters.record(100, 0.005)
    meters.record(20, 0.005)
    assert meters.prefill_tokens_per_s > 10_000
