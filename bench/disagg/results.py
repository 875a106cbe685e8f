"""Measures a load by `baton bench` in a child process, and makes rows and a page of its results."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Group
from rich.table import Table
from rich.text import Text

from baton.bench.contract import Row
from baton.bench.disagg.loads import Load
from baton.bench.load.report.page import add_line, document, panels

# name -> unit. These rows of `baton bench` become rows of the report.
RESULTS = {
    "ttft.p50": "ms", "ttft.p99": "ms", "ttit.p50": "ms", "ttit.p99": "ms", "ttit.max": "ms",
    "handover.p99": "ms", "throughput.output_tokens": "tokens/s", "goodput.requests": "requests/s",
    "goodput.share": "share", "requests.ok": "requests", "requests.failed": "requests",
}  # fmt: skip
FIRST_GAP_MS = 25.0
# Bounds of the ratio to the base, by kind of load.
RATIO_GOALS: Mapping[str, Mapping[str, tuple[float, Literal["higher", "lower"]]]] = {
    "open": {"ttft.p99": (1.1, "lower"), "ttit.p99": (1.0, "lower")},
    "closed": {"throughput.output_tokens": (1.0, "higher")},
    "swing": {"goodput.requests": (1.0, "higher")},
}

Found = dict[str, dict[str, float]]  # name -> value, low, high
Point = dict[str, Any]


def run(url: str, arguments: Sequence[str], out: Path) -> dict[str, Any]:
    """Runs `baton bench ARGUMENTS` in a child process. Returns its report.

    Prints what a reader needs to judge the results. A run whose client was too slow counts: with few cores
    every client is too slow. Raises RuntimeError if there is no report.
    """
    out.unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "baton.cluster.cli", "bench", *arguments,
        "--url", url, "--quiet", "--json", str(out),
    ]  # fmt: skip
    code = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
    if not out.exists():
        raise RuntimeError(f"{' '.join(command)}: exit code {code}")
    report = json.loads(out.read_text())
    for said in _notes(report):
        print(f"bench.disagg: {' '.join(arguments)}: {said}", file=sys.stderr)
    return report


def _notes(report: Mapping[str, Any]) -> list[str]:
    detail = report["detail"]
    slow = [f"the client could not keep up: {reason}" for reason in detail["invalid_reasons"]]
    return [*slow, *detail["notes"]]


def point(load: Load, level: float, report: Mapping[str, Any]) -> Point:
    """What the report keeps of one run."""
    found: Found = {
        row["name"]: {key: row[key] for key in ("value", "low", "high") if key in row}
        for row in report["results"]
        if row["name"] in RESULTS
    }
    detail = report["detail"]
    return {
        "load": load.name,
        "level": level,
        "slo": load.slo,
        "valid": detail["valid"],
        "notes": _notes(report),
        "errors": detail["errors"],
        "results": found,
    }


def rows(
    side: str, load: Load, point: Point, base: tuple[str, Found] | None, *, judged: bool
) -> Iterator[Row]:
    """The rows of one run.

    `base`: the name and the results of the side that ratios refer to. Goals hold for a side that is `judged`.
    """
    prefix = f"disagg.{side}.{load.key}.{load.level_key(point['level'])}"
    for name, found in point["results"].items():
        row: dict[str, Any] = {"low": found.get("low"), "high": found.get("high")}
        goal, better = (FIRST_GAP_MS, "lower") if name == "handover.p99" else (None, "lower")
        if name in RATIO_GOALS[load.kind] and base is not None and (other := base[1].get(name)):
            row |= {"ratio": found["value"] / other["value"], "ratio_to": base[0]}
            goal, better = RATIO_GOALS[load.kind][name]
        if judged:
            row |= {"goal": goal, "better": better}
        yield Row(f"{prefix}.{name}", found["value"], RESULTS[name], **row)


def line(side: str, load: Load, point: Point) -> str:
    """One run in a line, with latencies in ms."""
    found = point["results"]

    def value(name: str) -> str:
        return f"{found[name]['value']:,.4g}" if name in found else "–"

    return (
        f"{load.name} {load.level_text(point['level'])} {side}: "
        f"TTFT {value('ttft.p50')}/{value('ttft.p99')}{interval(found, 'ttft.p99')} · "
        f"gap p99 {value('ttit.p99')}{interval(found, 'ttit.p99')}, first {value('handover.p99')}, "
        f"longest {value('ttit.max')} · {value('throughput.output_tokens')} tokens/s · "
        f"{found['goodput.share']['value']:.1%} within SLO · "
        f"{value('requests.ok')} answered, {value('requests.failed')} failed {', '.join(point['errors'])}"
    )


def interval(found: Found, name: str) -> str:
    """The 95 % confidence interval, if there are enough samples for both bounds or for the lower one."""
    known = found.get(name, {})
    if "low" not in known:
        return ""
    return f" [{known['low']:.4g}–{known['high']:.4g}]" if "high" in known else f" [≥ {known['low']:.4g}]"


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
