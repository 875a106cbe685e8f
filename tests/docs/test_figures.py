"""The plots of pages are what `make figures` draws from the committed results, and show what tables say."""

import re
from pathlib import Path

from docs.figures import frontier
from docs.figures.generate import HERE, figures, ratios

ROOT = Path(__file__).parents[2]
LOADS = re.compile(
    r"^\| (\S+/\S+), ([\d.]+)(?: on (four) GPUs a side)? \(.*\| \**([\d.]+)\** \| \**([\d.]+)\** \|$", re.M
)
SHORT = re.compile(
    r"^\| (\S+/\S+)[^,|]*, ([\d.]+)(?: requests)?/s(?:, (four) GPUs)?[^|]*\|[^|]*\|[^|]*\|[^|]*"
    r"\| \**([\d.]+)\**/\**([\d.]+)\** · \**([\d.]+)\** \|$",
    re.M,
)


def test_the_plots_are_drawn_from_the_results() -> None:
    stale = [path.name for path, text in figures().items() if path.read_text() != text]
    assert not stale, "run `make figures`"


def test_the_axes_of_the_frontier_hold_all_points() -> None:
    cases = {name for names in frontier.PANELS.values() for name in names}
    drawn = {name: point for name, point in frontier.points().items() if name.startswith(tuple(cases))}
    assert len(drawn) > 20
    assert {x: y for x, y in drawn.items() if y[0] > frontier.WAIT or y[1] > frontier.GAP} == {}


def measured(lengths: str, rate: str, four: str, *names: str) -> list[float]:
    known = ratios(HERE / ("four-gpus.json" if four else "two-gpus.json"))
    return [known[f"{lengths.replace('/', '_')}.r{rate}.{name}"][0] for name in names]


def test_the_tables_have_the_same_ratios() -> None:
    rows = LOADS.findall((ROOT / "docs" / "performance.md").read_text())
    assert len(rows) > 7
    for *load, ttft, gap in rows:
        assert measured(*load, "ttft.p99", "gap.p99") == [float(ttft), float(gap)], load


def test_the_rows_of_the_readme_have_the_same_ratios() -> None:
    rows = SHORT.findall((ROOT / "README.md").read_text())
    assert len(rows) == 6
    for *load, p50, p99, gap in rows:
        assert measured(*load, "ttft.p50", "ttft.p99", "gap.p99") == [float(p50), float(p99), float(gap)], (
            load
        )
