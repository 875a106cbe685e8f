"""What all figures share: colours, marks, and the card with title and legend."""

from collections.abc import Iterable, Sequence
from html import escape

# Two colours each, for light and for dark pages. Marks differ in form, too.
COLOURS = (
    ("#2f6fdf", "#6ea8ff"), ("#c2570c", "#ff9d57"), ("#16803c", "#5fd38a"), ("#8b3fc7", "#cf9bff"),
)  # fmt: skip
MARKS = (
    "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0z", "M-4-4h8v8h-8z", "M0-5.4L5.2 4h-10.4z",
    "M0-5.4L5.4 0 0 5.4-5.4 0z",
)  # fmt: skip
STYLE = """\
text { font: 13px system-ui, sans-serif; fill: #24292f }
.card { fill: #ffffff; stroke: #d0d7de }
.soft { fill: #57606a }
.grid { stroke: #d8dee4 }
.one { stroke: #57606a; stroke-width: 1.5 }
.better { fill: #16803c; fill-opacity: .07 }
"""
DARK = """\
text { fill: #e6edf3 }
.card { fill: #0d1117; stroke: #30363d }
.soft { fill: #9198a1 }
.grid { stroke: #30363d }
.one { stroke: #9198a1 }
.better { fill: #5fd38a; fill-opacity: .08 }
"""


def card(title: str, series: Sequence[str], width: int, height: int, drawn: Iterable[str]) -> str:
    """A figure as an SVG file that fits light and dark pages. `series`: their names, by number."""
    return "\n".join([*_opening(title, series, width, height), *drawn, "</svg>"]) + "\n"


def _opening(title: str, series: Sequence[str], width: int, height: int) -> Iterable[str]:
    light = "\n".join(f".s{i} {{ fill: {a}; stroke: {a} }}" for i, (a, _) in enumerate(COLOURS))
    dark = "\n".join(f".s{i} {{ fill: {b}; stroke: {b} }}" for i, (_, b) in enumerate(COLOURS))
    size = f'viewBox="0 0 {width} {height}" width="{width}"'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    yield f"<title>{escape(title)}</title>"
    yield f"<style>\n{STYLE}{light}\n@media (prefers-color-scheme: dark) {{\n{DARK}{dark}\n}}\n</style>"
    yield f'<rect class="card" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="6"/>'
    yield f'<text x="16" y="26" font-weight="600">{escape(title)}</text>'
    left = 16.0
    for i, name in enumerate(series):
        yield f'<path class="s{i}" d="{MARKS[i]}" transform="translate({left + 6:.0f} 48)"/>'
        yield f'<text x="{left + 17:.0f}" y="52.5">{escape(name)}</text>'
        left += 40 + 7.0 * len(name)
