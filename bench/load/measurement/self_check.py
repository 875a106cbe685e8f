"""Where the warm-up of a run ends, whether it is steady after it, and whether the client kept up.

MSER-5 finds the warm-up (White 1997; White, Cobb, Spratt 2000). It cuts batches of 5 from the start, at most
half of them, so that the standard error of the mean of the rest is smallest. Noise alone can cause a cut, so
the mean of the cut part must differ from the rest. The rest is tested for a trend (Mann-Kendall on batch
means): percentiles mean nothing if a queue grows during the whole run.

A run in which the client was the bottleneck is invalid. The bounds are relative to what is measured: a client
that is 3 ms late spoils a TTFT of 20 ms, but not one of 2 s. So the median of a client is compared with the
median that it measured, and its p99 with that p99.
"""

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from baton.bench.load.traffic.client_process import ClientUsage
from baton.steps.quantiles import percentile
from baton.system.words import counted

MAX_CPU = 0.9  # of one core, for the busiest client process: above it chunks wait in the client
MAX_WAITED = 0.2  # share of the time for which a client process was ready to run and had no core
CHECKED = (50, 99)  # percentiles
_LEAST_SECONDS = 0.005
_OF_LATENCY = 0.05


def check(
    loads: Sequence[ClientUsage],
    lags: Sequence[float],
    ttft: Mapping[int, float],
    gaps: Mapping[int, float],
    died: Sequence[str],
) -> tuple[dict[str, float], list[str]]:
    """How busy the client was, and why its run is invalid: no reasons, if it is valid.

    Times are in seconds. `cpu` and `waited` are shares of the run's time, of the worst client process.

    Args:
        lags: how late the client sent each request.
        ttft, gaps: what was measured, by percentile (`CHECKED`). Each bounds the client's lateness there.
        died: what became of client processes that ended early.
    """
    stalls = np.asarray([s for load in loads for s in load.stalls] or [0.0])
    delays = np.asarray(lags or [0.0])
    cpu = max((load.cpu / load.elapsed for load in loads if load.elapsed), default=0.0)
    waited = max((load.waited / load.elapsed for load in loads if load.elapsed), default=0.0)
    reasons = list(died)
    for fault, lateness, measured, share in (
        ("requests went out late", delays, ttft, _OF_LATENCY),
        ("the client's event loop stalled", stalls, gaps, 2 * _OF_LATENCY),
    ):
        for q in CHECKED:
            measured_s, bound = (
                percentile(lateness, q / 100),
                max(_LEAST_SECONDS, share * measured.get(q, 0.0)),
            )
            if measured_s > bound:
                reasons.append(f"{fault}: p{q} {measured_s * 1e3:.1f} ms, bound {bound * 1e3:.1f} ms")
                break
    if cpu > MAX_CPU:
        reasons.append(f"a client process used {cpu:.0%} of a core: give more --advanced.processes")
    if waited > MAX_WAITED:
        reasons.append(
            f"a client process waited for a core {waited:.0%} of the time: run it on another machine"
        )
    return {
        "lag_p99": percentile(delays, 0.99),
        "stall_p99": percentile(stalls, 0.99),
        "cpu": cpu,
        "waited": waited,
    }, reasons


_BATCH = 5
_LEAST_REQUESTS = 40
_CUT_Z = 3.0
_CUT_CHANGE = 0.05  # of the mean: a smaller change is no warm-up
_TREND_BATCHES = 20
_TREND_Z = 3.0
_TREND_CHANGE = 0.25  # of the mean, from the first to the last quarter: a smaller change is no trend


class Steadiness(msgspec.Struct, frozen=True):
    """`begin`: seconds after the start of the run from which samples count. `statement`: for the report."""

    begin: float
    steady: bool | None  # None: too few requests to tell
    statement: str


def fixed_warm_up(seconds: float, times: Sequence[float], values: Sequence[float]) -> Steadiness:
    """Excludes a warm-up of given length."""
    samples = [(t, v) for t, v in zip(times, values, strict=True) if t >= seconds]
    return _judged(seconds, f"warm-up of {seconds:g} s excluded as asked", samples)


def detect(times: Sequence[float], values: Sequence[float]) -> Steadiness:
    """`times`: intended send times, ascending. `values`: the TTFT of the same requests."""
    pairs = list(zip(times, values, strict=True))
    if len(pairs) < _LEAST_REQUESTS:
        return Steadiness(
            0.0, None, f"{counted(len(pairs), 'request')}, too few to detect a warm-up: nothing excluded"
        )
    cut = _mser([v for _, v in pairs])
    begin = pairs[cut][0] if cut else 0.0
    text = f"warm-up of {begin:.1f} s ({counted(cut, 'request')}) excluded" if cut else "no warm-up seen"
    return _judged(begin, text, pairs[cut:])


def _judged(begin: float, text: str, pairs: Sequence[tuple[float, float]]) -> Steadiness:
    if len(pairs) < _LEAST_REQUESTS:
        return Steadiness(begin, None, f"{text}; {counted(len(pairs), 'request')}, too few to tell if steady")
    change = _trend([v for _, v in pairs])
    if change is not None:
        return Steadiness(
            begin,
            False,
            f"{text}; NOT steady: TTFT {'rises' if change > 0 else 'falls'} by {abs(change):.0%}",
        )
    return Steadiness(begin, True, f"{text}; steady after it")


def _mser(values: Sequence[float]) -> int:
    """How many samples to cut from the start, at most half of them."""
    count = len(values) // _BATCH
    means = np.asarray(values[: count * _BATCH]).reshape(count, _BATCH).mean(axis=1)
    # The errors of all suffixes, from sums that begin at the end.
    sizes = np.arange(count, 0, -1)
    sums, squares = np.cumsum(means[::-1])[::-1], np.cumsum((means**2)[::-1])[::-1]
    errors = (np.maximum(squares - sums**2 / sizes, 0) / sizes**2)[: count // 2 + 1]
    # The earliest of equal errors: rounding must not cut from a constant series.
    best = int(np.argmax(errors <= errors.min() + 1e-12 * max(1.0, float(np.max(means**2)))))
    if not best:
        return 0
    cut, steady = means[:best], means[best:]
    noise = math.sqrt(float(steady.var(ddof=1)) * (1 / len(cut) + 1 / len(steady)))
    threshold = max(_CUT_Z * noise, _CUT_CHANGE * float(steady.mean()))
    return best * _BATCH if abs(float(cut.mean() - steady.mean())) > threshold else 0


def _trend(values: Sequence[float]) -> float | None:
    """The relative change over the series if it is a clear trend, else None."""
    means = np.asarray([part.mean() for part in np.array_split(np.asarray(values), _TREND_BATCHES)])
    n = len(means)
    score = float(np.sum(np.sign(means[None, :] - means[:, None])[np.triu_indices(n, 1)]))
    z = score / math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    quarter = n // 4
    change = float((means[-quarter:].mean() - means[:quarter].mean()) / max(float(means.mean()), 1e-9))
    return change if abs(z) > _TREND_Z and abs(change) > _TREND_CHANGE else None
