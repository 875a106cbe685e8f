"""Renders the tables of docs/lab from docs/lab/runs: `make figures`.

A run file is what `bench.report.Report` writes (`--json`). Among its keys are:

    card: name of the card, or null for a run on a CPU.
    commit: of the version that was measured.
    command: how to repeat the run.
    note: circumstances, and what the rows cannot say.

A run file of tests has the bench "tests" and the rows "passed" and "failed".
What an old run does not know is null.
"""

import json
from pathlib import Path
from typing import Any

LAB = Path(__file__).parent
BEGIN, END = "<!-- runs of tests: from docs/lab/runs, by make figures -->", "<!-- end of runs -->"


def runs(folder: Path, bench: str) -> list[tuple[str, dict[str, Any]]]:
    """Name and content of each run of this bench, by name. Names begin with the date."""
    found = [(path.name, json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))]
    return [(name, run) for name, run in found if run["bench"] == bench]


def table(folder: Path) -> str:
    """The table of the runs of tests. A dash: the run does not state one count."""
    lines = ["| date | commit | card | passed | failed | parts and causes |", "|---|---|---|---|---|---|"]
    for name, run in runs(folder, "tests"):
        values = {row["name"]: row["value"] for row in run["results"]}
        counts = [values.get(each) for each in ("passed", "failed")]
        cells = [run["started"][:10], run["commit"], run["card"] or "CPU"]
        cells += ["–" if count is None else f"{count:,.0f}" for count in counts]
        lines.append("| " + " | ".join([*cells, f"[run](runs/{name})"]) + " |")
    return "\n".join(lines)


def render(page: str, folder: Path) -> str:
    """The page with the table between its marks made anew."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{table(folder)}\n\n{END}{after}"


if __name__ == "__main__":
    page = LAB / "tests.md"
    page.write_text(render(page.read_text(), LAB / "runs"))
