"""Simulated prefill workers that share long prompts."""

import statistics

import pytest

from baton.bench.lab.routing_sim.__main__ import alone_seconds, shared


@pytest.mark.parametrize("workers", [4, 64])
@pytest.mark.parametrize(("load", "goal"), [(0.01, 0.4), (0.5, 0.6)])
def test_four_workers_share_a_long_prompt(workers: int, load: float, goal: float) -> None:
    ttft = shared(30_000, load, workers, 200, splits=True)  # the median of 60 hung on the seed
    assert statistics.median(ttft) < goal * alone_seconds(30_000)


@pytest.mark.cases(1)
@pytest.mark.parametrize("workers", [4, 64])
@pytest.mark.parametrize("tokens", [30_000, 128_000])
def test_splits_shorten_the_mean_wait_of_busy_workers(workers: int, tokens: int) -> None:
    ours, theirs = (shared(tokens, 0.8, workers, 200, splits=splits) for splits in (True, False))
    assert statistics.mean(ours) < statistics.mean(theirs)
