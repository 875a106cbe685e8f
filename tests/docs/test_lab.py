"""The pages of docs/lab are those of the run files."""

import json
from pathlib import Path

import pytest

from baton.bench.report import Report, Row
from docs.lab.generate import BLOCK, LAB, block, render

PAGES = sorted(LAB.glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_page_is_fresh(page: Path) -> None:
    assert render(page.read_text(), LAB / "runs") == page.read_text()


def test_a_page_shows_each_run() -> None:
    sections = {section for page in PAGES for section in BLOCK.findall(page.read_text())}
    runs = {path.name: json.loads(path.read_text()) for path in (LAB / "runs").glob("*.json")}
    assert [name for name, run in runs.items() if run["section"] not in sections] == []
    assert [name for name, run in runs.items() if not run["results"] and not run.get("tried")] == []


def write(folder: Path, day: str, rows: list[Row], **more: object) -> None:
    """A run file: the report of a bench with the keys that a run has more."""
    report = Report("engine", {}, started=f"2026-11-{day}T10:00:00+00:00", rows=rows)
    keys = {"section": "engine#x", "card": "H200", "commit": "0a1b2c3d", "command": "run it", "note": None}
    (folder / f"2026-11-{day}-a.json").write_text(json.dumps(report.as_dict() | keys | more))


def test_the_newest_run_of_a_row_stands(tmp_path: Path) -> None:
    write(tmp_path, "28", [Row("decode.b1", 5, "ms"), Row("decode.b8", 6, "ms", p99=7, goal=8)])
    write(tmp_path, "29", [Row("decode.b1", 4, "ms", ratio=0.8, ratio_to="vLLM")])
    write(tmp_path, "27", [Row("decode.b1", 9, "ms")])
    assert block("engine#x", tmp_path).splitlines() == [
        "[2026-11-28, 0a1b2c3d, H200](runs/2026-11-28-a.json)",
        "",
        "|  | value · p99 |",
        "|---|---|",
        "| `decode.b8` | 6 · 7 ms (≤ 8) |",
        "",
        "[2026-11-29, 0a1b2c3d, H200](runs/2026-11-29-a.json)",
        "",
        "|  | value | ÷ vLLM |",
        "|---|---|---|",
        "| `decode.b1` | 4 ms | 0.8 |",
    ]


def test_a_result_with_an_empty_list_of_what_was_tried_is_only_linked(tmp_path: Path) -> None:
    write(tmp_path, "29", [Row("decode.b1", 5, "ms")], tried=[])
    assert block("engine#x", tmp_path) == "More: [2026-11-29, 0a1b2c3d, H200](runs/2026-11-29-a.json)"


def test_rows_that_differ_in_one_part_are_columns(tmp_path: Path) -> None:
    sizes = {(name, size): Row(f"{name}.b{size}", size, "ms") for name in ("fp8", "int4") for size in (1, 8)}
    write(tmp_path, "29", list(sizes.values()))
    assert block("engine#x", tmp_path).splitlines()[2:] == [
        "| ms | b1 | b8 |",
        "|---|---|---|",
        "| `fp8` | 1 | 8 |",
        "| `int4` | 1 | 8 |",
    ]


def test_an_experiment_is_a_line_for_each_thing_that_was_tried(tmp_path: Path) -> None:
    write(tmp_path, "29", [Row("decode.b1", 5, "ms")], tried=["Larger tiles: 5 ms for 4. Not kept."])
    assert block("engine#x", tmp_path) == (
        "- Larger tiles: 5 ms for 4. Not kept. ([rows](runs/2026-11-29-a.json))"
    )


def test_the_newest_runs_of_tests_that_state_a_count_are_rows(tmp_path: Path) -> None:
    write(tmp_path, "20", [Row("seen", 1, "causes")], bench="tests")
    for day in range(21, 29):
        write(tmp_path, str(day), [Row("passed", 1200 + day, "tests")], bench="tests")
    rows = block("engine#x", tmp_path).splitlines()[2:]
    assert rows[0] == "| [2026-11-23, 0a1b2c3d, H200](runs/2026-11-23-a.json) | 1,223 |"
    assert len(rows) == 6
