"""Reduces the records of one run to the rows and the detail of its report. Pure.

The window [begin, end) follows the warm-up. Latencies are of the requests *intended* within it. Throughput is
what the server did within it: a request counts in proportion to the part of its time there, and a chunk to
that of the time since the one before. To count ends would say too much where many answers end together, as
those of equal length in a closed loop: a window from one end to another has one wave more of ends than of
work. A failed request enters no latency. It enters the counts and misses the
objectives.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from baton.bench.load.measurement.curves import curves
from baton.bench.load.measurement.quantiles import MIN_BLOCKS, Series, drawn, interval
from baton.bench.load.measurement.self_check import Steadiness, detect, fixed_warm_up
from baton.bench.load.measurement.slo import Bound, Slo
from baton.bench.load.target.answer import Failure, Record
from baton.bench.report import Row

LATENCIES = (
    "ttft", "ttft.first", "ttft.later", "itl", "itl.normalized", "itl.request", "handover", "e2e",
    "e2e.per_token",
)  # fmt: skip
PARTS = 20  # of the window, in time
_MOSTLY = 0.5
Latencies = Mapping[str, Mapping[str, Row]]
"""By metric and quantile."""


@dataclass(frozen=True, slots=True)
class Summary:
    """One run: the rows by name, and what tables and pages show beside them."""

    rows: dict[str, Row]
    detail: dict[str, Any]


def summarize(
    records: Sequence[Record], slo: Slo, *, warm_up: float | None, attainment: float = 0.99
) -> Summary:
    """Reduces the records.

    Args:
        warm_up: seconds to exclude; None detects it.
        attainment: share of the requests that must be good for the run to meet the objectives.
    """
    records = sorted(records, key=lambda r: r.intended)
    steadiness = _steadiness(records, warm_up)
    begin, end, window_statement = _window(records, steadiness.begin)
    due = [r for r in records if begin <= r.intended and r.failure is not Failure.INTERRUPTED]
    ok = [r for r in due if r.ok]
    failed = [r for r in due if not r.ok]
    errors = Counter(r.error_class for r in failed).most_common()
    series = _series(ok)
    goals = {f"{_name(bound)}.{bound.quantile}": bound.limit_ms for bound in slo.per_run}
    latencies = {name: of_name.rows(name, goals) for name, of_name in series.items()}
    slowest = latencies["e2e.per_token"].get("p90")
    filled = _filled(records, begin, end)
    if filled > begin:
        window_statement += f", throughput from {filled:.1f} s on"
    good = share("goodput.share", [r.ok and _is_good(r, slo) for r in due])
    rows = [
        *(row for of_metric in latencies.values() for row in of_metric.values()),
        *([] if slowest is None else [_interactivity(slowest)]),
        *_throughput(records, filled, end),
    ]
    if slo.per_request:
        edges = _edges(filled, end)
        done = sum((_done(r, edges) for r in records if r.ok and _is_good(r, slo)), np.zeros(PARTS))
        rows.append(rate("goodput.requests", "requests/s", done, float(done.sum()), _span(filled, end)))
        rows.append(good)
    rows += [
        Row("requests.sent", len(due), "requests"),
        Row("requests.ok", len(ok), "requests"),
        Row("requests.failed", len(failed), "requests"),
        Row("requests.refused", sum(r.refused for r in failed), "requests"),
        *(Row(f"errors.{error}", count, "requests") for error, count in errors),
        *_lengths(ok),
    ]
    samples = {r.error_class: r.detail for r in reversed(failed)}
    meets = all(_bound_met(bound, latencies) for bound in slo.per_run)
    return Summary(
        {row.name: row for row in rows},
        {
            "curves": curves(records, begin, end),
            "skipped_turns": sum(r.skipped_turns for r in due),
            "window": [begin, end],
            "window_statement": window_statement,
            "steady": steadiness.steady,
            "steadiness": steadiness.statement,
            "slo": str(slo) or None,
            "slo_met": (meets and good.value >= attainment) if slo.bounds else None,
            "interrupted": sum(r.failure is Failure.INTERRUPTED for r in records),
            "errors": {error: {"count": count, "sample": samples[error]} for error, count in errors},
        },
    )


def _interactivity(latency: Row) -> Row:
    """InferenceX's figure: the inverse of p90 of the latency per output token."""
    low, high = (end and 1e3 / end for end in (latency.high, latency.low))
    return Row("interactivity.p90", 1e3 / latency.value, "tokens/s", low=low, high=high)


def _throughput(records: Sequence[Record], begin: float, end: float) -> Iterator[Row]:
    edges, span, none = _edges(begin, end), _span(begin, end), np.zeros(PARTS)
    done = [(r, _done(r, edges)) for r in records if r.ok]
    requests = sum((parts for _, parts in done), none)
    count = float(requests.sum())
    yield rate("throughput.requests", "requests/s", requests, count, span)
    generated = sum((_generated(r, edges) for r in records), none)
    yield rate("throughput.output_tokens", "tokens/s", generated, count, span)
    if any(r.prompt_tokens is not None and parts.any() for r, parts in done):
        prompts = sum(((r.prompt_tokens or 0) * parts for r, parts in done), none)
        yield rate("throughput.input_tokens", "tokens/s", prompts, count, span)


def _edges(begin: float, end: float) -> np.ndarray:
    """Of the parts of the window, which are equally long. Shape [PARTS + 1]."""
    return np.linspace(begin, end, PARTS + 1)


def rate(name: str, unit: str, counts: np.ndarray, requests: float, span: float) -> Row:
    """A rate over the window, from the counts of its parts, which are of so many requests together.

    The interval is at least what one request more or less changes.
    """
    total = float(counts.sum())
    low, high = interval(drawn(len(counts)) @ counts)
    one_request = total / max(1.0, requests)
    low, high = max(0.0, min(low, total - one_request)), max(high, total + one_request)
    return Row(name, total / span, unit, low=low / span, high=high / span)


def share(name: str, good: Sequence[bool]) -> Row:
    """The share of requests, in order of time, that are good. Its interval is as that of `rate`."""
    count = max(1, len(good))
    blocks = np.array_split(np.array(good, float), max(MIN_BLOCKS, round(math.sqrt(count))))
    draws = drawn(len(blocks))
    sums, sizes = (draws @ [f(block) for block in blocks] for f in (np.sum, len))
    low, high = interval(sums / np.maximum(1, sizes))
    value = sum(good) / count
    return Row(
        name, value, "share", low=max(0.0, min(low, value - 1 / count)),
        high=min(1.0, max(high, value + 1 / count)),
    )  # fmt: skip


def _done(record: Record, edges: np.ndarray) -> np.ndarray:
    """The shares of a request that the server did in each part of the window."""
    return np.diff(np.interp(edges, (record.sent, record.ended), (0, 1)))


def _span(begin: float, end: float) -> float:
    return max(end - begin, 1e-9)


def _lengths(ok: Sequence[Record]) -> Iterator[Row]:
    """How long prompts and answers were, as the server counted, and how many were not as asked for."""
    counted = [(r.asked_input, r.prompt_tokens) for r in ok if r.prompt_tokens is not None]
    prompts = sum(count for _, count in counted)
    if counted:
        yield Row("input.mean", prompts / len(counted), "tokens")
        off = sum(length > 0 and length != count for length, count in counted)
        yield Row("input.off", off, "requests")
    if ok:
        generated, chunks = sum(r.generated for r in ok), sum(len(r.arrivals) for r in ok)
        yield Row("output.mean", generated / len(ok), "tokens")
        yield Row("output.short", sum(r.generated < r.asked_output for r in ok), "requests")
        yield Row("output.tokens_per_chunk", generated / chunks, "tokens")
    cached = [r.cached_tokens for r in ok if r.cached_tokens is not None]
    if cached:
        yield Row("input.cached", sum(cached) / max(1, prompts), "share")


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
        case "itl":
            mean = record.mean_gap
            return None if mean is None else mean * 1e3
        case "gap":
            return max(gaps) * 1e3 if gaps else None
        case "handover":
            return gaps[0] * 1e3 if gaps else None
    raise AssertionError(f"unknown metric {metric}")


def _bound_met(bound: Bound, latencies: Latencies) -> bool:
    """With too few samples for the quantile, the bound holds for the maximum."""
    of_metric = latencies[_name(bound)]
    row = of_metric.get(bound.quantile) or of_metric.get("max")
    return row is not None and row.value <= bound.limit_ms


def _name(bound: Bound) -> str:
    """The metric of the rows that a bound on the run limits."""
    return "itl" if bound.metric == "gap" else bound.metric


def _steadiness(records: Sequence[Record], warm_up: float | None) -> Steadiness:
    """By later turns if there are any: sessions begin with slow ones."""
    answered = [r for r in records if r.ok]
    ok = [r for r in answered if r.turn] or answered
    times, values = [r.intended for r in ok], [r.ttft for r in ok]
    return detect(times, values) if warm_up is None else fixed_warm_up(warm_up, times, values)


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
    """In ms. `itl` has every gap between chunks; `itl.normalized` has each token's share of its gap.
    `e2e.per_token` divides the latency by the output tokens. Only sessions of several turns have `ttft.first`
    and `ttft.later`."""
    later = [r for r in ok if r.turn]
    first = [r for r in ok if not r.turn] if later else []
    return {
        "ttft": Series.of([[r.ttft * 1e3] for r in ok]),
        "ttft.first": Series.of([[r.ttft * 1e3] for r in first]),
        "ttft.later": Series.of([[r.ttft * 1e3] for r in later]),
        "itl": Series.of([[g * 1e3 for g in r.gaps] for r in ok]),
        "itl.normalized": Series.of([_normalized(r) for r in ok]),
        "itl.request": Series.of([[m * 1e3] for r in ok if (m := r.mean_gap) is not None]),
        "handover": Series.of([[g * 1e3 for g in r.gaps[:1]] for r in ok]),
        "e2e": Series.of([[r.e2e * 1e3] for r in ok]),
        "e2e.per_token": Series.of([[r.e2e * 1e3 / max(1, r.generated)] for r in ok]),
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


def _generated(record: Record, edges: np.ndarray) -> np.ndarray:
    """Output tokens of each part, also of requests that failed later, since the server produced them."""
    if not record.arrivals:
        return np.zeros(PARTS)
    each = record.generated / len(record.arrivals) if record.ok else 1.0
    counts = np.cumsum([0, *(record.tokens or [each] * len(record.arrivals))])
    return np.diff(np.interp(edges, [record.sent, *record.arrivals], counts))
