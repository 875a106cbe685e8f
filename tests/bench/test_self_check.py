"""Whether a run may be believed: its warm-up, its trend, and the load of the client."""

from __future__ import annotations

import numpy as np

from baton.bench.load.measurement.self_check import Steadiness, check, detect, fixed_warm_up
from baton.bench.load.traffic.client_process import ClientUsage

IDLE = ClientUsage(elapsed=10.0, cpu=1.0, waited=0.1, stalls=[0.0005] * 1000)


def _reasons(load: ClientUsage = IDLE, lags: tuple[float, ...] = (0.0,) * 100, **more: object) -> list[str]:
    fields = {"ttft_p50": 0.05, "gap_p50": 0.01, "died": ()} | more
    return check([IDLE, load], lags, **fields)[1]  # type: ignore[arg-type]


def test_an_idle_client_is_valid() -> None:
    assert _reasons() == []
    assert check([], [], None, None, [])[1] == []


def test_late_sends_make_a_run_invalid() -> None:
    (reason,) = _reasons(lags=(0.0,) * 90 + (0.02,) * 10)
    assert "p99 20.0 ms, bound 5.0 ms" in reason
    assert _reasons(lags=(0.0,) * 90 + (0.02,) * 10, ttft_p50=1.0) == [], "2 % of what is measured"


def test_a_stalled_event_loop_makes_a_run_invalid() -> None:
    (reason,) = _reasons(ClientUsage(10.0, 1.0, 0.1, [0.02] * 1000))
    assert "event loop stalled" in reason


def test_a_busy_core_makes_a_run_invalid() -> None:
    (reason,) = _reasons(ClientUsage(10.0, 9.5, 0.1, [0.0] * 1000))
    assert "95% of a core" in reason
    assert "--processes" in reason


def test_waiting_for_a_core_makes_a_run_invalid() -> None:
    (reason,) = _reasons(ClientUsage(10.0, 1.0, 3.0, [0.0] * 1000))
    assert "waited for a core 30%" in reason


def test_a_dead_client_process_makes_a_run_invalid() -> None:
    assert _reasons(died=("client process 1 died (-9)",)) == ["client process 1 died (-9)"]


def _noise(count: int, seed: int = 0) -> np.ndarray:
    return 0.1 + np.random.default_rng(seed).exponential(0.02, count)


def _detect(values: np.ndarray) -> Steadiness:
    return detect([i * 0.1 for i in range(len(values))], values.tolist())


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
    found = fixed_warm_up(5.0, times, _noise(400).tolist())
    assert (found.begin, found.steady) == (5.0, True)
