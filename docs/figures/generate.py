"""Draws the figures of README.md and of docs/lab/load-tests.md from results of `bench.disagg --json`.

Run it with `make figures`. A test compares the files in docs/images with `figures()`. In a figure
each line has the dots of one quantity, with a colour for each series, at its ratio to the other side.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from docs.figures import frontier
from docs.figures.style import MARKS, card

HERE = Path(__file__).parent
IMAGES = HERE.parent / "images"

Ratios = Mapping[str, tuple[float, float, float]]
"""By name, without the name of the bench: a ratio, and the ends of its interval or twice the ratio."""


def ratios(path: Path) -> Ratios:
    """The ratios of one report."""
    rows: list[dict[str, Any]] = json.loads(path.read_text())["results"]
    return {
        row["name"].removeprefix("disagg."): (
            row["value"], row.get("low", row["value"]), row.get("high", row["value"])
        )
        for row in rows
        if row["unit"] == "ratio"
    }  # fmt: skip


@dataclass(frozen=True)
class Dots:
    """One figure.

    Attributes:
        rows: label, and for each series the name of its ratio; None leaves it out.
        inverse: ends of names of ratios that are better when higher. Their inverse is drawn.
    """

    title: str
    series: Sequence[str]
    rows: Sequence[tuple[str, Sequence[tuple[Ratios, str] | None]]]
    inverse: Sequence[str] = ()

    def values(self) -> Iterator[tuple[str, list[tuple[float, float, float] | None]]]:
        """The rows with what is drawn."""
        for label, names in self.rows:
            found = [None if each is None else self._of(*each) for each in names]
            yield label, found

    def _of(self, known: Ratios, name: str) -> tuple[float, float, float]:
        value, low, high = known[name]
        if name.endswith(tuple(self.inverse)):
            return 1 / value, 1 / high, 1 / low
        return value, low, high


WIDTH, LABELS, RIGHT, TOP, ROW, FOOT = 760, 250, 24, 84, 26, 46


def svg(figure: Dots) -> str:
    """A figure as an SVG file that fits light and dark pages."""
    rows = list(figure.values())
    ends = [end for _, found in rows for each in found if each for end in each[1:]]
    first, last = min([0.5, *ends]) - 0.03, max([1.25, *ends]) + 0.03
    height = TOP + ROW * len(rows) + FOOT

    def x(value: float) -> str:
        return f"{LABELS + (value - first) / (last - first) * (WIDTH - LABELS - RIGHT):.1f}"

    lines = _lines(rows, figure.series, first, last, height - FOOT, x)
    return card(figure.title, figure.series, WIDTH, height, lines)


def _lines(
    rows: Sequence[Any], series: Sequence[str], first: float, last: float, bottom: int, x: Any
) -> Iterator[str]:
    size = f'width="{float(x(1)) - float(x(first)):.1f}" height="{bottom - TOP + 16}"'
    yield f'<rect class="better" x="{x(first)}" y="{TOP - 12}" {size}/>'
    for tenth in range(math.ceil(first * 10), int(last * 10) + 1):
        kind = "one" if tenth == 10 else "grid"
        if tenth % 2 == 0:
            at = x(tenth / 10)
            yield f'<path class="{kind}" d="M{at} {TOP - 12}V{bottom + 4}"/>'
            place = f'x="{at}" y="{bottom + 20}" text-anchor="middle"'
            yield f'<text class="soft" {place}>{tenth / 10:.1f}</text>'
    yield f'<text class="soft" x="{x(1)}" y="{bottom + 38}" text-anchor="end">← Baton is better</text>'
    yield f'<text class="soft" x="{float(x(1)) + 12:.1f}" y="{bottom + 38}">vLLM is better →</text>'
    for number, (label, found) in enumerate(rows):
        y = TOP + ROW * number + 6
        yield f'<text x="16" y="{y + 4.5}">{escape(label)}</text>'
        shown = [i for i, each in enumerate(found) if each]
        for place, i in enumerate(shown):
            value, low, high = found[i]
            at = y + (place - (len(shown) - 1) / 2) * 5
            if low < high:
                yield f'<path class="s{i}" stroke-width="1.5" d="M{x(low)} {at:.1f}H{x(high)}"/>'
            told = escape(f"{label}, {series[i]}: {value:.2f}")
            move = f"translate({x(value)} {at:.1f})"
            yield f'<path class="s{i}" d="{MARKS[i]}" transform="{move}"><title>{told}</title></path>'


AGENTS = {
    "latency ÷ output tokens, p50": "e2e.per_token.p50",
    "latency ÷ output tokens, p90": "e2e.per_token.p90",
    "first token of first turns, p50": "ttft.first.p50",
    "first token of first turns, p90": "ttft.first.p90",
    "first token of later turns, p50": "ttft.later.p50",
    "first token of later turns, p90": "ttft.later.p90",
    "first token of later turns, p99": "ttft.later.p99",
    "gap, p50": "gap.p50",
    "gap, p99": "gap.p99",
    "time for a token of all (1 ÷ tokens/s)": "throughput.output_tokens",
}
FIXED = {"TTFT p50": "ttft.p50", "TTFT p99": "ttft.p99", "gap p99": "gap.p99"}


def figures() -> dict[Path, str]:
    """The path of each figure, and what is in the file."""
    two, four = ratios(HERE / "two-gpus.json"), ratios(HERE / "four-gpus.json")
    agents = {
        "16 agents": (two, "agents.a16"),
        "48": (two, "agents.a48"),
        "96": (two, "agents.a96"),
        "96, four GPUs a side": (four, "agents.a96"),
    }
    fixed = {
        "2000/150, 8 a second": (two, "2000_150.r8"),
        "2000/150, 12": (two, "2000_150.r12"),
        "2000/150, 22": (two, "2000_150.r22"),
        "2000/150, 44, four GPUs a side": (four, "2000_150.r44"),
        "8000/200, 3": (two, "8000_200.r3"),
        "8000/200, 4": (two, "8000_200.r4"),
        "500/500, 24": (two, "500_500.r24"),
        "200/20, 80": (two, "200_20.r80"),
        "30000/100, 0.8": (two, "30000_100.r0.8"),
    }
    of_agents = Dots(
        "Agents: Baton ÷ as many vLLM engines, 8B shape on H200s",
        list(agents),
        [
            (told, [(known, f"{load}.{which}") for known, load in agents.values()])
            for told, which in AGENTS.items()
        ],
        inverse=["throughput.output_tokens"],
    )
    of_lengths = Dots(
        "Prompt/answer tokens, requests a second: Baton ÷ as many vLLM engines",
        list(FIXED),
        [
            (told, [(known, f"{load}.{which}") for which in FIXED.values()])
            for told, (known, load) in fixed.items()
        ],
    )
    return {
        IMAGES / "agents.svg": svg(of_agents),
        IMAGES / "fixed-lengths.svg": svg(of_lengths),
        IMAGES / "frontier.svg": frontier.svg(),
    }


def main() -> None:
    for path, text in figures().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
