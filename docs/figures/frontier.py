"""Draws the frontier of first tokens and gaps from a run of `bench.routing_sim --only frontier`.

Each panel has the cases of so many workers. A line joins what Baton gives with each gap target; its large dot
is the default. The rules of vLLM and SGLang are single marks.
"""

import json
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path

from docs.figures.style import MARKS, card

RUN = Path(__file__).parents[1] / "lab" / "runs" / "2026-11-30-frontier.json"
PANELS = {
    "One H200": ("agents8.w1", "agents24.w1"),
    "Two H200": ("agents16.w2", "agents48.w2"),
}
TARGETS = ("steps2", "steps2.5", "steps3.5", "steps5", "steps7")
DEFAULT = "steps3.5"
SIDES = {"Baton, by gap target": None, "vLLM, chunks of 512": "vllm", "SGLang": "sglang"}
WIDTH, HEIGHT = 760, 372
LEFT, TOP, WIDE, HIGH = 52, 84, 304, 224
"""Of a panel."""
WAIT, GAP = 750.0, 200.0
"""Ends of the axes, in ms."""

Points = Mapping[str, tuple[float, float]]
"""By case and side: p90 of later turns, p99 of gaps."""


def points() -> Points:
    rows = json.loads(RUN.read_text())["results"]
    values = {row["name"].removeprefix("routing_sim.frontier."): row["value"] for row in rows}
    cut = ".later_p90"
    return {
        name.removesuffix(cut): (value, values[f"{name.removesuffix(cut)}.gap_p99"])
        for name, value in values.items()
        if name.endswith(cut)
    }


def svg() -> str:
    found = points()
    lines = [line for i, panel in enumerate(PANELS) for line in _panel(found, panel, LEFT + 372 * i)]
    title = "Agents, simulated: p99 of gaps over p90 of later turns' first tokens, ms"
    return card(title, list(SIDES), WIDTH, HEIGHT, lines)


def _panel(found: Points, panel: str, left: int) -> Iterator[str]:
    bottom = TOP + HIGH

    def at(point: tuple[float, float]) -> tuple[str, str]:
        wait, gap = point
        return f"{left + WIDE * wait / WAIT:.1f}", f"{bottom - HIGH * gap / GAP:.1f}"

    for i in range(6):
        x, y = at((WAIT * i / 5, GAP * i / 5))
        yield f'<path class="grid" d="M{x} {TOP}V{bottom}M{left} {y}h{WIDE}"/>'
        yield f'<text class="soft" x="{x}" y="{bottom + 18}" text-anchor="middle">{WAIT * i / 5:.0f}</text>'
        place = f'x="{left - 8}" y="{float(y) + 4.5:.1f}" text-anchor="end"'
        yield f'<text class="soft" {place}>{GAP * i / 5:.0f}</text>'
    yield f'<text class="soft" x="{left + WIDE}" y="{bottom + 38}" text-anchor="end">{escape(panel)}</text>'
    for case in PANELS[panel]:
        line = [at(found[f"{case}.{target}"]) for target in TARGETS]
        yield f'<path class="s0" style="fill:none" stroke-width="1.5" d="M{"L".join(map(" ".join, line))}"/>'
        agents = case.removeprefix("agents").partition(".")[0]
        for number, (label, side) in enumerate(SIDES.items()):
            for name in TARGETS if side is None else (side,):
                point = found[f"{case}.{name}"]
                x, y = at(point)
                size = " scale(.6)" if side is None and name != DEFAULT else ""
                told = escape(f"{agents} agents, {label}, {name}: {point[0]:.0f}, {point[1]:.1f}")
                move = f'transform="translate({x} {y}){size}"'
                yield f'<path class="s{number}" d="{MARKS[number]}" {move}><title>{told}</title></path>'
                if not size:
                    yield f'<text x="{float(x) + 8:.1f}" y="{float(y) - 6:.1f}">{agents}</text>'
