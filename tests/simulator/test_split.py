"""Simulated prefill workers that share long prompts."""

import statistics

import pytest

from baton.bench.lab.routing_sim.__main__ import alone_seconds, shared


@pytest.mark.parametrize("workers", [4, 64])
@pytest.mark.parametrize(("load", "goal"), [(0.01, 0.4), (0.5, 0.6)])
def test_four_workers_share_a_long_prompt(workers: int, load: float, goal: float) -> None:
    ttft = shared(30_000, load, workers, 200, splits=True).ttft  # the median of 60 hung on the seed
    assert statistics.median(ttft) < goal * alone_seconds(30_000)


@pytest.mark.cases(1)
@pytest.mark.parametrize("workers", [4, 64])
@pytest.mark.parametrize("tokens", [30_000, 128_000])
def test_splits_shorten_the_mean_wait_of_busy_workers(workers: int, tokens: int) -> None:
    ours, theirs = (shared(tokens, 0.8, workers, 200, splits=splits).ttft for splits in (True, False))
    assert statistics.mean(ours) < statistics.mean(theirs)


@pytest.mark.parametrize("tokens", [30_000, 128_000])
def test_the_second_token_waits_for_no_step_of_prompts_alone(tokens: int) -> None:
    """The worker that decodes computes whole prompts, too, in steps of up to 0.3 s. A request that is on its
    way there waits for a step of the gap target of 15 ms, and for its own."""
    assert shared(tokens, 0.5, 4, 200, splits=True).quantiles().first_gap_p99 < 2 * 0.015
