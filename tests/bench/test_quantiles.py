from __future__ import annotations

import itertools

import numpy as np
import pytest

from baton.bench.load.measurement.quantiles import Series


def test_quantiles_are_by_nearest_rank() -> None:
    found = Series.of([[float(x)] for x in range(1, 1001)]).rows("x", {})
    assert {quantile: row.value for quantile, row in found.items()} == {
        "p50": 500.0,
        "p90": 900.0,
        "p99": 990.0,
        "p99.9": 999.0,
        "max": 1000.0,
    }


def test_too_few_samples_have_no_upper_bound() -> None:
    found = Series.of([[float(x)] for x in range(100)]).rows("x", {})
    assert found["p99"].value == 98.0
    assert found["p99"].high is None
    assert found["p50"].high is not None


@pytest.mark.parametrize(
    ("count", "names"),
    [(1, {"p50", "max"}), (9, {"p50", "max"}), (10, {"p50", "p90", "max"}), (99, {"p50", "p90", "max"}),
     (100, {"p50", "p90", "p99", "max"}), (1000, {"p50", "p90", "p99", "p99.9", "max"})],
)  # fmt: skip
def test_a_quantile_needs_a_sample_above_it(count: int, names: set[str]) -> None:
    assert Series.of([[float(x)] for x in range(count)]).rows("x", {}).keys() == names


@pytest.mark.parametrize("size", [1, 20])
def test_the_interval_covers_the_true_value(size: int) -> None:
    """95 of 100 times, also where the samples of a cluster are all alike."""
    rng = np.random.default_rng(4)
    covered = 0
    for _ in range(300):
        groups = [[x] * size for x in rng.exponential(1.0, 400).tolist()]
        found = Series.of(groups).rows("x", {})["p90"]
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= np.log(10) <= found.high
    assert 0.90 <= covered / 300 <= 0.99


def test_clusters_widen_the_interval() -> None:
    rng = np.random.default_rng(5)
    values = rng.exponential(1.0, 200)
    clustered = Series.of([[x] * 50 for x in values.tolist()]).rows("x", {})["p90"]
    alone = Series.of([[x] for x in np.repeat(values, 50).tolist()]).rows("x", {})["p90"]
    assert clustered.high is not None
    assert alone.high is not None
    assert clustered.low is not None
    assert alone.low is not None
    assert clustered.high - clustered.low > 3 * (alone.high - alone.low)


def test_the_curve_ends_at_the_maximum_and_never_falls() -> None:
    curve = Series.of([[float(x)] for x in range(5000)]).curve()
    assert curve[-1] == (1.0, 4999.0)
    assert all(a[0] < b[0] and a[1] <= b[1] for a, b in itertools.pairwise(curve))


def test_an_empty_series_has_no_quantiles() -> None:
    assert Series.of([[], []]).rows("x", {}) == {}
    assert Series.of([]).curve() == []
