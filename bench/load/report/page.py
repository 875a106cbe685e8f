"""The HTML report: one page for one run or sweep, or for several of them. The page loads nothing.

The tables are those of the terminal (`table`). Plotly draws the charts.
"""

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from baton.bench.contract import require_plotly
from baton.bench.load.report.table import TITLES, render, render_sweep, rows_of

Report = Mapping[str, Any]
_WIDTH = 150  # of the tables, in characters
_CHART_HEIGHT = 340  # pixels
_RARE = {"0": 1, "50 %": 2, "90 %": 10, "99 %": 100, "99.9 %": 1000, "99.99 %": 10_000}
"""A percentile → one request in so many is beyond it. Such an axis shows the tail."""
_CSS = """
body { font: 15px system-ui, sans-serif; margin: 2rem auto; max-width: 1250px; padding: 0 1rem }
pre { font-size: 12.5px; line-height: 1.35; overflow-x: auto }
"""


@dataclass(frozen=True)
class Run:
    """One run on the page. A line joins the runs of a `group`, which is a report."""

    name: str
    group: str
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
    tables: list[RenderableType] = []
    for report, name in zip(reports, names, strict=True):
        if "points" in report["detail"]:
            tables += [Text(name, "bold"), render_sweep(report)]
    for run in runs:
        tables += [Text(f"{run.name}, {run.report['started']}", "bold"), render(run.report), _settings(run)]
    console = Console(file=io.StringIO(), record=True, width=_WIDTH, force_terminal=True)
    for table in tables:
        console.print(table)
    text = console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
    # The first chart holds plotly's script.
    charts = (
        chart.to_html(full_html=False, include_plotlyjs=not i) for i, chart in enumerate(_figures(runs))
    )
    title = escape(f"Load test: {', '.join(names)}")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_CSS}</style></head><body><h1>{title}</h1>{''.join(charts)}{text}</body></html>\n"
    )


def panels(titles: Sequence[str]) -> Any:
    """A figure with a chart for each title, two beside each other."""
    require_plotly()
    from plotly.subplots import make_subplots

    rows = -(-len(titles) // 2)
    figure = make_subplots(rows=rows, cols=2, subplot_titles=[escape(title) for title in titles])
    figure.update_layout(height=_CHART_HEIGHT * rows + 80, template="plotly_white", hovermode="closest")
    return figure


def add_line(
    figure: Any, panel: int, name: str, points: Sequence[tuple[float, float]], color: int, **style: Any
) -> None:
    """Adds a line to a chart of `panels`. The lines of one name have one entry in the legend."""
    from plotly.colors import qualitative

    x, y = zip(*points, strict=True) if points else ((), ())
    shown, name = not any(trace.name == escape(name) for trace in figure.data), escape(name)
    figure.add_scatter(
        x=x, y=y, name=name, legendgroup=name, showlegend=shown, row=panel // 2 + 1, col=panel % 2 + 1,
        line={"color": qualitative.D3[color % 10], "dash": style.pop("dash", "solid")}, **style,
    )  # fmt: skip


def _runs(reports: Sequence[Report], groups: Sequence[str]) -> Iterator[Run]:
    for report, group in zip(reports, groups, strict=True):
        points = report["detail"].get("points")
        for run in points or [report]:
            load = run["parameters"]["load"].removeprefix("open loop, ").removeprefix("closed loop, ")
            name = group if not points else load if len(reports) == 1 else f"{group}, {load}"
            yield Run(name, group, run)


def _figures(runs: Sequence[Run]) -> Iterator[Any]:
    if len(runs) > 1:
        yield _tradeoffs(runs)
    yield _distributions(runs)


def _tradeoffs(runs: Sequence[Run]) -> Any:
    """Latency against throughput. A line for each report."""
    metrics = ("ttit", "ttft")
    figure = panels([f"{TITLES[metric]}, against throughput" for metric in metrics])
    for color, group in enumerate(dict.fromkeys(run.group for run in runs)):
        members = [run for run in runs if run.group == group]
        for panel, metric in enumerate(metrics):
            for quantile, dash in (("p50", "solid"), ("p99", "dot")):
                points = [
                    (tokens, latency)
                    for run in members
                    if (tokens := run.value("throughput.output_tokens")) is not None
                    and (latency := run.value(f"{metric}.{quantile}")) is not None
                ]
                add_line(figure, panel, f"{group} {quantile}", points, color, dash=dash, mode="lines+markers")
    figure.update_xaxes(title_text="output tokens/s")
    return figure.update_yaxes(title_text="ms", type="log")


def _distributions(runs: Sequence[Run]) -> Any:
    metrics = ("ttft", "ttit", "handover", "e2e")
    figure = panels([TITLES[metric] for metric in metrics])
    for color, run in enumerate(runs):
        for panel, metric in enumerate(metrics):
            curve = run.detail["curves"].get(metric, [])
            points = [(1 / (1 - share), value) for share, value in curve if share < 1]
            add_line(figure, panel, run.name, points, color)
    figure.update_xaxes(title_text="percentile", type="log", tickvals=[*_RARE.values()], ticktext=[*_RARE])
    return figure.update_yaxes(title_text="ms", type="log")


def _settings(run: Run) -> Text:
    machine = run.report["machine"]
    told = {
        **run.report["parameters"],
        "machine of the client": f"{machine['cpu']}, {machine['cores']} cores",
    }
    return Text("\n".join(f"{key}: {value}" for key, value in told.items()) + "\n", "dim")
