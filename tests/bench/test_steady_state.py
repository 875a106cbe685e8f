from __future__ import annotations

import numpy as np

from baton.bench.load.measurement import self_check as steady_state


def _noise(count: int, seed: int = 0) -> np.ndarray:
    return 0.1 + np.random.default_rng(seed).exponential(0.02, count)


def _detect(values: np.ndarray) -> steady_state.Steadiness:
    return steady_state.detect([i * 0.1 for i in range(len(values))], values.tolist())


def test_a_slow_start_is_cut() -> None:
    values = _noise(400)
    values[:60] += np.linspace(2.0, 0.0, 60)
    found = _detect(values)
    assert 4.0 <= found.begin <= 8.0
    assert found.steady is True
    assert "excluded" in found.statement


def test_noise_alone_is_not_cut() -> None:
    cut = [_detect(_noise(300, seed)).begin for seed in range(40)]
    assert sum(begin > 0 for begin in cut) <= 2


def test_a_constant_series_is_not_cut() -> None:
    found = _detect(np.full(200, 0.05))
    assert found.begin == 0.0
    assert found.steady is True


def test_a_small_difference_is_not_cut() -> None:
    values = np.full(200, 0.2)
    values[:90] += 0.001
    assert _detect(values).begin == 0.0


def test_a_growing_queue_is_not_steady() -> None:
    found = _detect(_noise(400) + np.linspace(0.0, 3.0, 400))
    assert found.steady is False
    assert "rises" in found.statement


def test_too_few_requests_to_detect_a_warm_up() -> None:
    found = _detect(_noise(20))
    assert (found.begin, found.steady) == (0.0, None)
    assert "20 requests are too few" in found.statement


def test_a_given_warm_up_is_excluded() -> None:
    times = [i * 0.1 for i in range(400)]
    found = steady_state.fixed_warm_up(5.0, times, _noise(400).tolist())
    assert (found.begin, found.steady) == (5.0, True)
