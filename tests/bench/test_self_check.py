from __future__ import annotations

from baton.bench.load.measurement.self_check import check
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
