"""Checks whether the client was the bottleneck. Such a run is invalid.

The bounds are relative to what is measured: a client that is 3 ms late spoils a TTFT of 20 ms, but not one of
2 s.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from baton.bench.load.traffic.wire import ClientUsage

MAX_CPU = 0.9  # of one core, for the busiest client process: above it chunks wait in the client
MAX_WAITED = 0.2  # share of the time for which a client process was ready to run and had no core
_LEAST_SECONDS = 0.005
_OF_LATENCY = 0.05


def check(
    loads: Sequence[ClientUsage],
    lags: Sequence[float],
    ttft_p50: float | None,
    gap_p50: float | None,
    died: Sequence[str],
) -> tuple[dict[str, float], list[str]]:
    """How busy the client was, and why its run is invalid: no reasons, if it is valid.

    Times are in seconds. `cpu` and `waited` are shares of the run's time, of the worst client process.

    Args:
        lags: how late the client sent each request.
        ttft_p50, gap_p50: the measured medians.
        died: what became of client processes that ended early.
    """
    stalls = np.asarray([s for load in loads for s in load.stalls] or [0.0])
    late = np.asarray(lags or [0.0])
    lag_p99, stall_p99 = float(np.percentile(late, 99)), float(np.percentile(stalls, 99))
    cpu = max((load.cpu / load.elapsed for load in loads if load.elapsed), default=0.0)
    waited = max((load.waited / load.elapsed for load in loads if load.elapsed), default=0.0)
    reasons = list(died)
    lag_bound = max(_LEAST_SECONDS, _OF_LATENCY * (ttft_p50 or 0.0))
    if lag_p99 > lag_bound:
        reasons.append(f"requests went out late: p99 {lag_p99 * 1e3:.1f} ms, bound {lag_bound * 1e3:.1f} ms")
    stall_bound = max(_LEAST_SECONDS, _OF_LATENCY * 2 * (gap_p50 or 0.0))
    if stall_p99 > stall_bound:
        reasons.append(
            f"the client's event loop stalled: p99 {stall_p99 * 1e3:.1f} ms, bound {stall_bound * 1e3:.1f} ms"
        )
    if cpu > MAX_CPU:
        reasons.append(f"a client process used {cpu:.0%} of a core: give more --processes")
    if waited > MAX_WAITED:
        reasons.append(
            f"a client process waited for a core {waited:.0%} of the time: run it on another machine"
        )
    return {
        "lag_p99": lag_p99,
        "lag_max": float(late.max()),
        "stall_p99": stall_p99,
        "stall_max": float(stalls.max()),
        "cpu": cpu,
        "waited": waited,
    }, reasons
