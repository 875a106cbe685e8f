"""The final table in the terminal. Its input is the JSON object of a report, so old reports print, too."""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from baton.bench.load.measurement.summary import LATENCIES

TITLES = {
    "ttft": "TTFT",
    "ttft.first": "TTFT first turns",
    "ttft.later": "TTFT later turns",
    "itl": "ITL, every gap",
    "itl.normalized": "ITL per token",
    "itl.request": "ITL by request",
    "handover": "Handover",
    "e2e": "End to end",
    "e2e.per_token": "End to end/token",
}
_NAMES = {
    "throughput.requests": "Requests/s",
    "throughput.output_tokens": "Output tokens/s",
    "goodput.requests": "Goodput: requests/s within the objectives",
    "goodput.share": "Goodput: share of all requests",
    "input.cached": "Share of prompt tokens from the cache",
    "requests.sent": "Requests sent",
    "requests.failed": "Requests failed",
}
HELPS = (
    "What helps: close other programs, give a lower --concurrency or --rate, or run this command on another "
    "machine than the server."
)
_QUANTILES = ("p50", "p90", "p99", "p99.9", "max")
Rows = Mapping[str, Mapping[str, Any]]


def console() -> Console:
    # A pipe has no width.
    return Console(width=None if sys.stdout.isatty() else 120, highlight=False)


def rows_of(report: Mapping[str, Any]) -> Rows:
    return {row["name"]: row for row in report["results"]}


def name_of(row: str) -> str:
    """A row as people call it: `TTFT p99` for `ttft.p99`."""
    metric, _, quantile = row.rpartition(".")
    return _NAMES.get(row) or (f"{TITLES[metric]} {quantile}" if metric in TITLES else row)


def render(report: Mapping[str, Any]) -> RenderableType:
    """One run."""
    detail, rows = report["detail"], rows_of(report)
    parts: list[RenderableType] = [_title(report), *_banners(detail), _latencies(rows), _totals(rows, detail)]
    if detail["errors"]:
        parts.append(_errors(detail["errors"]))
    parts.append(_fine_print(report))
    return Group(*parts)


def render_sweep(report: Mapping[str, Any]) -> RenderableType:
    """A line for each run."""
    table = Table(title="Sweep", title_justify="left", title_style="bold")
    numbers = ["TTFT p50", "p99", "ITL p50", "p99", "max", "requests/s", "tokens/s", "good", "failed"]
    for column in ("load", *numbers, ""):
        table.add_column(column, justify="left" if column in ("load", "") else "right")
    for run in report["detail"]["points"]:
        rows, detail = rows_of(run), run["detail"]
        names = ("ttft.p50", "ttft.p99", "itl.p50", "itl.p99", "itl.max")
        good = rows.get("goodput.share")
        table.add_row(
            run["parameters"]["load"],
            *(ms(rows[name]["value"]) if name in rows else "–" for name in names),
            f"{rows['throughput.requests']['value']:.2f}",
            f"{rows['throughput.output_tokens']['value']:.1f}",
            f"{good['value']:.1%}" if good else "–",
            f"{rows['requests.failed']['value']:.0f}",
            verdict(detail),
        )
    best = rows_of(report).get("max_rate")
    parts: list[RenderableType] = [table]
    if best is not None:
        parts.append(
            Text(f"Highest rate within {report['parameters']['slo']}: {best['value']:.3g}/s", "bold green")
        )
    return Group(*parts)


def verdict(detail: Mapping[str, Any]) -> Text:
    if not detail["valid"]:
        return Text("INVALID", "bold red")
    if detail["incomplete"]:
        return Text("incomplete", "yellow")
    if detail["slo_met"] is not None:
        return Text("within SLO", "green") if detail["slo_met"] else Text("misses SLO", "yellow")
    return Text("not steady", "yellow") if detail["steady"] is False else Text("")


def ms(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def _title(report: Mapping[str, Any]) -> Text:
    p = report["parameters"]
    work = ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in p["workload"].items())
    return Text.assemble((f"{p['model']}", "bold"), f" at {p['url']}   {p['load']}   {work}", style="default")


def _banners(detail: Mapping[str, Any]) -> Iterator[Text]:
    if not detail["valid"]:
        yield Text(
            "INVALID: the client could not keep up, so these numbers do not show the server",
            "bold white on red",
        )
        for reason in detail["invalid_reasons"]:
            yield Text(f"  {reason}", "red")
        yield Text(HELPS)
    if detail["incomplete"]:
        yield Text("INCOMPLETE: the run was stopped before its end", "bold black on yellow")


def _latencies(rows: Rows) -> Table:
    """Without quantiles that no metric has enough samples for. It fits into 80 columns."""
    quantiles = [q for q in _QUANTILES if any(f"{metric}.{q}" in rows for metric in LATENCIES)]
    table = Table(
        title="Latency, ms", title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0)
    )
    table.add_column("")
    for quantile in quantiles:
        table.add_column(quantile, justify="right")
    table.add_column("95 % of p50", justify="right", style="dim")
    table.add_column("of p99", justify="right", style="dim")
    for metric in LATENCIES:
        if f"{metric}.p50" in rows:
            cells = [rows.get(f"{metric}.{q}") for q in quantiles]
            values = ("–" if row is None else ms(row["value"]) for row in cells)
            intervals = (_interval(rows.get(f"{metric}.{q}")) for q in ("p50", "p99"))
            table.add_row(TITLES[metric], *values, *intervals)
    return table


def _interval(row: Mapping[str, Any] | None) -> str:
    if row is None or "low" not in row:
        return ""
    return f"{ms(row['low'])}–{ms(row['high'])}" if "high" in row else f"≥ {ms(row['low'])}"


def _totals(rows: Rows, detail: Mapping[str, Any]) -> Padding:
    lines = Table.grid(padding=(0, 2))

    def line(name: str, text: str) -> None:
        lines.add_row(Text(name, "bold"), text)

    def value(name: str) -> float:
        return rows[name]["value"]

    sent, ok, failed = (value(f"requests.{name}") for name in ("sent", "ok", "failed"))
    refused = value("requests.refused")
    refused_text = f", {refused:.0f} of them refused (429)" if refused else ""
    line("Requests", f"{sent:.0f} sent, {ok:.0f} answered, {failed:.0f} failed{refused_text}")
    if "input.cached" in rows:
        mean, cached = value("input.mean"), value("input.cached")
        line("Prompts", f"{mean:,.0f} tokens on average, {cached:.1%} of all tokens from the cache")
    tokens = f"{value('throughput.output_tokens'):,.1f} output tokens/s"
    if "throughput.input_tokens" in rows:
        tokens += f", {value('throughput.input_tokens'):,.1f} input tokens/s"
    line("Throughput", f"{value('throughput.requests'):.2f} requests/s, {tokens}")
    if "interactivity.p90" in rows:
        line("Interactivity", f"{value('interactivity.p90'):,.1f} tokens/s: 1 ÷ p90 of End to end/token")
    if "goodput.requests" in rows:
        line(
            "Goodput",
            f"{value('goodput.requests'):.2f} requests/s, {value('goodput.share'):.1%} of all, "
            f"within {detail['slo']}",
        )
    elif detail["slo"]:
        line("SLO", detail["slo"])
    if detail["slo_met"] is not None:
        line("", "the run meets it" if detail["slo_met"] else "the run misses it")
    return Padding(lines, (0, 0, 1, 0))


def _errors(errors: Mapping[str, Any]) -> Table:
    table = Table(title="Failed requests", title_justify="left", title_style="bold red")
    table.add_column("class")
    table.add_column("count", justify="right")
    table.add_column("an example", overflow="fold")
    for name, error in errors.items():
        table.add_row(name, str(error["count"]), Text(error["sample"]))
    return table


def _fine_print(report: Mapping[str, Any]) -> Text:
    detail, client = report["detail"], report["detail"]["client"]
    lines = [
        f"Window: {detail['window_statement']}; {detail['steadiness']}.",
        f"Input lengths: {report['parameters']['input_exactness']}. Seed {report['parameters']['seed']}.",
        f"Client processes: {client['processes']}, CPU {client['cpu']:.0%} of a core, sends late by "
        f"{client['lag_p99'] * 1e3:.2f} ms p99, event loop late by {client['stall_p99'] * 1e3:.2f} ms p99: "
        + ("kept up." if detail["valid"] else "did NOT keep up."),
        *(f"Note: {note}." for note in detail["notes"]),
    ]
    return Text("\n".join(lines), "dim")
