"""The tables of docs/lab are those of the run files."""

import json
from pathlib import Path

from baton.bench.report import Report, Row
from docs.lab.generate import LAB, render, table


def test_the_page_is_fresh() -> None:
    page = (LAB / "tests.md").read_text()
    assert render(page, LAB / "runs") == page


def test_a_report_with_card_and_commit_is_a_run_file(tmp_path: Path) -> None:
    report = Report("tests", {}, started="2026-11-29T10:00:00+00:00")
    report.rows = [Row("passed", 1234, "tests"), Row("failed", 0, "tests")]
    more = {"card": "H200", "commit": "0a1b2c3d", "command": None, "note": None}
    (tmp_path / "2026-11-29-a.json").write_text(json.dumps(report.as_dict() | more))
    assert table(tmp_path).splitlines()[2:] == [
        "| 2026-11-29 | 0a1b2c3d | H200 | 1,234 | 0 | [run](runs/2026-11-29-a.json) |"
    ]
