"""Line charts as SVG text: scales, axes, legends. Colors are classes of the page's style."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 560, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 14, 12, 40
Point = tuple[float, float]


@dataclass(frozen=True)
class Scale:
    """Maps values to pixels. `ticks` are (value, label)."""

    to_pixel: Callable[[float], float]
    ticks: Sequence[tuple[float, str]]


@dataclass(frozen=True)
class Line:
    """`color` is the number of a color class of the page. `labels` appear beside the points."""

    name: str
    points: Sequence[Point]
    color: int
    dashed: bool = False
    dots: bool = False
    labels: Sequence[str] = ()


@dataclass(frozen=True)
class Chart:
    """One pair of axes. `shaded` is the interval of x that does not count. `marks` are the x of failures."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    x_scale: Callable[[Sequence[float], float, float], Scale] = field(
        default_factory=lambda: lambda values, a, b: linear(values, a, b)
    )
    log_y: bool = True
    shaded: tuple[float, float] | None = None
    marks: Sequence[float] = ()
    height: int = HEIGHT

    def svg(self) -> str:
        lines = [line for line in self.lines if line.points]
        if not lines:
            return (
                f'<figure class="chart"><figcaption>{escape(self.title)}</figcaption>'
                '<p class="empty">nothing was measured</p></figure>'
            )
        bottom = self.height - _BOTTOM
        x = self.x_scale([p[0] for line in lines for p in line.points], _LEFT, WIDTH - _RIGHT)
        ys = [p[1] for line in lines for p in line.points]
        y = (logarithmic if self.log_y and _spans_decades(ys) else linear)(ys, bottom, _TOP)
        parts = [*self._shade(x, bottom), *_axes(x, y, bottom), *self._labels(bottom)]
        parts += [_mark(x.to_pixel(at), bottom) for at in self.marks]
        parts += [_line(line, x, y) for line in lines]
        legend = "".join(
            f'<span><i class="key c{line.color}{_dash(line)}"></i>{escape(line.name)}</span>'
            for line in lines
        )
        return (
            f'<figure class="chart"><figcaption>{escape(self.title)}</figcaption>'
            f'<div class="plot"><svg viewBox="0 0 {WIDTH} {self.height}" role="img" '
            f'aria-label="{escape(self.title)}" data-series="{escape(self._hover(lines, x, y))}">'
            f'{"".join(parts)}<line class="cross" y1="{_TOP}" y2="{bottom}"/></svg>'
            f'<div class="tip"></div></div><div class="legend">{legend}</div></figure>'
        )

    def _shade(self, x: Scale, bottom: float) -> list[str]:
        if self.shaded is None or self.shaded[1] <= self.shaded[0]:
            return []
        a, b = (x.to_pixel(v) for v in self.shaded)
        return [
            f'<rect class="shade" x="{a:.1f}" y="{_TOP}" width="{b - a:.1f}" height="{bottom - _TOP:.1f}"/>'
        ]

    def _labels(self, bottom: float) -> list[str]:
        middle, center = (_TOP + bottom) / 2, (_LEFT + WIDTH - _RIGHT) / 2
        return [
            f'<text class="axis" x="{center}" y="{self.height - 4}" text-anchor="middle">'
            f"{escape(self.x_label)}</text>",
            f'<text class="axis" transform="translate(11 {middle:.0f}) rotate(-90)" text-anchor="middle">'
            f"{escape(self.y_label)}</text>",
        ]

    def _hover(self, lines: Sequence[Line], x: Scale, y: Scale) -> str:
        """The pixels and numbers with which the page's script shows values under the pointer."""
        return json.dumps(
            [
                {
                    "name": line.name,
                    "color": line.color,
                    "points": [
                        [round(x.to_pixel(a), 1), round(y.to_pixel(b), 1), number(b)] for a, b in line.points
                    ],
                }
                for line in lines
            ],
            separators=(",", ":"),
        )


def linear(values: Sequence[float], start: float, end: float) -> Scale:
    """From 0 to a round number above the largest value."""
    step = _ceil_125(max(max(values), 1e-9) / 4)
    top = step * math.ceil(max(max(values), 1e-9) / step - 1e-9)
    ticks = [(i * step, number(i * step)) for i in range(round(top / step) + 1)]
    return Scale(lambda v: start + (end - start) * v / top, ticks)


def seconds(values: Sequence[float], start: float, end: float) -> Scale:
    """From 0 to the largest value, without rounding."""
    last = max(max(values), 1e-9)
    step = _ceil_125(last / 8)
    ticks = [(i * step, number(i * step)) for i in range(int(last / step + 1e-9) + 1)]
    return Scale(lambda v: start + (end - start) * v / last, ticks)


def logarithmic(values: Sequence[float], start: float, end: float) -> Scale:
    """Over whole 1-2-5 steps around the values."""
    least = min(v for v in values if v > 0)
    low, high = _floor_125(least), _ceil_125(max(values))
    ticks = [(v, number(v)) for v in _steps_125(low, high)]
    span = math.log(high / low)
    return Scale(lambda v: start + (end - start) * math.log(max(v, low) / low) / span, ticks)


def percentile_axis(values: Sequence[float], start: float, end: float) -> Scale:
    """Shares of samples, with equal room for each further nine (HdrHistogram's axis, by Gil Tene)."""
    most = max((v for v in values if v < 1), default=0.9)
    last = max(1.0, -math.log10(max(1 - most, 1e-9))) + 0.15

    def to_pixel(share: float) -> float:
        nines = last if share >= 1 else min(last, -math.log10(1 - share))
        return start + (end - start) * nines / last

    names = ((0.0, "0"), (0.5, "50"), (0.9, "90"), (0.99, "99"), (0.999, "99.9"), (0.9999, "99.99"))
    return Scale(
        to_pixel, [*((q, name) for q, name in names if -math.log10(1 - q) < last - 0.1), (1.0, "max")]
    )


def number(value: float) -> str:
    """Three digits, without a trailing zero."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _axes(x: Scale, y: Scale, bottom: float) -> list[str]:
    right = WIDTH - _RIGHT
    parts = []
    for value, label in y.ticks:
        at = y.to_pixel(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{at + 3.5:.1f}" text-anchor="end">{label}</text>')
    for value, label in x.ticks:
        at = x.to_pixel(value)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{bottom}"/>')
        parts.append(f'<text x="{at:.1f}" y="{bottom + 15}" text-anchor="middle">{label}</text>')
    return parts


def _mark(at: float, bottom: float) -> str:
    return f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{bottom - 8}" y2="{bottom}"/>'


def _line(line: Line, x: Scale, y: Scale) -> str:
    at = [(x.to_pixel(a), y.to_pixel(b)) for a, b in line.points]
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in at)
    parts = [f'<polyline class="line c{line.color}{_dash(line)}" points="{path}"/>']
    if line.dots or len(at) == 1:
        parts += [f'<circle class="dot c{line.color}" cx="{a:.1f}" cy="{b:.1f}" r="3.5"/>' for a, b in at]
    for (a, b), label in zip(at, line.labels, strict=False):
        parts.append(
            f'<text class="point" x="{a:.1f}" y="{b + 16:.1f}" text-anchor="middle">{escape(label)}</text>'
        )
    return "".join(parts)


def _dash(line: Line) -> str:
    return " dash" if line.dashed else ""


def _spans_decades(values: Sequence[float]) -> bool:
    positive = [v for v in values if v > 0]
    return bool(positive) and max(positive) / min(positive) > 12


def _decade(value: float) -> float:
    return 10.0 ** math.floor(math.log10(value) + 1e-12)


def _ceil_125(value: float) -> float:
    decade = _decade(value)
    return next(m * decade for m in (1, 2, 5, 10) if m * decade >= value * (1 - 1e-9))


def _floor_125(value: float) -> float:
    decade = _decade(value)
    return next(m * decade for m in (5, 2, 1) if m * decade <= value * (1 + 1e-9))


def _steps_125(low: float, high: float) -> list[float]:
    found = [low]
    while found[-1] < high * (1 - 1e-9):
        found.append(_ceil_125(found[-1] * 1.5))
    return found
