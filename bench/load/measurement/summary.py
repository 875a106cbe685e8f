"""Reduces the records of one run to the numbers of its report. Pure.

The window [begin, end) follows the warm-up. Latencies are of the requests *intended* within it; throughput
counts what *arrived* within it. A failed request enters no latency. It enters the counts and misses the
objectives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from baton.bench.load.measurement import steady_state
from baton.bench.load.measurement.quantiles import Estimate, Series
from baton.bench.load.measurement.slo import QUANTILES, Bound, Slo
from baton.bench.load.measurement.steady_state import Steadiness
from baton.bench.load.target.record import Failure, Record

BINS = 90  # of the time line
_MOSTLY = 0.5


@dataclass(frozen=True, slots=True)
class Bin:
    """One interval of the time line. Latencies in ms; None if no sample came."""

    at: float
    ttft_p50: float | None
    ttft_p99: float | None
    gap_p50: float | None
    gap_p99: float | None
    tokens_per_s: float
    in_flight: float
    failed: int


@dataclass(frozen=True, slots=True)
class Summary:
    """One run. Rates are per second of the window.

    Attributes:
        latencies: in ms, by metric and quantile.
        input_lengths, output_lengths: least, mean and most tokens, as the server counted.
        input_off: requests whose prompt had another length than asked for.
        output_short: answers with fewer tokens than asked for.
    """

    begin: float
    end: float
    window_statement: str
    steadiness: Steadiness
    sent: int
    ok: int
    interrupted: int
    skipped_turns: int
    errors: dict[str, int]
    error_samples: dict[str, str]
    latencies: dict[str, dict[str, Estimate]]
    curves: dict[str, list[tuple[float, float]]]
    timeline: list[Bin]
    requests_per_s: float
    input_tokens_per_s: float | None
    output_tokens_per_s: float
    goodput_per_s: float | None
    goodput_share: float | None
    slo_met: bool | None
    tokens_per_chunk: float
    input_lengths: tuple[float, float, float] | None
    input_off: int
    output_lengths: tuple[float, float, float] | None
    output_short: int
    cached_share: float | None
    notes: list[str] = field(default_factory=list)

    @property
    def failed(self) -> int:
        return sum(self.errors.values())


def summarize(
    records: Sequence[Record],
    slo: Slo,
    *,
    warm_up: float | None,
    ramp: bool = False,
    attainment: float = 0.99,
) -> Summary:
    """Reduces the records.

    Args:
        warm_up: seconds to exclude; None detects it.
        ramp: the load is a ramp, which has no steady state.
        attainment: share of the requests that must be good for the run to meet the objectives.
    """
    records = sorted(records, key=lambda r: r.intended)
    steadiness = _steadiness(records, warm_up, ramp)
    begin, end, window_statement = _window(records, steadiness.begin)
    due = [r for r in records if begin <= r.intended and r.failure is not Failure.INTERRUPTED]
    ok = [r for r in due if r.ok]
    failed = [r for r in due if not r.ok]
    series = _series(ok)
    latencies = {name: s.estimates() for name, s in series.items() if len(s)}
    filled = _filled(records, begin, end)
    span = max(end - filled, 1e-9)
    arrived = sum(_tokens_within(r, filled, end) for r in records)
    ended = [r for r in records if r.ok and filled <= r.ended < end]
    share = sum(_is_good(r, slo) for r in ok) / len(due) if due else 0.0
    errors = Counter(r.error_class for r in failed)
    asked = [r for r in ok if r.asked_input and r.prompt_tokens is not None]
    prompts = [r.prompt_tokens for r in ok if r.prompt_tokens is not None]
    cached = [r.cached_tokens for r in ok if r.cached_tokens is not None]
    generated = [r.generated for r in ok]
    chunks = sum(len(r.arrivals) for r in ok)
    has_slo = bool(slo.per_request)
    return Summary(
        begin=begin,
        end=end,
        window_statement=window_statement
        + (f", throughput from {filled:.1f} s on" if filled > begin else ""),
        steadiness=steadiness,
        sent=len(due),
        ok=len(ok),
        interrupted=sum(r.failure is Failure.INTERRUPTED for r in records),
        skipped_turns=sum(r.skipped_turns for r in due),
        errors=dict(errors.most_common()),
        error_samples={c: next(r.detail for r in failed if r.error_class == c) for c in errors},
        latencies=latencies,
        curves={name: s.curve() for name, s in series.items() if len(s)},
        timeline=_timeline(records),
        requests_per_s=len(ended) / span,
        input_tokens_per_s=sum(r.prompt_tokens or 0 for r in ended) / span if prompts else None,
        output_tokens_per_s=arrived / span,
        goodput_per_s=sum(_is_good(r, slo) for r in ended) / span if has_slo else None,
        goodput_share=share if has_slo else None,
        slo_met=_slo_met(slo, latencies, share, attainment) if slo.bounds else None,
        tokens_per_chunk=sum(generated) / chunks if chunks else 0.0,
        input_lengths=_spread(prompts),
        input_off=sum(r.prompt_tokens != r.asked_input for r in asked),
        output_lengths=_spread(generated),
        output_short=sum(r.generated < r.asked_output for r in ok),
        cached_share=sum(cached) / max(1, sum(prompts)) if cached else None,
    )


def _is_good(record: Record, slo: Slo) -> bool:
    return slo.met_by_request(lambda metric: request_value(record, metric))


def request_value(record: Record, metric: str) -> float | None:
    """The value in ms that a bound on each request limits.

    None if an answer of one token has no such value.
    """
    gaps = record.gaps
    match metric:
        case "ttft":
            return record.ttft * 1e3
        case "e2e":
            return record.e2e * 1e3
        case "ttit":
            mean = record.mean_gap
            return None if mean is None else mean * 1e3
        case "gap":
            return max(gaps) * 1e3 if gaps else None
        case "handover":
            return gaps[0] * 1e3 if gaps else None
    raise AssertionError(f"unknown metric {metric}")


def _slo_met(slo: Slo, latencies: dict[str, dict[str, Estimate]], share: float, attainment: float) -> bool:
    """Whether all bounds on the run hold, and `attainment` of the requests met the bounds on each request."""
    return share >= attainment and all(_bound_met(b, latencies) for b in slo.per_run)


def _bound_met(bound: Bound, latencies: dict[str, dict[str, Estimate]]) -> bool:
    """With too few samples for the quantile, the bound holds for the maximum."""
    assert bound.quantile in QUANTILES
    name = "ttit" if bound.metric == "gap" else bound.metric
    of_metric = latencies.get(name, {})
    found = of_metric.get(bound.quantile) or of_metric.get("max")
    return found is not None and found.value <= bound.limit_ms


def _steadiness(records: Sequence[Record], warm_up: float | None, ramp: bool) -> Steadiness:
    ok = [r for r in records if r.ok]
    times, values = [r.intended for r in ok], [r.ttft for r in ok]
    if warm_up is not None:
        return steady_state.fixed_warm_up(warm_up, times, values)
    if ramp:
        return Steadiness(0.0, None, "a ramp has no steady state: nothing excluded")
    return steady_state.detect(times, values)


def _window(records: Sequence[Record], begin: float) -> tuple[float, float, str]:
    """The window ends when the last request was due. After that the load only decreases."""
    if not records:
        return begin, begin, "nothing was sent"
    last_due, last = records[-1].intended, max(r.ended for r in records)
    if last_due - begin >= _MOSTLY * (last - begin):
        return begin, last_due, f"{begin:.1f} s to {last_due:.1f} s, when the last request was due"
    return (
        begin, last,
        f"{begin:.1f} s to {last:.1f} s, the last answer: too few requests to exclude the end",
    )  # fmt: skip


def _filled(records: Sequence[Record], begin: float, end: float) -> float:
    """When throughput begins to count: at the end of the first answer, since the server fills up before.

    In a short run it counts from `begin` on.
    """
    first = max(begin, min((r.ended for r in records if r.ok), default=begin))
    return first if end - first >= _MOSTLY * (end - begin) else begin


def _series(ok: Sequence[Record]) -> dict[str, Series]:
    """In ms. `ttit` has every gap between chunks; `ttit.normalized` has each token's share of its gap."""
    return {
        "ttft": Series.of([[r.ttft * 1e3] for r in ok]),
        "ttit": Series.of([[g * 1e3 for g in r.gaps] for r in ok]),
        "ttit.normalized": Series.of([_normalized(r) for r in ok]),
        "ttit.request": Series.of([[m * 1e3] for r in ok if (m := r.mean_gap) is not None]),
        "handover": Series.of([[g * 1e3 for g in r.gaps[:1]] for r in ok]),
        "e2e": Series.of([[r.e2e * 1e3] for r in ok]),
    }


def _normalized(record: Record) -> list[float]:
    """A gap before a chunk of k tokens counts as k gaps of a k-th of its length.

    If the server does not count the tokens of chunks, all later chunks of an answer count as equal.
    """
    gaps = record.gaps
    if record.tokens:
        return [g * 1e3 / k for g, k in zip(gaps, record.tokens[1:], strict=True) for _ in range(k)]
    per_chunk = max(1.0, (record.generated - 1) / len(gaps)) if gaps else 1.0
    return [g * 1e3 / per_chunk for g in gaps]


def _tokens_within(record: Record, begin: float, end: float) -> float:
    """Output tokens that arrived, also of requests that failed later, since the server produced them."""
    if not record.arrivals:
        return 0.0
    if record.tokens:
        return sum(k for at, k in zip(record.arrivals, record.tokens, strict=True) if begin <= at < end)
    inside = sum(begin <= at < end for at in record.arrivals)
    return inside * (record.generated / len(record.arrivals) if record.ok else 1.0)


def _spread(values: Sequence[int]) -> tuple[float, float, float] | None:
    return (min(values), sum(values) / len(values), max(values)) if values else None


def _timeline(records: Sequence[Record]) -> list[Bin]:
    """TTFT counts at the intended send time, everything else when it happened."""
    if not records:
        return []
    last = max(max(r.ended for r in records), 1e-3)
    width = last / BINS
    ttfts: list[list[float]] = [[] for _ in range(BINS)]
    gaps: list[list[float]] = [[] for _ in range(BINS)]
    tokens, failed = [0.0] * BINS, [0] * BINS
    busy = np.zeros(BINS)
    edges = np.arange(BINS) * width

    def index(at: float) -> int:
        return min(BINS - 1, max(0, int(at / width)))

    for r in records:
        busy += np.clip(np.minimum(r.ended, edges + width) - np.maximum(r.intended, edges), 0, None)
        for n, at in enumerate(r.arrivals):
            tokens[index(at)] += r.tokens[n] if r.tokens else 1
            if n:
                gaps[index(at)].append((at - r.arrivals[n - 1]) * 1e3)
        if r.ok:
            ttfts[index(r.intended)].append(r.ttft * 1e3)
        elif r.failure is not Failure.INTERRUPTED:
            failed[index(r.ended)] += 1
    return [
        Bin(
            at=i * width,
            ttft_p50=_percentile(ttfts[i], 50),
            ttft_p99=_percentile(ttfts[i], 99),
            gap_p50=_percentile(gaps[i], 50),
            gap_p99=_percentile(gaps[i], 99),
            tokens_per_s=tokens[i] / width,
            in_flight=float(busy[i] / width),
            failed=failed[i],
        )
        for i in range(BINS)
    ]


def _percentile(values: list[float], q: float) -> float | None:
    return float(np.percentile(values, q)) if values else None
