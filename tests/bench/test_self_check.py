"""Whether a run may be believed: its warm-up, its trend, and the load of the client."""

from typing import Any

import numpy as np
import pytest

from baton.bench.load.measurement.self_check import Steadiness, check, detect
from baton.bench.load.traffic.client_process import ClientUsage

IDLE = ClientUsage(elapsed=10.0, cpu=1.0, waited=0.1, stalls=[0.0005] * 1000)
LATE = (0.0,) * 90 + (0.02,) * 10


@pytest.mark.parametrize(
    ("load", "more", "said"),
    [
        (IDLE, {}, ()),
        (IDLE, {"lags": LATE}, ("p99 20.0 ms, bound 5.0 ms",)),
        (IDLE, {"lags": LATE, "ttft": {50: 1.0, 99: 1.0}}, ()),  # 2 % of what is measured
        (IDLE, {"lags": LATE, "ttft": {50: 0.05, 99: 1.0}}, ()),  # the median is not late
        (IDLE, {"lags": (0.02,) * 100, "ttft": {50: 0.05, 99: 1.0}}, ("p50 20.0 ms, bound 5.0 ms",)),
        (ClientUsage(10.0, 1.0, 0.1, [0.02] * 3000), {}, ("event loop stalled: p50 20.0 ms",)),
        (ClientUsage(10.0, 1.0, 0.1, [0.0] * 900 + [0.02] * 100), {}, ("event loop stalled: p99 20.0 ms",)),
        (ClientUsage(10.0, 9.5, 0.1, [0.0] * 1000), {}, ("95% of a core", "--advanced.processes")),
        (ClientUsage(10.0, 1.0, 3.0, [0.0] * 1000), {}, ("waited for a core 30%",)),
        (IDLE, {"died": ("client process 1 died (-9)",)}, ("client process 1 died (-9)",)),
    ],
)
def test_a_client_that_was_the_bottleneck_makes_a_run_invalid(
    load: ClientUsage, more: dict[str, Any], said: tuple[str, ...]
) -> None:
    fields: dict[str, Any] = {
        "lags": (0.0,) * 100,
        "ttft": {50: 0.05, 99: 0.06},
        "gaps": {50: 0.01, 99: 0.02},
        "died": (),
    } | more
    _, reasons = check([IDLE, load], **fields)
    assert len(reasons) == bool(said)
    assert all(part in reasons[0] for part in said)


def test_a_run_without_a_client_is_not_invalid() -> None:
    assert check([], [], {}, {}, [])[1] == []


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


@pytest.mark.parametrize(
    ("values", "steady", "said"),
    [
        (np.full(200, 0.05), True, ""),
        (np.concatenate((np.full(90, 0.201), np.full(110, 0.2))), True, ""),  # a small difference
        (_noise(400) + np.linspace(0.0, 3.0, 400), False, "rises"),  # a growing queue
        (_noise(20), None, "20 requests, too few"),
    ],
)
def test_what_is_no_warm_up_is_not_cut(values: np.ndarray, steady: bool | None, said: str) -> None:
    found = _detect(values)
    assert found.steady is steady
    assert said in found.statement
    if steady is not False:
        assert found.begin == 0.0
