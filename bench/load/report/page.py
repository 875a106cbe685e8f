"""A report as one HTML file with plots: of one run, of a sweep, or of several runs over each other.

It needs nothing from elsewhere: uPlot, the style and the data are in it. Its input is the JSON object of
reports.
"""

import html
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from baton.bench.load.report.compare import Verdict, change, notes
from baton.bench.load.report.table import ms, name_of, rows_of

_PAGES = files("baton.router.endpoints.pages")
_ROWS = (
    "ttft.p50", "ttft.p99", "itl.p50", "itl.p99", "e2e.p50", "e2e.per_token.p50", "e2e.per_token.p90",
    "throughput.requests", "throughput.output_tokens", "goodput.requests", "goodput.share", "input.cached",
    "requests.sent", "requests.failed",
)  # fmt: skip
"""Of the table. The JSON of the report has all."""
NO_VERDICT = Verdict((), ())
Cell = tuple[str, str]
"""A text and its style."""
_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
<body class="dashboard">
<header class="bar"><h1>{title}</h1><span class="dim">{about}</span></header>
<main>
{banners}
<section><table>{table}</table>{notes}</section>
<div class="plots" id="plots"></div>
<section><h2>How it was measured</h2><table>{setup}</table></section>
</main>
<script>{uplot}</script>
<script id="data" type="application/json">{data}</script>
<script type="module">{script}</script>
</html>
"""


def write(
    path: Path, reports: Sequence[Mapping[str, Any]], names: Sequence[str], verdict: Verdict = NO_VERDICT
) -> None:
    """Writes the page of these reports, which are drawn over each other by these names. `verdict`: of their
    comparison."""
    path.write_text(page(reports, names, verdict))


def page(reports: Sequence[Mapping[str, Any]], names: Sequence[str], verdict: Verdict = NO_VERDICT) -> str:
    """Returns the page. Reports that were written without curves have only the table."""
    first = reports[0]
    model = first["parameters"].get("model", "")
    runs = [_run(report, name) for report, name in zip(reports, names, strict=True)]
    return _PAGE.format(
        title=html.escape(
            f"Load test of {model}" if len(reports) == 1 else f"{len(reports)} runs of {model}"
        ),
        about=html.escape(" · ".join(dict.fromkeys(str(report["started"]) for report in reports))),
        style=_read("style.css") + _read("uPlot.min.css"),
        banners="".join(_banner(report, name) for report, name in zip(reports, names, strict=True)),
        table=_table(reports, names),
        notes=_notes(reports, names, verdict),
        setup=_setup(reports, names),
        uplot=_read("uPlot.iife.min.js"),
        # Within a script only "</" and "<!--" could end it.
        data=json.dumps(runs).replace("<", "\\u003c"),
        script=Path(__file__).with_name("page.js").read_text(),
    )


def _read(name: str) -> str:
    return _PAGES.joinpath(name).read_text()


def _run(report: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What is drawn of a report: its curves, and of a sweep a point for each of its runs."""
    detail = report.get("detail", {})
    points = [
        {"x": load, "rows": {row: values["value"] for row, values in rows_of(point).items()}}
        for load, point in zip(detail.get("loads", ()), detail.get("points", ()), strict=False)
    ]
    return {"name": name, "curves": detail.get("curves", {}), "points": sorted(points, key=lambda p: p["x"])}


def _table(reports: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """A column for each run; of a sweep, for each load."""
    columns: list[tuple[str, Mapping[str, Any]]] = []
    for report, name in zip(reports, names, strict=True):
        points = report.get("detail", {}).get("points")
        prefix = f"{name}: " if len(reports) > 1 else ""
        columns += [(f"{prefix}{p['parameters']['load']}", p) for p in points] if points else [(name, report)]
    tables = [rows_of(report) for _, report in columns]
    compared = len(columns) == len(reports) > 1  # runs, each with the first one
    heads = [(name, "") for name, _ in columns]
    lines = [_row("th", "", "", _with_changes(heads, [("change", "")] * len(heads) if compared else ()))]
    for row in _ROWS:
        if any(row in rows for rows in tables):
            cells = [
                (f"{ms(rows[row]['value'])} {rows[row]['unit']}" if row in rows else "–", "")
                for rows in tables
            ]
            changes = [change(tables[0].get(row), rows.get(row)) for rows in tables] if compared else ()
            lines.append(_row("td", name_of(row), row, _with_changes(cells, changes)))
    return "".join(lines)


def _with_changes(cells: Sequence[Cell], changes: Sequence[Cell]) -> list[Cell]:
    """Puts each change but that of the first run behind its cell."""
    if not changes:
        return [*cells]
    return [cells[0], *(each for pair in zip(cells[1:], changes[1:], strict=True) for each in pair)]


def _row(kind: str, first: str, title: str, cells: Sequence[Cell]) -> str:
    """`title`: the name of the row in the report, which --fail-if takes."""
    numbers = "".join(
        f'<{kind} class="{f"number {style}".rstrip()}">{html.escape(text)}</{kind}>' for text, style in cells
    )
    return f'<tr><{kind} title="{html.escape(title)}">{html.escape(first)}</{kind}>{numbers}</tr>'


def _notes(reports: Sequence[Mapping[str, Any]], names: Sequence[str], verdict: Verdict) -> str:
    """What the terminal says below its tables."""
    lines: list[Cell] = [
        (f"{name}: Note: {note}." if len(reports) > 1 else f"Note: {note}.", "dim")
        for report, name in zip(reports, names, strict=True)
        for note in report.get("detail", {}).get("notes", ())
    ]
    if len(reports) > 1:
        lines += notes(reports, names, verdict)
    return "".join(f'<p class="{kind}">{html.escape(text)}</p>' for text, kind in lines)


def _setup(reports: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    described = [
        {**report["parameters"], **report.get("machine", {}), **report.get("versions", {})}
        for report in reports
    ]
    lines = [_row("th", "", "", [(name, "") for name in names])]
    for key in dict.fromkeys(key for each in described for key in each):
        lines.append(
            _row("td", key.replace("_", " "), key, [(str(each.get(key, "–")), "") for each in described])
        )
    return "".join(lines)


def _banner(report: Mapping[str, Any], name: str) -> str:
    detail, texts = report.get("detail", {}), []
    if not detail.get("valid", True):
        reasons = "; ".join(detail.get("invalid_reasons", ()))
        texts.append(f"{name}: INVALID: the client could not keep up. {reasons}")
    if detail.get("incomplete"):
        texts.append(f"{name}: incomplete, it was stopped before its end")
    return "".join(f'<section class="bad">{html.escape(text)}</section>' for text in texts)
