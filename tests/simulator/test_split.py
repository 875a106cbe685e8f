"""Simulated prefill workers that share long prompts."""

import statistics

import pytest

from baton.simulator.split import alone_seconds, simulate
from baton.steps.quantiles import percentile


@pytest.mark.parametrize("workers", [4, 64])
@pytest.mark.parametrize(("load", "goal"), [(0.0, 0.34), (0.5, 0.6)])
def test_four_workers_share_a_long_prompt(workers: int, load: float, goal: float) -> None:
    ttft, shared = simulate(30_000, load, workers=workers, splits=True, prompts=100)
    assert shared > 90
    assert statistics.median(ttft) < goal * alone_seconds(30_000)


def test_without_splits_an_idle_prompt_takes_as_long_as_alone() -> None:
    ttft, shared = simulate(30_000, 0.0, workers=4, splits=False, prompts=3)
    assert shared == 0
    assert ttft == [pytest.approx(alone_seconds(30_000))] * 3


@pytest.mark.cases(1)
@pytest.mark.parametrize("workers", [4, 64])
@pytest.mark.parametrize("tokens", [30_000, 128_000])
@pytest.mark.parametrize("load", [0.8, 0.95])
def test_busy_workers_make_no_other_prompt_wait_longer(workers: int, tokens: int, load: float) -> None:
    """Also where workers become free at different times. At 0.95 only the longest prompts are shared."""
    found = [
        simulate(tokens, load, workers=workers, splits=splits, prompts=200)[0] for splits in (True, False)
    ]
    ours, theirs = (percentile(ttft, 0.95) for ttft in found)
    if (tokens, load) == (30_000, 0.95):
        assert found[0] == found[1]
        return
    assert ours < theirs
    assert statistics.mean(found[0]) < statistics.mean(found[1])
