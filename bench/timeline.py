"""What happened over time, as one SVG file: panels below each other, over the same seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _PANEL, _LEFT, _RIGHT, _TOP, _GAP = 760, 130, 52, 16, 40, 34
_COLORS = ("#2563c9", "#d9580d", "#178a6a")
_STYLE = "font:12px system-ui,sans-serif;background:#fff"


@dataclass(frozen=True)
class Series:
    """`points` are (seconds, value); `steps` holds a value until the next point."""

    name: str
    points: Sequence[tuple[float, float]]
    steps: bool = False
    dots: bool = False


@dataclass(frozen=True)
class Panel:
    title: str
    series: Sequence[Series]


def timeline(title: str, panels: Sequence[Panel]) -> str:
    """The picture. Every panel needs a point."""
    end = max(x for panel in panels for series in panel.series for x, _ in series.points)
    height = _TOP + len(panels) * (_PANEL + _GAP)
    parts = [f'<text x="{_LEFT}" y="18" font-weight="600">{escape(title)}</text>']
    for number, panel in enumerate(panels):
        parts += _panel(panel, _TOP + number * (_PANEL + _GAP), end, last=number == len(panels) - 1)
    view = f'viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {view} style="{_STYLE}">{"".join(parts)}</svg>\n'


def _panel(panel: Panel, top: float, end: float, *, last: bool) -> list[str]:
    most = max(y for series in panel.series for _, y in series.points) * 1.1 or 1.0
    bottom, right = top + _PANEL, _WIDTH - _RIGHT

    def at(x: float, y: float) -> str:
        return f"{_LEFT + (right - _LEFT) * x / end:.1f},{bottom - _PANEL * y / most:.1f}"

    parts = [f'<text x="{_LEFT}" y="{top - 6}" fill="#5c6878">{escape(panel.title)}</text>']
    for share in (0.0, 0.5, 1.0):
        y, value = bottom - _PANEL * share / 1.1, most / 1.1 * share
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{right}" stroke="#dfe4ea"/>')
        parts.append(
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#5c6878">{value:.3g}</text>'
        )
    for number, series in enumerate(panel.series):
        color, points = _COLORS[number], [at(x, y) for x, y in series.points]
        if series.dots:
            parts += [
                f'<circle cx="{x}" cy="{y}" r="2" fill="{color}"/>'
                for x, _, y in (p.partition(",") for p in points)
            ]
        else:
            parts.append(
                f'<path d="{_line(points, series.steps)}" fill="none" stroke="{color}" stroke-width="2"/>'
            )
        if len(panel.series) > 1:
            x = right - 70 * (len(panel.series) - number)
            parts.append(f'<text x="{x}" y="{top - 6}" fill="{color}">{escape(series.name)}</text>')
    if last:
        for tick in range(5):
            x = _LEFT + (right - _LEFT) * tick / 4
            place = f'x="{x:.0f}" y="{bottom + 16}" text-anchor="middle" fill="#5c6878"'
            parts.append(f"<text {place}>{end * tick / 4:.0f} s</text>")
    return parts


def _line(points: Sequence[str], steps: bool) -> str:
    path = f"M{points[0]}"
    for point in points[1:]:
        x, _, y = point.partition(",")
        path += f"H{x}V{y}" if steps else f"L{x},{y}"
    return path
