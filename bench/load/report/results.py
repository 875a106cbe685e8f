"""The results of a run: rows in the shape of `bench.contract`, the detail for the HTML page, and JSONL."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from baton.bench.contract import Report, Row
from baton.bench.load.experiment import Outcome
from baton.bench.load.measurement.quantiles import Estimate
from baton.bench.load.measurement.summary import Summary

LATENCIES = ("ttft", "ttit", "ttit.normalized", "ttit.request", "handover", "e2e")
_DIGITS = 4


def report_of(outcome: Outcome, started: str, json_path: Path | None = None) -> Report:
    return Report("load", outcome.plan.parameters(), json_path, started, list(rows(outcome)), detail(outcome))


def report_of_sweep(
    points: Sequence[tuple[str, Report]], found: Row | None, started: str, json_path: Path | None
) -> Report:
    """`points`: the prefix of the row names and the report of each run.

    `found`: the highest rate within the SLO.
    """
    parameters = dict(points[0][1].parameters)
    parameters["load"] = f"sweep: {', '.join(prefix for prefix, _ in points)}"
    report = Report("load", parameters, json_path, started)
    if found is not None:
        report.add(found)
    for prefix, point in points:
        for row in point.rows:
            report.add(Row(**{**asdict(row), "name": f"{prefix}.{row.name}"}))
    runs = [point.as_dict() for _, point in points]
    report.detail = {
        "valid": all(run["detail"]["valid"] for run in runs),
        "incomplete": any(run["detail"]["incomplete"] for run in runs),
        "points": runs,
    }
    return report


def rows(outcome: Outcome) -> Iterator[Row]:
    summary, check = outcome.summary, outcome.self_check
    goals = {
        f"{'ttit' if b.metric == 'gap' else b.metric}.{b.quantile}": b.limit_ms
        for b in outcome.plan.options.slo.objectives.per_run
    }
    for metric in LATENCIES:
        for quantile, estimate in summary.latencies.get(metric, {}).items():
            name = f"{metric}.{quantile}"
            yield _row(name, estimate, "ms", goals.get(name))
    yield Row("throughput.requests", summary.requests_per_s, "requests/s")
    yield Row("throughput.output_tokens", summary.output_tokens_per_s, "tokens/s")
    if summary.input_tokens_per_s is not None:
        yield Row("throughput.input_tokens", summary.input_tokens_per_s, "tokens/s")
    if summary.goodput_per_s is not None and summary.goodput_share is not None:
        yield Row("goodput.requests", summary.goodput_per_s, "requests/s")
        yield Row("goodput.share", summary.goodput_share, "share")
    yield from _counts(summary)
    yield Row("client.lag.p99", check.lag_p99 * 1e3, "ms")
    yield Row("client.stall.p99", check.stall_p99 * 1e3, "ms")
    yield Row("client.cpu", check.cpu, "share")
    for stage in outcome.server.stages:
        for name in ("mean", "p50", "p99"):
            if (seconds := getattr(stage, name)) is not None:
                least = seconds * 1e3 if name in stage.beyond else None
                yield Row(f"server.{stage.name}.{name}", seconds * 1e3, "ms", low=least)


def _counts(summary: Summary) -> Iterator[Row]:
    yield Row("requests.sent", summary.sent, "requests")
    yield Row("requests.ok", summary.ok, "requests")
    yield Row("requests.failed", summary.failed, "requests")
    for error, count in summary.errors.items():
        yield Row(f"errors.{error}", count, "requests")
    if summary.input_lengths is not None:
        yield Row("input.mean", summary.input_lengths[1], "tokens")
        yield Row("input.off", summary.input_off, "requests")
    if summary.output_lengths is not None:
        yield Row("output.mean", summary.output_lengths[1], "tokens")
        yield Row("output.short", summary.output_short, "requests")
        yield Row("output.tokens_per_chunk", summary.tokens_per_chunk, "tokens")
    if summary.cached_share is not None:
        yield Row("input.cached", summary.cached_share, "share")


def _row(name: str, estimate: Estimate, unit: str, goal: float | None) -> Row:
    return Row(
        name,
        estimate.value,
        unit,
        goal=goal,
        better=None if goal is None else "lower",
        low=estimate.low,
        high=estimate.high,
    )


def detail(outcome: Outcome) -> dict[str, Any]:
    summary, check = outcome.summary, outcome.self_check
    return {
        "valid": outcome.valid,
        "incomplete": outcome.incomplete,
        "invalid_reasons": list(check.reasons),
        "notes": notes(outcome),
        "window": [summary.begin, summary.end],
        "window_statement": summary.window_statement,
        "steady": summary.steadiness.steady,
        "steadiness": summary.steadiness.statement,
        "slo": str(outcome.plan.options.slo.objectives) or None,
        "slo_met": summary.slo_met,
        "elapsed_s": outcome.elapsed,
        "interrupted": summary.interrupted,
        "errors": {
            error: {"count": count, "sample": summary.error_samples[error]}
            for error, count in summary.errors.items()
        },
        "curves": {
            metric: [[round(q, 6), round(v, _DIGITS)] for q, v in curve]
            for metric, curve in summary.curves.items()
        },
        "timeline": [
            {k: round(v, _DIGITS) for k, v in asdict(b).items() if v is not None} for b in summary.timeline
        ],
        "client": {k: v for k, v in msgspec.to_builtins(check).items() if k != "reasons"}
        | {"processes": outcome.processes},
        "server": {
            "statement": outcome.server.statement,
            "stages": msgspec.to_builtins(outcome.server.stages),
        },
    }


def notes(outcome: Outcome) -> list[str]:
    """Sentences that a reader needs to judge the numbers."""
    summary = outcome.summary
    found = list(outcome.plan.notes)
    if summary.input_off:
        found.append(
            f"{summary.input_off} of {summary.ok} prompts have other lengths than asked for, as the server "
            f"counts (input lengths: {outcome.plan.client.tokenization.statement})"
        )
    if summary.ok and "p99" not in summary.latencies["ttft"]:
        found.append(f"{summary.ok} answers are too few for p99 of their latencies, which needs 100")
    if summary.output_short:
        found.append(f"{summary.output_short} of {summary.ok} answers are shorter than asked for")
    if summary.tokens_per_chunk > 1.02:
        found.append(
            f"a chunk has {summary.tokens_per_chunk:.2f} tokens: ttit is the time between chunks, "
            "ttit.normalized divides it by their tokens"
        )
    if summary.skipped_turns:
        found.append(f"{summary.skipped_turns} later turns were not sent, since a turn before them failed")
    if summary.interrupted:
        found.append(f"{summary.interrupted} requests were interrupted and do not count")
    options = outcome.plan.options
    workload = options.workload
    repeats = workload.prefix_groups or options.trace or workload.dataset or workload.turns != "1"
    if summary.cached_share and not repeats:
        found.append(
            f"the server took {summary.cached_share:.0%} of the prompt tokens from its cache, though no two "
            "prompts of this run begin alike: give a new --seed"
        )
    return found


def write_requests(outcome: Outcome, path: Path) -> None:
    """Writes one JSON object per line, in order of the intended send time."""
    ordered = sorted(outcome.records, key=lambda r: (r.intended, r.index, r.turn))
    with path.open("wb") as file:
        for record in ordered:
            file.write(msgspec.json.encode(record.as_line()) + b"\n")
