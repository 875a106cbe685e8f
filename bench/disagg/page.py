"""The results as one HTML page: for each load a table and charts by rate, and the flags of all sides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from baton.bench.disagg.results import Point, interval
from baton.bench.load.report.page import document
from baton.bench.load.report.svg import Chart, Line

Sides = Mapping[str, Mapping[str, Any]]
# title -> y label, and the rows of the solid and the dashed line
CHARTS = {
    "TTFT: p50, and p99 dashed": ("ms", "ttft.p50", "ttft.p99"),
    "Gap: p99, and p99 of the first gap dashed": ("ms", "ttit.p99", "handover.p99"),
    "SLO goodput": ("requests/s", "goodput.requests", None),
}  # fmt: skip
COLUMNS = {
    "TTFT p50": "ttft.p50", "p99": "ttft.p99", "gap p99": "ttit.p99", "first gap p99": "handover.p99",
    "longest": "ttit.max", "tokens/s": "throughput.output_tokens", "good": "goodput.share",
    "answered": "requests.ok", "failed": "requests.failed",
}  # fmt: skip


def page(report: Mapping[str, Any]) -> str:
    """`report`: of this bench, as in its JSON file."""
    sides: Sides = report["detail"]["sides"]
    loads = dict.fromkeys(point["load"] for side in sides.values() for point in side["points"])
    about = f"{report['started']} · {', '.join(report['machine']['gpus']) or report['machine']['cpu']}"
    body = "".join(
        (
            f'<h1>Disaggregated or colocated</h1><p class="sub">{escape(about)}</p>',
            *(_load(load, sides) for load in loads),
            f"<h2>Flags</h2>{_flags(report['parameters'], sides)}",
            "<footer>Latencies are in ms and count from the intended send time. Brackets hold 95 % "
            "confidence intervals, with requests as the independent samples. Goodput counts the requests "
            "within the SLO. A failed request is a miss.</footer>",
        )
    )
    return document("Disaggregated or colocated", body)


def _load(load: str, sides: Sides) -> str:
    points = {name: _points(side, load) for name, side in sides.items()}
    slos = ", ".join(dict.fromkeys(point["slo"] for found in points.values() for point in found))
    charts = [_by_level(title, points, *rows) for title, rows in CHARTS.items()]
    charts.append(_tradeoff(points))
    return (
        f'<h2>{escape(load)}</h2><p class="sub">SLO: {escape(slos)}</p>{_table(points)}'
        f'<div class="grid2">{"".join(charts)}</div>'
    )


def _points(side: Mapping[str, Any], load: str) -> list[Point]:
    return sorted((p for p in side["points"] if p["load"] == load), key=lambda point: point["level"])


def _by_level(
    title: str, points: Mapping[str, Sequence[Point]], unit: str, solid: str, dashed: str | None
) -> str:
    lines = [
        Line(f"{name}, {row}", _xy(found, "level", row), color, row == dashed, True)
        for color, (name, found) in enumerate(points.items())
        for row in (solid, dashed)
        if row is not None
    ]
    return Chart(title, "requests/s, or users", unit, lines).svg()


def _tradeoff(points: Mapping[str, Sequence[Point]]) -> str:
    lines = [
        Line(name, _xy(found, "ttit.p50", "throughput.output_tokens"), color, False, True, _levels(found))
        for color, (name, found) in enumerate(points.items())
    ]
    return Chart("Throughput against TTIT", "TTIT p50, ms", "output tokens/s", lines, log_y=False).svg()


def _xy(points: Sequence[Point], x: str, y: str) -> list[tuple[float, float]]:
    """Points without both values, since all requests failed, are left out."""

    def value(point: Point, row: str) -> float | None:
        return point["level"] if row == "level" else point["results"].get(row, {}).get("value")

    pairs = ((value(point, x), value(point, y)) for point in points)
    return [(a, b) for a, b in pairs if a is not None and b is not None]


def _levels(points: Sequence[Point]) -> list[str]:
    return [f"{point['level']:g}" for point in points if "ttit.p50" in point["results"]]


def _table(points: Mapping[str, Sequence[Point]]) -> str:
    levels = sorted({point["level"] for found in points.values() for point in found})
    lines = "".join(_lines(level, points) for level in levels)
    head = "".join(f"<th>{name}</th>" for name in COLUMNS)
    head = f'<tr><th>rate</th><th class="text">side</th>{head}</tr>'
    return f'<div class="card"><table>{head}{lines}</table></div>'


def _lines(level: float, points: Mapping[str, Sequence[Point]]) -> str:
    return "".join(
        f'<tr><td>{level:g}</td><td class="text"><i class="key c{color}"></i>{escape(name)}'
        f"{'' if point['valid'] else ' <span class=bad>invalid</span>'}</td>{_cells(point)}</tr>"
        for color, (name, found) in enumerate(points.items())
        for point in found
        if point["level"] == level
    )


def _cells(point: Point) -> str:
    return "".join(
        f"<td>{_cell(point, row)}<small>{escape(interval(point['results'], row))}</small></td>"
        for row in COLUMNS.values()
    )


def _cell(point: Point, row: str) -> str:
    if row not in point["results"]:
        return "–"
    value = point["results"][row]["value"]
    return f"{value:.1%}" if row == "goodput.share" else f"{value:,.4g}"


def _flags(parameters: Mapping[str, Any], sides: Sides) -> str:
    described = [
        (f"{name}: {process}", text)
        for name, side in sides.items()
        for process, text in side["flags"].items()
    ]
    described += [(f"bench.disagg: {name}", str(value)) for name, value in parameters.items()]
    cells = "".join(f'<tr><td>{escape(a)}</td><td class="wrap">{escape(b)}</td></tr>' for a, b in described)
    return f'<div class="card"><table>{cells}</table></div>'
