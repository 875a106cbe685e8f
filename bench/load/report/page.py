"""The HTML report: one page for one run or sweep, or for several of them. The page loads nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from baton.bench.load.report import svg
from baton.bench.load.report.results import LATENCIES
from baton.bench.load.report.svg import Chart, Line
from baton.bench.load.report.table import TITLES, ms, rows_of, stage_ms

Report = Mapping[str, Any]
# The page holds its style and its script: it loads nothing.
CSS, JS = (Path(__file__).with_name(name).read_text() for name in ("page.css", "page.js"))
_COLORS = 8
_QUANTILES = ("p50", "p90", "p99", "p99.9", "max")
_ADDED_STAGES = (
    "router_queue",
    "prefill_queue",
    "prefill",
    "exposed_transfer",
    "decode",
)  # consecutive in a request


@dataclass(frozen=True)
class Run:
    """One run on the page. A line joins the runs of a `group` (a sweep)."""

    name: str
    group: int
    color: int
    report: Report

    @property
    def detail(self) -> Mapping[str, Any]:
        return self.report["detail"]

    def value(self, row: str) -> float | None:
        found = rows_of(self.report).get(row)
        return None if found is None else found["value"]


def page(reports: Sequence[Report], names: Sequence[str]) -> str:
    """`names`: of the reports. Raises ValueError for a report of another bench."""
    for report, name in zip(reports, names, strict=True):
        if "detail" not in report or report.get("bench") != "load":
            raise ValueError(
                f"{name} is no report of a load test. Give files that `baton bench run --json` wrote."
            )
    runs = list(_runs(reports, names))
    return document(f"Load test: {', '.join(names)}", "".join(_sections(reports, names, runs)))


def document(title: str, body: str) -> str:
    """A page with the style and the script of all reports. `body` is HTML."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head>"
        f"<body><main>{body}</main><script>{JS}</script></body></html>\n"
    )


def _runs(reports: Sequence[Report], groups: Sequence[str]) -> Iterator[Run]:
    color = 0
    for group, report in enumerate(reports):
        points = report["detail"].get("points")
        for run in points or [report]:
            name = groups[group] if not points else _short(run["parameters"]["load"])
            if points and len(reports) > 1:
                name = f"{groups[group]}, {name}"
            yield Run(name, group, color % _COLORS, run)
            color += 1


def _short(load: str) -> str:
    return load.removeprefix("open loop, ").removeprefix("closed loop, ")


def _sections(reports: Sequence[Report], groups: Sequence[str], runs: Sequence[Run]) -> Iterator[str]:
    yield _head(reports, groups)
    for run in runs:
        yield _banner(run, alone=len(runs) == 1)
    if len(runs) == 1:
        yield _tiles(runs[0])
    else:
        yield f"<h2>Side by side</h2>{_side_by_side(runs)}"
        yield f"<h2>Throughput against latency</h2>{_tradeoffs(runs, groups)}"
    yield f"<h2>Latency distributions</h2>{_distributions(runs)}"
    yield "<h2>Time line</h2>"
    for number, run in enumerate(runs):
        yield _timeline(run, folded=number >= 2, titled=len(runs) > 1)
    yield f"<h2>Inside the server</h2>{_stages(runs)}"
    failed = [run for run in runs if run.detail["errors"]]
    if failed:
        yield f"<h2>Failed requests</h2>{_errors(failed)}"
    if len(runs) == 1:
        yield f"<h2>All latencies</h2>{_latency_table(runs[0])}"
    yield f"<h2>How it was measured</h2>{_fine_print(runs)}"
    yield (
        "<footer>Latencies count from the intended send time. A failed request is a miss and enters no "
        "latency. Intervals are 95 % confidence intervals with requests as the independent samples.</footer>"
    )


def _head(reports: Sequence[Report], groups: Sequence[str]) -> str:
    first = reports[0]["parameters"]
    title = first["model"] if len(reports) == 1 else " · ".join(groups)
    points = len(reports[0]["detail"].get("points", ()))
    loads = f"sweep of {points} loads" if points else first["load"]
    if len(reports) > 1:
        loads = f"{len(reports)} reports"
    work = ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in first["workload"].items())
    urls = ", ".join(dict.fromkeys(r["parameters"]["url"] for r in reports))
    about = " · ".join((urls, loads, work, reports[0]["started"]))
    return f'<h1>{escape(str(title))}</h1><p class="sub">{escape(about)}</p>'


def _banner(run: Run, *, alone: bool) -> str:
    name = "" if alone else f"{escape(run.name)}: "
    found = ""
    if not run.detail["valid"]:
        reasons = "".join(f"<li>{escape(r)}</li>" for r in run.detail["invalid_reasons"])
        found += (
            f'<div class="banner bad">{name}INVALID: the client could not keep up, so these numbers do not '
            f"show the server<ul>{reasons}</ul></div>"
        )
    if run.detail["incomplete"]:
        found += f'<div class="banner warn">{name}INCOMPLETE: the run was stopped before its end</div>'
    if run.detail["steady"] is False:
        found += f'<div class="banner warn">{name}{escape(run.detail["steadiness"])}</div>'
    return found


def _tiles(run: Run) -> str:
    tiles = [
        ("TTFT p50", _ms(run, "ttft.p50"), f"p99 {_ms(run, 'ttft.p99')}"),
        ("TTIT p50", _ms(run, "ttit.p50"), f"p99 {_ms(run, 'ttit.p99')}, max {_ms(run, 'ttit.max')}"),
        ("Handover p50", _ms(run, "handover.p50"), f"token 1 → 2, p99 {_ms(run, 'handover.p99')}"),
        ("Output tokens/s", _number(run, "throughput.output_tokens"), ""),
        ("Requests/s", _number(run, "throughput.requests"), f"{_number(run, 'requests.ok')} answered"),
        ("Failed", _number(run, "requests.failed"), f"of {_number(run, 'requests.sent')}"),
    ]
    if run.detail["slo"]:
        share = run.value("goodput.share")
        verdict = "the run meets it" if run.detail["slo_met"] else "the run misses it"
        head = f"{share:.1%}" if share is not None else ("met" if run.detail["slo_met"] else "missed")
        tiles.append(("Within SLO", head, f"{run.detail['slo']}: {verdict}"))
    inner = (f"<span>{escape(a)}</span><b>{escape(b)}</b><small>{escape(c)}</small>" for a, b, c in tiles)
    return '<div class="tiles">' + "".join(f'<div class="tile">{tile}</div>' for tile in inner) + "</div>"


def _side_by_side(runs: Sequence[Run]) -> str:
    columns = {
        "TTFT p50": "ttft.p50", "TTFT p99": "ttft.p99", "TTIT p50": "ttit.p50", "TTIT p99": "ttit.p99",
        "TTIT max": "ttit.max", "handover p50": "handover.p50", "e2e p50": "e2e.p50",
    }  # fmt: skip
    head = "".join(f"<th>{c}</th>" for c in (*columns, "requests/s", "tokens/s", "good", "failed"))
    lines = []
    for run in runs:
        share = run.value("goodput.share")
        failed = run.value("requests.failed") or 0
        cells = "".join(f"<td>{escape(_ms(run, row, unit=False))}</td>" for row in columns.values())
        lines.append(
            f'<tr><td><i class="key c{run.color}"></i>{escape(run.name)}</td>{cells}'
            f"<td>{_number(run, 'throughput.requests')}</td>"
            f"<td>{_number(run, 'throughput.output_tokens')}</td>"
            f"<td>{'–' if share is None else f'{share:.1%}'}</td>"
            f'<td class="{"bad" if failed else ""}">{failed:.0f}</td></tr>'
        )
    return f'<div class="card"><table><tr><th>latencies in ms</th>{head}</tr>{"".join(lines)}</table></div>'


def _tradeoffs(runs: Sequence[Run], groups: Sequence[str]) -> str:
    charts = []
    for metric, title in (("ttit", "TTIT"), ("ttft", "TTFT")):
        lines = []
        for group, name in enumerate(groups):
            members = [run for run in runs if run.group == group]
            for quantile in ("p50", "p99"):
                points = [
                    (tokens, latency)
                    for run in members
                    if (tokens := run.value("throughput.output_tokens")) is not None
                    and (latency := run.value(f"{metric}.{quantile}")) is not None
                ]
                labels = [_load_label(run) for run in members] if quantile == "p50" else []
                color = group % _COLORS if len(groups) > 1 else (quantile == "p99")
                full = f"{name} {quantile}" if len(groups) > 1 else quantile
                lines.append(Line(full, points, int(color), quantile == "p99", True, labels))
        charts.append(Chart(f"{title} against throughput", "output tokens/s", f"{title}, ms", lines).svg())
    return f'<div class="grid2">{"".join(charts)}</div>'


def _load_label(run: Run) -> str:
    return _short(run.report["parameters"]["load"]).replace("poisson ", "")


def _distributions(runs: Sequence[Run]) -> str:
    charts = []
    for metric in ("ttft", "ttit", "handover", "e2e"):
        lines = [
            Line(run.name, [(q, v) for q, v in run.detail["curves"].get(metric, [])], run.color)
            for run in runs
        ]
        title = TITLES[metric]
        charts.append(Chart(title, "percentile", "ms", lines, x_scale=svg.percentile_axis).svg())
    return f'<div class="grid2">{"".join(charts)}</div>'


def _timeline(run: Run, *, folded: bool, titled: bool) -> str:
    bins = run.detail["timeline"]
    begin = run.detail["window"][0]
    last = max((b["at"] for b in bins), default=1.0)  # the same for all four charts

    def line(name: str, key: str, color: int, *, dashed: bool = False) -> Line:
        return Line(name, [(b["at"], b[key]) for b in bins if key in b], color, dashed)

    shaded = (0.0, begin) if begin > 0 else None
    failures = [b["at"] for b in bins if b["failed"]]

    def chart(title: str, unit: str, *lines: Line, log: bool = True) -> str:
        return Chart(
            title,
            "seconds since the start",
            unit,
            lines,
            x_scale=lambda _, a, b: svg.seconds([last], a, b),
            log_y=log,
            shaded=shaded,
            marks=failures,
            height=210,
        ).svg()

    charts = (
        chart("TTFT, by intended send time", "ms", line("p50", "ttft_p50", 0), line("p99", "ttft_p99", 1)),
        chart("TTIT, by arrival", "ms", line("p50", "gap_p50", 0), line("p99", "gap_p99", 1)),
        chart("Output tokens/s", "tokens/s", line("tokens/s", "tokens_per_s", 2), log=False),
        chart("Requests due and not yet answered", "requests", line("requests", "in_flight", 3), log=False),
    )
    inner = f'<div class="grid2">{"".join(charts)}</div>'
    if folded:
        return f"<details><summary>{escape(run.name)}</summary>{inner}</details>"
    return f"<h3>{escape(run.name)}</h3>{inner}" if titled else inner


def _stages(runs: Sequence[Run]) -> str:
    parts = []
    for run in runs:
        server = run.detail["server"]
        head = f"<h3>{escape(run.name)}</h3>" if len(runs) > 1 else ""
        if not server["stages"]:
            parts.append(f'{head}<p class="sub">{escape(server["statement"])}.</p>')
            continue
        added = [s for s in server["stages"] if s["name"] in _ADDED_STAGES]
        total = sum(s["mean"] for s in added) or 1.0
        bar = "".join(
            f'<i class="c{i}" style="width:{s["mean"] / total:.2%}" title="{_stage(s)}"></i>'
            for i, s in enumerate(added)
        )
        keys = "".join(f'<span><i class="key c{i}"></i>{_stage(s)}</span>' for i, s in enumerate(added))
        lines = "".join(
            f"<tr><td>{_stage(s)}</td>"
            + "".join(f"<td>{escape(stage_ms(s, k))}</td>" for k in ("mean", "p50", "p99"))
            + f'<td>{s["count"]:,}</td><td class="text"><small>{escape(s["metric"])}</small></td></tr>'
            for s in server["stages"]
        )
        drawn = f'<div class="bar">{bar}</div><div class="legend">{keys}</div>' if len(added) > 1 else ""
        parts.append(
            f'{head}<div class="card">{drawn}<table><tr>'
            "<th>stage</th><th>mean, ms</th><th>≈ p50</th><th>≈ p99</th><th>count</th>"
            f'<th class="text">metric</th></tr>{lines}</table></div>'
            f'<p class="sub">{escape(server["statement"])}.</p>'
        )
    return "".join(parts)


def _stage(stage: Mapping[str, Any]) -> str:
    return escape(stage["name"].replace("_", " "))


def _errors(runs: Sequence[Run]) -> str:
    lines = "".join(
        f'<tr><td>{escape(run.name)}</td><td class="text bad">{escape(name)}</td><td>{error["count"]}</td>'
        f'<td class="wrap">{escape(error["sample"])}</td></tr>'
        for run in runs
        for name, error in run.detail["errors"].items()
    )
    return (
        '<div class="card"><table><tr><th>run</th><th class="text">class</th><th>count</th>'
        f'<th class="text">an example</th></tr>{lines}</table></div>'
    )


def _latency_table(run: Run) -> str:
    rows = rows_of(run.report)
    lines = []
    for metric in LATENCIES:
        if f"{metric}.p50" not in rows:
            continue
        cells = "".join(_latency_cell(rows.get(f"{metric}.{q}")) for q in _QUANTILES)
        lines.append(f"<tr><td>{escape(TITLES[metric])}</td>{cells}</tr>")
    head = "".join(f"<th>{q}</th>" for q in _QUANTILES)
    return f'<div class="card"><table><tr><th>ms</th>{head}</tr>{"".join(lines)}</table></div>'


def _latency_cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "<td>–</td>"
    return f"<td>{ms(row['value'])}<br><small>{_interval(row)}</small></td>"


def _interval(row: Mapping[str, Any]) -> str:
    if "low" not in row:
        return "&nbsp;"
    return f"{ms(row['low'])} – {ms(row['high'])}" if "high" in row else f"≥ {ms(row['low'])}"


def _fine_print(runs: Sequence[Run]) -> str:
    parts = []
    for run in runs:
        client, detail = run.detail["client"], run.detail
        lines = [
            f"Window: {detail['window_statement']}; {detail['steadiness']}.",
            f"Client: {client['processes']} processes, CPU {client['cpu']:.0%} of a core, sends late by "
            f"{client['lag_p99'] * 1e3:.2f} ms p99, event loop late by "
            f"{client['stall_p99'] * 1e3:.2f} ms p99.",
            *(f"{note}." for note in detail["notes"]),
        ]
        notes = "".join(f"<li>{escape(line)}</li>" for line in lines)
        settings = "".join(
            f'<tr><td>{escape(key)}</td><td class="wrap">{escape(str(value))}</td></tr>'
            for key, value in (
                *run.report["parameters"].items(),
                ("machine of the client", _machine(run.report)),
            )
        )
        head = f"<h3>{escape(run.name)}</h3>" if len(runs) > 1 else ""
        parts.append(
            f'{head}<ul class="notes">{notes}</ul><details><summary>All settings</summary>'
            f'<div class="card"><table>{settings}</table></div></details>'
        )
    return "".join(parts)


def _machine(report: Report) -> str:
    machine = report["machine"]
    return f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}"


def _ms(run: Run, row: str, *, unit: bool = True) -> str:
    value = run.value(row)
    return "–" if value is None else ms(value) + (" ms" if unit else "")


def _number(run: Run, row: str) -> str:
    value = run.value(row)
    return (
        "–" if value is None else f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.2f}"
    )
