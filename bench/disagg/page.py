"""The results as one HTML page: for each load charts by rate and a table, and the flags of all sides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from baton.bench.disagg.results import Point, interval
from baton.bench.load.report.page import add_line, document, panels

Sides = Mapping[str, Mapping[str, Any]]
# title -> the rows of the solid and the dotted line
CHARTS = {
    "TTFT p50, p99 dotted, ms": ("ttft.p50", "ttft.p99"),
    "Gap p99, of the first gap dotted, ms": ("ttit.p99", "handover.p99"),
    "Requests/s within the SLO": ("goodput.requests",),
    "Output tokens/s": ("throughput.output_tokens",),
}
COLUMNS = {
    "TTFT p50": "ttft.p50", "p99": "ttft.p99", "gap p99": "ttit.p99", "first gap p99": "handover.p99",
    "longest": "ttit.max", "tokens/s": "throughput.output_tokens", "good": "goodput.share",
    "answered": "requests.ok", "failed": "requests.failed",
}  # fmt: skip


def page(report: Mapping[str, Any]) -> str:
    """`report`: of this bench, as in its JSON file."""
    sides: Sides = report["detail"]["sides"]
    loads = dict.fromkeys(point["load"] for side in sides.values() for point in side["points"])
    of_loads = {
        load: {name: [p for p in side["points"] if p["load"] == load] for name, side in sides.items()}
        for load in loads
    }
    about = f"{report['started']} · {', '.join(report['machine']['gpus']) or report['machine']['cpu']}"
    told = Text(
        "Latencies are in ms and count from the intended send time. Brackets hold 95 % confidence intervals, "
        "with requests as the independent samples. Goodput counts the requests within the SLO."
    )
    tables = [_table(load, points) for load, points in of_loads.items()]
    return document(
        "Disaggregated or colocated",
        Group(about, *tables, _flags(report["parameters"], sides), told),
        [_figure(load, points) for load, points in of_loads.items()],
    )


def _figure(load: str, points: Mapping[str, Sequence[Point]]) -> Any:
    figure = panels([*CHARTS])
    for panel, rows in enumerate(CHARTS.values()):
        for color, (name, found) in enumerate(points.items()):
            for row, dash in zip(rows, ("solid", "dot"), strict=False):
                line = [
                    (point["level"], point["results"][row]["value"])
                    for point in sorted(found, key=lambda point: point["level"])
                    if row in point["results"]  # not if all requests failed
                ]
                add_line(figure, panel, name, line, color, dash=dash, mode="lines+markers")
    figure.update_xaxes(title_text="requests/s, or users")
    return figure.update_layout(title=load)


def _table(load: str, points: Mapping[str, Sequence[Point]]) -> Table:
    slos = ", ".join(dict.fromkeys(point["slo"] for found in points.values() for point in found))
    table = Table("rate", "side", *COLUMNS, title=f"{load}, SLO {slos}", title_justify="left")
    every = [(point["level"], name, point) for name, found in points.items() for point in found]
    for level, name, point in sorted(every, key=lambda one: one[0]):
        side = Text(name if point["valid"] else f"{name} (invalid)", "" if point["valid"] else "red")
        table.add_row(f"{level:g}", side, *(_cell(point, row) for row in COLUMNS.values()))
    return table


def _cell(point: Point, row: str) -> str:
    if row not in point["results"]:
        return "–"
    value = point["results"][row]["value"]
    shown = f"{value:.1%}" if row == "goodput.share" else f"{value:,.4g}"
    return shown + interval(point["results"], row)


def _flags(parameters: Mapping[str, Any], sides: Sides) -> Table:
    table = Table("process", "flags", title="Flags", title_justify="left")
    for name, side in sides.items():
        for process, text in side["flags"].items():
            table.add_row(Text(f"{name}: {process}"), Text(text))
    for name, value in parameters.items():
        table.add_row(f"bench.disagg: {name}", Text(str(value)))
    return table
