from __future__ import annotations

import itertools

import numpy as np
import pytest

from baton.bench.load.traffic.workload import Arrivals


def _times(arrivals: Arrivals, count: int, seed: int = 7) -> np.ndarray:
    return np.array(list(itertools.islice(arrivals.times(seed), count)))


def test_constant_arrivals_are_exact() -> None:
    assert _times(Arrivals("constant", 8.0), 5).tolist() == [0.0, 0.125, 0.25, 0.375, 0.5]


@pytest.mark.parametrize(
    ("arrivals", "variation"),
    [
        (Arrivals("poisson", 5.0), 1.0),
        (Arrivals("gamma", 5.0, burstiness=0.25), 2.0),
        (Arrivals("gamma", 5.0, burstiness=4.0), 0.5),
    ],
)
def test_arrivals_have_their_rate_and_variation(arrivals: Arrivals, variation: float) -> None:
    gaps = np.diff(_times(arrivals, 40_000))
    assert gaps.mean() == pytest.approx(0.2, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05)
    assert gaps.min() >= 0


@pytest.mark.parametrize(("first", "last"), [(2.0, 10.0), (10.0, 2.0), (5.0, 5.0)])
def test_a_ramp_reaches_its_rate_and_stays_there(first: float, last: float) -> None:
    times = np.concatenate(
        [_times(Arrivals("ramp", first, ramp_to=last, ramp_seconds=100.0), 3000, seed) for seed in range(20)]
    )
    for begin, rate in ((0, first + 0.05 * (last - first)), (45, (first + last) / 2), (110, last)):
        counted = np.sum((times >= begin) & (times < begin + 10)) / 10 / 20
        assert counted == pytest.approx(rate, rel=0.1), begin


def test_the_same_seed_gives_the_same_times() -> None:
    arrivals = Arrivals("poisson", 3.0)
    assert (_times(arrivals, 2000, 1) == _times(arrivals, 2000, 1)).all()
    assert (_times(arrivals, 2000, 1) != _times(arrivals, 2000, 2)).any()
